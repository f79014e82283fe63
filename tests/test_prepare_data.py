"""The three tools that look after data, on one small corpus."""

import subprocess
import sys
from pathlib import Path

import pytest
from lmzoo.tools import inspect_data, prepare_data, train_tokenizer

from lmzoo import UserError
from lmzoo.tokenizer import load

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
    report = train_tokenizer.train(tmp_path / "new" / "my.json", words)
    assert load(tmp_path / "new" / "my.json").encode("line number 7") and "bytes per token, 0.000% unknown" in report


@pytest.mark.parametrize("tool", ["train_tokenizer", "prepare_data", "inspect_data"])
def test_tools_run_as_files(tmp_path, tool):
    file = Path(__file__).parent.parent / "tools" / f"{tool}.py"
    run = subprocess.run([sys.executable, file, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0 and "data=text" in run.stdout
