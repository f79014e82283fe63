"""What is built and refused, what comes back from a file, and what a damaged or killed write leaves behind."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import lmzoo
from lmzoo import UserError, checkpoint
from lmzoo.tokenizer import byte
from models import config


def part(target: str, **settings) -> dict:
    return {"_target_": target, "_partial_": True, **settings}


GPT = config("gpt", vocab_size=400, max_len=12, dropout=0.5, attention=["multi_head", "sliding_window"])


def saved(net: nn.Module, path: Path) -> Path:
    """A checkpoint such as training writes, as far as reading needs it."""
    run = {"model": net.config, "tokenizer": {"special": {}}, "trust": ["posix"]}
    identity = {"config": run, "tokenizer": byte([], 400).json, "wandb_id": "x", "version": "0"}
    checkpoint.write({"state_dict": {f"net.{k}": v for k, v in net.state_dict().items()}, "lmzoo": identity}, path)
    return path


def damage(path: Path) -> None:
    """One bit of it flips on the disk."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# build


def test_build_keeps_the_config_and_its_sizes():
    net = lmzoo.build(GPT)
    assert net.config == GPT
    assert [block.attn.window for block in net.blocks] == [None, GPT["attention"][1]["window"]]
    assert lmzoo.build(OmegaConf.create(GPT)).config == GPT


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "lmzoo.checkpoint.os.system",  # the path begins with ours, the object is not ours
        "lmzoo.checkpoint.torch.load",
        "lmzoo.checkpoint.write",  # ours, but no part of a model
        "torch.load", "torch.hub.load",
        "torch.nn.modules.module.torch.load",
        "torch.nn.Module.__init__.__globals__", "torch.nn.modules.module.functools.partial",
        "lmzoo.blocks.attention.torch.hub.load",
        "builtins.eval", "pathlib.Path", "this", "", 3,
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["root", "part", "list", "deep"])
def test_a_foreign_target_is_refused_wherever_it_stands(target, place):
    foreign = {"_target_": target}
    model = {
        "root": foreign,
        "part": GPT | {"init": foreign},
        "list": GPT | {"attention": [GPT["attention"][0], foreign]},
        "deep": GPT | {"ffn": part("lmzoo.blocks.ffn.FeedForward", activation={"a": [[{"b": foreign}]]})},
    }[place]
    with pytest.raises(UserError, match="_target_") as error:
        lmzoo.build(model)
    assert repr(target) in str(error.value)


