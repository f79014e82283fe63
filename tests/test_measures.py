"""Evaluations by a measure: composed for runs and exported folders, what is refused, and the same numbers from both."""

import json
import re

import pytest

import lmzoo
from lmzoo import UserError, hf
from lmzoo.checks import groups
from lmzoo.evaluate import evaluate
from lmzoo.evaluate import main as command
from lmzoo.likelihood import measuring
from lmzoo.likelihood.pseudo_perplexity import PseudoPerplexity
from lmzoo.literal import plain
from lmzoo.tokenizer import train_wordpiece
from small_store import settings
from spoken import TEXT
from test_evaluate import configured


@pytest.fixture(scope="session")
def runs(words, gpt_run, tmp_path_factory):
    """{family: (folder of a run, folder that it was exported to)}"""
    folder, found = tmp_path_factory.mktemp("runs"), {"gpt": gpt_run}
    for model, task in (("bert", "mlm"), ("t5", "span_corruption")):
        found[model] = folder / model
        given = words(folder / model, f"model={model}", f"task={task}", "tokenizer=char", "trainer.max_steps=1")
        lmzoo.fit(lmzoo.compose(*given))
    for model, run in found.items():
        hf.to_hf(lmzoo.load(run), folder / f"{model}-exported")
    return {model: (run, folder / f"{model}-exported") for model, run in found.items()}


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """{measure: the words of the text that it reads here}"""
    folder = tmp_path_factory.mktemp("texts")
    documents = [" ".join(TEXT[n : n + 9]) for n in range(8)]
    (folder / "a.txt").write_text("\n\n".join(documents), encoding="utf-8")
    rows = [{"question": text, "choices": ["hills", "a dog", "rain"], "answer": n % 3, "sentence_good": text,
             "sentence_bad": text[::-1], "UID": str(n % 2)} for n, text in enumerate(documents)]  # fmt: skip
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    labelled = [f"{text},{['pos', 'neg', 'neg'][n % 3]},{'test' if n > 3 else 'train'}"
                for n, text in enumerate(documents)]  # fmt: skip
    (folder / "a.csv").write_text("\n".join(["text,label,split", *labelled]), encoding="utf-8")
    plain, rows = ("data=text", f"data.path={folder / 'a.txt'}"), (f"data.path={folder / 'a.jsonl'}",)
    return {"sliding_window": plain, "pseudo_perplexity": plain, "multiple_choice": rows, "minimal_pairs": rows,
            "labels": ("data=csv", f"data.path={folder / 'a.csv'}", "data.split_column=split", "measure.n_shots=1",
                       "measure.words.pos=good")}  # fmt: skip


CASES = [("gpt", "sliding_window"), ("bert", "pseudo_perplexity"), ("bert", "minimal_pairs"), ("t5", "multiple_choice"),
         ("gpt", "labels")]  # fmt: skip
OTHERS = [("gpt", "minimal_pairs"), ("gpt", "multiple_choice"), ("bert", "multiple_choice"), ("bert", "labels"),
          ("t5", "labels")]  # fmt: skip
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS]


@pytest.mark.parametrize("model, measure", CASES + SLOW)
def test_an_exported_folder_gives_what_its_run_gives(model, measure, runs, texts):
    ours, theirs = (evaluate(configured(f"ckpt={ckpt}", f"measure={measure}", *texts[measure])) for ckpt in runs[model])
    assert ours == pytest.approx(theirs, rel=1e-5) and all(name.startswith("test/") for name in ours)


def test_a_runs_own_text(gpt_run, texts):
    """As the run's task measures it but for the borders of rows; or another text of its kind."""
    found = evaluate(configured(f"ckpt={gpt_run}", "measure=sliding_window"))
    task = evaluate(configured(f"ckpt={gpt_run}"))
    assert found["val/loss"] == pytest.approx(task["val/loss"], rel=0.05)
    file = texts["sliding_window"][1]
    other, same = (evaluate(configured(f"ckpt={gpt_run}", "measure=sliding_window", "trainer.accelerator=cpu", *words))
                   for words in ((file,), ("data=text", file)))  # fmt: skip
    assert other == same and {name.partition("/")[0] for name in other} == {"test"}
    with pytest.raises(UserError, match="split=test: the data has train and val"):
        evaluate(configured(f"ckpt={gpt_run}", "measure=sliding_window", "split=test"))


def test_a_runs_own_text_that_has_changed_is_said(words, tmp_path, caplog):
    file = tmp_path / "mine.txt"
    file.write_text("\n\n".join(" ".join(TEXT[n : n + 9]) for n in range(40)), encoding="utf-8")
    run = words(tmp_path / "run", "model=gpt", "task=clm", f"data.path={file}", "trainer.max_steps=1")
    lmzoo.fit(lmzoo.compose(*run))
    for changed in (False, True):
        if changed:
            file.write_text(file.read_text(encoding="utf-8").replace("the", "a"), encoding="utf-8")
        caplog.clear()
        evaluate(configured(f"ckpt={tmp_path / 'run'}", "measure=sliding_window"))
        assert ("the run's data has changed since it was trained" in caplog.text) == changed


def test_unknown_tokens_are_said(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("a cat \u4e2d\u6587 sat\n\na \u4e2d cat", encoding="utf-8")
    config = {"split": None, "other": True, **settings(tmp_path, path=str(tmp_path / "a.txt"))}
    split, store = measuring.read(PseudoPerplexity(), config, train_wordpiece(["a cat sat"], 40))
    assert split == "test" and store.n_documents == 2
    assert "3 of the " in caplog.text and "tokens of test stand for signs or words that the tokenizer" in caplog.text


def test_the_command_prints_a_line_for_each_split_and_group(gpt_run, texts, monkeypatch, capsys):
    words = [f"ckpt={gpt_run}", "measure=minimal_pairs", *texts["minimal_pairs"]]
    monkeypatch.setattr("sys.argv", ["lmzoo.evaluate", *words])
    command()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" accuracy ")[0].strip() for line in lines] == ["test", "test/UID=0", "test/UID=1"]
    assert [line.partition("  of ")[2] for line in lines] == ["8 items", "4 items", "4 items"]


