"""Show what a model reads: rows as text, with the borders of documents, and how long documents are.

python -m lmzoo.tools.inspect_data model=gpt task=clm data=text data.path='books/*.txt' --rows 3
"""

import numpy as np
from lmzoo.tools import answer, parser

from lmzoo import UserError, compose, data
from lmzoo.data.packing import Rows
from lmzoo.data.shards import Split

WIDTH = 50  # characters of the longest bar


def inspect(words: list[str], split: str, n_rows: int, verify: bool) -> str:
    """The first `n_rows` rows of a split in the order of the store, and a histogram of its documents' lengths."""
    config = compose(*words)
    tokenizer = data.prepare_tokenizer(config)
    store = data.prepare(config, tokenizer)
    if split not in store.splits:
        raise UserError(f"--split {split}: the data has {', '.join(store.splits)}")
    if verify:
        store.verify()
    rows = Rows(store[split], config.data.packing, config.data.row_length, config.data.row_length)
    lines = [f"{len(rows):,} rows of {rows.length} tokens, packing {rows.packing}; {rows.n_cut:,} tokens cut off", ""]
    for number in range(min(n_rows, len(rows))):
        row = rows[number]
        borders = np.flatnonzero(np.diff(row["document_ids"])) + 1
        parts = [tokenizer.decode(part, skip_special=False) for part in np.split(row["tokens"], borders)]
        label = f", label {store.labels[row['label']]}" if "label" in row else ""
        lines += [f"row {number}: {len(row['tokens'])} tokens, documents: {len(parts)}{label}", "  ║ ".join(parts), ""]
    return "\n".join([*lines, *histogram(store[split])])


def histogram(split: Split) -> list[str]:
    """Documents by length, in classes that double: 1, 2-3, 4-7, ..."""
    counts = np.bincount(np.log2(np.diff(split.ends, prepend=0)).astype(int))
    return ["documents by length in tokens", *(
        f"{2**i:>9,} - {2**(i + 1) - 1:<9,} {count:>9,} {'█' * -(-WIDTH * count // counts.max())}"
        for i, count in enumerate(counts.tolist()) if count)]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("words", nargs="+", metavar="word=value", help="as for training: model=... task=...")
    arguments.add_argument("--split", default="train", help="train, val or test")
    arguments.add_argument("--rows", type=int, default=3, help="how many rows to show")
    arguments.add_argument("--verify", action="store_true", help="read the whole store and compare its checksums")
    given = arguments.parse_args()
    answer(inspect, given.words, given.split, given.rows, given.verify)


if __name__ == "__main__":
    main()
