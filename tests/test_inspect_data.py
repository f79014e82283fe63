"""What inspect_data shows is what training reads: put together again it is the store's stream."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from lmzoo.tools import inspect_data
from lmzoo.tools.inspect_data import UNASKED, by_length, histogram, spell

from lmzoo import UserError
from lmzoo.data.labelled import Document
from lmzoo.data.packing import Rows
from lmzoo.tokenizer import byte, train_wordpiece
from small_store import Writer


@pytest.fixture(scope="module")
def show(words, tmp_path_factory):
    """show(split, rows, *words) -> (the rows' texts, the stream of the split as text, all that was shown)"""
    def shown(split, n_rows, *more, **settings):
        given = words(tmp_path_factory.mktemp("run"), "tokenizer=char", *more)
        said = inspect_data.inspect(given, split, n_rows, verify=True, **settings)
        _, module = inspect_data.assemble(given)
        part = module.store[split]
        stream = module.tokenizer.decode(part.read(0, part.n_tokens), skip_special=False)
        return re.findall(r"^── .*\n((?:[^─]+?\n))\n", said, re.M), stream, said

    return shown


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("packing", ["stream", "isolate"])
def test_a_causal_row_is_a_piece_of_the_stream(show, split, packing):
    texts, stream, _ = show(split, 24, "model=gpt", "task=clm", f"data.packing={packing}")
    assert len(texts) == 24
    for text in texts:
        whole = re.sub(r"\[(.+)→(.+)\]\n$", r"\1\2", text).rstrip("\n")  # the row's last token, and what comes after it
        ends, bars, last = whole.count("⟦</s>⟧"), whole.count(" ║ "), whole.endswith("⟦</s>⟧")
        whole = whole.replace(" ║ ", "").replace("⟦", "").replace("⟧", "")
        assert whole in stream
        assert bars == whole.count("</s><s>") == ends - last
    assert any(" ║ <s>" in text for text in texts)


def test_a_row_of_whole_documents_asks_for_eos_without_reading_it(show):
    texts, _, _ = show("train", 4, "model=gpt", "task=clm", "data.packing=fit", "data.row_length=1000",
                       "model.max_len=1000")
    for text in texts:
        for document in text.strip("\n").split(" ║ "):
            assert re.fullmatch(r"<s>[a-z ]+\[.→</s>\]", document)


def test_a_masked_row_with_its_answers_is_a_piece_of_the_stream(show):
    texts, stream, said = show("train", 16, "model=bert", "task=mlm", "task.rate=0.3")
    found = [re.findall(r"\[([^→]*)→(.)\]", text) for text in texts]
    assert all(re.sub(r"\[[^→]*→(.)\]", r"\1", text).replace(" ║ ", "").strip("\n") in stream for text in texts)
    assert [len(targets) for targets in found] == [int(n) for n in re.findall(r"(\d+) targets", said)]
    shares = [sum(read == "MASK" for read, _ in row) / len(row) for row in found]
    assert 0.7 < sum(shares) / len(shares) < 0.9  # 80 %


def test_a_corrupted_row_with_its_spans_put_back_is_a_piece_of_the_stream(show):
    texts, stream, _ = show("train", 16, "model=t5", "task=span_corruption")
    for text in texts:
        source, target = re.fullmatch(r"input   (.+)\ntarget  (.+)\n", text).groups()
        spans = re.split(r"<extra_id_\d+>", target.replace(" ║ ", "").removesuffix("</s>"))
        kept = re.split(r"<extra_id_\d+>", source.replace(" ║ ", "").removesuffix("</s>"))
        assert spans[0] == "" and len(spans) == len(kept) > 1
        assert kept[0] + "".join(span + rest for span, rest in zip(spans[1:], kept[1:], strict=True)) in stream


def test_a_classified_text_stands_with_its_label(show, tmp_path):
    (tmp_path / "d.csv").write_text("text,label\n" + "".join(f"{'good' if i % 2 else 'bad'} {'x' * i},{'plus' if i % 2 else 'minus'}\n" for i in range(40)))  # noqa: E501
    _, _, said = show("train", 20, "model=bert", "task=classification", "data=csv", f"data.path={tmp_path}/d.csv")
    found = re.findall(r"label (\w+)\n<s>(\w+) x*</s>\n", said)
    assert len(found) == 20 and set(found) == {("plus", "good"), ("minus", "bad")}


def test_a_pair_stands_with_both_its_texts(show, tmp_path):
    (tmp_path / "d.csv").write_text("text,other,label\n" + "".join(f"a {'x' * (i % 8)},b {'y' * (i % 8)},{i % 2}\n" for i in range(40)))  # noqa: E501
    texts, _, said = show("train", 20, "model=bert", "task=classification", "data=csv", f"data.path={tmp_path}/d.csv",
                          "data.pair_column=other")
    found = re.findall(r"label (.)\nfirst   <s>a (x*)</s>\nsecond  b (y*)</s>\n", said)
    assert len(found) == len(texts) == 20
    assert all(len(x) == len(y) and len(x) % 2 == int(label) for label, x, y in found)


OWN = byte([], 400)
SHOWN = {
    "classes": [(Document("ab", ("x", "y")), "label x, y\n<s>ab</s>"), (Document("c", ()), "label none\n<s>c</s>")],
    "number": [(Document("ab", -2.5), "label -2.5\n<s>ab</s>")],
    "text": [(Document("ab", second="cd"), "input   <s>ab</s>\ntarget  cd</s>")],
    "tags": [(Document("ab c", ("B", "O"), words=("ab", "c")), "<s>[a→B]b [c→O]</s>")],
}  # fmt: skip


@pytest.mark.parametrize("kind", SHOWN)
def test_labels_of_every_kind(tmp_path, kind):
    writer = Writer(tmp_path, OWN, kind=kind)
    for document, _ in SHOWN[kind]:
        encoded = OWN.encode_firsts([document.words]) if kind == "tags" else OWN.encode_words(list(document.texts))
        writer.add_documents("train", encoded, [document])
    store = writer.finish()
    module, rows = SimpleNamespace(store=store, labels=store.labels), Rows(store["train"], "single", 16, None)
    for number, (_, expected) in enumerate(SHOWN[kind]):
        text = inspect_data.labelled(OWN, module, "here", rows[number])
        assert text.removeprefix(f"── here: {len(rows[number]['tokens'])} tokens").strip("\n, ") == expected


def test_rows_are_those_of_the_step(show):
    rows = [show("train", 8, "model=bert", "task=mlm", "data.batch_size=4", step=step)[0] for step in (0, 1, 10**6)]
    assert rows[0][4:] == rows[1][:4] and rows[0] != rows[2]
    with pytest.raises(UserError, match="--step 1000: val has no batch 1000"):
        show("val", 1, "model=bert", "task=mlm", step=1000)


def test_a_mixture_s_sources_are_counted(show, tmp_path):
    sizes = {"one": 30, "two": 10}
    given = []
    for name, n in sizes.items():
        (tmp_path / name).write_text("\n".join(f"{i:05} line" for i in range(n * 10)))
        given += [f"data.sources.{name}.path={tmp_path / name}", f"data.sources.{name}.weight={40 - n}",
                  f"data.sources.{name}.reader.split=line"]
    words = ["model=gpt", "task=clm", "data=mixture", "data.row_length=16", "tokenizer=byte",
             "tokenizer.vocab_size=400", *given]
    said = inspect_data.inspect(words, "train", 1, verify=False)
    table = dict(re.findall(r"^(one|two) +(.+)$", said, re.M))
    documents, tokens, shares, read = zip(*(line.replace(",", "").split() for line in table.values()), strict=True)
    assert [int(n) / int(k) for n, k in zip(tokens, documents, strict=True)] == [12, 12]  # 10 bytes, bos and eos
    assert read == ("25.0%", "75.0%") and shares[0] == f"{int(tokens[0]) / sum(map(int, tokens)):.1%}"
    assert 250 < int(documents[0]) < 300 and 80 < int(documents[1]) < 100


def test_lengths_fall_into_classes_that_double():
    class Lengths:
        def lengths(self):
            yield np.array([1, 2, 3])
            yield np.array([4, 7, 8, 1 << 20])

    documents, tokens = by_length(Lengths())
    assert documents.sum() == 7 and tokens.sum() == 1 + 2 + 3 + 4 + 7 + 8 + (1 << 20)
    counts = [line.split() for line in histogram(documents)[1:]]
    assert [(line[0], int(line[3])) for line in counts] == [("1", 1), ("2", 2), ("4", 2), ("8", 1), ("1,048,576", 1)]
    assert len(counts[1][4]) == 50 and len(counts[0][4]) == 25


def test_the_picture(show, tmp_path):
    show("train", 0, "model=gpt", "task=clm", png=tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_marks_and_borders():
    own = byte([], 400)
    ids = own.document(own.encode("ab")) + own.document([]) + own.document(own.encode("c"))
    assert spell(own, ids) == "<s>ab</s> ║ <s></s> ║ <s>c</s>"
    assert spell(own, own.encode("abcd"), [None, UNASKED, UNASKED, "x"]) == "a⟦bc⟧[d→x]"
    assert spell(own, own.encode("abcd"), documents=[0, 0, 1, 2]) == "ab ║ c ║ d"
    assert spell(own, [own.mask, own.mask], ["a", "b"]) == "[MASK→a][MASK→b]"


def test_words_keep_their_spaces_around_marks():
    own = train_wordpiece(["the dog sees the dogs and sees cats"] * 9, 60)
    ids = own.encode("the dogs sees the cats")
    text = spell(own, ids, ["x", *[None] * (len(ids) - 1)])
    assert text.startswith("[") and text.replace("→x]", "").removeprefix("[").replace("##", "") == own.decode(ids)


@pytest.mark.parametrize(("n_rows", "step", "message"), [(1, -1, "--step -1 is less"), (-3, 0, "--rows -3 is less")])
def test_numbers_below_zero_are_refused(n_rows, step, message):
    with pytest.raises(UserError, match=message):
        inspect_data.inspect([], "train", n_rows, verify=False, step=step)
