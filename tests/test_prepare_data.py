"""The three tools that look after data, on one small corpus."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lmzoo.tools import inspect_data, prepare_data, train_tokenizer

from lmzoo import UserError, compose, data
from lmzoo.data import unknown
from lmzoo.data.sources import Source
from lmzoo.tokenizer import load, measure

WORDS = ["model=gpt", "task=clm", "data=text", "data.reader.split=line", "data.row_length=16",
         "tokenizer.vocab_size=300"]


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.setenv("LMZOO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus.txt").write_text("\n".join(f"line number {i}" for i in range(100)))
    return [*WORDS, f"data.path={tmp_path}/corpus.txt"]


def test_prepare_and_inspect(words):
    table = prepare_data.prepare(words).splitlines()
    counts = {line.split()[0]: [int(cell.replace(",", "")) for cell in line.split()[1:4]] for line in table[1:3]}
    assert counts["train"][0] + counts["val"][0] == 100
    assert counts["train"][2] + counts["val"][2] == 12 * 100 + 10 + 2 * 90  # "line number " and one or two digits
    shown = inspect_data.inspect(words, "train", n_rows=2, verify=True)
    assert "<|endoftext|>line number " in shown and "║" in shown and "█" in shown
    with pytest.raises(UserError, match="--split test: the data has train, val"):
        inspect_data.inspect(words, "test", n_rows=1, verify=False)


def test_train_tokenizer(tmp_path, words):
    report = train_tokenizer.train(tmp_path / "my.json", words)
    own = load(tmp_path / "my.json")
    texts = {"train": [], "val": []}
    for split, document in Source(compose(*words).data).documents():
        texts[split].append(document.text)
    for name, split in (("trained on", "train"), ("held out", "val")):
        n_bytes, n_tokens = sum(map(len, texts[split])), sum(len(own.encode(text)) for text in texts[split])
        row = next(line for line in report.splitlines() if line.startswith(name)).split()[-4:]
        assert row == [f"{n_bytes:,}", f"{n_tokens:,}", f"{n_bytes / n_tokens:.2f}", "0.000%"]


def test_a_tokenizer_is_spoken_of_when_it_is_trained_and_not_again(words):
    said = []
    own = data.prepare_tokenizer(compose(*words), said.append)
    data.prepare_tokenizer(compose(*words), said.append)
    held_out = [document.text for split, document in Source(compose(*words).data).documents() if split == "val"]
    assert said == [f"tokenizer trained: {len(own):,} tokens; on held-out text {measure(own, held_out)}"]
    assert held_out and measure(own, held_out).n_tokens > 0
    own = data.prepare_tokenizer(compose(*words, "data.val_fraction=0"), said.append)
    assert said[1:] == [f"tokenizer trained: {len(own):,} tokens"]  # of no text nothing is said


def test_the_held_out_text_of_a_tokenizer_is_that_of_val_path(tmp_path, words):
    (tmp_path / "val.txt").write_text("aaa\nbbb")
    said = []
    own = data.prepare_tokenizer(compose(*words, f"data.val_path={tmp_path}/val.txt"), said.append)
    assert str(measure(own, ["aaa", "bbb"])) in said[0]


@pytest.mark.parametrize("tool", ["train_tokenizer", "prepare_data", "inspect_data"])
def test_tools_run_as_files(tmp_path, tool):
    file = Path(__file__).parent.parent / "tools" / f"{tool}.py"
    run = subprocess.run([sys.executable, file, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0 and "data=text" in run.stdout


def test_the_table_counts_what_was_left_out(tmp_path, words):
    (tmp_path / "corpus.txt").write_text("\n".join(f"line number {i % 40}" for i in range(100)))
    table = prepare_data.prepare([*words, "data.deduplicate=true"]).splitlines()
    rows = {line.split()[0]: line.split() for line in table}
    assert int(rows["train"][1]) + int(rows["val"][1]) == 40
    assert rows["repeated"] == ["repeated", "60", "left", "out", "820"]  # 60 times 12 characters and one or two digits
    assert rows["tokenised"][3] == "MB/s" and float(rows["tokenised"][2]) > 0


def test_the_table_says_how_much_of_the_text_is_unknown(tmp_path, words):
    """WordPiece with 8 tokens of room for letters: [UNK] stands for each word with another."""
    lines = ["aaa bbb ccc"] * 50 + [f"aaa {chr(0x3b1 + i % 20)} zzz" for i in range(50)]
    (tmp_path / "corpus.txt").write_text("\n".join(lines), encoding="utf-8")
    words = [*words, "data.val_fraction=0.2", "tokenizer=wordpiece", "tokenizer.vocab_size=12"]
    config = compose(*words, "model=bert", "task=mlm")
    own = data.prepare_tokenizer(config)
    store = data.prepare(config, own)
    rows = {line.split()[0]: line.split() for line in prepare_data.table(store, own.unk)}
    for name in store.splits:
        tokens = store[name].read(0, store[name].n_tokens).tolist()
        assert rows[name][5] == f"{tokens.count(own.unk) / len(tokens):.3%}"
    assert rows["train"][5] != "0.000%" and unknown.share(store["train"], None) == 0


def test_the_unknown_tokens_of_a_large_split_are_counted_in_samples(monkeypatch):
    monkeypatch.setattr(unknown, "SAMPLES", 4)
    monkeypatch.setattr(unknown, "SAMPLED", 10)
    stream, read = np.repeat([7, 1, 1, 7], 25), []
    split = SimpleNamespace(n_tokens=100, read=lambda begin, end: read.append(begin) or stream[begin:end])
    assert unknown.share(split, 7) == 0.5 and read == [0, 25, 50, 75]
    line = "50.0% of the tokens of val are unknown to the tokenizer, and all alike to the net"
    assert unknown.told({"val": split}, 7) == line
    assert not unknown.told({"val": split}, 8) and not unknown.told({"val": split}, None)
