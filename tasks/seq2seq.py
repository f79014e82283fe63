"""Write a text for a text: translation, summaries, answers to instructions.

An encoder-decoder reads one and writes the other (Sutskever et al. 2014, arXiv:1409.3215). A decoder goes on from one
to the other, and only what it is to write is a target (instruction tuning: Wei et al. 2021, arXiv:2109.01652).

    document          b a a a e c c e            b: bos, where the tokenizer has one; e: eos; s: start
    encoder-decoder   a a a e                    decoder   s c c       labels   c c e
    decoder           b a a a c c                                      labels   . . . c c e
"""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics.functional.text.rouge import rouge_score
from torchmetrics.text import SacreBLEUScore

from ..blocks.loss import IGNORED
from ..decoding import generate
from ..errors import UserError
from .base import kept, stack, wrap
from .downstream import Documents, DocumentsInRows, tokens

ROUGE = ("rouge1", "rouge2", "rougeL")


class TextToText(DocumentsInRows):
    """Collator: both texts of a document, which are cut together.

    start: what an encoder-decoder's decoder begins with, None for a decoder; bos: whether documents begin with one.
    """

    def __init__(self, pad: int, start: int | None, bos: bool):
        self.pad, self.start, self.bos = pad, start, bos

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        """Documents (n,) -> input_ids, attention_mask (B, S), labels (B, T), sample (B,): the row's place in its split;
        of an encoder-decoder also decoder_input_ids, decoder_attention_mask (B, T)."""
        texts = [row["tokens"][: row["second"]] for row in examples]
        written = [row["tokens"][row["second"] :] for row in examples]
        if self.start is None:
            texts = [text[:-1] for text in texts]
            rows = [np.concatenate([text, tokens[:-1]]) for text, tokens in zip(texts, written, strict=True)]
            labels = [np.concatenate([np.full(len(text) - 1, IGNORED), tokens])
                      for text, tokens in zip(texts, written, strict=True)]  # fmt: skip
            sides = {"": rows}
        else:
            sides = {"": [text[self.bos :] for text in texts],
                     "decoder_": [np.insert(tokens[:-1], 0, self.start) for tokens in written]}  # fmt: skip
            labels = written
        batch = {"labels": stack(labels, IGNORED), "sample": self.samples(examples)}
        for side, rows in sides.items():
            batch |= {f"{side}input_ids": stack(rows, self.pad), f"{side}attention_mask": kept(rows)}
        return batch


