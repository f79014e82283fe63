"""The words of a mixture's sources: completed from the kind of each, and refused by name where they are wrong."""

from dataclasses import fields

import pytest

import lmzoo
import lmzoo.data.mixture
from lmzoo.literal import plain
from lmzoo.mixing import BLOCK, OF_ALL, WORDS
from lmzoo.schema import Data

ONE = ("data.sources.wiki.path=a.txt", "data.sources.wiki.weight=2")


def sources(*words):
    return plain(lmzoo.compose("model=gpt", "task=clm", "data=mixture", *words))["data"]["sources"]


def test_every_word_of_the_data_is_a_sources_or_the_mixtures():
    assert {*WORDS} - {field.name for field in fields(Data)} == {"weight", "kind"}
    rows = {"packing", "row_length", "batch_size", "micro_batch_size", "num_workers"}
    assert {*OF_ALL} == rows | {"processes", "cache_dir", "per_class", "group_by_length"}


def test_a_block_is_what_the_order_takes_for_one():
    assert BLOCK == lmzoo.data.mixture.BLOCK


def test_a_source_is_what_its_kind_and_its_words_say():
    found = sources(*ONE, "data.sources.wiki.reader.split=line", "data.val_fraction=0.1", "data.sources.code.weight=1",
                    "data.sources.code.kind=jsonl", "data.sources.code.path=[it's.jsonl, ${x}.jsonl]",
                    "data.sources.code.field=a.b", "data.sources.code.val_fraction=0.2", "data.sources.docs.kind=pydoc",
                    "data.sources.docs.weight=0.5")
    assert {name: source["weight"] for name, source in found.items()} == {"wiki": 2, "code": 1, "docs": 0.5}
    assert found["wiki"]["reader"] == {"_target_": "lmzoo.data.corpus.Text", "split": "line"}
    reader = {word: value for word, value in found["code"]["reader"].items() if value is not None}
    assert reader == {"_target_": "lmzoo.data.corpus.Jsonl", "field": "a.b"}
    assert found["code"]["path"] == ["it's.jsonl", "${x}.jsonl"] and found["docs"]["path"] is None
    assert [source["val_fraction"] for source in found.values()] == [0.1, 0.2, 0.1]
    assert all({*source} == {*WORDS} for source in found.values())


@pytest.mark.parametrize(("words", "message"), [
    ((), "data=mixture has no sources"),
    (("data.sources.wiki.path=a.txt",), "data.sources.wiki has no weight"),
    ((*ONE, "data.sources.wiki.weight=null"), "data.sources.wiki has no weight"),
    ((*ONE, "data.sources.wiki.pth=a"), "data.sources.wiki.pth: there is no such word; did you mean path?"),
    ((*ONE, "+data.sources.wiki.pth=a"), "data.sources.wiki.pth: there is no such word; did you mean path?"),
    ((*ONE, "data.source.code.path=b.txt"), "data.source.code.path: there is no such word; did you mean sources?"),
    ((*ONE, "data.sources.code=b.txt"), "data.sources.code=b.txt: a source has words of its own"),
    ((*ONE, "data.sources.wiki.batch_size=3"), "data.sources.wiki.batch_size: this is one for all sources, data.batch"),
    ((*ONE, "data.path=b.txt"), "data.path: the text of a mixture is that of its sources, data.sources.NAME.path"),
    ((*ONE, "data.sources.wiki.kind=jsnl"), "wiki.kind=jsnl: there is no such kind; did you mean jsonl?"),
    ((*ONE, "data.sources.wiki.kind=mixture"), "wiki.kind=mixture: there is no such kind"),
    ((*ONE, "data.sources.wiki.val_fraction=line"), "data.sources.wiki.val_fraction='line' should be a number"),
    ((*ONE, "data.sources.wiki.reader.splt=line"), "data.sources.wiki.reader.splt: Text has no such word; did you"),
    ((*ONE, "data.sources.wiki.field=x"), "data.sources.wiki.field: Text has no such word"),
    ((*ONE, "data.sources.code.weight=much"), "data.sources.code.weight='much' should be a number"),
    ((*ONE, "data.sources.code.weight=0"), "data.sources.code.weight=0.0 must be a number above 0"),
    ((*ONE, "data.sources.code.weight=-1"), "data.sources.code.weight=-1.0 must be a number above 0"),
    ((*ONE, "data.sources.code.weight=inf"), "data.sources.code.weight=inf must be a number above 0"),
    ((*ONE, "data.sources.code.weight=nan"), "data.sources.code.weight=nan must be a number above 0"),
    ((*ONE, "data.sources.code.weight=0.001"), "code.weight=0.001 of 2.001 is less than one row in 1024"),
    ((*ONE, "data=text"), "data.sources: only a mixture has sources"),
])
def test_what_is_wrong_is_named(words, message):
    with pytest.raises(lmzoo.UserError) as error:
        sources(*words)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_source_of_the_command_line_is_that_of_a_file():
    typed = sources(*ONE)
    assert sources("data.sources={wiki: {path: a.txt, weight: 2}}") == typed


def test_weights_are_refused_before_the_sources_are_looked_at(monkeypatch):
    monkeypatch.setattr(lmzoo.mixing, "whole", None)
    given = [f"data.sources.s{i}.weight={weight}" for i, weight in enumerate([1, 1, 3000])]
    with pytest.raises(lmzoo.UserError, match="data.sources.s0.weight=1 of 3002 is less than one row in 1024"):
        sources(*given)
