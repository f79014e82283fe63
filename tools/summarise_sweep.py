"""What came of a sweep, or of any folder of runs: a table sorted by result, and a picture of it.

python -m lmzoo.tools.summarise_sweep FOLDER [--metric val/loss] [--picture FILE]

A line of the table is a run: its metrics at the end (so far, if it has not ended), seconds of
training, whether it is done, running, stopped at a step or failed, and what differs in its
configuration. The best is on top: the least of a loss, perplexity, error or bits, the most of the
rest. Runs that differ in their seed alone are also shown as mean and standard deviation. Tasks have
tables of their own, since their losses mean different things, and so have runs of other texts or
tokenizers, unless all of them have bits per byte, by which they are then sorted. The picture
(FOLDER/summary.png) is a line over one number that differs, a map over two, else bars.
"""

import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, zip_longest
from pathlib import Path

from lmzoo.tools import answer, new_file, parser

from lmzoo import UserError
from lmzoo.callbacks.metrics import Table
from lmzoo.callbacks.picture import draw_bars, draw_line, draw_map
from lmzoo.callbacks.saving import lower_is_better
from lmzoo.checkpoint import in_training, names
from lmzoo.checks import explain
from lmzoo.literal import load, plain
from lmzoo.signatures import nearest
from lmzoo.sweep import jobs

HOUSEKEEPING = ("run_dir", "callbacks", "logger", "tags", "trust", "ckpt", "checkpoint")  # changes no result
TEXT = re.compile(r"tokenizer\..*|data\.(sources\..*|path|val_path.*|val_fraction|name|config|field|text_column)")
BITS = "val/bits_per_byte"
WIDTH, DIFFERENCES = 100, 24  # columns of a table; of what differs, if there is more than one metric
WIDEST = {"run": 30}  # columns of a column, of the others 18


@dataclass
class Run:
    """A run's name and state, its metrics, its seconds of training, and its configuration as {dotted word: value}."""

    name: str
    state: str
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    config: dict[str, object] = field(default_factory=dict)
    words: dict[str, object] = field(default_factory=dict)  # of `config`, what differs from the others of its task

    @property
    def task(self) -> object:
        return self.config.get("task._target_")

    @property
    def setting(self) -> dict[str, object]:
        return {word: value for word, value in self.words.items() if word != "seed"}


def summarise(folder: str, metric: str | None = None, picture: str | None = None) -> str:
    """The tables of the runs below `folder`, one for all that can be compared; draws as many pictures."""
    if picture:
        new_file(picture, ".png")
    runs = read(Path(folder))
    if not runs:
        raise UserError(f"{folder}: there is no run in it (a folder with a config.yaml)")
    known = {name for run in runs for name in run.metrics}
    if known and (wanted := metric or "val/loss") not in known:
        raise UserError(f"--metric {wanted}: no run in {folder} has it{nearest(wanted, known)}")
    sections, groups = [], comparable(runs, metric)
    for n, (title, by, own) in enumerate(groups):
        sign = 1 if lower_is_better(by) else -1
        own.sort(key=lambda run: rank(sign * run.metrics.get(by, math.nan)))  # noqa: B023
        for run, words in zip(own, differing([run.config for run in own]), strict=True):
            run.words = words
        seeds = grouped(own, by)
        sections += [title] * bool(title) + [table(own, by), *unseeded(seeds, by, own)]
        if seeds:
            file = Path(picture or Path(folder, "summary.png"))
            name = re.sub(r"[^\w.=-]+", "-", title.removeprefix("task "))
            name = name if len(name) < 40 else f"{name[:40]}-{n}"
            file = file.with_stem(f"{file.stem}-{name}") if len(groups) > 1 else file
            sections.append(drawn(seeds, by, file, named=picture is not None))
    return "\n\n".join(sections)


def comparable(runs: Sequence[Run], metric: str | None) -> list[tuple[str, str, list[Run]]]:
    """(title, what to sort by, runs) of each set of runs whose metrics mean the same.

    They have one task, and one text and tokenizer, or all of them bits per byte where nobody asks for another `metric`.
    A run of which nothing is known goes with the last.
    """
    found, tasks = [], parted([run for run in runs if run.config], lambda run: run.task)
    for own in tasks or [[]]:
        texts = parted(own, lambda run: str(text(run)))
        measured = all(BITS in run.metrics for run in own if run.metrics) and metric in (None, BITS)
        sets = [own] if len(texts) < 2 or measured else texts
        words = labels(differing([text(some[0]) for some in sets])) if len(sets) > 1 else [""]
        for some, word in zip(sets, words, strict=True):
            title = [f"task {short(own[0].task)}" if len(tasks) > 1 else "", word]
            by = BITS if len(texts) > 1 and measured else metric or "val/loss"
            found.append(("  ".join(filter(None, title)), by, some))
    found[-1][2].extend(run for run in runs if not run.config)
    return found


