"""Runs that train an adapter: what their checkpoints hold, and that these find their base again, or say why not."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from lmzoo.tools.export import export
from lmzoo.tools.merge_adapter import merge

import lmzoo
import tiny_run
from lmzoo import UserError, checkpoint, evaluate
from lmzoo.config import command, compose

TASKS = {"bert": "mlm", "gpt": "clm", "t5": "span_corruption"}
NAMES = TASKS.keys()
LORA = ("adapter=lora", "adapter.rank=2")


@pytest.fixture(scope="module", autouse=True)
def lean():
    with tiny_run.lean():
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return tiny_run.texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def runs(texts, tmp_path_factory):
    """A folder with a pretrained run of each family, NAME, and an adapter of it for classes, lora-NAME."""
    folder = tmp_path_factory.mktemp("runs")
    for name, task in TASKS.items():
        words = tiny_run.spoken(texts, *tiny_run.TASKS[task], f"run_dir={folder / name}", "trainer.max_steps=4")
        lmzoo.fit(compose(*words))
        lmzoo.fit(compose(*tuned(texts, folder / name, folder / f"lora-{name}", *LORA)))
    return folder


def tuned(texts, base, folder, *more):
    """The words of a run that learns classes from a checkpoint."""
    words = tiny_run.spoken(texts, "task=classification", "data=csv", f"init_from={base}", f"run_dir={folder}", *more)
    return [word for word in words if not word.startswith(("model.", "size=", "tokenizer="))]


@pytest.mark.parametrize("name", NAMES)
def test_every_file_holds_the_adapter_alone_and_loads_as_a_net(runs, name):
    base = lmzoo.load(runs / name).state_dict()
    size = (runs / name / "checkpoints/last.ckpt").stat().st_size
    files = sorted((runs / f"lora-{name}" / "checkpoints").glob("*.ckpt"))
    assert {file.name.partition("-")[0] for file in files} == {"best", "step", "last.ckpt"}
    for file in files:
        kept = checkpoint.weights(checkpoint.read(file))
        assert all("lora_" in key or key.startswith("head.") for key in kept) and file.stat().st_size < size / 3
        net = lmzoo.load(file).state_dict()
        changed = {key for key in net if not key.startswith("head.") and not torch.equal(net[key], base[key])}
        assert changed and all(key.endswith(("attn.q.weight", "attn.v.weight")) for key in changed)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_whole_one_bit_for_bit(runs, name, tmp_path):
    whole, part = runs / f"lora-{name}", tmp_path / "part"
    shutil.copytree(whole, part)
    torch.rand(3)
    net, _ = lmzoo.fit(compose(f"ckpt={part / 'checkpoints/step-000003.ckpt'}"))
    assert tiny_run.digest(part) == tiny_run.digest(whole) and tiny_run.rows(part) == tiny_run.rows(whole)
    loaded = lmzoo.load(whole).state_dict()
    assert all(torch.equal(weight, loaded[key]) for key, weight in net.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_evaluate_measures_what_the_run_did(runs, name, monkeypatch):
    found = []
    monkeypatch.setattr(sys, "argv", ["evaluate", f"ckpt={runs / f'lora-{name}'}", "split=val"])
    command("evaluate", lambda config: found.append(evaluate.evaluate(config)))
    result = json.loads((runs / f"lora-{name}" / "result.json").read_text())
    assert found[0]["val/loss"] == pytest.approx(result["val/loss"], abs=1e-5)


def test_a_pretraining_task_trains_the_adapters_alone(runs, texts, tmp_path):
    more = ("task=clm", "data=text", "trainer.max_steps=2")
    lmzoo.fit(compose(*tuned(texts, runs / "gpt", tmp_path / "run", *LORA, *more)))
    assert all("lora_" in key for key in checkpoint.weights(checkpoint.read(tmp_path / "run/checkpoints/last.ckpt")))
    net = lmzoo.load(tmp_path / "run")
    assert net.generate(torch.tensor([[1, 2]]), max_new_tokens=2).shape == (1, 4)


@pytest.fixture
def moved(runs, tmp_path):
    """A copy of the decoder's run and its adapter, side by side."""
    for name in ("gpt", "lora-gpt"):
        shutil.copytree(runs / name, tmp_path / name)
    return tmp_path


def same(net, other):
    return all(torch.equal(weight, other.state_dict()[key]) for key, weight in net.state_dict().items())


