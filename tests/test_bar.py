import io
import re
import sys

import pytest

from lmzoo.data import sources
from lmzoo.data.bar import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("size", [10_000, 100_000])  # of documents that are less, and more, than they are thought to be
def test_progress_ends_at_the_whole(monkeypatch, size):
    monkeypatch.setattr("sys.stderr", Terminal())
    parts = [[sources.Unit("path", sources.Piece("a", n_bytes=50_000), [])] for _ in range(4)]
    jobs = [{"part": number, "units": parts[number]} for number in (1, 3)]
    progress, seen = Progress("tokenise", parts, jobs), []
    for job in jobs:
        for step in (lambda: progress.add(job["part"], size, 3), lambda: progress.finish(job)):  # noqa: B023
            step()
            seen.append(progress.bar.n)
    first = min(size, 50_000)
    assert seen == [100_000 + first, 150_000, 150_000 + first, 200_000]
    progress.bar.refresh()
    shown = sys.stderr.getvalue()
    assert "200k/200k" in shown and "6 documents" in shown
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d, +[\d.]+[kMG]?B/s", shown)  # time taken < time left, speed
    assert sum(progress.done.values()) == 2 * size