def test_a_refused_name_is_not_even_imported(tmp_path, monkeypatch):
    (tmp_path / "surprise.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="surprise.Net"):
        lmzoo.build({"_target_": "surprise.Net"})
    assert "surprise" not in sys.modules


def test_trust_opens_one_module_and_no_other(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import torch, os\nclass Net(torch.nn.Linear): pass\n")
    (tmp_path / "mine2.py").write_text("import torch\nclass Net(torch.nn.Linear): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    sizes = {"in_features": 2, "out_features": 3}
    assert lmzoo.build({"_target_": "mine.Net"} | sizes, trust=("mine",)).weight.shape == (3, 2)
    for target in ("mine2.Net", "mine.os.system"):
        with pytest.raises(UserError, match=target):
            lmzoo.build({"_target_": target} | sizes, trust=("mine",))


def test_an_interpolation_in_a_plain_dict_is_refused_and_a_live_config_is_resolved():
    with pytest.raises(UserError, match=r"model.vocab_size='\$\{tokenizer.vocab_size\}' is an interpolation"):
        lmzoo.build(GPT | {"vocab_size": "${tokenizer.vocab_size}"})
    live = OmegaConf.create({"tokenizer": {"vocab_size": 77}, "model": GPT | {"vocab_size": "${tokenizer.vocab_size}"}})
    assert lmzoo.build(live.model).config["vocab_size"] == 77


def test_sizes_that_do_not_fit_are_said_in_the_parts_own_words():
    with pytest.raises(UserError, match=r"^d_model=15 is not divisible by n_heads=4$"):
        lmzoo.build(GPT | {"d_model": 15})
    with pytest.raises(UserError, match="no _target_"):
        lmzoo.build({"d_model": 15})
    with pytest.raises(UserError, match=r"model._target_='lmzoo.models.Decodr' does not exist"):
        lmzoo.build(GPT | {"_target_": "lmzoo.models.Decodr"})


# load


def test_load_gives_the_live_models_logits_bit_for_bit(tmp_path):
    net = lmzoo.build(GPT)
    for p in net.parameters():
        nn.init.normal_(p)
    net.eval()
    ids = torch.randint(400, (3, 12), generator=torch.Generator().manual_seed(0))
    saved(net, tmp_path / "run/checkpoints/step-000001.ckpt")
    for path in (tmp_path / "run", str(tmp_path / "run/checkpoints/step-000001.ckpt")):
        loaded = lmzoo.load(path)
        assert torch.equal(loaded(ids), net(ids))
        assert not loaded.training
        assert loaded.config == GPT
        assert loaded.tokenizer.decode(loaded.tokenizer.encode("Größe 你好")) == "Größe 你好"
    assert loaded.state_dict().keys() == net.state_dict().keys()


def test_load_refuses_a_foreign_target_in_a_file_whatever_the_file_trusts(tmp_path):
    net = lmzoo.build(GPT)
    net.config = GPT | {"init": {"_target_": "lmzoo.checkpoint.os.getcwd"}}
    with pytest.raises(UserError, match="os.getcwd"):
        lmzoo.load(saved(net, tmp_path / "a.ckpt"))


class Classifier(nn.Module):
    def __init__(self, width: int, n_classes: int | None = None):
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, n_classes) if n_classes else nn.Identity()


def test_load_weights_takes_a_new_head_and_reports():
    old, net = Classifier(4, 7), Classifier(4, 3)
    head = net.head.weight.clone()
    report = checkpoint.load_weights(net, old.state_dict())
    assert torch.equal(net.embed.weight, old.embed.weight) and torch.equal(net.body.weight, old.body.weight)
    assert torch.equal(net.head.weight, head)
    assert set(report.loaded) == {"embed.weight", "body.weight", "body.bias"}
    assert report.missing == report.unexpected == ["head.weight", "head.bias"]
    without = checkpoint.load_weights(Classifier(4), old.state_dict())
    assert (without.missing, without.unexpected) == ([], ["head.weight", "head.bias"])


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda s: s.pop("body.bias"), "missing: body.bias"),
        (lambda s: s.update({"body.extra": torch.zeros(1)}), "unexpected: body.extra"),
        (lambda s: s.update({"embed.weight": torch.zeros(6, 4)}), r"embed.weight \(6, 4\), here \(5, 4\)"),
        (lambda s: s.update({"heads": s.pop("body.bias")}), "missing: body.bias; unexpected: heads"),
        (lambda s: [s.pop(k) for k in list(s)], "missing: embed.weight, body.weight, body.bias"),
    ],
)
def test_load_weights_names_what_does_not_fit_and_copies_nothing(change, named):
    state, net = Classifier(4, 7).state_dict(), Classifier(4, 7)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    change(state)
    with pytest.raises(UserError, match=named):
        checkpoint.load_weights(net, state)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


@pytest.mark.parametrize(("n_ids", "n_new", "size"), [(10, 12, 12), (10, 12, 16), (10, 16, 16), (10, 10, 10)])
def test_a_vocabulary_grows_into_its_spare_rows_and_beyond(n_ids, n_new, size):
    """Of 10 ids in a net of 10 rows, or of 16 of which 6 are spare."""
    rows = 10 if size == 12 else size
    state = {"embed.tokens.weight": torch.randn(rows, 3), "head.bias": torch.randn(rows), "norm.weight": torch.ones(3)}
    wider = checkpoint.widened(state, n_ids, n_new)
    assert torch.equal(wider["norm.weight"], state["norm.weight"])
    for key in ("embed.tokens.weight", "head.bias"):
        assert len(wider[key]) == size and torch.equal(wider[key][:n_ids], state[key][:n_ids])
        assert torch.equal(wider[key][n_new:], state[key][n_new:])
        for new in wider[key][n_ids:n_new]:
            torch.testing.assert_close(new, state[key][:n_ids].mean(0))


