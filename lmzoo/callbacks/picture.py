"""Pictures: loss.png, a run's losses and its learning rate on a second axis; and what came of many runs."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import EngFormatter

TRAIN, VALIDATION, RATE, INK = "#4c78a8", "#e45756", "#a08a2e", "#444444"
NAMED = 60  # classes that have room for their names


def draw(rows: Sequence[dict[str, float]], path: str | Path, title: str = "") -> None:
    """Draws rows of metrics.csv (`step`, `train/loss`, `val/loss`, `val/NAME/loss`, `lr`; any may lack) as a PNG."""
    figure, loss = _figure()
    rate = loss.twinx()
    loss.set_zorder(rate.get_zorder() + 1)  # the losses in front
    loss.patch.set_visible(False)

    lines = rate.plot(*_series(rows, "lr"), color=RATE, linewidth=1.2, linestyle=(0, (4, 2)), label="learning rate")
    lines += loss.plot(*_series(rows, "train/loss"), color=TRAIN, linewidth=1.2, label="train")
    steps, values = _series(rows, "val/loss")
    label = f"validation (last {values[-1]:.3f})" if values else "validation"
    lines += loss.plot(steps, values, color=VALIDATION, linewidth=1.8, marker="o", markersize=4, label=label)
    for column in sorted({name for row in rows for name in row if re.fullmatch("val/.+/loss", name)}):
        steps, values = _series(rows, column)
        loss.plot(steps, values, color=VALIDATION, linewidth=0.8)
        loss.annotate(column[4:-5], (steps[-1], values[-1]), color=VALIDATION, fontsize=7, xytext=(-3, 2), ha="right",
                      textcoords="offset points", parse_math=False)

    loss.set_xlabel("optimizer steps", color=INK)
    loss.set_ylabel("loss (nats per target)", color=INK)
    rate.set_ylabel("learning rate", color=RATE)
    rate.set_ylim(bottom=0)
    rate.yaxis.set_major_formatter("{x:g}")
    loss.xaxis.set_major_formatter(EngFormatter(sep=""))
    loss.margins(x=0.01)
    loss.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    for axis, colour in ((loss, INK), (rate, RATE)):
        _soften(axis, colour)
    if _drawable(title):
        loss.set_title(title, loc="left", fontsize=10, color=INK, parse_math=False)
    shown = [line for line in (*lines[1:], lines[0]) if len(line.get_xdata())]
    loss.legend(handles=shown, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    figure.savefig(path)


def _series(rows: Sequence[dict[str, float]], column: str) -> tuple[list[float], list[float]]:
    """The steps that have a value in `column`, and the values."""
    points = [(row["step"], row[column]) for row in rows if column in row]
    return [step for step, _ in points], [value for _, value in points]


def draw_line(points: Sequence[tuple[float, float, float]], path: str | Path, labels: tuple[str, str]) -> None:
    """Draws (x, value, deviation) as a line, a PNG at `path`; `labels` are of the axes."""
    figure, axis = _figure()
    x, values, deviations = zip(*sorted(points), strict=True)
    axis.errorbar(x, values, yerr=deviations if any(deviations) else None, color=TRAIN, marker="o", capsize=3)
    axis.set_xscale(_scale(x))
    axis.set_xlabel(labels[0], color=INK, parse_math=False)
    axis.set_ylabel(labels[1], color=INK)
    _soften(axis, INK)
    figure.savefig(path)


def draw_map(points: Sequence[tuple[float, float, float]], path: str | Path, labels: tuple[str, str, str]) -> None:
    """Draws (x, y, value) as a map of cells, a PNG at `path`; the same distance between all neighbours."""
    figure, axis = _figure()
    columns, lines = (sorted({point[i] for point in points}) for i in (0, 1))
    cells = [[math.nan] * len(columns) for _ in lines]
    for x, y, value in points:
        cells[lines.index(y)][columns.index(x)] = value
        axis.text(columns.index(x), lines.index(y), f"{value:.4g}", ha="center", va="center", color=INK, fontsize=9)
    image = axis.imshow(cells, origin="lower", aspect="auto", cmap="viridis", alpha=0.5)
    axis.set_xticks(range(len(columns)), [f"{x:g}" for x in columns])
    axis.set_yticks(range(len(lines)), [f"{y:g}" for y in lines])
    axis.set_xlabel(labels[0], color=INK, parse_math=False)
    axis.set_ylabel(labels[1], color=INK, parse_math=False)
    figure.colorbar(image, label=labels[2])
    figure.savefig(path)


def draw_bars(bars: Sequence[tuple[str, float, float]], path: str | Path, label: str) -> None:
    """Draws (name, value, deviation) as bars, the first on top, a PNG at `path`."""
    figure, axis = _figure(height=1.2 + 0.3 * len(bars))
    names, values, deviations = zip(*reversed(bars), strict=True)
    drawn = axis.barh(range(len(bars)), values, xerr=deviations if any(deviations) else None, color=TRAIN)
    axis.bar_label(drawn, fmt="%.4g", padding=3, fontsize=8)
    axis.set_yticks(range(len(bars)), names, parse_math=False)
    axis.set_xlabel(label, color=INK)
    axis.margins(x=0.1)
    _soften(axis, INK)
    figure.savefig(path)


def draw_confusion(counts: Sequence[Sequence[float]], names: Sequence[str], path: str | Path) -> None:
    """Draws how often texts of each class (a line) were taken for each (a column), a PNG at `path`."""
    n, step = len(names), math.ceil(len(names) / NAMED)
    figure, axis = _figure(height=max(4.5, 1.5 + 0.3 * min(n, NAMED)))
    shares = [[value / max(1, sum(line)) for value in line] for line in counts]
    image = axis.imshow(shares, aspect="auto", cmap="Blues", vmin=0, vmax=1, alpha=0.55)
    for y, line in enumerate(counts if n <= 30 else ()):
        for x, value in enumerate(line):
            axis.text(x, y, f"{value:g}", ha="center", va="center", color=INK, fontsize=8)
    shown = [name if _drawable(name) else str(place) for place, name in enumerate(names)][::step]
    axis.set_xticks(range(0, n, step), shown, rotation=90 if n > 6 else 0, fontsize=8, parse_math=False)
    axis.set_yticks(range(0, n, step), shown, fontsize=8, parse_math=False)
    axis.set_xlabel("prediction", color=INK)
    axis.set_ylabel("label", color=INK)
    figure.colorbar(image, label="share of the label's texts")
    figure.savefig(path)


def _drawable(text: str) -> bool:
    """Whether the font has all signs of a text; else there would be boxes, and warnings."""
    return set(map(ord, text)) <= get_font(findfont(FontProperties())).get_charmap().keys()


def _figure(height: float = 4.5) -> tuple[Figure, Axes]:
    """A figure without pyplot, so without a display and without state shared between runs; and its axes."""
    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    return figure, figure.add_subplot()


def _soften(axis: Axes, colour: str) -> None:
    axis.spines[:].set_color("#bbbbbb")
    axis.spines["top"].set_visible(False)
    axis.tick_params(colors=colour, labelsize=9)


def _scale(values: Sequence[float]) -> str:
    """Logarithmic for positive numbers that span more than one order of magnitude, as learning rates."""
    return "log" if min(values) > 0 and max(values) / min(values) >= 10 else "linear"
