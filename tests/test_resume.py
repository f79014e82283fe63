"""`ckpt=RUN` goes on with that run, and the resumed run is the uninterrupted one."""

import csv
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

import lmzoo
from lmzoo import UserError, checkpoint
from marks import slow_but

DROPPED = {"tokens_per_s", "data_wait", "mfu", "memory_mb"}  # the only columns that tell the time, and memory


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [{name: cell for name, cell in row.items() if name not in DROPPED} for row in csv.DictReader(file)]


def state(folder):
    return checkpoint.read(checkpoint.find(folder))


def same(one, two):
    """Whether two nested plain values are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(value, two[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory):
    """A run of 8 steps over epochs of 3, with a checkpoint each second step."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    lmzoo.fit(lmzoo.compose(*words(folder, *EIGHT)))
    return folder


EIGHT = ("model=gpt", "task=clm", "data.batch_size=32", "data.micro_batch_size=8", "data.num_workers=0",
         "trainer.max_steps=8", "trainer.val_every_n_steps=3", "trainer.log_every_n_steps=3",
         "checkpoint.every_n_steps=2", "checkpoint.keep_last=9", "optim.lr=3e-3")  # fmt: skip


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_resumed_run_is_the_whole_one(whole, tmp_path, step, words, capsys):
    """BEHAVIOUR 31: weights, moments, losses, rows and the wandb id, from a copy of the folder as it was at `step`."""
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    lmzoo.fit(lmzoo.compose(f"ckpt={folder / 'checkpoints' / f'step-{step:06d}.ckpt'}"))
    said = capsys.readouterr().out
    assert f"going on from step {step} of 8\n" in said and re.search(rf"left to run +{8 - step}  steps", said)
    assert rows(folder) == rows(whole)
    assert [row["step"] for row in rows(folder) if row["train/loss"]] == ["3", "6", "8"]
    before, after = state(whole), state(folder)
    assert same(before["state_dict"], after["state_dict"])
    assert same(before["optimizer_states"], after["optimizer_states"])
    assert before["lmzoo"]["wandb_id"] == after["lmzoo"]["wandb_id"]
    assert after["global_step"] == 8


WAYS = [
    "optim=sgd", "optim=adafactor", "optim=muon", "optim.layer_decay=0.8 optim.freeze=[blocks.0.*]", "schedule=wsd",
    "trainer.precision=16-mixed", "trainer.precision=bf16-mixed", "trainer.precision=bf16-true optim=muon",
]  # fmt: skip


@pytest.mark.parametrize("way", slow_but(["optim=muon", "schedule=wsd"], WAYS))
def test_every_way_to_train_is_resumed_bit_for_bit(words, tmp_path, way):
    """Four steps, and the last two of them again: weights, the optimizer's state, learning rates, fp16's loss scale."""
    import shutil

    more = ("model=gpt", "task=clm", "data.batch_size=8", "trainer.max_steps=4", "trainer.accelerator=cpu",
            "checkpoint.every_n_steps=2", "checkpoint.keep_last=9")  # fmt: skip
    lmzoo.fit(lmzoo.compose(*words(tmp_path / "whole", *more, *way.split())))
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    lmzoo.fit(lmzoo.compose(f"ckpt={tmp_path / 'run' / 'checkpoints' / 'step-000002.ckpt'}"))
    before, after = state(tmp_path / "whole"), state(tmp_path / "run")
    assert rows(tmp_path / "run") == rows(tmp_path / "whole") and before["global_step"] == 4
    assert not same(before["state_dict"], checkpoint.read(tmp_path / "run/checkpoints/step-000002.ckpt")["state_dict"])
    for part in ("state_dict", "optimizer_states", "MixedPrecision"):
        assert same(before.get(part), after.get(part)), part
    assert ("MixedPrecision" in before) is (way == "trainer.precision=16-mixed")


def test_the_configuration_is_the_runs(gpt_run):
    config = lmzoo.compose(f"ckpt={gpt_run}")
    stored = yaml.safe_load((gpt_run / "config.yaml").read_text())
    assert config.ckpt == str(gpt_run / "checkpoints" / "last.ckpt") or config.ckpt.endswith(".ckpt")
    assert lmzoo.literal.plain(config) | {"ckpt": None} == stored


