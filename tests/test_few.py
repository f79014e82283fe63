"""So many texts of each class: how many these are, by the seed and the data alone, in rows and in whole runs."""

import pickle
from collections import Counter

import numpy as np
import pytest

import lmzoo
import tiny_run
from lmzoo import plan as plans
from lmzoo.data.few import Few, few_of_each
from lmzoo.data.preparation import prepare
from lmzoo.errors import UserError
from small_store import TOKENIZER
from test_downstream import source
from test_labelled import labelled

CLASSES = [i % 7 % 3 for i in range(60)]  # of 0: 26, 1: 17, 2: 17


@pytest.mark.parametrize("n", [1, 5, 17])
def test_texts_of_one_class_each_are_so_many_of_every_class(n):
    found, counts = few_of_each(lambda text: [CLASSES[text]], 60, n, seed=3)
    assert Counter(CLASSES[text] for text in found) == counts == {0: n, 1: n, 2: n}
    assert found.tolist() == sorted(set(found))


def test_of_a_rare_class_there_is_what_there_is_and_more_hold_fewer():
    taken = [set(few_of_each(lambda text: [CLASSES[text]], 60, n, seed=3)[0].tolist()) for n in (2, 10, 20, 60)]
    assert taken[0] < taken[1] < taken[2] < taken[3] and list(map(len, taken)) == [6, 30, 20 + 17 + 17, 60]


def test_another_seed_takes_others():
    taken = [tuple(few_of_each(lambda text: [CLASSES[text]], 60, 3, seed)[0]) for seed in (1, 1, 2, 3)]
    assert taken[0] == taken[1] and len(set(taken)) == 3


def test_a_text_of_several_classes_is_taken_for_the_one_that_lacks_examples():
    several = [[0], [0, 1], [], [1], [0, 1, 2], [2]] * 9
    found, counts = few_of_each(several.__getitem__, len(several), 4, seed=0)
    assert all(counts[one] >= 4 for one in range(3)) and len(found) <= 12 and all(several[text] for text in found)
    assert counts == Counter(one for text in found for one in several[text])


@pytest.mark.parametrize("kind", ["class", "classes", "tags"])
def test_a_split_of_few_texts_is_one_of_them_alone(tmp_path, kind):
    rows = [{"text": f"{i}", "label": f"{label}", "words": [f"{i}", "x"], "tags": [f"{label}", "0"]}
            for i, label in enumerate(CLASSES)]  # fmt: skip
    whole = prepare(labelled(tmp_path, kind, rows, data={"val_fraction": 0}), TOKENIZER)["train"]
    few = pickle.loads(pickle.dumps(Few(whole, 4, 1)))
    assert few.n_documents == len(few.documents) and few.labels == ["0", "1", "2"] and not few.fewer
    spans = [few.span(i) for i in range(few.n_documents)]
    assert np.concatenate([*few.lengths()]).tolist() == [end - begin for begin, end in spans]
    assert few.n_tokens == sum(end - begin for begin, end in spans)
    for place, document in enumerate(few.documents.tolist()):
        assert few.label(place) == whole.label(document) and few.span(place) == whole.span(document)
        ids = few.read(*few.span(place))
        assert TOKENIZER.decode(ids).split()[0] == f"{document}"
    assert Few(whole, 20, 1).fewer == {"1": 17, "2": 17}


def words(folder, *more):
    train = source(folder / "train.csv", "classification", seed=0)
    return [*tiny_run.TINY, "model=bert", "task=classification", "data=csv", f"data.path={train}",
            f"run_dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}", "data.val_fraction=0.4", *more]


def test_a_run_trains_on_few_and_is_measured_on_all(tmp_path, monkeypatch):
    made, plan = [], plans.plan
    monkeypatch.setattr("lmzoo.plan.plan", lambda task, config, data, first_step: made.append(data) or plan(
        task, config, data, first_step))  # fmt: skip
    with tiny_run.lean():
        lmzoo.fit(lmzoo.compose(*words(tmp_path, "data.per_class=4", "task.class_weights=balanced")))
    (data,) = made
    assert data.n_rows("train") == 8 and data.n_rows("val") == data.store["val"].n_documents > 10
    assert sorted(data.rows["train"][row]["label"] for row in range(8)) == [0] * 4 + [1] * 4
    assert {len(window[0]["labels"]) for window in data.train_dataloader()} == {8}


def test_where_there_are_not_so_many_it_is_said(tmp_path):
    with tiny_run.lean(), pytest.warns(UserWarning, match=r"data.per_class: there are only \d+ of 'no', \d+ of 'yes'"):
        lmzoo.fit(lmzoo.compose(*words(tmp_path, "data.per_class=400")))


@pytest.mark.parametrize(("more", "line"), [
    (["data.per_class=0"], "data.per_class=0 must be between 1 and"),
    (["data.per_class=2", "task=regression"], "data.per_class: the task does not look at it .its labels are number"),
])  # fmt: skip
def test_mistakes_are_one_line(tmp_path, more, line):
    with pytest.raises(UserError, match=line):
        lmzoo.compose(*words(tmp_path, *more))


def test_a_mixture_has_no_few():
    with pytest.raises(UserError, match="data.per_class: a mixture is read by its weights"):
        lmzoo.compose("model=bert", "task=classification", "data=mixture", "data.sources.a.weight=1",
                      "data.sources.a.path=x", "data.sources.a.kind=csv", "data.per_class=3")


def test_labels_that_are_as_many_as_texts_are_no_classes(tmp_path):
    rows = "\n".join(f"text {i},label {i}" for i in range(40))
    (tmp_path / "train.csv").write_text(f"text,label\n{rows}")
    given = [word for word in words(tmp_path) if not word.startswith("data.path")]
    (tmp_path / "own.csv").write_text(f"text,label\n{rows}")
    with tiny_run.lean(), pytest.raises(UserError, match=r"has 40 labels, but only \d+ texts to train on: is"):
        lmzoo.fit(lmzoo.compose(*given, f"data.path={tmp_path / 'own.csv'}"))
