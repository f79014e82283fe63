"""What tasks on single documents share: their batches, what each family is read at, and what is written of a test.

An encoder is read at its first token (BERT: Devlin et al. 2018, arXiv:1810.04805), a decoder at its last kept token
(GPT: Radford et al. 2018), as is an encoder-decoder, whose decoder reads the text too (BART: Lewis et al. 2019,
arXiv:1910.13461).
"""

import math
import textwrap
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from ..blocks.loss import IGNORED
from ..errors import UserError, few
from .base import Task, kept, stack, wrap
from .predictions import Predictions

SHOWN = 25  # texts of a validation, of which `show` takes some


class DocumentsInRows:
    """What collators share that read a document a row, which the data has cut to the row's length."""

    def window(self, row_length: int) -> tuple[int, None]:
        """How many tokens a row reads; no stride, as a row is a document."""
        return row_length, None

    def samples(self, examples: list[dict]) -> Tensor:
        """The place of each row in its split, (B,)."""
        return torch.tensor([row["key"][2] for row in examples])


class Labelled(DocumentsInRows):
    """Collator: one document a row, its eos kept, and labels.

    types: whether the net has token types, for the texts of pairs.
    """

    def __init__(self, pad: int, types: bool = False):
        self.pad, self.types = pad, types

    def tell(self, labels: list[str] | None) -> None:
        """The names of the classes, which the data module tells; of numbers there are none."""
        self.labels = labels

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        """Documents (n,) -> input_ids, attention_mask (B, T), sample (B,): the row's place in its split; labels.

        Of pairs, `second` (B,) says where the second text begins, and token_type_ids (B, T) are 1 from there on.
        labels: classes (B,), marks of all classes (B, classes) or tags (B, T); of numbers (B,) 0, beside `numbers`.
        """
        rows = [row["tokens"] for row in examples]
        batch = {
            "input_ids": stack(rows, self.pad),
            "attention_mask": kept(rows),
            "sample": self.samples(examples),
        }
        if any("second" in row for row in examples):
            batch["second"] = torch.tensor([row.get("second", len(row["tokens"])) for row in examples])
            if self.types:
                places = torch.arange(batch["input_ids"].shape[1])
                batch["token_type_ids"] = (places >= batch["second"][:, None]).long() * batch["attention_mask"]
        return batch | self.targets(examples)

    def targets(self, examples: list[dict]) -> dict[str, Tensor]:
        """The labels as tensors; a row without one is no target."""
        if "tags" in examples[0]:
            return {"labels": stack([row["tags"] for row in examples], IGNORED)}
        labels = [row.get("label") for row in examples]
        kind = next((type(label) for label in labels if label is not None), int)
        if kind is list:
            classes = range(len(self.labels))
            marks = [[IGNORED if own is None else int(place in own) for place in classes] for own in labels]
            return {"labels": torch.tensor(marks)}
        if kind is float:
            numbers = torch.tensor([math.nan if label is None else label for label in labels], dtype=torch.float64)
            return {"labels": torch.where(numbers.isnan(), IGNORED, 0), "numbers": numbers}
        return {"labels": torch.tensor([IGNORED if label is None else label for label in labels])}


class Documents(Task):
    """A row is a document; what is predicted for each is kept, and after a test written to predictions.jsonl."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.predictions = Predictions()

    def tell_cut(self, more: str = "") -> None:
        """Say how much of the texts the rows do not hold, and `more` of that."""
        cut = [f"{rows.n_cut:,} tokens of {rows.n_too_long:,} texts of {split}"
               for split, rows in self.trainer.datamodule.rows.items() if rows.n_cut]  # fmt: skip
        if cut:
            self.warn_once(f"data.row_length: {', '.join(cut)} are not read{more}")

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.predictions = Predictions()

    def on_test_epoch_end(self) -> None:
        """Log the metrics, and write predictions.jsonl: every text of the split once, in the split's order."""
        super().on_test_epoch_end()
        file = Path(self.trainer.default_root_dir) / "predictions.jsonl"
        self.predictions.write(file, self.trainer.is_global_zero)


