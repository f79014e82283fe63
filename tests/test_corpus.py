import json
import random
import tracemalloc
from itertools import groupby

import pytest

from lmzoo.data import corpus, opening
from lmzoo.data.corpus import Csv, Document, Jsonl, Text, in_parts
from lmzoo.errors import UserError

SPLITS = ("file", "blank", "line")
CONTENTS = [
    "one\ntwo\n\nthree\n", "\ufeffone\r\n\r\ntwo\r\nthree", "\n\n \n  one\n \t\n\n\ntwo\n\n\n", "a", "\n\na", "a\n\n",
    "a\n \nb", "é\n\n中文\n\n😀😀\n", "no\x0bline\x0cend\x1c\x85\u2028here\n\nb",
    "  indented\n    more\n\n\u3000\n\xa0x\u3000\n", "x\r\r\ny\n\r\nz",
    "\ufeff\n\n\ufeffb\n", f"{'long' * 9}\n\n{' ' * 30}\n\n{' ' * 30}x\n",
]  # fmt: skip


def texts(documents):
    return [document.text for document in documents]


def whole(documents):
    """The texts of documents, their parts put together again."""
    found, more = [], False
    for document in documents:
        found[len(found) - more :] = [(found[-1] if more else "") + document.text]
        more = document.more
    assert not more
    return found


def reference(content, split):
    """What the documents are, from all of the text at once."""
    lines = content.removeprefix("\ufeff").split("\n")
    if split == "blank":
        lines = ["\n".join(block) for _, block in groupby(lines, lambda line: not line.strip())]
    found = ["\n".join(lines)] if split == "file" else lines
    return [text.strip() for text in found if text.strip()]


def random_contents(n):
    draw = random.Random(0)
    alphabet = ["a", "b", "é", "中", "😀", " ", "\n", "\n", "\n", "\r\n", "\t", "\u3000", "\x0c"]
    return ["".join(draw.choices(alphabet, k=draw.randint(1, 25))) + "z\n"[: draw.randint(1, 2)] for _ in range(n)]


@pytest.mark.parametrize("chunk", [8, 11, 1 << 20])
@pytest.mark.parametrize("split", SPLITS)
def test_pieces_of_any_size_are_the_whole(tmp_path, monkeypatch, split, chunk):
    monkeypatch.setattr(opening, "CHUNK", chunk)
    file, reader = tmp_path / "a.txt", Text(split)
    for content in CONTENTS + random_contents(25):
        file.write_bytes(content.encode())
        expected = reference(content, split)
        assert texts(reader(file)) == expected
        for n_bytes in range(1, 1 if split == "file" else len(content.encode()) + 2):
            monkeypatch.setattr(corpus, "PIECE_MB", n_bytes / 1e6)
            pieces = reader.pieces(file)
            assert [piece.begin for piece in pieces] == list(range(0, len(content.encode()), n_bytes))
            assert sum(piece.n_bytes for piece in pieces) == len(content.encode())
            each = [texts(reader.read(piece)) for piece in pieces]  # in any order: nothing is kept between pieces
            assert sum(each, []) == expected, (content, n_bytes)


def test_jsonl_in_pieces_of_any_size(tmp_path, monkeypatch):
    file, reader = tmp_path / "a.jsonl", Jsonl()
    records = ["a", "é\n\n中", "", "😀" * 5]
    content = "\ufeff" + "\n\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in records) + "\n \n"
    for data in (content.encode(), content.rstrip().encode()):
        file.write_bytes(data)
        for n_bytes in range(1, len(data) + 2):
            monkeypatch.setattr(corpus, "PIECE_MB", n_bytes / 1e6)
            assert texts(reader(file)) == records


def test_what_is_compressed_or_quoted_is_one_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE_MB", 1e-6)
    for name, reader in (("a.gz", Text()), ("a.zst", Jsonl()), ("a.csv", Csv()), ("a.txt", Text("file"))):
        (tmp_path / name).write_bytes(b"12345")
        assert reader.pieces(tmp_path / name) == [(str(tmp_path / name), 0, None, 5, None)]


def test_each_byte_is_looked_at_by_some_piece(tmp_path, monkeypatch):
    content = b"aa\nbb\n\ncc\n\n\ndd ee"
    for split in ("blank", "line"):
        for place in range(len(content)):
            (tmp_path / "a.txt").write_bytes(content[:place] + b"\xff" + content[place + 1 :])
            for n_bytes in range(1, len(content) + 1):
                monkeypatch.setattr(corpus, "PIECE_MB", n_bytes / 1e6)
                with pytest.raises(UserError, match=f"byte 0xff at offset {place};"):
                    list(Text(split)(tmp_path / "a.txt"))


