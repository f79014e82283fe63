"""What came of a sweep, or of any folder of runs: a table sorted by result, and a picture of it.

python -m lmzoo.tools.summarise_sweep FOLDER [--metric val/loss] [--highest] [--picture FILE]

A line of the table is a run: what differs in its configuration, its metrics at the end (so far, if it has not ended),
seconds of training, and whether it is done, failed or running. Runs that differ in their seed alone are also shown as
mean and standard deviation. The picture (FOLDER/summary.png) is a line over one number that differs, a map over two,
else bars.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from filelock import FileLock, Timeout
from lmzoo.tools import answer, parser

from lmzoo import UserError
from lmzoo.callbacks.metrics import Table
from lmzoo.callbacks.picture import draw_bars, draw_line, draw_map
from lmzoo.sweep import cut, jobs

HOUSEKEEPING = ("run_dir", "callbacks", "logger", "tags", "trust", "ckpt", "checkpoint")  # changes no result
WIDEST = 60  # columns for what differs


@dataclass
class Run:
    """A run's name, what differs in it from the others, its metrics, its seconds of training and its state."""

    name: str
    words: dict[str, object]
    metrics: dict[str, float]
    seconds: float | None
    state: str

    @property
    def setting(self) -> str:
        """What differs but the seed, as it might be typed."""
        return " ".join(f"{word}={number(value)}" for word, value in self.words.items() if word != "seed")


def summarise(folder: str, metric: str, highest: bool, picture: str | None) -> str:
    """The tables for the runs below `folder`; draws the picture."""
    runs = read(Path(folder))
    if not runs:
        raise UserError(f"{folder}: there is no run in it (a folder with a config.yaml)")
    runs.sort(key=lambda run: rank(run.metrics.get(metric), highest))
    seeds = grouped(runs, metric)
    parts = [table(runs, metric), *unseeded(seeds, metric)]
    if seeds:
        file = Path(picture or Path(folder) / "summary.png")
        draw(seeds, metric, file)
        parts.append(f"picture: {file}")
    return "\n\n".join(parts)


def read(folder: Path) -> list[Run]:
    """Every run below `folder`, and the jobs of sweeps there that were refused before they had a folder."""
    files = sorted(file for file in folder.rglob("config.yaml") if "wandb" not in file.relative_to(folder).parts)
    configs = [dict(leaves(yaml.safe_load(file.read_text(encoding="utf-8")))) for file in files]
    runs = [Run(place(file.parent, folder), words, *results(file.parent))
            for file, words in zip(files, differing(configs), strict=True)]  # fmt: skip
    for file in sorted(folder.rglob("jobs.jsonl")):
        for job in jobs(file.parent):
            if job.mistake and not any(file.parent.glob(f"{job.number}-*")):
                runs.append(Run(place(file.parent / str(job.number), folder), {}, {}, None, f"failed: {job.mistake}"))
    return runs


def place(run: Path, folder: Path) -> str:
    return folder.resolve().name if run == folder else run.relative_to(folder).as_posix()