def parted(runs: Sequence[Run], by: Callable[[Run], object]) -> list[list[Run]]:
    """The runs that have the same `by` together, in the order of the first of them."""
    found: dict[object, list[Run]] = {}
    for run in runs:
        found.setdefault(by(run), []).append(run)
    return list(found.values())


def text(run: Run) -> dict[str, object]:
    """The words that say of what text, cut into what tokens, the metrics of a run are."""
    return {word: value for word, value in run.config.items() if TEXT.fullmatch(word)}


def read(folder: Path) -> list[Run]:
    """Every run below `folder`, and the jobs of sweeps there that were refused before they had a folder.

    What can't be read of one is its state.
    """
    runs = []
    for file in sorted(folder.rglob("config.yaml")):
        if "wandb" not in file.relative_to(folder).parts:
            name = place(file.parent, folder)
            try:
                state, metrics, seconds = results(file.parent)
                runs.append(Run(name, state, metrics, seconds, dict(leaves(plain(load(file))))))
            except Exception as error:  # whatever somebody has done to its files
                runs.append(Run(name, f"broken: {explain(error)}"))
    for file in sorted(folder.rglob("jobs.jsonl")):
        try:
            runs += [Run(place(file.parent / str(job.number), folder), f"failed: {job.mistake}") for job in
                     jobs(file.parent) if job.mistake and not any(file.parent.glob(f"{job.number}-*"))]
        except Exception as error:
            runs.append(Run(place(file, folder), f"broken: {explain(error)}"))
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
    known = [config for config in configs if config]
    words = [word for word in dict.fromkeys(word for config in known for word in config)
             if len({str(config.get(word)) for config in known}) > 1]  # fmt: skip
    classes = tuple(word.removesuffix("_target_") for word in words if word.endswith("._target_"))
    words = [word for word in words if word.endswith("._target_") or not word.startswith(classes)]
    if "name" in words:
        words = [word for word in words if not word.startswith(("model.", "task.")) or not follows(word, known)]
    return [{word.removesuffix("._target_"): short(config[word]) for word in words if word in config}
            for config in configs]  # fmt: skip


def follows(word: str, configs: Sequence[dict]) -> bool:
    """Whether runs of one name have one value of `word`."""
    values = {(config.get("name"), str(config.get(word))) for config in configs}
    return len(values) == len({name for name, _ in values})


def short(value: object) -> object:
    return value.rpartition(".")[2] if isinstance(value, str) and value.startswith(("lmzoo.", "torch.")) else value


def results(run: Path) -> tuple[str, dict[str, float], float | None]:
    """(state, metrics, seconds) of the run in a folder; where it has not ended, the metrics of its last rows."""
    rows, ended = Table(run / "metrics.csv", []).read(), run / "result.json"
    timed = [row for row in rows if row.get("tokens_per_s")]
    tokens = [0, *(row["tokens"] for row in timed)]
    seconds = [(row["tokens"] - before) / row["tokens_per_s"] for before, row in zip(tokens, timed, strict=False)]
    metrics = {name: value for row in rows for name, value in row.items() if name.startswith(("val/", "test/"))}
    if ended.exists():
        metrics = {name: float(value) for name, value in json.loads(ended.read_text(encoding="utf-8")).items()}
    state = "done" if ended.exists() else left(run)
    try:
        state = "running" if in_training(run) else state
    except OSError:  # only who may write the folder can ask for its lock
        state = state if ended.exists() else f"{state} or running"
    return state, metrics, sum(seconds) if seconds else None


def left(run: Path) -> str:
    """The state of a run without a result: one that has checkpoints and did not break was stopped, and can go on."""
    broke = any(job.mistake and not job.mistake.startswith("stopped") and run.name.startswith(f"{job.number}-")
                for job in jobs(run.parent))  # fmt: skip
    steps = [int(found[1]) for name in names(run / "checkpoints") if (found := re.match(r"\w+-(\d+)", name))]
    return f"stopped at step {max(steps):,}" if steps and not broke else "failed"


def rank(value: float) -> float:
    """What to sort by: what is missing or no number is last."""
    return math.inf if math.isnan(value) else value


def table(runs: Sequence[Run], metric: str) -> str:
    """A line of at most WIDTH columns for each run, and more below it where a text is longer: nothing is cut.

    Metrics for which there is no room are named at the end.
    """
    metrics = list(dict.fromkeys([metric, *(name for run in runs for name in run.metrics)]))
    columns = {"run": [run.name for run in runs],
               **{name: [number(run.metrics.get(name)) for run in runs] for name in metrics},
               "seconds": ["" if run.seconds is None else f"{run.seconds:,.0f}" for run in runs],
               "state": [run.state for run in runs]}  # fmt: skip
    widths = {head: min(WIDEST.get(head, 18), max(map(len, (head, *cells)))) for head, cells in columns.items()}
    shown = set(metrics)
    for name in reversed(metrics[1:]):
        if sum(width + 2 for width in widths.values()) > WIDTH - DIFFERENCES:
            shown.remove(name)
            del widths[name]
    columns["differs in"] = labels([run.words for run in runs])
    widths["differs in"] = WIDTH - sum(width + 2 for width in widths.values())
    lines = []
    for cells in zip(*([head, *columns[head]] for head in widths), strict=True):
        wrapped = [textwrap.wrap(cell, width) for cell, width in zip(cells, widths.values(), strict=True)]
        for parts in zip_longest(*wrapped, fillvalue=""):
            lines.append("  ".join(part.rjust(width) if head in shown | {"seconds"} else part.ljust(width)
                                   for part, (head, width) in zip(parts, widths.items(), strict=True)).rstrip())
    left_out = [name for name in metrics if name not in shown]
    return "\n".join(lines + textwrap.wrap(f"no room for {', '.join(left_out)}", WIDTH) * bool(left_out))


