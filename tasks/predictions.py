"""What is predicted for each text of a split, and predictions.jsonl, in memory that does not grow with the texts."""

import json
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from tempfile import SpooledTemporaryFile

import numpy as np

from ..callbacks.guards import of_all_ranks
from ..literal import write

IN_MEMORY = 1 << 20  # bytes of records; more of them lie in a file without a name
AT_ONCE = 64  # records that go from rank to rank together


class Predictions:
    """Records by their text's place in the split, put in in any order, by any rank; read in the split's order."""

    def __init__(self):
        self.file = SpooledTemporaryFile(IN_MEMORY)
        self.lines = array("q")  # of each its place, and where it begins and ends in the file

    def add(self, records: Iterable[tuple[int, dict]]) -> None:
        """Put in records, each with its place."""
        self._put((place, json.dumps(record, ensure_ascii=False)) for place, record in records)

    def __len__(self) -> int:
        return len(self.lines) // 3

    def some(self) -> Iterator[dict]:
        """Five of the records, or as many as there are."""
        step = max(1, len(self) // 5)
        return (json.loads(line) for _, line in self._lines(np.s_[: 5 * step : step]))

    def write(self, path: Path, first_rank: bool) -> None:
        """Write the records of all ranks as JSON lines, in one move; all ranks call it, and the first one writes."""
        mine, lengths = self._lines(), of_all_ranks(len(self))
        for _ in range(0, max(lengths) if len(lengths) > 1 else 0, AT_ONCE):
            of_each = of_all_ranks(list(islice(mine, AT_ONCE)))
            if first_rank:
                self._put(chain.from_iterable(of_each[1:]))
        if first_rank:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, (line + "\n" for _, line in self._lines()))

    def _put(self, lines: Iterable[tuple[int, str]]) -> None:
        begin = self.file.seek(0, 2)
        for place, line in lines:
            end = begin + self.file.write(line.encode())
            self.lines.extend((place, begin, end))
            begin = end

    def _lines(self, which: slice = slice(None)) -> Iterator[tuple[int, str]]:
        lines = np.array(self.lines).reshape(-1, 3)
        for place, begin, end in lines[lines[:, 0].argsort()][which].tolist():
            self.file.seek(begin)
            yield place, self.file.read(end - begin).decode()
