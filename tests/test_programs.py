"""Nets as programs: the same logits from torch.export's and ONNX's files, for any number of rows of any length."""

import sys

import pytest
import torch

import models
from lmzoo import programs
from lmzoo.errors import UserError

SHAPES = ((1, 1, 1), (1, 9, 3), (3, 20, 11), (5, 2, 8))  # rows, their length, that of the decoder's
NAMED = ("gpt", "llama", "bert", "t5", "transformer")
WINDOW = models.attention(window=4)
CLASSIFIER = {"_target_": "lmzoo.blocks.head.Classifier", "_partial_": True, "n_classes": 3}
NETS = {
    **{name: (name, {"dropout": 0.1}) for name in NAMED},
    **{f"bert {position}": ("bert", {"position": position}) for position in models.POSITIONS},
    **{f"gpt {position}": ("gpt", {"position": position}) for position in
       ("rotary_ntk", "rotary_yarn", "rotary_llama3", "alibi", "t5")},
    **{f"gpt {kind}": ("gpt", {"attention": kind}) for kind in ("additive", "grouped_query", "qk_norm")},
    "t5 additive": ("t5", {"attention": "additive"}),
    "gpt window": ("gpt", {"attention": WINDOW}),
    "bert window": ("bert", {"attention": WINDOW}),
    "gpt windows by turns": ("gpt", {"attention": ["no_bias", WINDOW], "d_head": 16}),
    "gpt flex": ("gpt", {"attention": models.attention(window=4, backend="flex"), "d_head": 16}),
    "gpt matmul": ("gpt", {"attention": models.attention(backend="matmul")}),
    "gpt parallel": ("gpt", {"block": "parallel"}),
    "llama sandwich": ("llama", {"block": "sandwich", "share": 2}),
    **{f"bert {pool}": ("bert", {"head": CLASSIFIER | {"pool": pool}}) for pool in ("first", "last", "mean")},
}

QUICK = ("gpt", "bert", "t5", "gpt windows by turns")


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


def rows(net, batch, length, decoder_length):
    """Inputs of which the first row is padded on the left and the last on the right."""
    ids, seed = models.ids(batch, length, seed=batch), {"decoder_input_ids": 8, "token_type_ids": 9}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if length > 3:
        given["attention_mask"][0, :2] = 0
        given["attention_mask"][-1, 3 - batch :] = 0
    for name in programs.inputs(net)[2:]:
        shape = (batch, decoder_length) if name == "decoder_input_ids" else ids.shape
        given[name] = models.ids(*shape, vocab_size=50 if name == "decoder_input_ids" else 2, seed=seed[name])
    return given


def compare(net, run, atol):
    for shape in SHAPES:
        given = rows(net, *shape)
        with torch.no_grad():
            expected = net(**given)
        kept = given["attention_mask"].bool() if expected.shape[:2] == given["input_ids"].shape else ...
        assert expected.std() > 0.01
        torch.testing.assert_close(run(given)[kept], expected[kept], atol=atol, rtol=0)


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in NETS])
def test_a_program_of_torch_gives_the_nets_logits(name, tmp_path):
    kind, words = NETS[name]
    net = models.make(kind, **words)
    torch.export.save(programs.trace(net), tmp_path / "model.pt2")
    run = programs.opened(tmp_path / "model.pt2")
    compare(net, run, atol=1e-5)
    given = rows(net, 3, 20, 11)
    without = run(given | {"attention_mask": torch.ones_like(given["attention_mask"])})
    assert (without - run(given)).abs().max() > 1e-3  # padding is respected


def test_rows_longer_than_learned_positions_are_refused(tmp_path):
    torch.export.save(programs.trace(models.make("gpt")), tmp_path / "model.pt2")
    run = programs.opened(tmp_path / "model.pt2")
    assert run(rows(models.make("gpt"), 1, 32, 0)).shape == (1, 32, 50)
    with pytest.raises(Exception, match="32"):
        run(rows(models.make("gpt"), 1, 33, 0))


@pytest.mark.parametrize("name", ["gpt", *map(slow, ("llama", "bert", "t5", "transformer", "gpt window"))])
def test_a_program_of_onnx_gives_the_nets_logits(name, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    kind, words = NETS[name]
    net = models.make(kind, **words)
    programs.to_onnx(net, programs.trace(net)).save(tmp_path / "model.onnx")
    compare(net, programs.opened(tmp_path / "model.onnx"), atol=1e-4)
    import onnx

    sizes = [[dim.dim_param or dim.dim_value for dim in given.type.tensor_type.shape.dim]
             for given in onnx.load(tmp_path / "model.onnx").graph.input]
    assert sizes == [["batch", f"{'decoder_' * ('decoder' in name)}length"] for name in programs.inputs(net)]


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_program_reads_documents_of_one_row_apart(name):
    """As the net does when it is told of them: each has the positions and sees the tokens that it has alone."""
    net = models.make(name)
    ids, documents = models.ids(2, 9), torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [4, 5, 5, 5, 5, 6, 6, -1, -1]])
    mask = (documents >= 0).long()
    program = programs.Program(net, lambda given: net(**given))
    with torch.no_grad():
        expected = net(ids, mask, documents)
        found = program(ids, mask, document_ids=documents, readout=lambda head, logits: head(logits))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)
    assert not torch.allclose(net(ids, mask)[mask.bool()], expected[mask.bool()], atol=1e-2)


class Looking(torch.nn.Module):
    """A head whose answer depends on what the numbers are, which no program can."""

    def __init__(self, embed):
        super().__init__()

    def forward(self, hidden):
        return hidden if float(hidden.sum()) > 0 else -hidden


def test_a_net_of_which_no_program_can_be_made_is_named(tmp_path):
    net = models.make("gpt")
    net.head = Looking(net.embed)
    with pytest.raises(UserError, match=r"this decoder \(Embed, Learned, .*\) can't be exported, torch.export says"):
        programs.trace(net)


@pytest.mark.parametrize("name", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(name, monkeypatch):
    for other in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, other, None if other == name else sys)
    with pytest.raises(UserError) as refusal:
        programs.check_packages()
    assert str(refusal.value) == f"ONNX needs {name}: pip install 'lmzoo[onnx]'"
