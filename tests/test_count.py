"""The counting tool gives the papers' numbers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from lmzoo.tools.count import count, in_bytes

from lmzoo import UserError, memory


@pytest.mark.parametrize(
    "words, total",
    [
        (("model=gpt", "size=base"), "124,439,808"),
        (("model=llama", "size=7b"), "6,738,415,616"),
        (("model=bert", "size=base"), "109,514,298"),
        (("model=t5", "size=base"), "247,577,856"),
    ],
)
def test_published_sizes(words, total, monkeypatch):
    monkeypatch.setattr("lmzoo.tools.count.memory_table", lambda *_: "")
    assert total in count(*words)


def test_memory_says_which_engine_fits():
    """GPT-2's 124 million weights: 0.5 GB of each kind, on one device and an eighth of it."""
    words = ("model=gpt", "size=base", "data.batch_size=8", "data.micro_batch_size=1")
    text = count(*words, devices=8, device_memory="80 GB")
    table = [row for row in text.splitlines() if row.startswith(("one device", "ddp", "fsdp"))]
    assert [row.split()[-10] for row in table] == 6 * ["498"] + 3 * ["169"]
    assert [word for row in table for word in row.split() if word in memory.RECOMPUTE] == 3 * ["selective", "full"]
    assert max(map(len, text.splitlines())) <= 100
    assert text.endswith("in nine tenths of 80 GB: one device")
    assert count(*words, device_memory="1GB").endswith("in nine tenths of 1GB: fsdp, full recomputing")
    assert "none; more devices" in count(*words, device_memory="1 MB")
    with pytest.raises(UserError, match="--device-memory 80: say it as 80GB"):
        count(*words, device_memory="80")


@pytest.mark.parametrize(("words", "options", "line"), [
    (["model=gptt"], {}, "model=gptt"),
    (["data.row_length=5000"], {}, "data.row_length=5000 is more than the 128 positions of the model"),
    (["trainer.precision=abc"], {}, "trainer.precision=abc is not one of auto, 32-true"),
    (["model.n_heads=3"], {}, "d_model=128 is not divisible by n_heads=3"),
    ([], {"devices": 0}, "--devices 0 is less than 1"), ([], {"devices": -3}, "--devices -3 is less than 1"),
    *(([], {"device_memory": text}, f"--device-memory {text}: say it as 80GB")
      for text in ("80", "1.2.3GB", "GB", ".GB", "-1GB", "1e3GB", "80 G", "nanGB")),
])  # fmt: skip
def test_what_is_wrong_is_one_line(words, options, line):
    with pytest.raises(UserError) as refusal:
        count("model=gpt", *words, **options)
    assert str(refusal.value).startswith(line) and "\n" not in str(refusal.value)


def test_the_arithmetic_is_that_of_the_precision():
    """Weights of 2 bytes in bf16-true, of 4 else; what is kept for the backward pass is of 2 bytes in either bf16."""
    rows = {}
    for word in ("32-true", "bf16-mixed", "bf16-true", "16-mixed"):
        text = count("model=gpt", "size=tiny", "data.micro_batch_size=8", f"trainer.precision={word}")
        assert f"memory of a device in {word}" in text
        rows[word] = [*map(in_bytes, re.findall(r"[\d.]+ [MG]B", re.search(r"one device +8 +(.+)", text)[1]))]
    assert rows["bf16-true"][0] == pytest.approx(rows["32-true"][0] / 2, rel=0.01)
    assert rows["bf16-mixed"] == rows["16-mixed"] and rows["bf16-mixed"][0] == rows["32-true"][0]
    assert rows["bf16-mixed"][3] < rows["32-true"][3]


def test_the_readme_s_first_row_is_what_is_counted():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    cells = next(line for line in readme.splitlines() if line.startswith("| `model=gpt size=base`, rows")).split(" | ")
    text = count("model=gpt", "size=base", "data.batch_size=8", "trainer.precision=bf16-mixed", devices=8)
    totals = [in_bytes(row[-8:]) / 1e9 for row in text.splitlines()
              if row.startswith(("ddp", "fsdp")) and "selective" not in row]  # fmt: skip
    assert [float(cell.split()[0]) for cell in cells[2:6]] == pytest.approx(totals, abs=0.051)  # in GB


def test_the_command_says_how_it_is_used():
    done = subprocess.run([sys.executable, "-m", "lmzoo.tools.count", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "model=gpt size=base" in done.stdout


def test_the_optimizer_s_groups(monkeypatch):
    """BERT-base without its embeddings: 12 layers of 7,077,888 for Muon, the head's matrix for AdamW."""
    monkeypatch.setattr("lmzoo.tools.count.memory_table", lambda *_: "")
    text = count("model=bert", "size=base", "optim=muon", "optim.freeze=[embed*,position*]")
    assert [row.split()[:4] for row in text.split("\n\n")[1].splitlines()[1:3]] == [
        ["muon_decay", "72", "84,934,656", "0.1"], ["decay", "1", "589,824", "0.1"],
    ]  # fmt: skip
    with pytest.raises(UserError, match="optim.freeze: blok matches no parameter; there are blocks"):
        count("model=bert", "optim.freeze=[blok]")