def test_long_documents_come_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "LONGEST", 8)
    monkeypatch.setattr(opening, "CHUNK", 3)
    parts = [(part.text, part.more) for part in in_parts(Document("one two three fourteenth\nx\ty\n\n\n zzz"))]
    assert [text for text, _ in parts] == ["one two", " three", " fourtee", "nth\nx\ty", "\n\n\n zzz"]
    assert [more for _, more in parts] == [True, True, True, True, False]
    assert {part[1:3] for part in in_parts(Document("x" * 20, "l", "val"))} == {("l", "val")}
    draw = random.Random(1)
    for _ in range(200):
        content = "".join(draw.choices(["a", "bb", "中", " ", "\n"], k=60)) + "end"
        (tmp_path / "a.txt").write_bytes(content.encode())
        for split in SPLITS:
            try:
                found = list(Text(split)(tmp_path / "a.txt"))
            except UserError as error:
                assert "8 characters of white space" in str(error)
                assert " " * 9 in content.replace("\n", " ")
                continue
            assert whole(found) == reference(content, split)
            assert found == [part for text in reference(content, split) for part in in_parts(Document(text))]
            for one, following in zip(found, found[1:], strict=False):
                assert len(one.text) <= 8
                if one.more and not following.text[0].isspace():
                    assert not any(a.strip() and b.isspace() for a, b in zip(one.text, one.text[1:], strict=False))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("unit", ["word \t ", "x", "中文", "word word\n"])
