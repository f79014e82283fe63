import numpy as np
import pytest

from lmzoo.data.packing import Rows
from lmzoo.data.shards import Store, Writer
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte

TOKENIZER = byte((), 512, sentinels=0)
LENGTHS = (3, 2, 5, 1)  # with bos and eos: 5, 4, 7, 3 = 19 tokens


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    writer = Writer(tmp_path_factory.mktemp("store"), TOKENIZER, words=True)
    encoded = [(list(range(100 + 10 * i, 100 + 10 * i + n)), [True] + [False] * (n - 1)) for i, n in enumerate(LENGTHS)]
    writer.add("train", encoded, ["?"] * 4, ["d", None, "c", "d"])
    writer.finish(None, None)
    return Store(writer.folder)["train"]


STREAM = [1, 100, 101, 102, 2, 1, 110, 111, 2, 1, 120, 121, 122, 123, 124, 2, 1, 130, 2]
DOCUMENT = [0] * 5 + [1] * 4 + [2] * 7 + [3] * 3


@pytest.mark.parametrize(("length", "stride"), [(5, 4), (4, 4), (6, 6), (19, 18), (19, 19), (20, 19), (30, 29), (2, 1)])
def test_stream_rows_cover_everything(split, length, stride):
    """Stride < length (clm): each token but the first is a target once; stride = length: each token is read once."""
    rows = Rows(split, "stream", length, stride)
    got = [rows[i]["tokens"].tolist() for i in range(len(rows))]
    assert all(len(row) == length for row in got[:-1]) and len(got[-1]) > length - stride
    shared = length - stride
    assert got[0] + sum((row[shared:] for row in got[1:]), []) == STREAM
    assert all(a[len(a) - shared:] == b[:shared] for a, b in zip(got, got[1:], strict=False))


def test_document_ids_count_from_the_first_document_of_the_row(split):
    for length, stride in ((5, 4), (6, 6), (19, 19)):
        rows = Rows(split, "isolate", length, stride)
        for i in range(len(rows)):
            ids = np.array(DOCUMENT[i * stride:i * stride + length])
            assert rows[i]["document_ids"].tolist() == (ids - ids[0]).tolist()
            assert rows[i]["document_ids"].dtype == np.int32 and rows[i]["tokens"].dtype == np.int64
            assert "label" not in rows[i]


def test_word_starts_follow_the_tokens(split):
    rows = Rows(split, "stream", 6, 6)
    assert rows[0]["word_starts"].tolist() == [True, True, False, False, True, True]


def test_single_rows_are_documents(split):
    rows = Rows(split, "single", 4, 4)
    assert [rows[i]["tokens"].tolist() for i in range(4)] == [
        [1, 100, 101, 102], [1, 110, 111, 2], [1, 120, 121, 122], [1, 130, 2]]
    assert rows.n_cut == 1 + 3 and Rows(split, "stream", 4, 4).n_cut == 0
    assert [rows[i].get("label") for i in range(4)] == [1, None, 0, 1]


def test_whole_documents_keep_their_end(split):
    rows = Rows(split, "single", 4, None)
    assert [rows[i]["tokens"].tolist() for i in range(4)] == [
        [1, 100, 101, 2], [1, 110, 111, 2], [1, 120, 121, 2], [1, 130, 2]]
    assert rows[2]["word_starts"].tolist() == [True, True, False, True]


def test_wrong_packings_are_refused(split):
    with pytest.raises(UserError, match="data.packing='fit' is not one of stream, isolate, single"):
        Rows(split, "fit", 4, 4)
    with pytest.raises(UserError, match="set data.packing=single"):
        Rows(split, "stream", 4, None)