def test_what_may_be_changed(gpt_run):
    more = ("trainer.max_steps=9", "checkpoint.keep_last=3", "logger.wandb.mode=offline")
    config = lmzoo.compose(f"ckpt={gpt_run}", *more)
    assert (config.trainer.max_steps, config.checkpoint.keep_last, config.logger.wandb.mode) == (9, 3, "offline")


def test_a_longer_run_in_another_unit(gpt_run):
    trainer = lmzoo.compose(f"ckpt={gpt_run}", "trainer.max_epochs=3").trainer
    assert (trainer.max_steps, trainer.max_epochs) == (None, 3)


def test_a_part_changes_only_what_it_says(gpt_run):
    """trainer=ddp says strategy and devices; the length is still the run's."""
    trainer = lmzoo.compose(f"ckpt={gpt_run}", "trainer=ddp", "trainer.devices=3").trainer
    assert (trainer.strategy, trainer.devices, trainer.max_steps) == ("ddp", 3, 6)


@pytest.mark.parametrize(
    "word",
    ["optim.lr=1", "model=gpt", "model.dropout=0", "data.batch_size=2", "task=clm", "seed=1", "run_dir=x", "debug=fast",
     "size=base", "tokenizer.vocab_size=9", "init_from=x", "compile=true"],
)  # fmt: skip
def test_anything_else_is_refused_by_name(gpt_run, word):
    with pytest.raises(UserError, match=word.partition("=")[0].replace(".", r"\.") + ": ckpt="):
        lmzoo.compose(f"ckpt={gpt_run}", word)


def test_changed_words_reach_the_callbacks_that_follow_them(gpt_run):
    config = lmzoo.compose(f"ckpt={gpt_run}", "checkpoint.every_n_steps=2", "trainer.log_every_n_steps=3")
    assert (config.callbacks.checkpoints.every_n_steps, config.callbacks.metrics.every_n_steps) == (2, 3)


BROKEN = {
    "[1, 2]": "words with values belong here",
    "text": "words with values belong here",
    "": "it is empty",
    "a: [1": "this is no YAML (line 1)",
    "seed: 0": "Missing mandatory value",
    "data: [1]": "data=[1] should be words with values",
    "optim: {lr: abc}": "optim.lr='abc' should be a number",
    "foo: 1": "foo: there is no such word",
}


