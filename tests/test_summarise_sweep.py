"""The summary of folders of runs that are written here by hand."""

import json
import re
import struct

import pytest
import yaml
from filelock import FileLock
from lmzoo.tools import summarise_sweep
from lmzoo.tools.summarise_sweep import differing, labels, leaves, read, summarise

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
        text = summarise(str(tmp_path))
    assert rows(text) == [
        ["run", "val/loss", "seconds", "state", "differs", "in"],
        ["1-gpt", "4", "6", "done", "lr=0.003"],
        ["3-gpt", "4.5", "6", "failed", "lr=0.03"],
        ["0-gpt", "5", "6", "done", "lr=0.001"],
        ["4-gpt", "6", "6", "running", "lr=0.1"],
        ["2-gpt", "nan", "6", "done", "lr=0.01"],
        ["5", "failed:", "no", "such"], ["word"],
    ]


def test_seeds_alone_have_means_of_all_metrics(tmp_path):
    """By hand: 4 and 5 have mean 4.5 and deviation sqrt(1/2); .5, .7 and .9 have .7 and .2."""
    for seed, loss, accuracy in ((1, 4.0, 0.5), (2, 5.0, 0.7), (3, float("nan"), 0.9)):
        write(tmp_path / f"{seed}", {"seed": seed}, loss, **{"test/accuracy": accuracy})
    write(tmp_path / "diverged", {"seed": 1, "optim": {"lr": 9.0}}, float("nan"), **{"test/accuracy": 0.1})
    _, means, _ = summarise(str(tmp_path)).split("\n\n")
    assert [line.split() for line in means.splitlines()] == [
        "mean and standard deviation over seeds".split(),
        ["val/loss", "4.5", "±", "0.71", "of", "2", "runs"],
        ["test/accuracy", "0.7", "±", "0.2", "of", "3", "runs"],
    ]


def test_runs_that_differ_in_their_seed_alone_have_a_mean(tmp_path):
    """By hand: 4 and 5 have mean 4.5 and deviation sqrt(1/2); 2 and 2.2 have 2.1 and sqrt(0.02)."""
    for number, (lr, seed, loss) in enumerate([(1, 1, 4.0), (1, 2, 5.0), (2, 1, 2.0), (2, 2, 2.2), (3, 1, 9.0)]):
        write(tmp_path / f"{number}", {"optim": {"lr": lr}, "seed": seed}, loss)
    _, means, _ = summarise(str(tmp_path)).split("\n\n")
    assert means.splitlines()[1:] == [
        "2.1      ± 0.14     of 2 runs  lr=2", "4.5      ± 0.71     of 2 runs  lr=1",
    ]  # fmt: skip


@pytest.mark.parametrize(("settings", "kind", "drawn"), [
    ([{"optim": {"lr": 3}}, {"optim": {"lr": 1}}], "line", [(3, 1.0, 0.0), (1, 2.0, 0.0)]),
    ([{"optim": {"lr": x}, "data": {"n": y}} for x, y in ((1, 5), (2, 5), (1, 6))], "map",
     [(1, 5, 1.0), (2, 5, 2.0), (1, 6, 3.0)]),
    ([{"tied": True}, {"tied": False}], "bars", [("0", 1.0, 0.0), ("1", 2.0, 0.0)]),
    ([{"optim": {"lr": x}, "data": {"n": x}, "steps": x} for x in (1, 2)], "bars",
     [("0", 1.0, 0.0), ("1", 2.0, 0.0)]),
    ([{}], "bars", [("0", 1.0, 0.0)]),
])  # fmt: skip
def test_the_picture_fits_what_differs(tmp_path, monkeypatch, settings, kind, drawn):
    for number, config in enumerate(settings):
        write(tmp_path / f"{number}", config, number + 1.0)
    given, real = [], getattr(summarise_sweep, f"draw_{kind}")
    monkeypatch.setattr(summarise_sweep, f"draw_{kind}", lambda *words: given.append(words[0]) or real(*words))
    text = summarise(str(tmp_path), picture=str(tmp_path / "here.png"))
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
        summarise(str(tmp_path / "none"))


