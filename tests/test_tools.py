"""What all tools have in common: their help, what they never do to a file, and how they say what the disk refuses."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from lmzoo.tools import benchmark

from lmzoo import UserError, tools
from lmzoo.errors import Interrupted

NAMES = sorted(file.stem for file in Path(tools.__file__).parent.glob("[!_]*.py"))
WRITERS = {  # words that are wrong in all else too: the file is what is looked at first
    "train_tokenizer": ["FILE.json", "model=nothing"],
    "inspect_data": ["--png", "FILE.png", "model=nothing"],
    "summarise_sweep": ["/nowhere", "--picture", "FILE.png"],
    "export": ["/nowhere", "FILE"],
    "attention": ["/nowhere", "--html", "FILE.html"],
    "attention --png": ["/nowhere", "--png", "FILE.png"],
    **{f"benchmark {name}": [name, "--json", "FILE.json"] for name in benchmark.NAMES},
    **{f"benchmark {name} --png": [name, "--png", "FILE.png"] for name in ("train", "scale")},
}


def said(monkeypatch, capsys, tool, *words):
    """(exit code, stdout, stderr) of a tool."""
    module = "benchmark.__main__" if tool.startswith("benchmark") else tool.split()[0]
    monkeypatch.setattr(sys, "argv", [tool, *map(str, words)])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"lmzoo.tools.{module}").main()
    return end.value.code or 0, *capsys.readouterr()


@pytest.mark.parametrize("tool", [*NAMES, *(f"benchmark {name}" for name in ("", *benchmark.NAMES))])
def test_help_is_at_most_100_columns_wide(monkeypatch, capsys, tool):
    monkeypatch.setenv("COLUMNS", "100")
    name = tool.removeprefix("benchmark").strip() if tool.startswith("benchmark") else ""
    code, text, _ = said(monkeypatch, capsys, tool, *filter(None, [name]), "--help")
    assert code == 0 and max(map(len, text.splitlines())) <= 100
    assert f"python -m lmzoo.tools.{tool}".strip() in text


@pytest.mark.parametrize("place", ["there", "there/below", "missing/below", "folder", "x" * 300])
@pytest.mark.parametrize("tool", WRITERS)
def test_a_file_that_is_there_and_a_place_that_is_none(monkeypatch, capsys, tmp_path, tool, place):
    (suffix,) = {Path(word).suffix for word in WRITERS[tool] if "FILE" in word}
    there, folder = tmp_path / f"there{suffix}", tmp_path / f"folder{suffix}"
    there.write_text("mine")
    folder.mkdir()
    (folder / "mine").touch()
    if tool == "export" and place in ("missing/below", "x" * 300):
        pytest.skip("makes its folder")
    first, _, below = place.partition("/")
    file = tmp_path / (f"{first}{suffix}/{below}{suffix}" if below else f"{first}{suffix}")
    before = sorted(tmp_path.rglob("*"))
    code, out, error = said(monkeypatch, capsys, tool,
                            *(str(file) if "FILE" in word else word for word in WRITERS[tool]))
    assert code == 2 and out == "" and error.count("\n") == 1 and str(tmp_path) in error
    assert there.read_text() == "mine" and sorted(tmp_path.rglob("*")) == before


def test_a_new_file_is_not_made_yet(tmp_path):
    assert tools.new_file(tmp_path / "new.png", ".png") == tmp_path / "new.png"
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="new.foo: name a file that ends in .png"):
        tools.new_file(tmp_path / "new.foo", ".png")


@pytest.mark.parametrize(("error", "line"), [
    (KeyboardInterrupt(), "lmzoo: interrupted\n"), (Interrupted("saved", 130), "lmzoo: saved\n"),
    (PermissionError(13, "Permission denied", "/a/b"), "lmzoo: /a/b: Permission denied (is the path right"),
    (NotADirectoryError(20, "Not a directory", "/a/b"), "lmzoo: /a/b: Not a directory (is the path right"),
    (OSError("two\nlines"), "lmzoo: two; lines"), (UserError("a mistake"), "lmzoo: a mistake"),
])  # fmt: skip
def test_what_ends_a_tool_is_one_line(capsys, error, line):
    def fail():
        raise error

    with pytest.raises(SystemExit) as end:
        tools.answer(fail)
    out, told = capsys.readouterr()
    assert end.value.code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert out == "" and told.startswith(line) and told.count("\n") == 1


@pytest.mark.parametrize("tool", NAMES)
def test_an_option_that_no_tool_has_is_one_line(monkeypatch, capsys, tool):
    code, out, error = said(monkeypatch, capsys, tool, "--nothing")
    assert (code, out, error.count("\n")) == (2, "", 1) and error.startswith("lmzoo: ")


@pytest.mark.parametrize(("tool", "word", "instead"), [
    ("extrapolate", "model.max_len=64", "give --length"), ("extrapolate", "model/position=alibi", "give --schemes"),
    ("norm_study", "model.n_layers=3", "give --depths"), ("norm_study", "model/block=pre", "give --blocks"),
    ("norm_study", "name=mine", "leave it out"),
])  # fmt: skip
def test_a_word_that_a_tool_says_itself(monkeypatch, capsys, tool, word, instead):
    name = word.partition("=")[0]
    assert said(monkeypatch, capsys, tool, word) == (2, "", f"lmzoo: {word}: this tool says {name} itself: {instead}\n")


@pytest.mark.parametrize("tool", ["export", "merge_checkpoint", "yardsticks", "summarise_sweep"])
@pytest.mark.parametrize("place", ["file", "file/below", "folder", "missing", "x" * 300])
def test_a_run_that_is_none(monkeypatch, capsys, tmp_path, tool, place):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    code, _, error = said(monkeypatch, capsys, tool, tmp_path / place, *[tmp_path / "new"] * (tool == "export"))
    assert code == 2 and error.startswith("lmzoo: ") and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", [
    ["train", "--families", "gpt,foo"], ["train", "--dtype", "fp64"], ["train", "--peers", "x"],
    ["train", "--rounds", "0"], ["train", "--allocator", "x"], ["packing", "--families", "t5"],
    ["scale", "--axes", "width"], ["scale", "--steps", "-1"], ["data", "--mb", "0"], ["data", "--mb", "nan"],
    ["data", "--processes", "1.5"], ["startup", "--rounds", "many"], [], ["nothing"],
])  # fmt: skip
def test_what_a_benchmark_does_not_know(monkeypatch, capsys, words):
    code, _, error = said(monkeypatch, capsys, "benchmark", *words)
    assert code == 2 and error.count("\n") == 1 and re.match("lmzoo: (argument|the following|--mb)", error)


@pytest.mark.parametrize(("tool", "function", "words"), [
    ("count", "count", ["model=gpt", "--devices", "2", "size=tiny"]),
    ("inspect_data", "inspect", ["model=gpt", "--rows", "2", "task=clm"]),
    ("train_tokenizer", "train", ["a.json", "tokenizer=byte"]), ("prepare_data", "prepare", ["model=gpt", "task=clm"]),
    ("extrapolate", "extrapolate", ["optim.lr=1", "--length", "16", "seed=1"]),
    ("norm_study", "study", ["optim.lr=1", "--depths", "2", "seed=1"]), ("export", "export", ["--to", "hf", "a", "b"]),
    ("attention", "see", ["--text", "a", "run"]), ("merge_adapter", "merge", ["run", "--base", "x", "file"]),
])  # fmt: skip
def test_words_stand_before_and_behind_options(monkeypatch, tool, function, words):
    module, asked = importlib.import_module(f"lmzoo.tools.{tool}"), []
    monkeypatch.setattr(module, function, lambda *given, **more: asked.append([*given, more]))
    monkeypatch.setattr(sys, "argv", [tool, *words])
    module.main()
    options = [i for i, word in enumerate(words) if word.startswith("--")]
    for word in (word for i, word in enumerate(words) if not {i, i - 1} & set(options)):
        assert re.search(rf"(?<![\w=]){re.escape(word)}(?![\w=])", str(asked))
    assert len(asked) == 1
