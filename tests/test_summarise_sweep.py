"""The summary of folders of runs that are written here by hand."""

import json
import struct

import pytest
import yaml
from filelock import FileLock
from lmzoo.tools import summarise_sweep
from lmzoo.tools.summarise_sweep import differing, leaves, read, summarise

from lmzoo import UserError
from lmzoo.sweep import Job, record


def write(folder, config, val_loss=None, done=True, **metrics):
    folder.mkdir(parents=True)
    usual = {"run_dir": str(folder), "callbacks": {"metrics": {"folder": str(folder)}}, "name": "gpt-clm"}
    (folder / "config.yaml").write_text(yaml.safe_dump(usual | config, sort_keys=False))
    (folder / "metrics.csv").write_text(
        "step,tokens,tokens_per_s,val/loss\n2,200,100.0,\n3,300,,9.0\n" + f"4,600,100.0,{val_loss or ''}\n"
    )
    if done:
        (folder / "result.json").write_text(json.dumps({"val/loss": val_loss} | metrics))


def rows(text):
    return [line.split() for line in text.split("\n\n")[0].splitlines()]


def test_runs_are_sorted_by_result_with_what_differs_and_their_state(tmp_path):
    """Seconds by hand: 200 tokens at 100 a second, then 400."""
    write(tmp_path / "0-gpt", {"optim": {"lr": 1e-3}}, 5.0)
    write(tmp_path / "1-gpt", {"optim": {"lr": 3e-3}}, 4.0)
    write(tmp_path / "2-gpt", {"optim": {"lr": 1e-2}}, float("nan"))
    write(tmp_path / "3-gpt", {"optim": {"lr": 3e-2}}, 4.5, done=False)
    write(tmp_path / "4-gpt", {"optim": {"lr": 1e-1}}, 6.0)
    (tmp_path / "4-gpt" / "wandb" / "files").mkdir(parents=True)
    (tmp_path / "4-gpt" / "wandb" / "files" / "config.yaml").write_text("optim: {lr: 7}")
    for number, mistake in ((0, ""), (3, "RuntimeError: broken"), (5, "no such word")):
        record(tmp_path, Job(number, [], None, mistake))
    with FileLock(tmp_path / "4-gpt" / ".lock"):
        text = summarise(str(tmp_path), "val/loss", False, None)
    assert rows(text) == [
        ["run", "differs", "in", "val/loss", "seconds", "state"],
        ["1-gpt", "optim.lr=0.003", "4", "6", "done"],
        ["3-gpt", "optim.lr=0.03", "4.5", "6", "failed"],
        ["0-gpt", "optim.lr=0.001", "5", "6", "done"],
        ["4-gpt", "optim.lr=0.1", "6", "6", "running"],
        ["2-gpt", "optim.lr=0.01", "nan", "6", "done"],
        ["5", "failed:", "no", "such", "word"],
    ]
    assert [row[0] for row in rows(summarise(str(tmp_path), "val/loss", True, None))[1:3]] == ["4-gpt", "0-gpt"]


def test_runs_that_differ_in_their_seed_alone_have_a_mean(tmp_path):
    """By hand: 4 and 5 have mean 4.5 and deviation sqrt(1/2); 2 and 2.2 have 2.1 and sqrt(0.02)."""
    for number, (lr, seed, loss) in enumerate([(1, 1, 4.0), (1, 2, 5.0), (2, 1, 2.0), (2, 2, 2.2), (3, 1, 9.0)]):
        write(tmp_path / f"{number}", {"optim": {"lr": lr}, "seed": seed}, loss)
    _, means, _ = summarise(str(tmp_path), "val/loss", False, None).split("\n\n")
    assert means.splitlines()[1:] == ["optim.lr=2  2.1 ± 0.14  of 2 runs", "optim.lr=1  4.5 ± 0.71  of 2 runs"]


@pytest.mark.parametrize(("settings", "kind", "drawn"), [
    ([{"optim": {"lr": 3}}, {"optim": {"lr": 1}}], "line", [(3, 1.0, 0.0), (1, 2.0, 0.0)]),
    ([{"optim": {"lr": x}, "data": {"n": y}} for x, y in ((1, 5), (2, 5), (1, 6))], "map",
     [(1, 5, 1.0), (2, 5, 2.0), (1, 6, 3.0)]),
    ([{"tied": True}, {"tied": False}], "bars", [("tied=true", 1.0, 0.0), ("tied=false", 2.0, 0.0)]),
    ([{"optim": {"lr": x}, "data": {"n": x}, "steps": x} for x in (1, 2)], "bars",
     [("optim.lr=1 data.n=1 steps=1", 1.0, 0.0), ("optim.lr=2 data.n=2 steps=2", 2.0, 0.0)]),
    ([{}], "bars", [("0", 1.0, 0.0)]),
])  # fmt: skip
def test_the_picture_fits_what_differs(tmp_path, monkeypatch, settings, kind, drawn):
    for number, config in enumerate(settings):
        write(tmp_path / f"{number}", config, number + 1.0)
    given, real = [], getattr(summarise_sweep, f"draw_{kind}")
    monkeypatch.setattr(summarise_sweep, f"draw_{kind}", lambda *words: given.append(words[0]) or real(*words))
    text = summarise(str(tmp_path), "val/loss", False, str(tmp_path / "here.png"))
    assert text.endswith(f"picture: {tmp_path / 'here.png'}")
    assert [sorted(points, key=str) for points in given] == [sorted(drawn, key=str)]
    header = (tmp_path / "here.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG") and struct.unpack(">I", header[16:20]) == (1200,)


def test_classes_stand_for_their_words_and_a_name_for_its_model():
    norm = {"_target_": "torch.nn.RMSNorm", "eps": 1e-6}, {"_target_": "lmzoo.blocks.Other", "bias": True}
    configs = [dict(leaves({"name": "gpt", "model": {"norm": part, "d": 8}})) for part in norm]
    assert differing(configs) == [{"model.norm": "RMSNorm"}, {"model.norm": "Other"}]
    models = [("gpt", 8, 1), ("gpt", 8, 2), ("llama", 9, 1)]
    configs = [dict(leaves({"name": name, "model": {"d": d, "n": n}, "seed": 0})) for name, d, n in models]
    assert differing(configs) == [{"name": name, "model.n": n} for name, _, n in models]


def test_a_folder_that_is_a_run_and_one_without_any(tmp_path):
    write(tmp_path / "run", {}, 1.0)
    assert [run.name for run in read(tmp_path / "run")] == ["run"]
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="there is no run in it"):
        summarise(str(tmp_path / "none"), "val/loss", False, None)


def test_a_small_run(gpt_run):
    (run,) = read(gpt_run)
    assert run.state == "done" and run.metrics == json.loads((gpt_run / "result.json").read_text())
    assert run.seconds > 0 and run.words == {}
