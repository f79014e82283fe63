"""Regression: standardised targets, correlations by hand, alike for any batch size and number of ranks.

Run as a script this file is one of two ranks that test one net on 7 texts.
"""

import math
import warnings
from functools import partial

import pytest
import torch
from lightning import Trainer
from lmzoo.tasks.regression import Regression

import downstream_run
import lmzoo
import ranks
import tiny_run
from downstream_run import TEXTS, examples, held, learn

NUMBERS = [3.0, -100.0, 4.0, 1.0, 5.0, 9.0, 2.5]
KNOWN = {"mean": 2.0, "deviation": 4.0}
task = partial(downstream_run.task, Regression, n=1)


def evaluate(folder, rank=0, world=1, size=2, numbers=NUMBERS, guesses=None):
    tested = task()
    tested.identity["numbers"] = KNOWN
    if guesses:
        tested.logits = lambda batch: torch.tensor(guesses)[batch["sample"], None]
    data = downstream_run.Texts(tested.collator, examples(numbers), None, "number", rank, world, size)
    return downstream_run.evaluate(folder, tested, data, world)


def test_loss_is_of_standardised_numbers():
    """-100 is a number like any other."""
    model = task()
    model.identity["numbers"] = KNOWN
    sums = model.loss(batch := model.collator(list(examples(NUMBERS))))
    expected = sum((guess - (number - 2) / 4) ** 2 for guess, number in zip(model.logits(batch)[:, 0].tolist(), NUMBERS,
                                                                            strict=True))
    assert sums["loss"].item() == pytest.approx(expected, rel=1e-5) and sums["targets"] == 7
    assert (batch["labels"] != -100).all()


def test_mean_and_deviation_are_of_the_training_labels_and_go_into_the_checkpoint():
    model = task()
    model.trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    model.trainer.datamodule = data = downstream_run.Texts(model.collator, examples(NUMBERS), None, "number")
    for numbers, expected in (([1.0, 2.0, 3.0, 6.0], (3.0, math.sqrt(3.5))), ([7.0, 7.0], (7.0, 1.0))):
        data.rows["train"] = held(numbers=numbers)
        model.setup("fit")
        model.on_save_checkpoint(checkpoint := {})
        found = checkpoint["lmzoo"]["numbers"]
        assert (found["mean"], found["deviation"]) == pytest.approx(expected)
    assert set(model.measured()) == {f"val/{name}" for name in ("loss", "pearson", "spearman", "mae", "rmse")}


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_one_repeated_batch_is_learned(name):
    model = task(name)
    model.identity["numbers"] = {"mean": -10.8, "deviation": 36.5}
    assert learn(model, examples(NUMBERS)) < 0.02


def test_metrics_and_predictions_by_hand(tmp_path):
    """Guesses 6, 2, 10, 14 for 1, 2, 3, 4: deviations (-2, -6, 2, 6) against (-1.5, -.5, .5, 1.5)."""
    tested = task()
    tested.identity["numbers"] = KNOWN
    tested.logits = lambda batch: torch.tensor([[1.0], [0.0], [2.0], [3.0]])
    data = downstream_run.Texts(tested.collator, examples([1.0, 2.0, 3.0, 4.0], TEXTS[:4]), None, "number", size=4)
    found, rows, shown = downstream_run.evaluate(tmp_path, tested, data)
    assert found["test/pearson"] == pytest.approx((3 + 3 + 1 + 9) / math.sqrt(80 * 5))
    assert found["test/spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert found["test/mae"] == pytest.approx((5 + 0 + 7 + 10) / 4)
    assert found["test/rmse"] == pytest.approx(math.sqrt((25 + 0 + 49 + 100) / 4))
    assert found["test/loss"] == pytest.approx((1.25**2 + 0 + 1.75**2 + 2.5**2) / 4)
    assert rows == [{"text": text, "label": label, "prediction": guess} for text, label, guess in
                    zip(TEXTS, (1.0, 2.0, 3.0, 4.0), (6.0, 2.0, 10.0, 14.0), strict=False)]
    assert "6 (it is 1)" in shown


def test_what_is_not_defined_is_left_out_and_never_warns(tmp_path, recwarn):
    """Pearson's correlation with what is constant; torchmetrics calls Spearman's 0 there."""
    found, _, _ = evaluate(tmp_path, numbers=[1.0] * 7)
    assert found.keys() == {"test/loss", "test/spearman", "test/mae", "test/rmse"}
    assert not [warning for warning in recwarn if "variance" in str(warning.message)]


def test_a_run_whose_monitor_is_not_always_defined(tmp_path, monkeypatch, capsys):
    """In none of its validations, whose labels are all alike; then in one, whose weights are those that are tested."""
    table = tmp_path / "a.csv"
    table.write_text("text,label,split\n" + "".join(
        f"number {n},{1 if n % 3 == 1 else n},{['train', 'val', 'test'][n % 3]}\n" for n in range(24)))
    words = tiny_run.spoken({"data=csv": [f"data.path={table}"]}, "model=bert", "task=regression", "data=csv",
                            "data.split_column=split", "trainer.max_steps=6", "trainer.val_every_n_steps=2",
                            "checkpoint.monitor=val/pearson", "checkpoint.keep_best=3")  # fmt: skip
    _, metrics = lmzoo.fit(lmzoo.compose(*words, f"run_dir={tmp_path / 'never'}"))
    assert "val/pearson" not in metrics and "test/pearson" in metrics
    assert "val/pearson was defined in no validation: the test is of the last step\n" in capsys.readouterr().out

    summarise, seen = Regression.summarise, []

    def once(task, sums, split):
        seen.append(task.trainer.global_step)
        return summarise(task, sums, split) | ({"pearson": 0.5} if seen[-1] == 4 else {})

    monkeypatch.setattr(Regression, "summarise", once)
    lmzoo.fit(lmzoo.compose(*words, f"run_dir={tmp_path / 'once'}"))
    found = {row["step"]: row["val/pearson"] for row in tiny_run.rows(tmp_path / "once") if row["val/loss"]}
    assert found == {"2": "", "4": "0.5", "6": ""}
    assert [file.name for file in (tmp_path / "once/checkpoints").glob("best-*")] == ["best-000004-0.5.ckpt"]
    assert "the test is of the best by val/pearson, best-000004-0.5.ckpt" in capsys.readouterr().out


@pytest.mark.slow
def test_other_batch_sizes_and_two_ranks_give_the_same(tmp_path):
    """Of seven texts in four batches rank 1 has three and a filler; in one, nothing but a filler."""
    expected = evaluate(tmp_path / "one", size=7)
    found = ranks.run(__file__, tmp_path)
    for metrics, rows, _ in (evaluate(tmp_path / "small", size=3), *found[0]):
        assert metrics == pytest.approx(expected[0], rel=1e-6, abs=1e-6)
        for row, other in zip(rows, expected[1], strict=True):
            assert row == other | {"prediction": pytest.approx(other["prediction"], abs=1e-5)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    two = ranks.folder() / "two"
    ranks.save([evaluate(two, ranks.rank(), 2), evaluate(two, ranks.rank(), 2, size=7)])
