"""Show what a model reads and what it is asked: rows as training reads them, and what is in a split.

python -m lmzoo.tools.inspect_data model=gpt task=clm data=text data.path='books/*.txt' --step 1000

A bar ║ stands between documents. [MASK→word] is what a masked model reads, and what it is asked
for. A causal model is asked for each next token (where that is not what it reads next, it stands
there in the same way), but it reads ⟦these⟧ without a question. Of span corruption the encoder's
input and the target stand below each other. A document with a label stands as it is stored, the tag
of a word at its first piece.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice, pairwise
from pathlib import Path

import numpy as np
import torch
from lmzoo.tools import answer, new_file, parser

from lmzoo import UserError, compose, data, load, parts
from lmzoo.blocks.loss import IGNORED
from lmzoo.checkpoint import build
from lmzoo.data.mixture import MixedRows
from lmzoo.data.packing import Rows
from lmzoo.tokenizer import Tokenizer

WIDTH = 50  # characters of the longest bar
FINE = 4  # classes of length in the picture, from one length to its double
UNASKED = ""  # the mark of a token that is read without a question; other marks are what is asked for at a token


def inspect(words: list[str], split: str, n_rows: int, verify: bool, step: int = 0, png: Path | None = None) -> str:
    """Rows of a split as the task's collator makes them, from `step` on; how the split is packed; its documents."""
    for word, number in (("--rows", n_rows), ("--step", step)):
        if number < 0:
            raise UserError(f"{word} {number} is less than 0")
    if png:
        new_file(png, ".png")
    task, module = assemble(words)
    if split not in module.rows:
        raise UserError(f"--split {split}: the data has {', '.join(module.rows)}")
    if verify:
        module.store.verify()
    rows = module.rows[split]
    if module.store.kind:
        found = (labelled(task.tokenizer, module, where, row) for where, row in documents_of(module, split, step))
    else:
        found = (written(task, where, row) for where, row in read(module, split, step))
    shown = list(islice(found, n_rows))
    if n_rows and not shown:
        raise UserError(f"--step {step}: {split} has no batch {step}")
    documents, tokens = by_length(rows.split)
    if png:
        draw(documents, tokens, rows.length, png)
    return "\n".join([packed(rows), "", *shown, *sources(rows), *histogram(documents)])


def assemble(words: list[str]):
    """(task, data module) of the run that `words` describe; its net has no weights."""
    config = compose(*words)
    start = config.ckpt or config.init_from
    source = load(start, tuple(config.trust), reads_text=True) if start else None
    tokenizer = source.tokenizer if config.ckpt else parts.build_tokenizer(config, source, {})
    store = data.prepare(config, tokenizer)
    with torch.device("meta"):
        net = build(parts.model_config(config, store.labels), config.trust)
    task = parts.build_task(config, net, tokenizer)
    return task, data.DataModule(store, tokenizer, task.collator, config.data, seed=config.seed)


def read(module, split: str, step: int) -> Iterator[tuple[str, dict]]:
    """(where it stands, its part of the batch as lists) of each row, from optimizer step or batch `step` on."""
    for number, window in numbered(loader_of(module, split, step), split, step):
        for batch in window:
            columns = {name: value.tolist() for name, value in batch.items() if isinstance(value, torch.Tensor)}
            for i, row in enumerate(zip(*columns.values(), strict=True)):
                yield f"step {number}, micro-batch {batch['micro']}, row {i}", dict(zip(columns, row, strict=True))


def documents_of(module, split: str, step: int) -> Iterator[tuple[str, dict]]:
    """The same of documents with labels, each as the data give it to the task's collator."""
    for number, window in numbered(loader_of(module, split, step).sampler, split, step):
        for micro in window:
            for i, row in enumerate(micro.rows.tolist()):
                yield f"step {number}, micro-batch {micro.number}, row {i}", module.rows[split][row]