def test_tied_weights_stay_tied():
    net = lmzoo.build(GPT)
    checkpoint.load_weights(net, lmzoo.build(GPT).state_dict())
    with torch.no_grad():
        net.embed.tokens.weight.zero_()
    assert not net.head(torch.ones(1, 16)).any()


# files


def test_the_manifest_has_the_sha256_of_the_file_on_disk(tmp_path):
    file = tmp_path / "a.ckpt"
    checkpoint.write({"x": torch.arange(10000)}, file)
    digest = subprocess.run(["sha256sum", file], capture_output=True, text=True, check=True).stdout.split()[0]
    assert json.loads((tmp_path / "MANIFEST.json").read_text()) == {"a.ckpt": digest}
    assert torch.equal(checkpoint.read(file)["x"], torch.arange(10000))


def test_a_damaged_checkpoint_is_passed_over_by_name_for_the_newest_whole_one(tmp_path, caplog):
    folder = tmp_path / "run/checkpoints"
    for step in (1, 2, 3):
        checkpoint.write({"step": step, "x": torch.zeros(1000)}, folder / f"step-00000{step}.ckpt")
    checkpoint.link(folder / "step-000003.ckpt", "last.ckpt")
    assert checkpoint.find(tmp_path / "run").name == "last.ckpt"
    damage(folder / "last.ckpt")  # and with it step 3, which is the same file
    assert checkpoint.find(tmp_path / "run") == folder / "step-000002.ckpt"
    (line,) = caplog.messages
    assert "damaged" in line and line.endswith("last.ckpt, step-000003.ckpt; taking step-000002.ckpt")
    with pytest.raises(UserError, match="step-000003.ckpt is damaged"):
        checkpoint.read(folder / "step-000003.ckpt")
    for name in checkpoint.names(folder)[:2]:
        damage(folder / name)
    with pytest.raises(UserError, match=r"no whole checkpoint .*damaged: last.ckpt, .*step-000001.ckpt"):
        checkpoint.find(tmp_path / "run")


