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


def test_a_wrong_word_is_refused():
    with pytest.raises(UserError, match="model=gptt"):
        count("model=gptt")


def test_the_command_says_how_it_is_used():
    done = subprocess.run([sys.executable, "-m", "lmzoo.tools.count", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "model=gpt size=base" in done.stdout