class Seq2Seq(Documents):
    """Teacher forcing; what the net itself writes is compared with what stood there by SacreBLEU (Post 2018,
    arXiv:1804.08771; 0 to 100, over the whole split, unsmoothed), ROUGE (Lin 2004; F1, of ASCII words) and letter by
    letter.

    n_answers: it writes for the first so many texts of a validation; for all of a test. At most max_answer tokens
    (None: a row's), the likeliest each, or by beam search. bleu_tokenizer: one of SacreBLEU's, 13a, zh, char, intl ...
    """

    summed = ("nll", "correct", "targets", "answers", "exact_match", *ROUGE)

    def __init__(
        self,
        net: nn.Module,
        tokenizer,
        *args,
        n_answers: int = 100,
        max_answer: int | None = None,
        n_beams: int = 1,
        length_penalty: float = 1.0,
        bleu_tokenizer: str = "13a",
        **settings,
    ):
        super().__init__(net, tokenizer, *args, **settings)
        decoder = net.family == "decoder"
        tokenizer.require("eos", *(() if decoder else ("start",)), task="seq2seq")
        start = None if decoder else tokenizer.start
        self.collator = TextToText(tokenizer.pad or 0, start, tokenizer.bos is not None)
        self.eos, self.n_answers, self.max_answer = tokenizer.eos, n_answers, max_answer
        self.search = {"n_beams": n_beams, "length_penalty": length_penalty}
        try:
            self.bleu = SacreBLEUScore(tokenize=bleu_tokenizer)
        except (ValueError, ImportError) as error:
            raise UserError(f"task.bleu_tokenizer={bleu_tokenizer}: {error}") from None

    def setup(self, stage: str) -> None:
        self.tell_cut("; what is to be written is learned and compared as far as a row holds it")
        if not self.can_write and self.n_answers:
            self.warn_once("trainer=fsdp: answers are neither written nor compared; evaluate the run on one device")

    def loss(self, batch: dict) -> dict[str, Tensor]:
        names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
        return self.net(*(batch[name] for name in names if name in batch), readout=self.readout(batch["labels"]))

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.bleu.reset()

    def validation_step(self, batch: dict, index: int, dataloader_idx: int = 0) -> None:
        self.measure(batch, dataloader_idx, batch["sample"] < self.n_answers)

    def test_step(self, batch: dict, index: int, dataloader_idx: int = 0) -> None:
        self.measure(batch, dataloader_idx, batch["sample"] >= 0)

    def measure(self, batch: dict, source: int, chosen: Tensor) -> None:
        """Add a batch's sums, and compare the answers to its `chosen` (B,) rows."""
        chosen = chosen & (batch["labels"] != IGNORED).any(1)  # a filler has no targets
        sums = dict.fromkeys(self.summed, 0.0) | self.loss(batch)
        if chosen.any() and self.can_write:
            records = self.answered({name: rows[chosen] for name, rows in batch.items() if isinstance(rows, Tensor)})
            sums |= self.judged(*([record[name] for record in records] for name in ("prediction", "target")))
            self.predictions.add(zip(batch["sample"][chosen].tolist(), records, strict=True))
        self.add(sums, source)

    def judged(self, answers: list[str], targets: list[str]) -> dict[str, float]:
        """Sums over the answers; BLEU's counts are added up by themselves."""
        self.bleu.update(answers, [[target] for target in targets])
        found, n = rouge_score(answers, targets, rouge_keys=ROUGE), len(answers)
        exact = sum(answer.strip() == target.strip() for answer, target in zip(answers, targets, strict=True))
        return {"answers": n, "exact_match": exact} | {name: n * float(found[f"{name}_fmeasure"]) for name in ROUGE}

    def answered(self, batch: dict) -> list[dict[str, str]]:
        """For each row its text, what is to be written (at last, where there are several turns), and what the net
        writes."""
        ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        decoder = self.net.family == "decoder"
        limit = self.max_answer or next(iter(self.trainer.datamodule.rows.values())).length
        if decoder:  # the prompt ends where the first target of the last turn is predicted
            places, is_target = torch.arange(ids.shape[1], device=ids.device), labels != IGNORED
            begins = is_target & ~nn.functional.pad(is_target, (1, -1))
            n_prompt = (begins * (places + 1)).amax(1)
            labels = labels.masked_fill(places < n_prompt[:, None] - 1, IGNORED)
            ids, mask = ids[:, : n_prompt.max()], mask[:, : n_prompt.max()]
            mask = mask * (places[: ids.shape[1]] < n_prompt[:, None])
        room = (self.net.max_positions or math.inf) - (mask.sum(1).cpu() if decoder else torch.ones(len(ids)))
        columns = {
            "text": tokens({"input_ids": ids, "attention_mask": mask}),
            "target": [self.up_to_eos(row[row != IGNORED].tolist()) for row in labels],
            "prediction": map(self.up_to_eos, self.continued(ids, mask, room.clamp(max=limit).long())),
        }
        return [dict(zip(columns, map(self.tokenizer.decode, row), strict=True))
                for row in zip(*columns.values(), strict=True)]  # fmt: skip

    def continued(self, ids: Tensor, mask: Tensor, limits: Tensor) -> list[list[int]]:
        """What the net writes for each row of ids (B, T), right-padded: at most so many tokens (B,), whoever else is
        in the batch.

        All rows are continued as far as the longest can be; those that have not ended there and may go on, once more.
        """
        decoder, written, left = self.net.family == "decoder", [[]] * len(ids), torch.arange(len(ids))
        start = None if decoder else self.tokenizer.start
        while len(left):
            limit = limits[left].min()
            some = left if self.search["n_beams"] == 1 else left[limits[left] == limit]  # beams look to their end
            width = mask[some].sum(1).max()
            rows = generate(self.net, ids[some, :width], mask[some, :width], int(limit), eos=self.eos, start=start,
                            **self.search)[:, width if decoder else 1 :].cpu()  # fmt: skip
            ended = (rows == self.eos).any(1) | (limits[some] == limit)
            for place, row in zip(some[ended].tolist(), rows[ended].tolist(), strict=True):
                written[place] = row
            left = left[~torch.isin(left, some[ended])]
        return written

    def up_to_eos(self, ids: list[int]) -> list[int]:
        """The ids before the first eos."""
        return ids[: ids.index(self.eos)] if self.eos in ids else ids

    @property
    def can_write(self) -> bool:
        """Whether the net can write answers: ranks that hold a share of it each would wait for each other."""
        return not hasattr(self.trainer.strategy, "shard")

    def answering(self, split: str) -> bool:
        """Whether the net writes for texts of a split."""
        return self.can_write and (split.startswith("test") or self.n_answers > 0)

    def summarise(self, sums: dict[str, float], split: str) -> dict[str, float]:
        """And of what was written the shares of exact matches, ROUGE, and of a whole split BLEU."""
        found, names = super().summarise(sums, split), ("exact_match", *ROUGE)
        if not self.answering(split) or "/" in split and not sums["answers"]:
            return found
        found |= {name: sums[name] / sums["answers"] if sums["answers"] else math.nan for name in names}
        return found if "/" in split else found | {"bleu": 100 * float(self.bleu.compute())}

    def show(self) -> str:
        """Some held-out texts, what the net wrote, and what stood there."""
        lines = ["Some held-out texts, and what is written for them:"] if self.predictions else []
        for row in self.predictions.some():
            lines.append(wrap(row["text"][:190], "  "))
            lines += [wrap(f"{'[' + row[name][:180] + ']'} {what}", "      ")
                      for name, what in (("prediction", ""), ("target", "stood there"))]  # fmt: skip
        return "\n".join(lines)