def labels(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Each setting as text, its words from the end on by which they are known from each other: `lr=0.01 seed=1`."""
    words = {word: word.split(".") for setting in settings for word in setting}
    keys = {}
    for word, parts in words.items():
        n = next(n for n in count(1) if [other[-n:] for other in words.values()].count(parts[-n:]) == 1)
        keys[word] = ".".join(parts[-n:])
    return [" ".join(f"{keys[word]}={number(value)}" for word, value in setting.items()) for setting in settings]


def number(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def grouped(runs: Sequence[Run], metric: str) -> list[tuple[Run, list[float]]]:
    """(one of them, their metric) for the runs of each setting that have a finite one."""
    groups: dict[tuple, tuple[Run, list[float]]] = {}
    for run in runs:
        if math.isfinite(value := run.metrics.get(metric, math.nan)):
            groups.setdefault(tuple(run.setting.items()), (run, []))[1].append(value)
    return list(groups.values())


def unseeded(groups: Sequence[tuple[Run, list[float]]], metric: str, runs: Sequence[Run]) -> list[str]:
    """A table of means over seeds, where there are some: of the metric, of all metrics if nothing else differs."""
    if len(groups) == 1 and len(groups[0][1]) > 1:
        runs = [run for run in runs if run.setting == groups[0][0].setting]  # not of one that has diverged
        found = {name: [run.metrics[name] for run in runs if math.isfinite(run.metrics.get(name, math.nan))]
                 for name in dict.fromkeys([metric, *(name for run in runs for name in run.metrics)])}  # fmt: skip
        width = max(map(len, found))
        lines = [f"{name:<{width}}  {statistics.fmean(own):<8.4g} ± {statistics.stdev(own):<8.2g} of {len(own)} runs"
                 for name, own in found.items() if len(own) > 1]  # fmt: skip
        return ["\n".join(["mean and standard deviation over seeds", *lines])]
    several = [(run, values) for run, values in groups if len(values) > 1]
    settings = labels([run.setting for run, _ in several])
    lines = [f"{statistics.fmean(values):<8.4g} ± {statistics.stdev(values):<8.2g} of {len(values)} runs  {setting}"
             for setting, (_, values) in zip(settings, several, strict=True)]  # fmt: skip
    lines = [textwrap.fill(line, WIDTH, subsequent_indent=" " * 31) for line in lines]
    return ["\n".join([f"{metric}, mean and standard deviation", *lines])] if lines else []


def drawn(groups: Sequence[tuple[Run, list[float]]], metric: str, file: Path, named: bool) -> str:
    """Draws the picture; says where. One that lies where nobody has `named` a place is drawn anew."""
    try:
        if named or not (file.is_file() and b"Matplotlib" in file.read_bytes()[:200]):
            new_file(file, ".png")
        draw(groups, metric, file)
    except (UserError, OSError) as error:
        if named:
            raise
        return f"no picture: {explain(error)}; say where by --picture FILE"
    return f"picture: {file}"


def draw(groups: Sequence[tuple[Run, list[float]]], metric: str, file: Path) -> None:
    """The picture that fits what differs."""
    words = list(dict.fromkeys(word for run, _ in groups for word in run.setting))
    places = [tuple(run.words.get(word) for word in words) for run, _ in groups]
    numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for place in places for x in place)
    results = [(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0) for _, values in groups]
    if numeric and len(words) == 1:
        draw_line([place + result for place, result in zip(places, results, strict=True)], file, (*words, metric))
    elif numeric and len(words) == 2:
        draw_map([place + result[:1] for place, result in zip(places, results, strict=True)], file, (*words, metric))
    else:
        names = [textwrap.fill(run.name, 40) for run, _ in groups]
        draw_bars([(name, *result) for name, result in zip(names, results, strict=True)], file, metric)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("folder", help="a sweep's folder, or any folder with runs below it")
    arguments.add_argument("--metric", help="what to sort by and to draw (val/loss)")
    arguments.add_argument("--picture", metavar="FILE", help="where to draw, a new .png (FOLDER/summary.png)")
    given = arguments.parse_args()
    answer(summarise, given.folder, given.metric, given.picture)


if __name__ == "__main__":
    main()