def loader_of(module, split: str, step: int):
    """The loader of a split; of "train" from `step` on."""
    loader = getattr(module, f"{split}_dataloader")()
    if split == "train":
        loader.load_state_dict({"step": step})
    return loader


def numbered(items: Iterable, split: str, step: int) -> Iterator[tuple[int, list]]:
    """(number, its micro-batches) of the steps, or the batches of an evaluation, from `step` on."""
    return enumerate(items, step) if split == "train" else islice(enumerate([item] for item in items), step, None)


def labelled(tokenizer: Tokenizer, module, where: str, row: dict) -> str:
    """A document with its label, its second text below it, tags at their words."""
    ids, second, kind, names = row["tokens"].tolist(), row.get("second"), module.store.kind, module.labels
    title, label, tags = f"── {where}: {len(ids)} tokens", row.get("label"), row.get("tags")
    if kind in ("class", "classes", "number"):
        chosen = [] if label is None else label if kind == "classes" else [label]
        title += ", label " + (", ".join(f"{one:g}" if kind == "number" else names[one] for one in chosen) or "none")
    if second:
        first, other = ("input ", "target") if kind == "text" else ("first ", "second")
        return f"{title}\n{first}  {spell(tokenizer, ids[:second])}\n{other}  {spell(tokenizer, ids[second:])}\n"
    marks = None if tags is None else [None if tag == IGNORED else names[tag] for tag in tags.tolist()]
    return f"{title}\n{spell(tokenizer, ids, marks)}\n"


def written(task, where: str, row: dict) -> str:
    """A row as text, with what is asked of it."""
    mask, targets, tokenizer = row.get("attention_mask"), row["labels"], task.tokenizer
    kept = [i for i in range(len(row["input_ids"])) if mask is None or mask[i]]
    ids = [row["input_ids"][i] for i in kept]
    title = f"── {where}: {len(ids)} tokens"
    asked = [label for label in targets if label != IGNORED]
    title += f", {len(asked)} targets"
    if "decoder_input_ids" in row:
        return f"{title}\ninput   {spell(tokenizer, ids)}\ntarget  {spell(tokenizer, asked)}\n"
    if task.net.family == "encoder":
        expected, unasked = [IGNORED] * len(ids), None
    else:
        expected, unasked = [*ids[1:], None], UNASKED
    marks = [unasked if targets[i] == IGNORED else None if targets[i] == usual else spell(tokenizer, [targets[i]])
             for i, usual in zip(kept, expected, strict=True)]
    documents = row.get("document_ids")
    return f"{title}\n{spell(tokenizer, ids, marks, documents and [documents[i] for i in kept])}\n"


def spell(tokenizer: Tokenizer, ids: list[int], marks: Sequence[str | None] | None = None,
          documents: Sequence[int] | None = None) -> str:
    """Tokens as text, a token with a mark in brackets; a bar between documents, which eos and bos tell where
    `documents`, the number of each token's, does not."""
    marks, bos, eos = marks or [None] * len(ids), tokenizer.bos, tokenizer.eos
    borders = [i for i in range(1, len(ids)) if (documents[i - 1] != documents[i] if documents else
                                                 ids[i - 1] == eos and bos in (None, ids[i]))]
    parts = pairwise([0, *borders, len(ids)])
    return " ║ ".join(spell_document(tokenizer, ids[begin:end], marks[begin:end]) for begin, end in parts)


def spell_document(tokenizer: Tokenizer, ids: list[int], marks: Sequence[str | None]) -> str:
    """Runs of tokens with the same mark are decoded together; one of which something is asked stands alone."""
    text, last = "", None
    for (mark, _), places in groupby(range(len(ids)), key=lambda i: (marks[i], i if marks[i] else None)):
        run = [ids[i] for i in places]
        part = "MASK" if run == [tokenizer.mask] else tokenizer.decode(run, skip_special=False)
        space = " " if last is not None and spaced(tokenizer, last, run[0]) else ""
        text += space + (part if mark is None else f"⟦{part}⟧" if mark == UNASKED else f"[{part}→{mark}]")
        last = run[-1]
    return text