def test_a_link_is_the_same_file_and_outlives_the_first_name(tmp_path):
    checkpoint.write({"x": 1}, tmp_path / "a.ckpt")
    for _ in range(2):
        checkpoint.link(tmp_path / "a.ckpt", "last.ckpt")
    assert os.path.samefile(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
    checkpoint.remove(tmp_path / "a.ckpt")
    assert checkpoint.read(checkpoint.find(tmp_path)) == {"x": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["MANIFEST.json", "last.ckpt"]


def test_last_is_the_newest_run_under_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="last: no run under runs/"):
        checkpoint.find("last")
    for age, run in enumerate(("b/new", "a/newest", "c/old")):
        checkpoint.write({}, Path("runs") / run / "checkpoints/last.ckpt")
        when = {"c/old": 100, "b/new": 200, "a/newest": 300}[run] + age
        os.utime(Path("runs") / run / "checkpoints/MANIFEST.json", (when, when))
    assert checkpoint.find("last") == Path("runs/a/newest/checkpoints/last.ckpt")


def test_last_passes_over_runs_that_a_living_process_trains(tmp_path, monkeypatch):
    """The lock of a process that was killed is no sign of life; a live run can still be named."""
    monkeypatch.chdir(tmp_path)
    for run in ("old", "new"):
        checkpoint.write({}, Path("runs") / run / "checkpoints/last.ckpt")
    Path("runs/old/.lock").touch()
    train = "import sys\nfrom filelock import FileLock\nwith FileLock(sys.argv[1]): print(flush=True), input()"
    living = []
    for run in ("new", "old"):
        assert checkpoint.find("last").parts[1] == run
        living.append(subprocess.Popen([sys.executable, "-c", train, f"runs/{run}/.lock"], stdin=-1, stdout=-1))
        living[-1].stdout.readline()
    assert checkpoint.find("runs/new").parts[1] == "new"
    with pytest.raises(UserError, match="each run under runs/ is in training at the moment; name one, as runs/new"):
        checkpoint.find("last")
    for process in living:
        process.kill(), process.wait()
    assert checkpoint.find("last").parts[1] == "new"


@pytest.mark.parametrize("content", ["[1, 2]", "", "{", '{"last.ckpt": 5}', "null", "3"])
def test_a_broken_manifest_names_the_files_that_are_there(tmp_path, content):
    folder = tmp_path / "run/checkpoints"
    checkpoint.write({"x": 1}, folder / "step-000001.ckpt")
    checkpoint.write({"x": 2}, folder / "last.ckpt")
    (folder / "short.ckpt").write_bytes((folder / "last.ckpt").read_bytes()[:-100])
    (folder / "MANIFEST.json").write_text(content)
    with pytest.raises(UserError, match="no whole checkpoint .*give one of its files by name: .*step-000001") as error:
        checkpoint.find(tmp_path / "run")
    assert "short.ckpt" not in str(error.value)
    assert checkpoint.read(checkpoint.find(folder / "step-000001.ckpt")) == {"x": 1}


@pytest.mark.parametrize("call", [checkpoint.find, lmzoo.load])
def test_what_is_not_there_is_named(tmp_path, call):
    with pytest.raises(UserError, match="nothing does not exist"):
        call(tmp_path / "nothing")
    with pytest.raises(UserError, match="no whole checkpoint"):
        call(tmp_path)


def test_a_file_that_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "text.ckpt").write_text("hello")
    torch.save({"x": Path("not plain")}, tmp_path / "objects.ckpt")
    torch.save({"x": torch.zeros(1000)}, tmp_path / "short.ckpt")
    (tmp_path / "short.ckpt").write_bytes((tmp_path / "short.ckpt").read_bytes()[:2000])
    for name in ("text.ckpt", "objects.ckpt", "short.ckpt"):
        with pytest.raises(UserError, match=f"{name} is not a whole checkpoint"):
            checkpoint.read(tmp_path / name)
    torch.save({"x": 1}, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="other.ckpt is no checkpoint of lmzoo"):
        lmzoo.load(tmp_path / "other.ckpt")


def test_what_is_not_plain_is_not_written(tmp_path):
    checkpoint.write({"x": 1}, tmp_path / "a.ckpt")
    with pytest.raises(Exception, match="PosixPath|pathlib"):
        checkpoint.write({"x": Path("a")}, tmp_path / "a.ckpt")
    assert checkpoint.read(tmp_path / "a.ckpt") == {"x": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["MANIFEST.json", "a.ckpt"]


def test_a_full_disk_leaves_the_previous_checkpoint_whole_and_nothing_else(tmp_path):
    checkpoint.write({"x": 1}, tmp_path / "a.ckpt")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoint.write({"x": torch.zeros(1_000_000)}, tmp_path / "a.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoint.read(tmp_path / "a.ckpt") == {"x": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["MANIFEST.json", "a.ckpt"]


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    script = (
        "import sys, torch\nfrom lmzoo import checkpoint as c\n"
        "x = torch.zeros(300_000)\n"
        "for i in range(10**6):\n"
        f"    c.write(dict(i=i, x=x), {str(tmp_path)!r} + f'/step-{{i:06d}}.ckpt')\n"
        f"    c.link({str(tmp_path)!r} + f'/step-{{i:06d}}.ckpt', 'last.ckpt')\n"
        f"    i and c.remove({str(tmp_path)!r} + f'/step-{{i - 1:06d}}.ckpt')\n"
        "    print(i, flush=True)\n"
    )
    for pause in (0.0, 0.013):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        seen = [int(process.stdout.readline()) for _ in range(3)][-1]
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        seen = max([seen, *map(int, process.stdout.read().split())])
        process.wait()
        state = checkpoint.read(checkpoint.find(tmp_path))
        assert state["i"] >= seen and len(state["x"]) == 300_000