MISTAKES = [
    ("gpt measure.stride=3", "measure: say measure=NAME, one of labels, minimal_pairs"),
    ("gpt measure=sliding_windw", "measure=sliding_windw: there is no such option; did you mean sliding_window"),
    ("gpt measure=sliding_window measure.strid=3", "measure.strid: SlidingWindow has no such word; did you mean"),
    ("gpt measure=sliding_window measure.stride=x", "measure.stride='x' should be a whole number or null"),
    ("gpt measure=sliding_window measure.stride=0", "measure.stride=0 must be between 1 and"),
    ("gpt measure=sliding_window measure.stride=65", "measure.stride=65 must be between 1 and the window's length, 64"),
    ("gpt measure=sliding_window trainer.precision=32-true", "trainer.precision changes nothing in a measure; of"),
    ("gpt measure=sliding_window trainer=ddp", "trainer changes nothing in a measure"),
    ("gpt measure=sliding_window data.batch_size=4", "data.batch_size changes nothing .* say measure.batch_size"),
    ("gpt measure=sliding_window data.field=x", "data.field: name the source that this word belongs to"),
    ("gpt measure=sliding_window split=train", "split=train: it may be val or test"),
    ("gpt measure=sliding_window data=text data.path=A.txt split=val", "split=val: all of data.path is read"),
    ("gpt measure=sliding_window data=text data.path=/nowhere", "matches no file"),
    ("gpt measure=sliding_window data=text data.path=A.txt data.val_path.x=A.csv", "data.val_path.x changes nothing"),
    ("gpt measure=pseudo_perplexity", "measure=pseudo_perplexity is for nets of family encoder, and this one is"),
    ("t5 measure=minimal_pairs data.path=A.jsonl", "measure=minimal_pairs is for nets of family encoder or decoder"),
    ("gpt measure=multiple_choice", "data.path is not set"),
    ("gpt measure=multiple_choice data=csv data.path=A.csv", "this measure reads questions in JSON lines"),
    ("gpt measure=multiple_choice data.path=A.jsonl data.field=q", "data.field changes nothing in this measure"),
    ("gpt measure=multiple_choice data.path=A.jsonl split=val", "split=val: all of data.path is read"),
    ("gpt measure=labels data=csv data.path=A.csv split=train", "split=train: it may be val or test or whole"),
    ("gpt measure=labels data=csv data.path=A.csv data.pair_column=x", "data.pair_column changes nothing in this"),
    ("gpt measure=labels data=csv data.path=A.csv data.per_class=3", "data.per_class changes nothing in this measure"),
    ("gpt measure=labels data=csv data.path=A.csv data.words_column=x", "data.words_column changes nothing in this"),
    ("gpt measure=labels data=csv data.path=A.csv split=whole measure.n_shots=1", "the train split has 0 texts"),
    ("exported measure=sliding_window", "is an exported folder, which has no data of its own: say what to measure"),
    ("exported data=jsonl measure._target_=torch.nn.Linear", "measure._target_=torch.nn.Linear: take a class of lmzoo"),
]


@pytest.mark.parametrize("typed, line", MISTAKES)
def test_mistakes(typed, line, runs, texts, monkeypatch, capsys):
    """As the command tells them: in one line."""
    model, *more = typed.split()
    folder = runs["gpt"][1] if model == "exported" else runs[model][0]
    beside = texts["multiple_choice"][0].removeprefix("data.path=").removesuffix("a.jsonl")
    more = [word.replace("=A.", f"={beside}a.") for word in more]
    monkeypatch.setattr("sys.argv", ["lmzoo.evaluate", f"ckpt={folder}", *more])
    with pytest.raises(SystemExit, match="2"):
        command()
    said = capsys.readouterr().err
    assert re.search(line, said) and said.count("\n") == 1


def test_free_text_is_literal(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    words = ["measure.template='{}, ${x}'", "measure.between=", "measure.words.pos=it's [good]"]
    config = configured(f"ckpt={tmp_path}", "measure=labels", *words)
    assert plain(config.measure)["template"] == "'{}, ${x}'" and config.measure.between == ""
    assert config.measure.words == {"pos": "it's [good]"}


@pytest.mark.parametrize("measure", groups()["measure"])
def test_every_measure_is_composed_for_a_folder(measure, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = configured(f"ckpt={tmp_path}", f"measure={measure}", "data=jsonl", "data.path=a.jsonl")
    assert config.measure._target_.startswith(f"lmzoo.likelihood.{measure}.") and config.other


def test_a_measure_of_ones_own(gpt_run, tmp_path, monkeypatch):
    (tmp_path / "own_measure.py").write_text("""
class Bytes:
    reads, families = "documents", ("decoder",)

    def __init__(self, factor: int = 1):
        self.factor = factor

    def __call__(self, net, documents):
        return {"bytes": self.factor * documents.n_bytes}
""")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a.txt").write_text("abc\n\nde")
    words = [f"ckpt={gpt_run}", "data=text", f"data.path={tmp_path / 'a.txt'}", "measure._target_=own_measure.Bytes"]
    assert evaluate(configured(*words, "+measure.factor=2", "trust=[own_measure]")) == {"test/bytes": 10}
    with pytest.raises(UserError, match=r"trust=\[own_measure\]"):
        configured(*words)
