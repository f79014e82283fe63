"""The README names only what is there: tests that show what is guaranteed, options, tools, files."""

import ast
import re
import shlex
from pathlib import Path

import pytest

import lmzoo
from lmzoo.checks import groups

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMPOSED = re.compile(r"(?m)^python -m lmzoo\.train (model=[^#\n\\]*)")


def test_what_is_guaranteed_is_shown_by_tests_that_are_there():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", README)
    assert len(named) > 15
    for file, test in named:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, test)


@pytest.mark.parametrize("group", ["model/position", "model/attention", "model/ffn", "optim", "schedule", "tokenizer"])
def test_the_options_of_a_group_are_all_named_and_exist(group):
    row = next(line for line in README.splitlines() if line.startswith("|") and f"`{group}=" in line)
    named = re.findall(r"`(\w+)`", "`" + row.split(f"`{group}=")[1].split(";")[0])
    assert sorted(named) == groups()[group]


def test_no_prompt_ends_in_a_blank():
    """Which tokenizers take as the beginning of the next word."""
    prompts = re.findall(r'(?:prompt=|encode\()"([^"]*)"', README)
    assert len(prompts) > 3 and not [prompt for prompt in prompts if prompt != prompt.rstrip()]


def test_tools_that_are_named_exist():
    tools = set(re.findall(r"lmzoo\.tools\.(\w+)", README))
    assert len(tools) > 5
    for tool in tools:
        assert (ROOT / "tools" / f"{tool}.py").exists() or (ROOT / "tools" / tool).is_dir(), tool


@pytest.mark.parametrize("line", [line for line in COMPOSED.findall(README) if "data=mixture" not in line])
def test_commands_compose(line):
    """Also those whose files are the reader's own: paths are looked at later."""
    assert lmzoo.compose(*shlex.split(line)).model