def leaves(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    """(dotted word, value) of a configuration without its housekeeping."""
    if isinstance(node, Mapping) and node:
        for word, child in node.items():
            if path or word not in HOUSEKEEPING:
                yield from leaves(child, f"{path}.{word}".removeprefix("."))
    else:
        yield path, node if isinstance(node, int | float | str) and not isinstance(node, bool) else json.dumps(node)


def differing(configs: Sequence[dict]) -> list[dict[str, object]]:
    """Of each configuration the words in which it differs from others; what follows from the run's name is left out.

    Where classes differ their names stand for all their words.
    """
    words = [word for word in dict.fromkeys(word for config in configs for word in config)
             if len({str(config.get(word)) for config in configs}) > 1]  # fmt: skip
    classes = tuple(word.removesuffix("_target_") for word in words if word.endswith("._target_"))
    words = [word for word in words if word.endswith("._target_") or not word.startswith(classes)]
    if "name" in words:
        words = [word for word in words if not word.startswith(("model.", "task.")) or not follows(word, configs)]
    return [{word.removesuffix("._target_"): short(config[word]) for word in words if word in config}
            for config in configs]  # fmt: skip


def follows(word: str, configs: Sequence[dict]) -> bool:
    """Whether runs of one name have one value of `word`."""
    values = {(config.get("name"), str(config.get(word))) for config in configs}
    return len(values) == len({name for name, _ in values})


def short(value: object) -> object:
    return value.rpartition(".")[2] if isinstance(value, str) and value.startswith(("lmzoo.", "torch.")) else value


def results(run: Path) -> tuple[dict[str, float], float | None, str]:
    """(metrics, seconds, state) of the run in a folder; where it has not ended, the metrics of its last rows."""
    rows, ended = Table(run / "metrics.csv", []).read(), run / "result.json"
    timed = [row for row in rows if row.get("tokens_per_s")]
    tokens = [0, *(row["tokens"] for row in timed)]
    seconds = [(row["tokens"] - before) / row["tokens_per_s"] for before, row in zip(tokens, timed, strict=False)]
    metrics = {name: value for row in rows for name, value in row.items() if name.startswith(("val/", "test/"))}
    state = "running" if busy(run) else "done" if ended.exists() else "failed"
    if state == "done":
        metrics = json.loads(ended.read_text(encoding="utf-8"))
    return metrics, sum(seconds) if seconds else None, state


def busy(run: Path) -> bool:
    """Whether a process trains in this folder now."""
    if not (run / ".lock").exists():
        return False
    try:
        with FileLock(run / ".lock", timeout=0):
            return False
    except Timeout:
        return True


def rank(value: float | None, highest: bool) -> float:
    """What to sort by: the best first, what is missing or no number last."""
    return math.inf if value is None or math.isnan(value) else -value if highest else value


def table(runs: Sequence[Run], metric: str) -> str:
    """A line for each run."""
    names = dict.fromkeys([metric, *(name for run in runs for name in run.metrics)])
    head = ["run", "differs in", *names, "seconds", "state"]
    lines = [
        [run.name, cut(differs(run), WIDEST), *(number(run.metrics.get(name)) for name in names),
         "" if run.seconds is None else f"{run.seconds:,.0f}", cut(run.state, WIDEST)]
        for run in runs
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    right = range(2, len(head) - 1)
    return "\n".join("  ".join(cell.rjust(width) if i in right else cell.ljust(width)
                               for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
                     for line in [head, *lines])  # fmt: skip


def differs(run: Run) -> str:
    return " ".join(filter(None, [run.setting, f"seed={run.words['seed']}" if "seed" in run.words else ""]))


def number(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def grouped(runs: Sequence[Run], metric: str) -> list[tuple[Run, list[float]]]:
    """(one of them, their metric) for the runs of each setting that have a finite one."""
    groups: dict[tuple, tuple[Run, list[float]]] = {}
    for run in runs:
        if math.isfinite(value := run.metrics.get(metric, math.nan)):
            setting = tuple((word, value) for word, value in run.words.items() if word != "seed")
            groups.setdefault(setting, (run, []))[1].append(value)
    return list(groups.values())


def unseeded(groups: Sequence[tuple[Run, list[float]]], metric: str) -> list[str]:
    """A table of means over seeds, where there are some."""
    several = [(run.setting, values) for run, values in groups if len(values) > 1]
    width = max((len(setting) for setting, _ in several), default=0)
    lines = [f"{setting:<{width}}  {statistics.fmean(values):.4g} ± {statistics.stdev(values):.2g}  "
             f"of {len(values)} runs".lstrip() for setting, values in several]  # fmt: skip
    return ["\n".join([f"{metric}, mean and standard deviation", *lines])] if lines else []


def draw(groups: Sequence[tuple[Run, list[float]]], metric: str, file: Path) -> None:
    """The picture that fits what differs."""
    words = list(dict.fromkeys(word for run, _ in groups for word in run.words if word != "seed"))
    places = [tuple(run.words.get(word) for word in words) for run, _ in groups]
    numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for place in places for x in place)
    results = [(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0) for _, values in groups]
    if numeric and len(words) == 1:
        draw_line([place + result for place, result in zip(places, results, strict=True)], file, (*words, metric))
    elif numeric and len(words) == 2:
        draw_map([place + result[:1] for place, result in zip(places, results, strict=True)], file, (*words, metric))
    else:
        names = [cut(run.setting or run.name, WIDEST) for run, _ in groups]
        draw_bars([(name, *result) for name, result in zip(names, results, strict=True)], file, metric)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("folder", help="a sweep's folder, or any folder with runs below it")
    arguments.add_argument("--metric", default="val/loss", help="what to sort by and to draw (val/loss)")
    arguments.add_argument("--highest", action="store_true", help="more of it is better")
    arguments.add_argument("--picture", help="where to draw (FOLDER/summary.png)")
    given = arguments.parse_args()
    answer(summarise, given.folder, given.metric, given.highest, given.picture)


if __name__ == "__main__":
    main()
