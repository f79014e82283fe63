"""The counting tool gives the papers' numbers."""

import subprocess
import sys

import pytest
from lmzoo.tools.count import count

from lmzoo import UserError


@pytest.mark.parametrize(
    "words, total",
    [
        (("model=gpt", "size=base"), "124,439,808"),
        (("model=llama", "size=7b"), "6,738,415,616"),
        (("model=bert", "size=base"), "109,514,298"),
        (("model=t5", "size=base"), "247,577,856"),
    ],
)
def test_published_sizes(words, total):
    text = count(*words)
    assert total in text
    assert max(map(len, text.splitlines())) <= 100


def test_memory_says_which_engine_fits():
    """GPT-2's 124 million weights: 0.5 GB of each kind, on one device and an eighth of it."""
    words = ("model=gpt", "size=base", "data.batch_size=8", "data.micro_batch_size=1")
    text = count(*words, devices=8, device_memory="80 GB")
    table = [row for row in text.splitlines() if row.startswith(("one device", "ddp", "fsdp"))]
    assert [row.split()[-10] for row in table] == 4 * ["498"] + 2 * ["169"]
    assert ["recomputed" in row for row in table] == 3 * [False, True]
    assert max(map(len, text.splitlines())) <= 100
    assert text.endswith("in nine tenths of 80 GB: one device")
    assert count(*words, device_memory="2GB").endswith("in nine tenths of 2GB: fsdp, recomputed blocks")
    assert "none; more devices" in count(*words, device_memory="1 MB")
    with pytest.raises(UserError, match="--device-memory 80: say it as 80GB"):
        count(*words, device_memory="80")


def test_a_wrong_word_is_refused():
    with pytest.raises(UserError, match="model=gptt"):
        count("model=gptt")


def test_the_command_says_how_it_is_used():
    done = subprocess.run([sys.executable, "-m", "lmzoo.tools.count", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "model=gpt size=base" in done.stdout


def test_the_optimizer_s_groups():
    """BERT-base without its embeddings: 12 layers of 7,077,888 for Muon, the head's matrix for AdamW."""
    text = count("model=bert", "size=base", "optim=muon", "optim.freeze=[embed*,position*]")
    assert [row.split()[:4] for row in text.split("\n\n")[1].splitlines()[1:3]] == [
        ["muon_decay", "72", "84,934,656", "0.1"], ["decay", "1", "589,824", "0.1"],
    ]  # fmt: skip
    with pytest.raises(UserError, match="optim.freeze: blok matches no parameter; there are blocks"):
        count("model=bert", "optim.freeze=[blok]")
