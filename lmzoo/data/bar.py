"""A bar for what several processes read of a source."""

import threading

from tqdm import tqdm


class Progress:
    """A bar over all processes, in a terminal only: how much of the source is read, how fast, how long it will take."""

    def __init__(self, title: str, parts: list, jobs: list[dict]):
        self.sizes = {job["part"]: sum(unit.piece.n_bytes for unit in job["units"]) for job in jobs}
        total = sum(unit.piece.n_bytes for units in parts for unit in units)
        self.done, self.n_documents, self._lock = dict.fromkeys(self.sizes, 0), 0, threading.Lock()
        self.before = total - sum(self.sizes.values())
        self.finished: set[int] = set()
        self.bar = tqdm(total=total or None, initial=self.before, desc=title, unit="B", unit_scale=True, disable=None,
                        leave=False)

    def add(self, part: int, n_bytes: int, n_documents: int) -> None:
        """So many bytes of a part's text, which may be more or less than the part is thought to have, are done."""
        with self._lock:
            self.done[part] += n_bytes
            self.n_documents += n_documents
            self._show()

    def finish(self, job: dict) -> None:
        with self._lock:
            self.finished.add(job["part"])
            self._show()

    def _show(self) -> None:
        now = sum(size if part in self.finished else min(self.done[part], size) for part, size in self.sizes.items())
        self.bar.set_postfix_str(f"{self.n_documents:,} documents", refresh=False)
        self.bar.update(self.before + now - self.bar.n)