def test_runs_that_move_together_find_each_other(runs, moved, monkeypatch):
    whole, elsewhere = lmzoo.load(runs / "lora-gpt"), runs.with_name("elsewhere")
    runs.rename(elsewhere)
    try:
        assert same(lmzoo.load(moved / "lora-gpt"), whole)
        monkeypatch.chdir(moved)
        assert same(lmzoo.load("lora-gpt/checkpoints/last.ckpt"), whole)
        shutil.rmtree(moved / "gpt")
        for use in (lmzoo.load, lambda run: lmzoo.fit(compose(f"ckpt={run}", "trainer.max_steps=9"))):
            with pytest.raises(UserError) as error:
                use(moved / "lora-gpt")
            line = str(error.value)
            assert f"lora-gpt/checkpoints/last.ckpt is an adapter, and its base {runs}/gpt" in line
            assert "does not exist: put it back, or give its place" in line and "\n" not in line
    finally:
        elsewhere.rename(runs)


def test_a_base_with_other_weights_is_refused_wherever_it_is_needed(runs, moved, monkeypatch):
    file = moved / "gpt/checkpoints/last.ckpt"
    state = checkpoint.read(file)
    state["state_dict"]["net.norm.weight"][0] += 1e-6
    checkpoint.write(state, file)
    lora = moved / "lora-gpt/checkpoints/step-000003.ckpt"
    told = checkpoint.read(lora)
    told["lmzoo"]["base"]["path"] = str(file)
    checkpoint.write(told, lora)
    monkeypatch.setattr("lmzoo.data.prepare", None)  # nothing is prepared for it
    for use in (lmzoo.load, lambda file: lmzoo.fit(compose(f"ckpt={file}")),
                lambda run: merge(run, moved / "whole.ckpt"), lambda run: lmzoo.fit(compose(
                    f"init_from={run}", "task=clm", "data=text", "data.path=x", f"run_dir={moved / 'new'}"))):
        with pytest.raises(UserError) as error:
            use(lora)
        line = str(error.value)
        assert f"step-000003.ckpt is an adapter of other weights than those of {file}" in line and "\n" not in line


@pytest.mark.parametrize(("entry", "value"), [("base", {}), ("base", {"path": 3}), ("base", None), ("adapter", [8])])
def test_a_checkpoint_that_does_not_name_its_base_is_refused(moved, entry, value):
    file = moved / "lora-gpt/checkpoints/last.ckpt"
    state = checkpoint.read(file)
    (state["lmzoo"] if entry == "base" else state["lmzoo"]["config"])[entry] = value
    checkpoint.write(state, file)
    with pytest.raises(UserError, match=rf"last.ckpt is no whole checkpoint of lmzoo: its entry \S*{entry} is missing"):
        lmzoo.load(file)


def test_a_merged_file_is_a_net_without_a_base(runs, moved):
    file = moved / "whole.ckpt"
    assert f"{file}: give it to lmzoo.load" in merge(str(moved / "lora-gpt"), file, str(moved / "gpt"))
    assert not (moved / "MANIFEST.json").exists()  # whose folder would pass for a run
    shutil.rmtree(moved / "gpt")
    assert same(lmzoo.load(file), lmzoo.load(runs / "lora-gpt"))
    with pytest.raises(UserError, match="whole.ckpt is a net of its own, without an adapter"):
        merge(str(file), moved / "again.ckpt")
    with pytest.raises(UserError, match="whole.ckpt is there already"):
        merge(str(moved / "lora-gpt"), file)
    with pytest.raises(UserError, match="is an adapter of other weights than those of .*bert"):
        merge(str(moved / "lora-gpt"), moved / "again.ckpt", str(runs / "bert"))
    with pytest.raises(UserError, match="no state|not the state of its optimizer"):
        lmzoo.fit(compose(f"ckpt={file}"))


def test_a_run_starts_from_what_an_adapter_learned_but_no_adapter_does(runs, texts, tmp_path):
    lmzoo.fit(compose(*tuned(texts, runs / "lora-gpt", tmp_path / "full", "optim.lr=0", "trainer.max_steps=1")))
    start, learned = lmzoo.load(tmp_path / "full").state_dict(), lmzoo.load(runs / "lora-gpt").state_dict()
    assert all(torch.equal(weight, learned[key]) for key, weight in start.items())
    lmzoo.fit(compose(*tuned(texts, tmp_path / "full", tmp_path / "second", *LORA, "trainer.max_steps=1")))
    with pytest.raises(UserError, match="is an adapter itself: make it a net first, python -m lmzoo.tools.merge_ad"):
        lmzoo.fit(compose(*tuned(texts, runs / "lora-gpt", tmp_path / "third", *LORA)))