def spaced(tokenizer: Tokenizer, first: int, second: int) -> bool:
    """Whether decoding puts a space between two tokens, as WordPiece's does."""
    together, *alone = (tokenizer.decode(ids, skip_special=False) for ids in ([first, second], [first], [second]))
    return together == " ".join(alone)


def packed(rows: Rows | MixedRows) -> str:
    """How many rows there are, and what padding and cutting cost."""
    padding = rows.n_padding / (rows.n_inputs + rows.n_padding)
    return (f"{len(rows):,} rows of {rows.length:,} tokens, packing {rows.packing}: {padding:.2%} of their places are "
            f"padding, {rows.n_cut:,} of {rows.split.n_tokens:,} tokens are cut off")


def sources(rows: Rows | MixedRows) -> list[str]:
    """What each source of a mixture holds, and its share of the rows that are read."""
    if len(rows.sources) < 2:
        return []
    lines = [f"{'source':<20}{'documents':>14}{'tokens':>18}{'share':>8}{'of rows read':>14}"]
    for (name, own), weight in zip(rows.sources.items(), rows.weights, strict=True):
        share, read = own.split.n_tokens / rows.split.n_tokens, weight / sum(rows.weights)
        lines.append(f"{name or '':<20}{own.split.n_documents:>14,}{own.split.n_tokens:>18,}{share:>8.1%}{read:>14.1%}")
    return [*lines, ""]


def by_length(split) -> tuple[np.ndarray, np.ndarray]:
    """Documents, and their tokens, in classes of length of which `FINE` double it: 2^(i / FINE) and more."""
    documents, tokens = np.zeros((2, 64 * FINE), np.int64)
    for lengths in split.lengths():
        classes = (FINE * np.log2(lengths)).astype(int)
        documents += np.bincount(classes, minlength=len(documents))
        tokens += np.bincount(classes, lengths, minlength=len(tokens)).astype(np.int64)
    return documents, tokens


def histogram(documents: np.ndarray) -> list[str]:
    """Documents by length, in classes that double: 1, 2-3, 4-7, ..."""
    counts = documents.reshape(-1, FINE).sum(1)
    return ["documents by length in tokens", *(
        f"{2**i:>9,} - {2**(i + 1) - 1:<9,} {count:>9,} {'█' * -(-WIDTH * count // counts.max())}"
        for i, count in enumerate(counts.tolist()) if count)]


def draw(documents: np.ndarray, tokens: np.ndarray, row_length: int, file: Path) -> None:
    """A PNG of documents, and of all their tokens, by length; the length of a row as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    last = int(np.flatnonzero(documents).max()) + 1
    above, below = figure.subplots(2, sharex=True)
    for axis, counts, counted in ((above, documents, "documents"), (below, tokens, "tokens")):
        axis.stairs(counts[:last], 2 ** (np.arange(last + 1) / FINE), fill=True, color="#4c78a8")
        axis.axvline(row_length, color="#e45756", linestyle="--", label=f"a row: {row_length:,} tokens")
        axis.set_ylabel(counted)
    below.set_xscale("log", base=2)
    below.set_xlabel("tokens of a document")
    above.legend(frameon=False)
    figure.savefig(file, format="png")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("words", nargs="+", metavar="word=value", help="as for training: model=... task=...")
    arguments.add_argument("--split", default="train", help="train, val or test")
    arguments.add_argument("--rows", type=int, default=3, help="how many rows to show")
    arguments.add_argument("--step", type=int, default=0, help="from which optimizer step on (val, test: which batch)")
    arguments.add_argument("--verify", action="store_true", help="read the whole store and compare its checksums")
    arguments.add_argument("--png", type=Path, metavar="FILE", help="draw the histogram of lengths, too, as a new file")
    given = arguments.parse_args()
    answer(inspect, given.words, given.split, given.rows, given.verify, given.step, given.png)


if __name__ == "__main__":
    main()
