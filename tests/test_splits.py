"""However the rows of a step are split into micro-batches, it is one step, for every task with its own net and rows.

`test_base.py` holds the step itself against torch, on ranks too; `test_exact_resume.py` real runs on two ranks.
"""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import lmzoo
import tiny_run
from lmzoo.train import assemble
from marks import slow_but
from tiny_run import TASKS, rows, spoken

SGD = (
    "optim=sgd", "optim.lr=1.0", "optim.clip_norm=0.05", "optim.weight_decay=0", "optim.optimizer.momentum=0",
    "optim.optimizer.nesterov=false", "schedule=constant", "schedule.warmup_steps=0", "model.dropout=0",
    "trainer.max_steps=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return tiny_run.texts(tmp_path_factory.mktemp("texts"))


PLAIN = {task: (*words, *SGD, *(["task.head.dropout=0"] if task == "classification" else []))
         for task, words in TASKS.items()}  # fmt: skip


@pytest.mark.parametrize("task", slow_but(["clm", "span_corruption"], TASKS))
def test_a_step_is_one_for_any_split(texts, tmp_path, task):
    """Four steps, the last of an epoch among them, of 8 rows, 2 and 1 a forward: weights and rows to 1e-6."""
    found = []
    for size in (8, 2, 1):
        words = spoken(texts, *PLAIN[task], f"data.micro_batch_size={size}", f"run_dir={tmp_path / str(size)}")
        net, metrics = lmzoo.fit(lmzoo.compose(*words))
        kept = [{name: float(cell) for name, cell in row.items() if cell} for row in rows(tmp_path / str(size))]
        found.append((net.state_dict(), kept, metrics))
    for state, kept, metrics in found[1:]:
        torch.testing.assert_close(state, found[0][0], rtol=0, atol=1e-6)
        assert kept == [pytest.approx(row, rel=1e-5, abs=1e-6) for row in found[0][1]]
        assert metrics == pytest.approx(found[0][2], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("task", slow_but(["mlm"], TASKS))
def test_clipping_sees_the_gradient_of_the_mean(texts, tmp_path, task):
    """One step in forwards of one row, against torch's gradient of all rows' mean, clipped by torch."""
    words = spoken(texts, *PLAIN[task], f"run_dir={tmp_path / 'run'}", "trainer.max_steps=1")
    reference, data = assemble(lmzoo.compose(*words, "data.micro_batch_size=8"))
    (batch,) = next(iter(data.train_dataloader()))
    loss = reference.loss(batch)["loss"] / (batch["labels"] != -100).sum()
    loss.backward()
    norm = clip_grad_norm_(reference.parameters(), 0.05)
    expected = {name: (weight - weight.grad).detach() for name, weight in reference.net.named_parameters()}
    net, _ = lmzoo.fit(lmzoo.compose(*words, "data.micro_batch_size=1"))
    (row,) = rows(tmp_path / "run")
    assert norm > 0.1 and float(row["grad_norm"]) == pytest.approx(norm.item(), rel=1e-5)
    assert float(row["train/loss"]) == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(dict(net.named_parameters()), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "names"), [("mixture", {"a", "b/x", "b/y"}), ("text", {"x", "y"})])
def test_each_source_and_named_set_is_validated_by_itself(texts, tmp_path, kind, names):
    """Its own mean, and the mean over all targets together, for any number of rows a forward: against torch."""
    path = Path(texts["data=text"][0].partition("=")[2])
    sets = {"x": path.with_name("b.txt"), "y": path.with_name("c.csv")}
    given = [f"data.val_path.{name}={file}" for name, file in sets.items()]
    given = ["data=mixture", "data.val_fraction=0.3"] if kind == "mixture" else given
    metrics, monitored = {}, f"val/{max(names)}/loss"
    for size in (8, 2):
        words = spoken(texts, *TASKS["clm"], *given, "trainer.max_steps=2", f"data.micro_batch_size={size}",
                       "model.dropout=0", f"run_dir={tmp_path / str(size)}",
                       f"checkpoint.monitor={monitored}")  # fmt: skip
        words = [word for word in words if kind == "mixture" or not word.startswith("data.val_fraction")]
        net, metrics[size] = lmzoo.fit(lmzoo.compose(*words))
    data = assemble(lmzoo.compose(*words, f"run_dir={tmp_path / 'none'}"))[1]
    means, n, n_bytes = {}, {}, {}
    for name, source in data.rows["val"].sources.items():
        batch = data.collator([source[row] | {"key": (0, 0, row)} for row in range(len(source))])
        with torch.no_grad():
            logits = net(batch["input_ids"], document_ids=batch.get("document_ids")).flatten(0, 1)
        means[name] = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()).item()
        n[name], n_bytes[name] = int((batch["labels"] != -100).sum()), source.split.n_bytes
    different = sorted(means.values())
    assert means.keys() == names and min(b - a for a, b in pairwise(different)) > 1e-4
    expected = {}
    for place in {"val", *(f"val/{name}" for name in names), *(f"val/{name.split('/')[0]}" for name in names)}:
        inside = [name for name in names if f"val/{name}/".startswith(f"{place}/")]
        nats = sum(means[name] * n[name] for name in inside)
        mean = nats / sum(n[name] for name in inside)
        expected |= {f"{place}/loss": mean, f"{place}/perplexity": math.exp(mean)}
        expected[f"{place}/bits_per_byte"] = nats / math.log(2) / sum(n_bytes[name] for name in inside)
    for found in metrics.values():
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert {name.rpartition("/")[0] for name in found} == {name.rpartition("/")[0] for name in expected}
    last = rows(tmp_path / "2")[-1]
    assert {name: float(last[name]) for name in expected} == {name: metrics[2][name] for name in expected}
    kept = json.loads((tmp_path / "2" / "result.json").read_text())
    assert kept[monitored] == metrics[2][monitored]
    assert [file.name for file in (tmp_path / "2" / "checkpoints").glob("best*")]