@pytest.mark.parametrize(("words", "line"), [
    (["adapter.targets=['*attn.w']"], "adapter.targets: *attn.w matches no linear layer of the blocks"),
    (["adapter.targets=[]"], "adapter.targets=[] leaves no layer to adapt"),
    (["adapter.rank=17"], "adapter.rank=17 is more than the 16 x 16 matrix of blocks.0.attn.q can have"),
    (["adapter.rank=0"], "adapter.rank=0 must be between 1 and"),
    (["adapter.rank=half"], "adapter.rank='half' should be a whole number"),
    (["adapter.alpha=0"], "adapter.alpha=0.0 must be above 0"),
    (["+adapter.dropout=0.1"], "adapter.dropout: there is no such word"),
    (["tokenizer.add=[x]"], "tokenizer.add: an adapter leaves the embedding as it is"),
    (["optim=muon"], "no matrix of the blocks is trained"),
])  # fmt: skip
def test_a_mistake_is_one_line_before_any_data_is_read(runs, texts, tmp_path, monkeypatch, words, line):
    monkeypatch.setattr("lmzoo.data.prepare", None)
    with pytest.raises(UserError) as error:
        lmzoo.fit(compose(*tuned(texts, runs / "gpt", tmp_path / "run", "adapter=lora", *words)))
    assert line in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("words", "line"), [
    (["adapter=lora"], "adapter=lora: an adapter is trained beside the weights of a checkpoint; say of which"),
    (["adapter.rank=4"], "adapter.rank=4: no adapter is chosen whose word this could be: say adapter=lora"),
])  # fmt: skip
def test_an_adapter_needs_a_base_and_its_words_an_adapter(words, line):
    with pytest.raises(UserError, match=line):
        compose("model=gpt", "task=clm", *words)


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_adapter_has_the_merged_weights_and_is_a_base_itself(runs, texts, name, tmp_path):
    pytest.importorskip("transformers")
    run = tmp_path / "run"
    words = tuned(texts, runs / name, run, *LORA, f"task={TASKS[name]}", "data=text", "trainer.max_steps=2")
    lmzoo.fit(compose(*words))
    export(str(run), str(tmp_path / "theirs"))
    assert same(lmzoo.load(run), lmzoo.load(tmp_path / "theirs"))
    assert not same(lmzoo.load(runs / name), lmzoo.load(run))
    again = tuned(texts, tmp_path / "theirs", tmp_path / "again", *LORA, "trainer.max_steps=1")
    net, _ = lmzoo.fit(compose(*again))
    assert same(lmzoo.load(tmp_path / "again"), net)


@pytest.mark.parametrize("name", NAMES)
def test_a_linear_probe_trains_the_head_alone(runs, texts, tmp_path, name):
    probe = ("optim.freeze=[*,-head*]", "trainer.max_steps=2")
    still, _ = lmzoo.fit(compose(*tuned(texts, runs / name, tmp_path / "still", *probe, "optim.lr=0")))
    net, _ = lmzoo.fit(compose(*tuned(texts, runs / name, tmp_path / "run", *probe)))
    start = still.state_dict()
    changed = {key for key, weight in net.state_dict().items() if not torch.equal(weight, start[key])}
    assert changed == {key for key in start if key.startswith("head.")}
    base = lmzoo.load(runs / name).state_dict()
    assert all(torch.equal(weight, base[key]) for key, weight in start.items() if not key.startswith("head."))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [
    ("trainer=ddp",), ("trainer=fsdp", "checkpoint.sharded=true", "trainer.activation_checkpointing=full"),
], ids=["ddp", "fsdp"])  # fmt: skip
def test_two_ranks_learn_what_one_does(runs, texts, tmp_path, engine):
    micro = ("data.micro_batch_size=4", "trainer.accelerator=cpu", *LORA)
    one, _ = lmzoo.fit(compose(*tuned(texts, runs / "bert", tmp_path / "one", *micro)))
    words = tuned(texts, runs / "bert", tmp_path / "two", *micro, *engine, "trainer.devices=2")
    done = subprocess.run([sys.executable, "-m", "lmzoo.train", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    two = lmzoo.load(tmp_path / "two").state_dict()
    for key, weight in one.state_dict().items():
        torch.testing.assert_close(two[key], weight, rtol=0, atol=1e-6)
    lmzoo.fit(compose(f"ckpt={tmp_path / 'two'}", "trainer.strategy=auto", "trainer.devices=1", "trainer.max_steps=9"))