def test_a_small_run(gpt_run):
    (run,) = read(gpt_run)
    assert run.state == "done" and run.metrics == json.loads((gpt_run / "result.json").read_text())
    assert run.seconds > 0 and run.task.endswith(".CausalLM")


def test_more_of_an_accuracy_is_better(tmp_path):
    for n in range(3):
        write(tmp_path / f"{n}", {"optim": {"lr": n}}, 1.0, **{"val/accuracy": n / 10})
    assert [row[0] for row in rows(summarise(str(tmp_path), "val/accuracy"))[1:]] == ["2", "1", "0"]
    with pytest.raises(UserError, match="--metric val/acuracy: no run in .* has it; did you mean val/accuracy?"):
        summarise(str(tmp_path), "val/acuracy")


def test_tables_are_narrow_and_lose_nothing(tmp_path):
    """Texts that differ at their end, their beginning or in the middle; more metrics than there is room for."""
    metrics = {f"{split}/{name}": 1.0 for split in ("val", "test") for name in ("perplexity", "accuracy", "bits")}
    for n in range(4):
        path = f"/{'same/' * 20}{n}/{'again/' * 20}x.txt"
        config = {"data": {"rate": n}, "optim": {"path": path, "rate": n + 5}, "name": f"{n}{'y' * 90}"}
        write(tmp_path / f"{'long-name-' * 6}{n}{'-as-long' * 6}", config, 4.0 + n, **metrics)
    (tmp_path / "jobs.jsonl").write_text("")
    record(tmp_path, Job(7, [], None, "a mistake " * 30))
    shown = summarise(str(tmp_path)).split("\n\n")[0]
    assert max(map(len, shown.splitlines())) <= 100
    head = shown.splitlines()[0].split()
    columns = [name for name in (*metrics, "val/loss") if name in head]
    left_out = re.search(r"no room for (.*)", shown, re.DOTALL)[1].replace("\n", " ").split(", ")
    assert {*columns, *left_out} == {"val/loss", *metrics} and "val/loss" in columns
    whole = "".join(line[shown.splitlines()[0].index("differs"):].strip() for line in shown.splitlines()[1:])
    for n in range(4):
        path = f"/{'same/' * 20}{n}/{'again/' * 20}x.txt"
        assert f"name={n}{'y' * 90}data.rate={n}path={path}optim.rate={n + 5}" in whole.replace(" ", "")


def test_words_are_known_by_their_last_parts():
    """`a.lr` alone is `lr`; where two words end alike both keep more; a word that is the end of another stays whole."""
    assert labels([{"optim.lr": 1, "a.b.x": 2, "a.c.x": 3, "name": "n", "data.name": "m"}]) == [
        "lr=1 b.x=2 c.x=3 name=n data.name=m"]


@pytest.mark.parametrize(("file", "content"), [
    ("config.yaml", b"\xff\xfe"), ("config.yaml", b"a: [1"), ("config.yaml", b""), ("config.yaml", b"- 1"),
    ("config.yaml", b"a: 2020-01-01"), ("metrics.csv", b"\xff\n"), ("metrics.csv", b"what,ever\n1,2\n"),
    ("metrics.csv", b"step,val/loss\n1,x\n"), ("result.json", b"{"), ("result.json", b"[]"),
    ("result.json", b'{"val/loss": "x"}'), ("../jobs.jsonl", b"{"), ("../jobs.jsonl", b'{"a": 1}\n'),
])  # fmt: skip
def test_a_broken_file_is_named_and_the_others_are_shown(tmp_path, file, content):
    write(tmp_path / "good", {}, 1.0)
    write(tmp_path / "other", {}, 2.0)
    (tmp_path / "other" / file).write_bytes(content)
    said = rows(summarise(str(tmp_path)))
    name = "jobs.jsonl" if file.startswith("..") else "other"
    assert ["good", "1", "6", "done"] in said
    assert [row[:2] for row in said if row[0] == name] == [[name, "broken:"]]


def test_folders_in_which_nothing_may_be_written(tmp_path, monkeypatch):
    """Run as root, so the disk is made to refuse: the lock can't be asked for, the picture can't be drawn."""
    write(tmp_path / "a", {}, 1.0)
    write(tmp_path / "b", {}, 2.0, done=False)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "there")

    monkeypatch.setattr(summarise_sweep, "in_training", refuse)
    monkeypatch.setattr(type(tmp_path), "touch", refuse)
    text = summarise(str(tmp_path))
    assert [row[3:] for row in rows(text)[1:]] == [["done"], ["failed", "or", "running"]]
    assert "no picture: " in text and text.endswith("say where by --picture FILE")


