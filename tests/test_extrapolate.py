"""Loss by position: of a net whose losses are known, and of nets trained in rows of 8 and read in rows of 24."""

import math
import random
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lmzoo.tools import extrapolate

import lmzoo
from lmzoo import UserError

WORDS = ["size=tiny", "model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.d_ff=32", "tokenizer=byte",
         "data=text", "trainer.max_steps=2", "data.batch_size=4", "logger.wandb.mode=disabled", "data.processes=1"]


def test_the_loss_is_that_of_each_position():
    """A net that is sure of token 1 after an even position, and knows nothing after an odd one."""
    logits = torch.zeros(1, 4, 5)
    logits[0, ::2, 1] = 50.0
    tokens = np.ones(13, np.int64)  # three rows of four, and the last one's last target
    split = SimpleNamespace(n_tokens=13, read=lambda begin, end: tokens[begin:end])
    nats = extrapolate.by_position(lambda ids: logits, split, 4)
    assert nats.tolist() == pytest.approx([0, math.log(5)] * 2, abs=1e-6)
    tokens[5] = 2  # the second row's first position is sure of 1, and pays 50 nats, in one row of three
    assert extrapolate.by_position(lambda ids: logits, split, 4)[0] == pytest.approx(50 / 3, abs=1e-5)
    cut = SimpleNamespace(n_tokens=13, read=lambda begin, end: tokens[begin : min(end, begin + 5 if begin else 3)])
    assert extrapolate.by_position(lambda ids: logits, cut, 4)[0] == pytest.approx(25, abs=1e-5)  # two sets: 3, and 10


def test_a_rotary_net_is_read_in_five_ways():
    """With the same weights: the same at the first position, which is not turned, another later."""
    words = ["size=tiny", "model.d_model=16", "model.n_layers=1", "model.n_heads=2", "tokenizer.vocab_size=50"]
    net = lmzoo.build(extrapolate.config(words, "rotary", 8).model).eval()
    for weight in net.parameters():
        torch.nn.init.normal_(weight)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        logits = {name: longer(ids) for name, longer in extrapolate.readings(net, "rotary", words, 8, 24)}
    assert set(logits) == {"rotary", *extrapolate.SCALINGS}
    for name in extrapolate.SCALINGS:
        torch.testing.assert_close(logits[name][:, 0], logits["rotary"][:, 0])
        assert not torch.allclose(logits[name][:, -1], logits["rotary"][:, -1], atol=1e-3), name


def test_schemes_are_trained_short_and_read_long(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    (tmp_path / "a.txt").write_text("\n\n".join("".join(draw.choices("abc ", k=60)) for _ in range(99)))
    words = [*WORDS, f"data.path={tmp_path / 'a.txt'}"]
    lines = extrapolate.extrapolate(words, ["learned", "rotary"], 8, 24, tmp_path / "a.png").splitlines()
    assert lines[0].split()[-9:] == ["0", "-", "7", "8", "-", "15", "16", "-", "23"]
    found = {name: cells for name, *cells in map(str.split, lines[1:])}
    assert set(found) == {"learned", "rotary", *extrapolate.SCALINGS} and found["learned"][1:] == ["-", "-"]
    assert all(1 < float(cell) < 9 for cell in found["rotary_yarn"])
    assert (tmp_path / "a.png").stat().st_size > 5000
    for word, line in (("data.val_fraction=0", "no held-out text to read"), ("seed=1", "is no row of 9999")):
        with pytest.raises(UserError, match=line):
            extrapolate.extrapolate([*words, word], ["rotary"], 8, 9999, None)
    with pytest.raises(UserError, match="--read 8 must be more than the rows of training"):
        extrapolate.extrapolate(words, ["rotary"], 8, 8, None)


@pytest.mark.slow
def test_alibi_reads_on_without_loss(tmp_path, monkeypatch):
    """Press et al. 2022: trained in rows of 16, it tells as much up to position 64, where sinusoids are lost."""
    monkeypatch.chdir(tmp_path)
    draw, after = random.Random(0), {"a": "bbbc", "b": "ccca", "c": "aaab"}  # what mostly follows a letter
    text = ["".join(accumulate(range(draw.randrange(200)), lambda letter, _: draw.choice(after[letter]), initial="a"))
            for _ in range(400)]  # fmt: skip
    (tmp_path / "a.txt").write_text("\n\n".join(text))
    own = ["data.batch_size=16", "data.val_fraction=0.5", "trainer.max_steps=300", "optim.lr=1e-2"]
    words = [*WORDS, *own, f"data.path={tmp_path / 'a.txt'}"]
    lines = extrapolate.extrapolate(words, ["sinusoidal", "alibi"], 16, 64, None).splitlines()[1:]
    found = {name: list(map(float, cells)) for name, *cells in map(str.split, lines)}
    assert 0.56 < found["alibi"][0] < 0.8  # 0.562 are the nats of such a letter
    assert max(found["alibi"][1:]) < found["alibi"][0] + 0.03 < found["sinusoidal"][-1] - 0.1
