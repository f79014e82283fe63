"""loss.png: a run's training and validation loss, and its learning rate on a second axis."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

TRAIN, VALIDATION, RATE, INK = "#4c78a8", "#e45756", "#a08a2e", "#444444"


def draw(rows: Sequence[dict[str, float]], path: str | Path, title: str = "") -> None:
    """Draws the rows of metrics.csv (`step`, `train/loss`, `val/loss`, `lr`; any may lack some) as a PNG at `path`."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # drawn without pyplot, so without a display and without state shared between runs
    loss = figure.add_subplot()
    rate = loss.twinx()
    loss.set_zorder(rate.get_zorder() + 1)  # the losses in front
    loss.patch.set_visible(False)

    lines = rate.plot(*_series(rows, "lr"), color=RATE, linewidth=1.2, linestyle=(0, (4, 2)), label="learning rate")
    lines += loss.plot(*_series(rows, "train/loss"), color=TRAIN, linewidth=1.2, label="train")
    steps, values = _series(rows, "val/loss")
    label = f"validation (last {values[-1]:.3f})" if values else "validation"
    lines += loss.plot(steps, values, color=VALIDATION, linewidth=1.8, marker="o", markersize=4, label=label)

    loss.set_xlabel("optimizer steps", color=INK)
    loss.set_ylabel("loss (nats per target)", color=INK)
    rate.set_ylabel("learning rate", color=RATE)
    rate.set_ylim(bottom=0)
    rate.yaxis.set_major_formatter("{x:g}")
    loss.xaxis.set_major_formatter(EngFormatter(sep=""))
    loss.margins(x=0.01)
    loss.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    for axis, colour in ((loss, INK), (rate, RATE)):
        axis.spines[:].set_color("#bbbbbb")
        axis.spines["top"].set_visible(False)
        axis.tick_params(colors=colour, labelsize=9)
    loss.set_title(title, loc="left", fontsize=10, color=INK)
    shown = [line for line in (*lines[1:], lines[0]) if len(line.get_xdata())]
    loss.legend(handles=shown, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    figure.savefig(path)


def _series(rows: Sequence[dict[str, float]], column: str) -> tuple[list[float], list[float]]:
    """The steps that have a value in `column`, and the values."""
    points = [(row["step"], row[column]) for row in rows if column in row]
    return [step for step, _ in points], [value for _, value in points]
