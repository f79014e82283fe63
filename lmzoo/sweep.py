"""What a sweep keeps of its jobs, wherever they run, and shows when they are done."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class Job(NamedTuple):
    """A run of a sweep: its number, its words, its validation loss (None: it has none), what went wrong."""

    number: int
    words: list[str]
    loss: float | None
    mistake: str


class Sweep(Callback):
    """Tells the command which folder Hydra has settled on for its sweep; a list of jobs in it is an earlier sweep's."""

    folder: Path | None = None

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        Sweep.folder = Path(config.hydra.sweep.dir)
        (Sweep.folder / "jobs.jsonl").unlink(missing_ok=True)


def record(folder: Path, job: Job) -> None:
    """Add a job that is done to the list in the sweep's `folder`: a launcher may run it in another process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "jobs.jsonl", "a", encoding="utf-8") as lines:
        lines.write(json.dumps(job._asdict(), ensure_ascii=False) + "\n")


def jobs(folder: Path | None) -> list[Job]:
    """The jobs of the sweep in `folder` that are done."""
    file = folder / "jobs.jsonl" if folder else None
    if file is None or not file.exists():
        return []
    return [Job(**json.loads(line)) for line in file.read_text(encoding="utf-8").split("\n") if line]


def table(jobs: Sequence[Job]) -> str:
    """A line of at most 100 columns for each job: its number, those of its words that vary, loss or error."""
    common = set.intersection(*(set(job.words) for job in jobs)) if len(jobs) > 1 else set()
    rows = [("job", "words", "val/loss")]
    for job in sorted(jobs, key=lambda job: job.number):
        result = job.mistake or ("none" if job.loss is None else f"{job.loss:.4g}")
        rows.append((str(job.number), " ".join(word for word in job.words if word not in common), result))
    width = min(50, max(len(words) for _, words, _ in rows))
    return "\n".join(
        f"{number:>3}  {cut(words, width):<{width}}  {cut(result, 93 - width)}" for number, words, result in rows
    )


def cut(text: str, width: int) -> str:
    """`text` on one line of at most `width` columns."""
    return text if len(text) <= width else text[: width - 3] + "..."
