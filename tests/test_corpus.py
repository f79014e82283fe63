import pytest

from lmzoo.data.corpus import Document, files, lines, read_csv, read_jsonl, read_text
from lmzoo.errors import UserError


def texts(documents):
    return [document.text for document in documents]


@pytest.fixture
def book(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes("\ufeffFirst line\nsecond line\n\n \n第二段\r\nend\r\n\r\nlast".encode())
    return file


def test_documents_are_files_blocks_or_lines(book):
    assert texts(read_text(book, split="line")) == ["First line", "second line", "第二段", "end", "last"]
    assert texts(read_text(book, split="blank")) == ["First line\nsecond line", "第二段\r\nend", "last"]
    assert texts(read_text(book, split="file")) == ["First line\nsecond line\n\n \n第二段\r\nend\r\n\r\nlast"]


def test_paths(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden", ".git/x", "[odd] it's, ${x} 中.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    names = lambda path: [file.name for file in files(path)]  # noqa: E731
    assert names("a.txt") == ["a.txt"]
    assert names(str(tmp_path)) == ["[odd] it's, ${x} 中.txt", "a.txt", "b.txt", "c.txt"]
    assert names("[ab].txt") == ["a.txt", "b.txt"]
    assert names("**/c.txt") == ["c.txt"]
    assert names("[odd] it's, ${x} 中.txt") == ["[odd] it's, ${x} 中.txt"]  # a file of that name wins over the glob
    assert names(["b.txt", "*.txt"]) == ["b.txt", "[odd] it's, ${x} 中.txt", "a.txt"]  # each once


def test_bad_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"data.val_path=.*none\*.txt matches no file"):
        files(f"{tmp_path}/none*.txt", "data.val_path")
    with pytest.raises(UserError, match="data.path is not set"):
        files(None)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"empty.txt is empty"):
        files(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"fine\nalso fine\ncaf\xe9 noir\n")
    with pytest.raises(UserError, match=r"latin.txt is not UTF-8: byte 0xe9 at offset 18"):
        texts(read_text(tmp_path / "latin.txt"))
    (tmp_path / "cut.txt").write_bytes("中".encode()[:2])
    with pytest.raises(UserError, match=r"cut.txt is not UTF-8: byte 0xe4 at offset 0"):
        texts(read_text(tmp_path / "cut.txt"))
    (tmp_path / "blank.txt").write_text(" \n\n")
    for split in ("file", "blank", "line"):
        with pytest.raises(UserError, match="blank.txt holds nothing but white space"):
            texts(read_text(tmp_path / "blank.txt", split=split))


def test_lines_are_read_one_at_a_time(tmp_path):
    (tmp_path / "two.txt").write_bytes(b"good\n\xff")
    reader = lines(tmp_path / "two.txt")
    assert next(reader) == "good\n"  # before the bad byte is seen
    with pytest.raises(UserError, match="offset 5"):
        next(reader)


def test_jsonl(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one\\n\\u4e2d", "label": 3, "x": {"y": "deep"}}\n\n'
                    '{"text": "", "label": "b", "x": {"y": "z"}}\n')
    assert list(read_jsonl(file)) == [Document("one\n中", "3"), Document("", "b")]
    assert list(read_jsonl(file, field="x.y", label_column="text"))[0] == Document("deep", "one\n中")


@pytest.mark.parametrize(("line", "message"), [
    ('{"body": "x", "id": 1}', "line 2 has no field data.field=text; the fields are body, id"),
    ('{"text": 5}', "line 2: data.field=text is not text but int"),
    ("{broken", "line 2 is not JSON"),
    ("[1]", "line 2 is not a JSON object but a list"),
    ('{"text": "\\ud800"}', "line 2: the text holds half of a surrogate pair"),
])
def test_bad_jsonl_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line)
    with pytest.raises(UserError, match=message):
        list(read_jsonl(tmp_path / "a.jsonl"))


def test_csv(tmp_path):
    (tmp_path / "a.csv").write_text('text,label,id\n"two\nlines, ""quoted""",good,1\n中文,bad,2\n', encoding="utf-8")
    assert list(read_csv(tmp_path / "a.csv")) == [Document('two\nlines, "quoted"', "good"), Document("中文", "bad")]
    assert list(read_csv(tmp_path / "a.csv", text_column="id", label_column="text"))[1] == Document("2", "中文")
    (tmp_path / "b.tsv").write_text("text\tx\na, b\t1\n")
    assert list(read_csv(tmp_path / "b.tsv")) == [Document("a, b", None)]
    (tmp_path / "long.csv").write_text("text\n" + "x" * 200_000)
    assert len(next(read_csv(tmp_path / "long.csv")).text) == 200_000


def test_bad_csv_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("review,stars\nfine,5\n")
    with pytest.raises(UserError, match="no column data.text_column=text; the columns are review, stars"):
        list(read_csv(tmp_path / "a.csv"))
    with pytest.raises(UserError, match="no column data.label_column=star; the columns are review, stars"):
        list(read_csv(tmp_path / "a.csv", text_column="review", label_column="star"))
    (tmp_path / "b.csv").write_text("a,text\nonly\n")
    with pytest.raises(UserError, match="line 2: the row has fewer than 2 columns"):
        list(read_csv(tmp_path / "b.csv"))