def test_a_very_long_document_needs_little_memory(tmp_path, monkeypatch, split, unit):
    monkeypatch.setattr(corpus, "LONGEST", 20_000)
    monkeypatch.setattr(opening, "CHUNK", 5_000)
    (tmp_path / "a.txt").write_text(unit * (1_000_000 // len(unit)) + "." + " " * 10_000, encoding="utf-8")
    tracemalloc.start()
    n = sum(len(document.text) for document in Text(split)(tmp_path / "a.txt"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    n_line_ends = unit.count("\n") * (split == "line")
    assert n == 1_000_000 // len(unit) * (len(unit) - n_line_ends) + 1
    assert peak < 700_000  # 20,000 characters of up to 2 bytes: held, joined, and in lines of one word each


def test_white_space_without_end_is_refused_inside_a_document_only(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "LONGEST", 100)
    (tmp_path / "a.txt").write_text("\n" * 1000 + "a" + "\n" * 90 + "b" + "\n" * 99)
    assert texts(Text("file")(tmp_path / "a.txt")) == ["a" + "\n" * 90 + "b"]
    (tmp_path / "a.txt").write_text("a" + "\n" * 200 + "b")
    assert texts(Text("blank")(tmp_path / "a.txt")) == ["a", "b"]
    with pytest.raises(UserError, match="a.txt has more than 100 characters of white space at one place"):
        texts(Text("file")(tmp_path / "a.txt"))


def test_files_without_documents_are_named(tmp_path):
    empty = [(f"{split}.txt", " \n\n", Text(split)) for split in SPLITS]
    empty += [("bom.txt", "\ufeff", Text()), ("a.jsonl", "\n \n", Jsonl()), ("a.csv", "text,label\n\n", Csv()),
              ("cr.csv", "\r\r\r", Csv())]
    for name, content, reader in empty:
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=f"{name} holds no documents: remove it"):
            texts(reader(tmp_path / name))


def test_jsonl(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one\\n\\u4e2d", "label": 3, "x": {"y": "deep"}}\n\n'
                    '{"text": "", "label": "b", "x": {"y": "z\\u0000"}}\n')
    assert list(Jsonl()(file)) == [Document("one\n中", "3"), Document("", "b")]
    assert list(Jsonl("x.y", "text")(file)) == [Document("deep", "one\n中"), Document("z\0", None)]


def test_labels_of_json(tmp_path):
    labels = {'"a"': "a", "3": "3", "-2.50": "-2.5", "true": "true", "false": "false", "null": None, '""': None,
              '"None"': "None"}
    (tmp_path / "a.jsonl").write_text("\n".join('{"text": "x", "label": %s}' % label for label in labels))  # noqa: UP031
    assert [document.label for document in Jsonl()(tmp_path / "a.jsonl")] == list(labels.values())


@pytest.mark.parametrize(("line", "message"), [
    ('{"body": "x", "id": 1}', "line 3: no field data.field=text; the fields are body, id"),
    ('{"text": 5}', "line 3: data.field=text is not text but int"),
    ('{"text": null}', "line 3: data.field=text is not text but NoneType"),
    ("{broken", "line 3: not JSON"),
    ("[1]", "line 3: not a JSON object but a list"),
    ("[" * 100_000, "line 3: .*recursion"),
    ('{"text": "\\ud800"}', "line 3: the text holds half of a surrogate pair"),
])  # fmt: skip
@pytest.mark.parametrize("n_bytes", [7, 1000])
def test_bad_jsonl_is_named(tmp_path, monkeypatch, line, message, n_bytes):
    monkeypatch.setattr(corpus, "PIECE_MB", n_bytes / 1e6)
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n\n' + line)
    with pytest.raises(UserError, match=f"a.jsonl {message}"):
        for piece in Jsonl().pieces(tmp_path / "a.jsonl")[:9]:  # the bad line begins in the third
            list(Jsonl().read(piece))


@pytest.mark.parametrize(("label", "message"), [
    ('"\\udc00"', "holds half of a surrogate pair"), ('["a"]', r"\['a'\] is not a text, a number, true or false"),
    ('{"a": 1}', "{'a': 1} is not"), ("NaN", "nan is not"), ("[]", r"\[\] is not")])  # fmt: skip
def test_what_can_be_no_class_is_refused_only_where_it_is_asked_for(tmp_path, label, message):
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": %s}' % label)  # noqa: UP031
    assert list(Jsonl()(tmp_path / "a.jsonl")) == [Document("x")]
    with pytest.raises(UserError, match=f"a.jsonl line 1: the label {message}"):
        list(Jsonl(label_column="label")(tmp_path / "a.jsonl"))


def test_csv(tmp_path):
    (tmp_path / "a.csv").write_bytes('\ufefftext,label,id\n"two\nlines, ""quoted""",good,1\r\n\n中文,,2\n'.encode())
    assert list(Csv()(tmp_path / "a.csv")) == [Document('two\nlines, "quoted"', "good"), Document("中文", None)]
    assert list(Csv("id", "text")(tmp_path / "a.csv"))[1] == Document("2", "中文")
    (tmp_path / "b.tsv").write_text("text\tx\na, b\t1\n\t2\n")
    assert list(Csv()(tmp_path / "b.tsv")) == [Document("a, b"), Document("")]
    (tmp_path / "c.csv").write_text("x;text\n1;a, b")
    assert list(Csv(delimiter=";")(tmp_path / "c.csv")) == [Document("a, b")]


def test_a_long_cell_comes_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "LONGEST", 100_000)
    (tmp_path / "long.csv").write_text("text,label\n" + "x" * 250_000 + ",a")
    found = list(Csv()(tmp_path / "long.csv"))
    assert [(len(document.text), document.label, document.more) for document in found] == [
        (100_000, "a", True), (100_000, "a", True), (50_000, "a", False)]  # fmt: skip


@pytest.mark.parametrize(("content", "words", "message"), [
    ("review,stars\nfine,5\n", {}, "has no column data.text_column=text; the columns are review, stars"),
    ("text,stars\nfine,5\n", {"label_column": "star"}, "has no column data.label_column=star; .* are text, stars"),
    ("text\nfine\n", {"text_column": "Text"}, "has no column data.text_column=Text; the columns are text"),
    ("text,a,text\nfine,1,2\n", {}, "has more than one column data.text_column=text; the columns are text, a, text"),
    ("text,label,label\nfine,1,2\n", {}, "has more than one column data.label_column=label"),
    ("a,text\n1,x\n\nonly\n", {}, "line 4: 1 cells, but there are 2 columns"),
    ("a,text\n1,\"x\ny\"\n1,2,3\n", {}, "line 4: 3 cells, but there are 2 columns"),
    ('a,text\n1,x\n2,"open\n3,y\n', {}, "line 3: unexpected end of data .is a quote open"),
    ('a,text\n1,x\n2,"not" doubled\n3,y\n', {}, "line 3: ',' expected after '\"'"),
    ("text\nold\rmac\r", {}, "line 2: new-line character seen in unquoted field"),
])  # fmt: skip
def test_bad_csv_is_named(tmp_path, content, words, message):
    (tmp_path / "a.csv").write_bytes(content.encode())
    with pytest.raises(UserError, match=f"a.csv {message}"):
        list(Csv(**words)(tmp_path / "a.csv"))


@pytest.mark.parametrize("delimiter", ["", "ab", "\\t", "\n", '"'])
def test_a_delimiter_is_one_character(tmp_path, delimiter):
    (tmp_path / "a.csv").write_text("text\nx")
    with pytest.raises(UserError, match="data.reader.delimiter=.* is not a single character"):
        Csv(delimiter=delimiter).pieces(tmp_path / "a.csv")
