"""tools/reproduce_downstream.sh: what is mistyped is said in a line, before anything is made."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "reproduce_downstream.sh"


USAGE = "usage: tools/reproduce_downstream.sh DATA OUT [--models bert,gpt,t5] [--sets movies,...] [--quick] [WORD...]"


@pytest.mark.parametrize(("words", "line"), [
    ([], USAGE),
    (["data"], USAGE),
    (["data", "out", "--models"], "--models: name some of bert, gpt, t5"),
    (["data", "out", "--models", "bert,llama"], "--models: llama is not one of bert, gpt, t5"),
    (["data", "out", "--sets", "imdb", "--quick"], "--sets: there is no imdb"),
    (["data", "out", "--fast"], "unknown: --fast"),
    (["data", "out", "--sets", "movies", "--quick"], "data/wiki_en.txt is missing"),
])  # fmt: skip
def test_mistakes_are_one_line(tmp_path, words, line):
    done = subprocess.run(["bash", str(SCRIPT), *words], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line + "\n")
    assert not (tmp_path / "out").exists()
