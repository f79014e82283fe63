"""tools/reproduce_downstream.sh: what is mistyped is said in a line, before anything is made."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "reproduce_downstream.sh"


@pytest.mark.parametrize(("words", "line"), [
    ([], "usage: tools/reproduce_downstream.sh DATA OUT [--minutes N] [--quick]"),
    (["data"], "usage: tools/reproduce_downstream.sh DATA OUT [--minutes N] [--quick]"),
    (["data", "out", "--minutes"], "--minutes : give a whole number, 1 or more"),
    (["data", "out", "--minutes", "08"], "--minutes 08: give a whole number, 1 or more"),  # to bash a broken octal
    (["data", "out", "--fast"], "unknown: --fast"),
    (["data", "out", "--minutes", "1", "--quick"], "data/wiki_en.txt is missing"),
])  # fmt: skip
def test_mistakes_are_one_line(tmp_path, words, line):
    done = subprocess.run(["bash", str(SCRIPT), *words], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line + "\n")
    assert not (tmp_path / "out").exists()
