"""What is built and refused, what comes back from a file, and what a damaged or killed write leaves behind."""

import sys
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
        "torch.nn.attention._fa4.register_flash_attention_fa4", "lmzoo.blocks.attention.flex",  # of theirs, but no part
        "torch.nn.functional.gelu", "lmzoo.blocks.cache.Cache", "torch.nn.Module.load_state_dict", "lmzoo.train.main",
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
    report = checkpoint.load_weights(net, old.state_dict(), new=("head",))
    assert torch.equal(net.embed.weight, old.embed.weight) and torch.equal(net.body.weight, old.body.weight)
    assert torch.equal(net.head.weight, head)
    assert set(report.loaded) == {"embed.weight", "body.weight", "body.bias"}
    assert report.missing == report.unexpected == ["head.weight", "head.bias"]
    without = checkpoint.load_weights(Classifier(4), old.state_dict(), new=("head",))
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
        checkpoint.load_weights(net, state, new=("head",))
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
    checkpoint.load_weights(net, lmzoo.build(GPT).state_dict(), new=())
    with torch.no_grad():
        net.embed.tokens.weight.zero_()
    assert not net.head(torch.ones(1, 16)).any()


WRONG = {
    "lmzoo": lambda state: state.update(lmzoo=3),
    "lmzoo.config": lambda state: state["lmzoo"].pop("config"),
    "lmzoo.config ": lambda state: state["lmzoo"]["config"].pop("model"),
    "lmzoo.tokenizer": lambda state: state["lmzoo"].pop("tokenizer"),
    "lmzoo.tokenizer ": lambda state: state["lmzoo"].update(tokenizer="{}"),
    "state_dict": lambda state: state["state_dict"].update({"net.head.weight": 3}),
    "missing: embed.tokens.weight": lambda state: state["state_dict"].pop("net.embed.tokens.weight"),
    "unexpected: more": lambda state: state["state_dict"].update({"net.more": torch.zeros(1)}),
    "of another shape: embed.tokens.weight (1,), here": lambda state: state["state_dict"].update(
        {"net.embed.tokens.weight": torch.zeros(1)}
    ),
}


@pytest.mark.parametrize("entry", WRONG)
def test_a_wrong_checkpoint_is_named_with_what_is_wrong(gpt_run, tmp_path, monkeypatch, entry):
    """One line, however it is opened, before any data is read."""
    file = tmp_path / "wrong.ckpt"
    state = checkpoint.read(checkpoint.find(gpt_run))
    WRONG[entry](state)
    torch.save(state, file)
    monkeypatch.setattr("lmzoo.data.prepare", lambda *_, **__: pytest.fail("data was prepared"))
    new = ("task=clm", f"init_from={file}", f"run_dir={tmp_path / 'run'}")
    opened = {
        "load": lambda: lmzoo.load(file),
        "ckpt": lambda: lmzoo.fit(lmzoo.compose(f"ckpt={file}", "trainer.max_steps=9")),
        "init_from": lambda: lmzoo.fit(lmzoo.compose(*new)),
    }
    for way, call in opened.items():
        with pytest.raises(UserError) as refusal:
            call()
        line = str(refusal.value)
        assert line.startswith(str(file)) and "\n" not in line, way
        assert (entry if ":" in entry else f"its entry {entry.strip()} is missing or broken") in line, way


@pytest.mark.parametrize("entry", ["optimizer_states", "loops", "global_step", "pytorch-lightning_version"])
def test_a_net_alone_is_no_run_to_go_on_with(gpt_run, tmp_path, monkeypatch, entry):
    state = checkpoint.read(checkpoint.find(gpt_run))
    del state[entry]
    torch.save(state, tmp_path / "net.ckpt")
    monkeypatch.setattr("lmzoo.data.prepare", lambda *_, **__: pytest.fail("data was prepared"))
    with pytest.raises(UserError, match="net.ckpt holds a net, but not the state .* init_from="):
        lmzoo.fit(lmzoo.compose(f"ckpt={tmp_path / 'net.ckpt'}", "trainer.max_steps=9"))
    assert lmzoo.load(tmp_path / "net.ckpt").family == "decoder"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nothing_is_trained_from_weights_that_are_not_finite(gpt_run, tmp_path, monkeypatch, value):
    file = tmp_path / "bad.ckpt"
    state = checkpoint.read(checkpoint.find(gpt_run))
    state["state_dict"]["net.blocks.1.ffn.up.weight"][3, 4] = value
    torch.save(state, file)
    monkeypatch.setattr("lmzoo.data.prepare", lambda *_, **__: pytest.fail("data was prepared"))
    new = ("task=clm", f"init_from={file}", f"run_dir={tmp_path / 'run'}")
    for words in ([f"ckpt={file}", "trainer.max_steps=9"], new):
        with pytest.raises(UserError, match=r"bad.ckpt: blocks.1.ffn.up.weight holds numbers that are not finite"):
            lmzoo.fit(lmzoo.compose(*words))