def test_tasks_are_not_ranked_together(tmp_path):
    for n, task in enumerate(["clm", "mlm", "clm", "mlm"]):
        write(tmp_path / f"{n}", {"task": {"_target_": f"lmzoo.tasks.{task}", "rate": n}, "seed": 0}, 5.0 - n)
    parts = summarise(str(tmp_path)).split("\n\n")
    assert [part.split()[-1] for part in parts[::3]] == ["clm", "mlm"] and parts[0] == "task clm"
    assert [[line.split()[0] for line in part.splitlines()[1:]] for part in parts[1::3]] == [["2", "0"], ["3", "1"]]
    assert parts[2::3] == [f"picture: {tmp_path}/summary-{task}.png" for task in ("clm", "mlm")]
    assert all((tmp_path / f"summary-{task}.png").exists() for task in ("clm", "mlm"))


def test_the_picture_replaces_only_its_own(tmp_path):
    write(tmp_path / "a", {}, 1.0)
    assert summarise(str(tmp_path)).endswith("picture: " + str(tmp_path / "summary.png"))
    assert summarise(str(tmp_path)).endswith("picture: " + str(tmp_path / "summary.png"))
    (tmp_path / "summary.png").write_bytes(b"mine")
    assert "no picture: " in summarise(str(tmp_path)) and (tmp_path / "summary.png").read_bytes() == b"mine"
    with pytest.raises(UserError, match="is there already"):
        summarise(str(tmp_path), picture=str(tmp_path / "summary.png"))


def test_a_run_that_was_stopped_is_no_failure(tmp_path):
    """It has checkpoints, no result, and nobody trains it; one that broke has checkpoints as well."""
    for number in range(3):
        write(tmp_path / f"{number}-gpt", {"optim": {"lr": number}}, 5.0 + number, done=False)
        (tmp_path / f"{number}-gpt" / "checkpoints").mkdir()
        files = {} if number == 0 else {"step-000900.ckpt": "", "best-001200-5.ckpt": "", "last.ckpt": ""}
        (tmp_path / f"{number}-gpt" / "checkpoints" / "MANIFEST.json").write_text(json.dumps(files))
    for number, mistake in ((1, "stopped by a signal"), (2, "RuntimeError: broken")):
        record(tmp_path, Job(number, [], None, mistake))
    assert {run.name: run.state for run in read(tmp_path)} == {
        "0-gpt": "failed", "1-gpt": "stopped at step 1,200", "2-gpt": "failed"}


def test_losses_of_other_tokens_or_text_are_not_ranked_together(tmp_path):
    """A smaller vocabulary has the lower loss, of shorter tokens; per byte of the text it is the other way round."""
    for n, (size, loss, bits) in enumerate([(300, 3.0, 2.5), (600, 4.0, 2.0), (300, 2.9, 2.4)]):
        config = {"tokenizer": {"vocab_size": size}, "optim": {"lr": n}, "data": {"path": "a.txt", "batch_size": n}}
        write(tmp_path / f"{n}", config, loss, **{"val/bits_per_byte": bits})
    assert [row[:2] for row in rows(summarise(str(tmp_path)))] == [
        ["run", "val/bits_per_byte"], ["1", "2"], ["2", "2.4"], ["0", "2.5"]]
    parts = summarise(str(tmp_path), "val/loss").split("\n\n")
    assert parts[::3] == ["vocab_size=300", "vocab_size=600"]
    assert [[line.split()[0] for line in part.splitlines()[1:]] for part in parts[1::3]] == [["2", "0"], ["1"]]
    write(tmp_path / "3", {"tokenizer": {"vocab_size": 300}, "data": {"path": "b.txt"}}, 1.0)
    titles = summarise(str(tmp_path)).split("\n\n")[::3]
    assert titles == [f"vocab_size={size} path={path}.txt" for size, path in ((300, "a"), (600, "a"), (300, "b"))]
