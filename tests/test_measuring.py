"""Which nets a measure is for, and which documents and rows it is given."""

import pytest

from lmzoo.errors import UserError
from lmzoo.likelihood.labels import Labels
from lmzoo.likelihood.measuring import check_net, chosen, read
from lmzoo.likelihood.pseudo_perplexity import PseudoPerplexity
from lmzoo.likelihood.sliding_window import SlidingWindow
from spoken import net


@pytest.mark.parametrize("measure, net, line", [
    (SlidingWindow(), net("bert"), "^measure=sliding_window is for nets of family decoder, and this one is of"),
    (PseudoPerplexity(), net("bert", head="pooler"), "=pseudo_perplexity needs a head .*, and this net ends in a P"),
    (SlidingWindow(33), net("gpt"), "measure.stride=33 must be between 1 and"),
])  # fmt: skip
def test_nets_that_a_measure_is_not_for(measure, net, line):
    with pytest.raises(UserError, match=line):
        check_net(measure, net)


def test_the_split_that_is_measured():
    assert [chosen(None, splits) for splits in (["train", "val", "test"], ["train", "val"])] == ["test", "val"]
    assert chosen("val", ["val", "test"]) == "val"
    with pytest.raises(UserError, match="split=test: the data has train and val"):
        chosen("test", ["train", "val"])


def test_labelled_texts_by_their_split(tmp_path):
    """A source's own splits; with split=whole all that it does not give to another."""
    rows = ["text,label,split", "a,x,train", "b,y,val", "c,x,test", "d,y,test"]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    reader = {"_target_": "lmzoo.data.corpus.Csv", "label_column": "label"}
    data = {"path": str(tmp_path / "a.csv"), "val_path": None, "test_path": None, "val_fraction": 0}

    def found(split, **more):
        config = {"data": {**data, "reader": {**reader, **more}}, "split": split, "other": True}
        name, texts = read(Labels(), config, None)
        return name, ["".join(document.text for document in of()) for of in texts]

    assert found(None, split_column="split") == ("test", ["cd", "a"])
    assert found("val", split_column="split") == ("val", ["b", "a"])
    assert found("whole") == ("test", ["abcd", ""])
