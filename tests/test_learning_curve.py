"""The learning curve: which cells are trained, on what, and that a finished one is not trained again."""

import json
import re
import statistics
import sys

import pytest
from lmzoo.tools import learning_curve
from lmzoo.tools.learning_curve import Init, Size, configured, counted, curve, macro_f1, named

import lmzoo
import tiny_run
from lmzoo import UserError
from lmzoo.data.few import Few
from lmzoo.data.preparation import prepare

WORDS = ["task=classification", "data=jsonl", "data.split_column=split", "trainer.max_steps=2", "data.batch_size=8",
         "trainer.precision=32-true", "logger.wandb.mode=disabled", "trainer.val_every_n_steps=2"]  # fmt: skip
SIGNS = {"pos": "good", "neg": "bad"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts of two classes, which a word of each tells; of three training texts two are negative."""
    file = tmp_path_factory.mktemp("texts") / "reviews.jsonl"
    labels = {"train": ["neg", "neg", "pos"] * 10, "dev": ["pos", "neg"] * 3, "test": ["pos", "neg"] * 5}
    rows = [{"text": f"film {i} is {SIGNS[label]}", "label": label, "split": split}
            for split, own in labels.items() for i, label in enumerate(own)]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture(scope="module")
def base(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "base"
    with tiny_run.lean():
        lmzoo.fit(lmzoo.compose(*tiny_run.TINY, "model=bert", "task=mlm", "data=jsonl", f"data.path={texts}",
                                "data.split_column=split", "trainer.max_steps=2", f"run_dir={folder}"))  # fmt: skip
    return folder


def test_a_curve_is_trained_once_and_goes_on(texts, base, tmp_path, monkeypatch):
    folder, trained, fit = tmp_path / "curve", [], lmzoo.fit
    monkeypatch.setattr(lmzoo, "fit", lambda config: trained.append(config) or fit(config))
    words = [*WORDS, f"data.path={texts}"]
    with tiny_run.lean():
        curve(folder, [str(base)], [Size("2", 1)], [1], "test/accuracy", words)
        assert [(config.init_from, config.data.per_class, config.seed, config.trainer.max_steps) for config in trained
                ] == [(str(base), 2, 1, 1)]  # fmt: skip
        (folder / "base-2-1" / "result.json").write_text('{"test/accuracy": 0.25}')
        sizes = [Size("2", 1), Size("all")]
        told = curve(folder, [str(base), "scratch", "majority"], sizes, [1], "test/accuracy", words)
    assert [(config.init_from, config.data.per_class, config.trainer.max_steps) for config in trained[1:]] == [
        (str(base), None, 2), (None, 2, 1), (None, None, 2)]  # fmt: skip
    assert trained[2].model.d_model == lmzoo.load(base).config["d_model"]
    assert lmzoo.load(folder / "scratch-2-1").tokenizer.json == lmzoo.load(base).tokenizer.json
    lines = told.splitlines()
    assert lines[:2] == ["| test/accuracy | 2 a class | all |", "|---|---|---|"]
    assert lines[2].startswith("| base | 0.250 | ") and lines[4] == "| majority class | 0.500 | 0.500 |"
    records = json.loads((folder / "table.json").read_text())
    assert records[0] == {"init": "base", "per_class": "2", "metric": "test/accuracy", "seeds": [1], "values": [0.25],
                          "mean": 0.25, "deviation": None}  # fmt: skip
    assert (folder / "table.png").stat().st_size > 5000


def test_means_and_deviations_are_over_seeds(tmp_path, monkeypatch):
    values = {1: 0.5, 2: 0.6, 3: 0.8}
    monkeypatch.setattr(learning_curve, "check", lambda *_: None)
    monkeypatch.setattr(learning_curve, "result", lambda run, line, size, seed, words: {"m": values[seed]})
    told = curve(tmp_path / "new", ["majority"], [Size("4"), Size("all")], [1, 2, 3], "m", [])
    cell = f"{statistics.fmean(values.values()):.3f} ± {statistics.stdev(values.values()):.3f}"
    assert told.splitlines()[2] == f"| majority class | {cell} | {cell} |" and cell == "0.633 ± 0.153"


def test_what_is_no_net_is_counted_on_the_texts_that_a_net_learns_from(texts, base):
    config = configured(Init("majority", str(base)), Size("all"), 1, [*WORDS, f"data.path={texts}"])
    assert counted("majority", config) == pytest.approx({"test/accuracy": 0.5, "test/f1": 1 / 3})
    pytest.importorskip("sklearn")
    config = configured(Init("svm", str(base)), Size("4"), 1, [*WORDS, f"data.path={texts}"])
    assert counted("svm", config) == {"test/accuracy": 1, "test/f1": 1}
    with pytest.MonkeyPatch.context() as patch:
        asked = []
        patch.setattr(learning_curve, "support_vectors", lambda *given: asked.extend(given[::2]) or ["pos"] * 10)
        counted("svm", config)
    tokenizer = lmzoo.load(base).tokenizer
    few = Few(prepare(config, tokenizer)["train"], 4, seed=1)
    texts = [tokenizer.decode(few.read(*few.span(i))) for i in range(few.n_documents)]
    assert asked[0] == texts and sorted(asked[1]) == ["neg"] * 4 + ["pos"] * 4


def test_a_pair_is_both_of_its_texts(texts, base, tmp_path):
    """The first texts are all alike; only the second tells the class."""
    pytest.importorskip("sklearn")
    rows = [json.loads(line) for line in texts.read_text().splitlines()]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row | {"text": "a film", "b": row["text"]}) for row in rows))
    words = [*WORDS, f"data.path={tmp_path / 'a.jsonl'}", "data.pair_column=b"]
    assert counted("svm", configured(Init("svm", str(base)), Size("all"), 1, words))["test/accuracy"] == 1


def test_macro_f1_by_hand():
    assert macro_f1(list("aab"), list("abb")) == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert macro_f1(list("aab"), list("aac")) == pytest.approx((1 + 0 + 0) / 3)


def test_names():
    assert [(line.name, line.base, line.fresh) for line in named(["a/x", "scratch", "scratch:b/y", "svm"])] == [
        ("x", "a/x", False), ("scratch", "a/x", True), ("scratch-y", "b/y", True), ("svm", "a/x", False)]  # fmt: skip
    assert named(["scratch"]) == [Init("scratch", None, fresh=True)]
    with pytest.raises(UserError, match="--init a/x b/x: two of them have one name"):
        named(["a/x", "b/x"])


def said(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["learning_curve", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        learning_curve.main()
    return end.value.code, capsys.readouterr().err.strip().splitlines()[-1]


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, texts, base):
    words = [*WORDS, f"data.path={texts}"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    code, line = said(monkeypatch, capsys, tmp_path / "mine", "--init", base, *words)
    assert code == 2 and "mine is not empty, and holds no learning curve" in line
    new, setting = tmp_path / "new", learning_curve.matched(tmp_path / "new", words, {"base": str(base)}, {"2": 5})
    code, line = said(monkeypatch, capsys, new, "--init", base, "nowhere", *words)
    assert code == 2 and "init_from=nowhere does not exist" in line and not new.exists()
    new.mkdir()
    (new / "setting.json").write_text(json.dumps(setting))
    for given, expected in (
        ([*words, "seed=3"], "holds runs of other words"),
        (["--metric", "test/accurracy", "--sizes", "all", *words], "accurracy: majority class has no such; did you"),
        (["--sizes", "few", *words], "argument --sizes: invalid list value: 'few'"),
        (["--sizes", "0", *words], "argument --sizes: invalid list value: '0'"),
        (["--sizes", "2:0", *words], "argument --sizes: invalid list value: '2:0'"),
        (["--sizes", "2:5,2:6", *words], "argument --sizes: 2:5,2:6 says one twice"),
        (["--sizes", "2:6", *words], "holds runs of 5 steps for size 2: give a new folder"),
        (["--sizes", "2", *words], "holds runs of 5 steps for size 2: give a new folder"),
        (["--seeds=-1", *words], "argument --seeds: invalid list value: '-1'"),
        (["--seeds", "1,2,1", *words], "argument --seeds: 1,2,1 says one twice"),
        ([*words, "trainer=ddp"], "holds runs of other words"),
    ):
        code, line = said(monkeypatch, capsys, tmp_path / "new", "--init", "majority", base, *given)
        assert code == 2 and expected in line, line
    with pytest.raises(UserError, match="holds runs of another base"):
        learning_curve.matched(new, words, {"base": "elsewhere/base"}, {})
    for word, instead in (("seed=3", "say --seeds"), ("+data.per_class=5", "say --sizes"), ("run_dir=x", "folder")):
        with pytest.raises(UserError, match=f"{re.escape(word)}: leave it out; .*{instead}"):
            learning_curve.check([], Size("all"), 1, [*words, word])
    monkeypatch.setattr(learning_curve, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--init svm needs scikit-learn"):
        learning_curve.check([Init("svm", str(base))], Size("all"), 1, words)
    with pytest.raises(UserError, match="trainer.strategy=ddp: the cells are of one process"):
        configured(Init("base", str(base)), Size("all"), 1, [*words, "trainer=ddp"])
    monkeypatch.undo()
    for word, line in (("task.labels=classes", "texts of one class each"), ("data.deduplicate=true", "one class each"),
                       ("data.split_column=null", "this is for data with a test")):  # fmt: skip
        with pytest.raises(UserError, match=line):
            learning_curve.check([Init("majority", str(base))], Size("all"), 1, [*words, word])
