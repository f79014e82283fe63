"""What a run's validation loss is worth: the same targets seen by models that only count.

python -m lmzoo.tools.yardsticks RUN ...

Beside a causal model stands a bigram model over the same tokens, p(w | v) = (c(v, w) + m p(w)) /
(c(v) + m), with the mass m that suits the validation text best, and what `xz` needs for the same
bytes. Beside a masked model and span corruption stands the unigram model of their targets, beside
the latter also its own loss when each row of the decoder reads the encoder's output for another
row. Counts are of one epoch of training, each with one added for every token.
"""

import math

import numpy as np
import torch
from lmzoo.tools import answer, parser

from lmzoo import compose
from lmzoo.blocks.loss import IGNORED
from lmzoo.checkpoint import read, weights
from lmzoo.train import assemble

MASSES = (1, 3, 10, 30, 100, 300, 1000)


def yardsticks(run: str) -> list[tuple[str, float, str]]:
    """(what, value, unit) for the run at the path `run`, the run's own number first."""
    config = compose(f"ckpt={run}")
    task, data = assemble(config)
    task.net.load_state_dict(weights(read(config.ckpt)))
    task.eval()
    family, vocab_size = task.net.family, len(task.tokenizer)
    nats = loss(task, data.val_dataloader())
    seen = pairs(batch for window in data.train_dataloader() for batch in window)
    held_out = pairs(data.val_dataloader())
    if family != "decoder":
        counted = unigram(seen[1], held_out[1], vocab_size).mean()
        rows = [("this run", nats, "nats per target"), ("unigram entropy", counted, "nats per target")]
        if family == "encoder-decoder":
            shuffled = loss(task, map(rolled, data.val_dataloader()))
            rows.append(("this run, inputs shuffled among rows", shuffled, "nats per target"))
        return rows
    per_byte = len(held_out[1]) / (math.log(2) * data.n_bytes("val"))
    rows = [("this run", nats * per_byte, "bits per byte")]
    rows.append(("smoothed bigram", bigram(*seen, *held_out, vocab_size) * per_byte, "bits per byte"))
    rows.append(("unigram", unigram(seen[1], held_out[1], vocab_size).mean() * per_byte, "bits per byte"))
    if data.xz_bits_per_byte is not None:
        rows.append(("xz", data.xz_bits_per_byte, "bits per byte"))
    return rows


def table(run: str) -> str:
    """The yardsticks of a run, a line each."""
    return "\n".join([run, *(f"  {what:<38}{value:8.3f} {unit}" for what, value, unit in yardsticks(run))])


def loss(task, batches) -> float:
    """The task's mean nats per target over all `batches`, in float32."""
    with torch.no_grad():
        sums = [task.loss(batch) for batch in batches]
    return float(sum(s["nll"].double() for s in sums)) / int(sum(s["targets"] for s in sums))


def rolled(batch: dict) -> dict:
    """The batch with each row's input in the place of the next; a batch of one row stays as it is."""
    moved = {key: batch[key].roll(1, 0) for key in ("input_ids", "attention_mask") if key in batch}
    return batch | moved


def pairs(batches) -> tuple[np.ndarray, np.ndarray]:
    """(input token, target) of every target in `batches`; the first means something in causal models only."""
    found = []
    for batch in batches:
        inputs = batch.get("decoder_input_ids", batch["input_ids"])
        chosen = batch["labels"] != IGNORED
        found.append(torch.stack([inputs[chosen], batch["labels"][chosen]]).numpy())
    return tuple(np.concatenate(found, axis=1))


def unigram(seen: np.ndarray, held_out: np.ndarray, vocab_size: int) -> np.ndarray:
    """Nats of each target of `held_out` under the counts of `seen`, one added for every token."""
    counts = np.bincount(seen, minlength=vocab_size) + 1
    return -np.log(counts / counts.sum())[held_out]


def bigram(before: np.ndarray, seen: np.ndarray, context: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Mean nats of `held_out`, each after its `context`, under the counts of `seen` after `before`."""
    keys, counts = np.unique(before * vocab_size + seen, return_counts=True)
    wanted = context * vocab_size + held_out
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    together = np.where(keys[place] == wanted, counts[place], 0)
    alone = np.bincount(before, minlength=vocab_size)[context]
    backed = np.exp(-unigram(seen, held_out, vocab_size))
    return min(-np.log((together + mass * backed) / (alone + mass)).mean() for mass in MASSES)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or a checkpoint file")
    for run in arguments.parse_args().runs:
        answer(table, run)


if __name__ == "__main__":
    main()