class Downstream(Documents):
    """A net with a head of its own for labels, and its metrics.

    A subclass defines `judged` (the sums of the loss), `metrics_of` (its metrics by name, for labels of a kind),
    `count` (tell them of a batch), `predicted` (what is written of each row) and `verdict` (how that is shown).
    `uncounted` says what comes of the tokens that rows do not hold.
    """

    uncounted = ""

    def __init__(self, net: nn.Module, tokenizer, *args, **settings):
        super().__init__(net, tokenizer, *args, **settings)
        types = net.family != "encoder-decoder" and net.embed.tells_pairs
        self.collator = Labelled(tokenizer.pad or 0, types)
        self.labels: list[str] = []

    @property
    def n_outputs(self) -> int:
        return self.net.head.out.out_features

    def setup(self, stage: str) -> None:
        """Take the labels' names from the data, and count what of its texts a row doesn't hold."""
        data = self.trainer.datamodule
        self.check(data)
        self.identity["labels"] = self.labels or None  # a checkpoint names its classes
        if fewer := getattr(data.rows["train"].split if "train" in data.rows else None, "fewer", None):
            self.warn_once("data.per_class: there are only " + few([f"{n} of {name!r}" for name, n in fewer.items()]))
        self.tell_cut(self.uncounted)
        with warnings.catch_warnings(action="ignore"):  # of the memory that some take
            self.scores = MetricCollection(self.metrics_of(data.store.kind))

    def check(self, data) -> None:
        self.labels = list(data.labels or ())
        if self.labels and len(self.labels) != self.n_outputs:
            raise UserError(f"the data has {len(self.labels)} labels, but the model's head has {self.n_outputs} "
                            "classes")
        train = data.rows["train"].split if "train" in data.rows else None
        learned = train.labels if train else self.labels
        if train and data.store.kind == "class" and len(learned) < len(self.labels) > train.n_documents:
            raise UserError(f"the data has {len(self.labels)} labels, but only {train.n_documents} texts to train on: "
                            "is data.label_column the column of the class?")
        for name, rows in data.rows.items():
            if n := rows.split.n_unlabelled:
                raise UserError(f"{name} has texts without a label ({n:,}{self.beginning(rows)}): leave them out")
            if unknown := [label for label in rows.split.labels if label not in learned]:
                raise UserError(f"no text of train has the label {few(map(repr, unknown))}, which {name} has: "
                                f"leave those texts out of {name}, or give others to train on")

    def beginning(self, rows) -> str:
        """How the first text without a label begins."""
        for split in (own.split for own in rows.sources.values()):
            for document in (number for number in range(split.n_documents) if split.label(number) is None):
                begin, end = split.span(document)
                text = self.tokenizer.decode(split.read(begin, min(end, begin + 100)))
                return f", the first begins {textwrap.shorten(text, 60, placeholder=' ...')!r}"
        return ""

    def trained_labels(self) -> Iterator[int | list[int] | float]:
        """The label of every training document."""
        for rows in self.trainer.datamodule.rows["train"].sources.values():
            yield from map(rows.split.label, range(rows.split.n_documents))

    def logits(self, batch: dict) -> Tensor:
        """(B, outputs of the head) in fp32, whatever the net's precision: in bf16 texts that are alike would tie."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        types = {name: rows for name, rows in batch.items() if name == "token_type_ids"}  # of pairs, for nets with any
        return self.net(ids, mask, **types, readout=lambda head, hidden: in_full(head, hidden, mask))

    def loss(self, batch: dict) -> dict[str, Tensor]:
        return self.judged(self.logits(batch), batch)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.scores.reset()

    def validation_step(self, batch: dict, index: int, dataloader_idx: int = 0) -> None:
        logits = self.evaluate(batch, dataloader_idx)
        if (batch["sample"] < SHOWN).any():
            self.predictions.add(row for row in self.written(batch, logits) if row[0] < SHOWN)

    def test_step(self, batch: dict, index: int, dataloader_idx: int = 0) -> None:
        self.predictions.add(self.written(batch, self.evaluate(batch, dataloader_idx)))

    def evaluate(self, batch: dict, source: int) -> Tensor:
        """Count the batch in the metrics; returns its logits."""
        logits = self.logits(batch)
        self.add(self.judged(logits, batch), source)
        self.count(logits, batch)
        return logits

    def summarise(self, sums: dict[str, float], split: str) -> dict[str, float]:
        """The loss and all metrics that are defined; of a set by itself the loss, and the accuracy where it is one."""
        found = super().summarise(sums, split)
        if "/" in split:
            return {name: found[name] for name in ("loss", "accuracy") if name == "loss" or name in self.scores}
        if not sums["targets"]:  # nothing was seen
            return {"loss": found["loss"]} | dict.fromkeys(self.scores.keys(), math.nan)
        with warnings.catch_warnings(action="ignore"):  # of what is not defined
            computed = {name: float(value) for name, value in self.scores.compute().items()}
        return {"loss": found["loss"]} | {name: value for name, value in computed.items() if not math.isnan(value)}

    def written(self, batch: dict, logits: Tensor) -> list[tuple[int, dict]]:
        """For each text its place in the split, and what is written of it: itself, its label and the prediction."""
        if (batch["labels"] == IGNORED).all():  # a filler
            return []
        columns = batch["sample"].tolist(), self.texts(batch), self.predicted(batch, logits)
        return [(sample, text | line) for sample, text, line in zip(*columns, strict=True)]

    def texts(self, batch: dict) -> list[dict[str, str]]:
        """The text of each row; of a pair both."""
        rows, seconds = tokens(batch), batch.get("second")
        if seconds is None:
            return [{"text": self.tokenizer.decode(row)} for row in rows]
        return [{"text": self.tokenizer.decode(row[:second]), "second": self.tokenizer.decode(row[second:])}
                for row, second in zip(rows, seconds.tolist(), strict=True)]

    def show(self) -> str:
        """Some texts that were held out, what they were taken for, and their labels."""
        if not self.predictions:
            return ""
        lines = ["Some held-out texts:"]
        for row in self.predictions.some():
            text = " ".join(row["words"]) if "words" in row else " / ".join(
                row[name] for name in ("text", "second") if name in row)
            lines.append(wrap(textwrap.shorten(text, 190, placeholder=" ..."), "  "))
            lines.append("      " + textwrap.shorten(self.verdict(row), 94, placeholder=" ..."))
        return "\n".join(lines)


def in_full(head: Callable[..., Tensor], hidden: Tensor, *mask: Tensor) -> Tensor:
    """What a head makes of hidden states with its weights as they are kept, not as autocast rounds them; in fp32."""
    tied = (embed.parameters() for embed in getattr(head, "embed", ()))
    weights = chain(head.parameters(), *tied) if isinstance(head, nn.Module) else ()
    dtype = next((weight.dtype for weight in weights), hidden.dtype)  # FSDP has rounded them
    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden.to(dtype), *mask).float()


def tokens(batch: dict) -> list[list[int]]:
    """The ids of each row, without its padding."""
    lengths = batch["attention_mask"].sum(1).tolist()
    return [row[:n] for row, n in zip(batch["input_ids"].tolist(), lengths, strict=True)]
