import bz2
import gzip
import lzma
import os
import sys
import tempfile
from pathlib import Path

import pytest

from lmzoo.data import opening
from lmzoo.data.opening import Piece, blocks, files, line_number, lines, opened
from lmzoo.errors import UserError
from test_preparation import unprivileged


def zst(data):
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst}


def piece_of(file):
    return Piece(str(file), 0, None, file.stat().st_size)


def read(file, by=lines):
    piece = piece_of(file)
    with opened(piece) as stream:
        return list(by(stream, piece))


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


def test_paths_that_hold_nothing(tmp_path):
    with pytest.raises(UserError, match=r"data.val_path=.*none\*.txt matches no file"):
        files(f"{tmp_path}/none*.txt", "data.val_path")
    with pytest.raises(UserError, match="data.path is not set"):
        files(None)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"empty.txt is empty"):
        files(tmp_path)


def test_lines_are_read_one_at_a_time(tmp_path):
    file = tmp_path / "two.txt"
    file.write_bytes(b"good\n\xff")
    with pytest.raises(UserError, match="offset 5"), opened(piece_of(file)) as stream:
        reader = lines(stream, piece_of(file))
        assert next(reader) == (0, "good\n")  # before the bad byte is seen
        next(reader)


@pytest.mark.parametrize("suffix", [".txt", *COMPRESS, ".GZ"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(("data", "message"), [
    (b"fine\nalso fine\ncaf\xe9 noir\n", "is not UTF-8: byte 0xe9 at offset 18"),
    ("\ufeffcaf".encode() + b"\xe9 noir\n", "is not UTF-8: byte 0xe9 at offset 6"),
    ("中中".encode()[:5], "is not UTF-8: byte 0xe4 at offset 3"),
    ("中".encode() + b"\xed\xa0\x80", "is not UTF-8: byte 0xed at offset 3"),  # half a surrogate pair
    ("é\nb\0c".encode(), "is not plain text: NUL byte at offset 4"),
    ("ab\n".encode("utf-16-le"), "is not plain text: NUL byte at offset 1"),
])
def test_what_is_no_text_is_named_with_its_offset(tmp_path, monkeypatch, suffix, chunk, data, message):
    monkeypatch.setattr(opening, "CHUNK", chunk)
    (tmp_path / f"a{suffix}").write_bytes(COMPRESS.get(suffix.lower(), bytes)(data))
    for by in (lines, blocks):
        with pytest.raises(UserError, match=message) as caught:
            read(tmp_path / f"a{suffix}", by)
        assert f"a{suffix}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files(tmp_path, suffix):
    data = "first\nzweite Zeile\r\n第三\n".encode() * 1000
    file, compress = tmp_path / f"a.txt{suffix}", COMPRESS[suffix]
    file.write_bytes(compress(data[:10_000]) + compress(data[10_000:]))  # two streams in one file, as by `cat`
    found = read(file)
    assert "".join(text for _, text in found).encode() == data and len(found) == 3000
    assert line_number(piece_of(file), found[2222][0]) == 2223
    whole = compress(data)
    for bad in (whole[:-1], whole[: len(whole) // 2], whole[:20], b"no such archive at all, but text"):
        file.write_bytes(bad)
        with pytest.raises(UserError, match=r"a.txt\.\w+ cannot be read to its end: [^\n]+$"):
            read(file)


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.zst").write_bytes(zst(b"x"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pyarrow is missing .*: pip install 'lmzoo\[data\]'"):
        read(tmp_path / "a.zst")


@pytest.mark.parametrize("change", [lambda file: file.unlink(), lambda file: file.write_bytes(b"short"),
                                    lambda file: file.write_bytes(file.read_bytes() + b"more\n")])
@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_file_that_changes_is_noticed(tmp_path, change, meanwhile):
    file = tmp_path / "a.txt"
    file.write_bytes(b"a line of text\n" * 10)
    piece = piece_of(file)
    if not meanwhile:
        change(file)
    with pytest.raises(UserError, match="a.txt changed while it was read"), opened(piece) as stream:
        reader = lines(stream, piece)
        next(reader)
        if meanwhile:
            change(file)
        list(reader)


def test_a_file_that_loses_what_is_behind_a_piece_may_do_so(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a line of text\n" * 10)
    for n, fine in ((50, True), (49, False)):
        piece = Piece(str(tmp_path / "a.txt"), 20, 50, 30)
        (tmp_path / "a.txt").write_bytes((b"a line of text\n" * 10)[:n])
        try:
            with opened(piece) as stream:
                list(lines(stream, piece))
        except UserError:
            assert not fine
        else:
            assert fine


def test_a_folder_is_read_through_its_links(tmp_path):
    """A link has its own name, its place and its suffix; whatever it leads to is read once; circles end."""
    blobs, corpus = tmp_path / "blobs", tmp_path / "corpus"
    (blobs / "deep").mkdir(parents=True)
    (corpus / "sub").mkdir(parents=True)
    for name in ("9f", "3a", "deep/c.txt"):
        (blobs / name).write_text(name)
    (corpus / "a.jsonl").symlink_to(blobs / "9f")
    (corpus / "b.txt.gz").symlink_to(blobs / "3a")
    (corpus / "linked").symlink_to(blobs / "deep")
    (corpus / "twice").symlink_to(blobs / "deep")
    (corpus / "sub" / "circle").symlink_to(corpus)
    (corpus / "sub" / "again.txt").symlink_to(blobs / "9f")
    expected = ["a.jsonl", "b.txt.gz", "linked/c.txt"]
    assert [str(file.relative_to(corpus)) for file in files(corpus)] == expected
    assert [str(file.relative_to(corpus)) for file in files(f"{corpus}/*.*")] == expected[:2]
    (tmp_path / "here").symlink_to(corpus)
    assert [file.name for file in files([tmp_path / "here", corpus / "a.jsonl"])] == ["a.jsonl", "b.txt.gz", "c.txt"]


@pytest.mark.parametrize("path", ["", "/*.txt", "/gone.txt"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"gone.txt is a link that leads nowhere: mend it or leave it out$"):
        files(f"{tmp_path}{path}")


@pytest.mark.parametrize("mode", [0, 0o444, 0o111])  # neither; listed, but not entered; entered, but not listed
@pytest.mark.parametrize("path", ["", "*/*.txt", "**/*.txt", "c*/*/x.txt", "*/in/*.txt", "closed/*.txt", "closed/i*"])
def test_a_folder_that_may_not_be_read_is_named(path, mode):
    with tempfile.TemporaryDirectory() as here:  # where others may look, unlike pytest's own folders
        Path(here).chmod(0o755)
        for folder in ("open", "closed"):
            (Path(here) / folder / "in").mkdir(parents=True)
            (Path(here) / folder / "in" / "x.txt").write_text("text")
            (Path(here) / folder / "y.txt").write_text("text")
        (Path(here) / "closed").chmod(mode)
        with unprivileged():
            with pytest.raises(UserError, match=r"^data.path: \S*/closed\S* cannot be read: Permission denied"):
                files(f"{here}/{path}")
            assert len(files([f"{here}/open/*.txt", f"{here}/o*/in/*"])) == 2  # it is not on the way


def test_a_file_that_vanishes_while_it_is_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    look = opening._is_file
    monkeypatch.setattr(opening, "_is_file", lambda path: look(path) and not os.remove(path))
    with pytest.raises(UserError, match=r"a.txt cannot be read: No such file or directory$"):
        files(tmp_path)


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_a_later_stream_whose_head_is_damaged_is_no_end(tmp_path, suffix, spoiled):
    file, streams = tmp_path / f"a.txt{suffix}", [COMPRESS[suffix](text) for text in (b"first\n", b"second\n")]
    second = bytearray(streams[1])
    second[spoiled] ^= 0x80
    file.write_bytes(streams[0] + bytes(second))
    with pytest.raises(UserError, match=r"a.txt\.\w+ cannot be read to its end"):
        read(file)


@pytest.mark.parametrize("suffix", [".bz2", ".xz"])
def test_zeros_between_and_behind_streams_are_padding(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(opening, "CHUNK", 3)
    (tmp_path / f"a{suffix}").write_bytes((COMPRESS[suffix](b"text\n") + bytes(8)) * 2)
    assert "".join(text for _, text in read(tmp_path / f"a{suffix}")) == "text\n" * 2
