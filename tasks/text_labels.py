"""Classification by an encoder-decoder that writes the class's name (T5: Raffel et al. 2019, arXiv:1910.10683).

It keeps its head over the vocabulary, so nothing of the pretrained net is thrown away. Learned is the class's name and
eos; a text's class is that whose name is the likeliest as a whole, so none but the classes is ever said.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..blocks.loss import IGNORED, log_probabilities
from ..errors import UserError
from ..texts import spoken, word_for
from .base import kept, stack
from .classification import Classification
from .downstream import Labelled, in_full

AT_ONCE = 512  # tokens of names that one decoder row holds


class Named(Labelled):
    """Collator: what `Labelled` gives, and the name of each row's class as its decoder reads and writes it."""

    def __init__(self, tokenizer, words: Mapping[str, str] | str, longest: int | None):
        super().__init__(tokenizer.pad or 0)
        self.tokenizer, self.words, self.longest = tokenizer, words, longest
        self.names: list[np.ndarray] = []

    def tell(self, labels: list[str]) -> None:
        """And UserError for a name that the tokenizer or the net can't write."""
        super().tell(labels)
        tokenizer = self.tokenizer
        said = spoken(labels, self.words, "task.words")
        self.names = [np.array([*tokenizer.encode(word), tokenizer.eos]) for word in said.values()]
        earlier: dict[tuple[int, ...], str] = {}
        for (label, word), name in zip(said.items(), self.names, strict=True):
            ways = f"{word!r} of the class {label}: give it another, {word_for(label, 'task.words')}"
            if tokenizer.unk is not None and tokenizer.unk in name:
                raise UserError(f"the tokenizer has no token for a part of {ways}")
            if len(name) == 1:
                raise UserError(f"the tokenizer makes nothing of {ways}")
            if (other := earlier.setdefault(tuple(name), label)) != label:
                raise UserError(f"the tokenizer makes the same of the class {other} and of {ways}")
            if len(name) > (self.longest or len(name)):
                raise UserError(f"the decoder's {self.longest} positions are too few for {ways}")

    def targets(self, examples: list[dict]) -> dict[str, Tensor]:
        """labels (B,), the classes, and decoder_labels, decoder_input_ids, decoder_attention_mask (B, longest name)."""
        batch = super().targets(examples)
        nothing = np.zeros(0, dtype=int)
        written = [nothing if label == IGNORED else self.names[label] for label in batch["labels"].tolist()]
        rows = self.reads(written)
        return batch | {"decoder_labels": stack(written, IGNORED), "decoder_input_ids": stack(rows, self.pad),
                        "decoder_attention_mask": kept(rows)}  # fmt: skip

    def reads(self, names: list[np.ndarray]) -> list[np.ndarray]:
        """What the decoder reads to write each of some names."""
        return [np.insert(name[:-1], 0, self.tokenizer.start) for name in names]


class TextLabels(Classification):
    """One label a text, by its name. The loss is that of all its tokens together, in nats a text.

    words: what to call a class in place of its name, {name: word}, or that as a text of JSON or YAML.
    """

    def __init__(self, net: nn.Module, tokenizer, *args, words: Mapping[str, str] | str | None = None, **settings):
        super().__init__(net, tokenizer, *args, **settings)
        tokenizer.require("eos", "start", task="classification by text")
        self.collator = Named(tokenizer, words or {}, net.max_positions)

    @property
    def n_outputs(self) -> int:
        return len(self.labels)

    def loss(self, batch: dict) -> dict[str, Tensor]:
        """The sums over the texts of -log p of their classes' names."""
        tokens, labels = batch["decoder_labels"], batch["labels"]
        written, options = tokens != IGNORED, self.cross_entropy_options()

        def readout(head: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
            logits = in_full(head, hidden[written])
            nats = F.cross_entropy(logits, tokens[written], reduction="none",
                                   label_smoothing=options.get("label_smoothing", 0.0))
            nats = nats + options.get("z_loss", 0.0) * logits.logsumexp(-1).square()
            if self.training and self.weights is not None:
                nats = nats * self.weights[labels][:, None].expand_as(tokens)[written]
            loss = nats.sum()
            return {"loss": loss, "nll": loss.detach(), "targets": (labels != IGNORED).sum()}

        return self.net(batch["input_ids"], batch["attention_mask"], batch["decoder_input_ids"],
                        batch["decoder_attention_mask"], readout=readout)

    def logits(self, batch: dict) -> Tensor:
        """(B, classes) in fp32: the log-probability of each class's name."""
        names = self.collator.names
        n_together = max(1, AT_ONCE // max(map(len, names)))
        some = (names[begin : begin + n_together] for begin in range(0, len(names), n_together))
        return torch.cat([self.log_likelihoods(batch, own) for own in some], 1).float()

    def log_likelihoods(self, batch: dict, names: list[np.ndarray]) -> Tensor:
        """(B, names): they stand in one decoder row, each a document of its own."""
        ids, numbers = batch["input_ids"], [np.full(len(name), number) for number, name in enumerate(names)]
        tokens, row, number = (torch.from_numpy(np.concatenate(parts)).to(ids.device)
                               for parts in (names, self.collator.reads(names), numbers))  # fmt: skip

        def readout(head: nn.Module, hidden: Tensor) -> Tensor:
            nats, _ = log_probabilities(partial(in_full, head), hidden.flatten(0, 1), tokens.repeat(len(ids)))
            return nats.new_zeros(len(ids), len(names)).index_add_(1, number, nats.unflatten(0, (len(ids), -1)))

        row, documents = (one.expand(len(ids), -1) for one in (row, number))
        return self.net(ids, batch["attention_mask"], row, decoder_document_ids=documents, readout=readout)

    def judged(self, logits: Tensor, batch: dict) -> dict[str, Tensor]:
        """The sums of an evaluation: of the names as wholes, as the loss in training has them."""
        labels = batch["labels"]
        kept = labels != IGNORED
        nats = -logits[kept].gather(-1, labels[kept, None]).sum()
        return {"loss": nats, "nll": nats, "correct": (logits.argmax(-1) == labels)[kept].sum(), "targets": kept.sum()}