@pytest.mark.parametrize("content", BROKEN)
def test_a_config_that_a_hand_has_broken(gpt_run, tmp_path, content):
    """Refused with the file's name, without opening a checkpoint; once it is removed the checkpoint's copy serves."""
    import shutil

    shutil.copytree(gpt_run, tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    file.write_text(content)
    for words in ([f"ckpt={tmp_path / 'run'}"], ["task=clm", f"init_from={tmp_path / 'run'}"]):
        with pytest.raises(UserError) as refusal:
            lmzoo.compose(*words)
        assert str(refusal.value).startswith(f"{file}: ") and BROKEN[content] in str(refusal.value)
        assert "\n" not in str(refusal.value) and "each checkpoint holds a copy" in str(refusal.value)
    file.unlink()
    assert lmzoo.compose(f"ckpt={tmp_path / 'run'}").run_dir == str(tmp_path / "run")


def test_modules_are_trusted_for_this_command_only(gpt_run, tmp_path):
    """What a run's folder or a checkpoint says of its own trust counts for nothing."""
    import shutil

    shutil.copytree(gpt_run, tmp_path / "run")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    config["trust"], config["model"]["attention"]["_target_"] = ["mine"], "mine.Attention"
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    for words in ([f"ckpt={tmp_path / 'run'}"], ["task=clm", f"init_from={tmp_path / 'run'}"]):
        with pytest.raises(UserError, match=r"model.attention._target_=mine.Attention: .* trust=\[mine\]"):
            lmzoo.compose(*words)
        assert lmzoo.compose(*words, "trust=mine").trust == ["mine"]


def test_learned_positions_have_the_checkpoints_length(gpt_run):
    for length in (32, 128):
        with pytest.raises(UserError, match="model.max_len: the checkpoint has learned 64 positions"):
            lmzoo.compose("task=clm", f"init_from={gpt_run}", f"model.max_len={length}")
    assert lmzoo.compose("task=clm", f"init_from={gpt_run}", "model.max_len=64").model.max_len == 64


def test_last_is_the_newest_run(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run under runs/"):
        lmzoo.compose("ckpt=last")
    lmzoo.fit(lmzoo.compose(*words("runs/a", "model=gpt", "task=clm", "trainer.max_steps=1")))
    assert lmzoo.compose("ckpt=last").run_dir == "runs/a"


def test_a_run_folder_that_was_moved(gpt_run, tmp_path):
    import shutil

    moved = tmp_path / "it's ${moved}, [here]"
    shutil.copytree(gpt_run, moved)
    config = lmzoo.compose(f"ckpt={moved}", "trainer.max_steps=7")
    assert config.run_dir == str(moved)
    lmzoo.fit(config)
    assert [row["step"] for row in rows(moved)] == ["1", "2", "3", "4", "5", "6", "7"]
    assert len(rows(gpt_run)) == 6


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_nothing_or_a_broken_file(tmp_path, content):
    with pytest.raises(UserError, match="does not exist"):
        lmzoo.compose("ckpt=" + str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="no whole checkpoint"):
        lmzoo.compose(f"ckpt={tmp_path}")
    (tmp_path / "broken.ckpt").write_bytes(content)
    with pytest.raises(UserError, match="broken.ckpt is not a whole checkpoint"):
        lmzoo.compose(f"ckpt={tmp_path / 'broken.ckpt'}")


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["SIGKILL", "SIGTERM"])
def test_a_killed_run_goes_on(whole, words, tmp_path, sign):
    """Killed in the middle, resumed by the command: the same rows and weights. SIGTERM saves and exits with 75."""
    folder = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-m", "lmzoo.train", *words(folder, *EIGHT)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "last.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(getattr(signal, sign))
    code = process.wait(timeout=60)
    assert code in ((-9, 0) if sign == "SIGKILL" else (75, 0))  # 0: it was quicker than the signal
    done = subprocess.run([sys.executable, "-m", "lmzoo.train", f"ckpt={folder}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rows(folder) == rows(whole)
    assert same(state(folder)["state_dict"], state(whole)["state_dict"])


def test_a_finished_run_is_left_as_it_is(whole, words):
    before = {file.name: file.read_bytes() for file in whole.iterdir() if file.is_file()}
    with pytest.raises(UserError, match="taken 8 steps, and would end after 8: give a larger trainer.max_steps"):
        lmzoo.fit(lmzoo.compose(f"ckpt={whole}"))
    assert before == {file.name: file.read_bytes() for file in whole.iterdir() if file.is_file()}


def test_a_corpus_that_has_changed_is_refused(words, tmp_path, corpus):
    text = tmp_path / "text.txt"
    text.write_bytes(corpus.read_bytes())
    lmzoo.fit(lmzoo.compose(*words(tmp_path / "run", "model=gpt", "task=clm", f"data.path={text}")))
    with text.open("a") as file:
        file.write("\n\none more document")
    with pytest.raises(UserError, match="its data has changed since"):
        lmzoo.fit(lmzoo.compose(f"ckpt={tmp_path / 'run'}", "trainer.max_steps=9"))


def test_a_run_that_left_no_checkpoint_starts_anew(words, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text("step,epoch,tokens,train/loss\n3,0.1,99,5.0\n")
    lmzoo.fit(lmzoo.compose(*words(tmp_path / "run", "model=gpt", "task=clm")))
    assert [int(row["step"]) for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_is_being_trained_is_left_alone(words, tmp_path, monkeypatch):
    from filelock import FileLock

    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr("lmzoo.data.prepare", lambda *_, **__: pytest.fail("data was prepared"))
    with FileLock(folder / ".lock"), pytest.raises(UserError, match="another process is training this run"):
        lmzoo.fit(lmzoo.compose(*words(folder, "model=gpt", "task=clm")))
    assert [file.name for file in folder.iterdir()] == [".lock"]
