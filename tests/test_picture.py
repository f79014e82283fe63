"""The picture shows what there is, looked for by its colours."""

import warnings

import matplotlib.image
import numpy as np
import pytest

from lmzoo.callbacks.picture import TRAIN, VALIDATION, draw, draw_confusion


def has_colour(image: np.ndarray, colour: str) -> bool:
    wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return bool((np.abs(image[..., :3] - wanted).max(-1) < 0.02).sum() > 20)


def test_the_picture_shows_what_there_is(tmp_path):
    train = [{"step": s, "train/loss": 8 / s, "lr": 1e-3 * s} for s in range(1, 9)]
    validation = [{"step": 4, "val/loss": 2.5}, {"step": 8, "val/loss": 1.5}]
    for part, seen in ((train + validation, (True, True)), (train, (True, False)), ([], (False, False))):
        draw(part, tmp_path / "loss.png", title="a run")
        image = matplotlib.image.imread(tmp_path / "loss.png")
        assert image.shape[:2] == (675, 1200)
        inside = image[100:540, 150:700]  # without the legend
        assert (has_colour(inside, TRAIN), has_colour(inside, VALIDATION)) == seen


def test_each_set_of_validation_has_its_line_and_its_name(tmp_path):
    rows = [{"step": s, "val/loss": 2, "val/perplexity": 9e9, "val/$x^$/loss": 1, "val/a/b/loss": 3} for s in (4, 8)]
    for n, expected in ((2, 1), (4, 2), (5, 3)):
        draw([dict(list(row.items())[:n]) for row in rows], tmp_path / "loss.png")
        across = matplotlib.image.imread(tmp_path / "loss.png")[60:600, 400]  # halfway, away from the names
        red = across[:, 0] - across[:, 2] > 0.1
        assert np.count_nonzero(np.diff(red.astype(int)) == 1) == expected


@pytest.mark.parametrize("title", ["运行", "a$b^$c", "run ${x}", "", "a run"])
def test_a_title_is_literal_and_never_warns(tmp_path, title):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw([], tmp_path / "loss.png", title=title)
    top = matplotlib.image.imread(tmp_path / "loss.png")[:80, :350, :3]
    assert bool((top < 0.5).any()) == (title not in ("", "运行"))


@pytest.mark.parametrize("names", [["a", "b"], ["运行", "a$b^$c"], [f"class {n}" for n in range(40)]])
def test_confusions_stand_where_label_and_prediction_meet(tmp_path, names):
    """The centre of what is dark, for texts of one class that are taken for one class."""

    def centre(label, prediction):
        counts = np.zeros((len(names), len(names)))
        counts[label, prediction] = 7
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            draw_confusion(counts.tolist(), names, tmp_path / "confusion.png")
        image = matplotlib.image.imread(tmp_path / "confusion.png")
        red = image[:, int(0.25 * image.shape[1]) : int(0.75 * image.shape[1]), 0]  # without names and colour bar
        return np.argwhere((red > 0.4) & (red < 0.75)).mean(0)

    middle, last = len(names) // 2 - 1, len(names) // 2
    (y, x), (below, same), (again, right) = centre(middle, middle), centre(last, middle), centre(middle, last)
    assert y < below and same == pytest.approx(x, abs=10) and x < right and again == pytest.approx(y, abs=10)


def test_confusions_of_many_classes_keep_to_a_page(tmp_path):
    for n in (60, 300):
        draw_confusion(np.eye(n).tolist(), [f"class {i}" for i in range(n)], tmp_path / f"{n}.png")
    small, large = (matplotlib.image.imread(tmp_path / f"{n}.png") for n in (60, 300))
    assert large.shape == small.shape
