import errno
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lmzoo.data import fitting
from lmzoo.data.fitting import Fitted, best_fit, cut
from lmzoo.data.labelled import Document
from lmzoo.data.packing import Rows
from lmzoo.errors import UserError
from small_store import TOKENIZER, Writer, write_store

LENGTHS = (3, 2, 5, 1)  # with bos and eos: 5, 4, 7, 3 = 19 tokens


@pytest.fixture(scope="module", params=[1, 3])
def split(request, tmp_path_factory):
    documents = [list(range(100 + 10 * i, 100 + 10 * i + n)) for i, n in enumerate(LENGTHS)]
    return write_store(tmp_path_factory.mktemp("store"), {"train": documents}, words=True, n_shards=request.param,
                       labels=["d", None, "c", "d"])["train"]


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
    with pytest.raises(UserError, match="data.packing='best' is not one of stream, isolate, fit, single"):
        Rows(split, "best", 4, 4)
    with pytest.raises(UserError, match="set data.packing=single"):
        Rows(split, "stream", 4, None)


def test_losses_by_hand(split):
    """19 tokens of 4 documents; a reader of T + 1 tokens at stride T loses no input but the last token's."""
    def losses(packing, length, stride):
        rows = Rows(split, packing, length, stride)
        return len(rows), rows.n_inputs, rows.n_cut, rows.n_padding

    assert losses("stream", 4, 4) == losses("isolate", 4, 4) == (5, 19, 0, 1)
    assert losses("stream", 5, 4) == (5, 18, 0, 2)
    assert losses("single", 5, 5) == (4, 5 + 4 + 5 + 3, 2, 1 + 2)
    assert losses("single", 5, 4) == (4, 4 + 3 + 4 + 2, 2, 1 + 2)
    assert losses("single", 5, None) == (4, 17, 2, 3)
    assert losses("fit", 8, 8) == (3, 19, 0, 5)  # 7; 5 + 3; 4
    assert losses("fit", 7, 6) == (3, 4 + 3 + 6 + 2, 0, 3)  # 6; 4 + 2; 3


def test_whole_documents_in_rows_by_hand(split):
    """Rows of 8: documents 0 and 3 share one (5 + 3), 1 and 2 are alone; rows in the order of their first document."""
    rows = Rows(split, "fit", 8, 8)
    assert [rows[i]["tokens"].tolist() for i in range(len(rows))] == [
        STREAM[:5] + STREAM[16:], STREAM[5:9], STREAM[9:16]]
    assert [rows[i]["document_ids"].tolist() for i in range(3)] == [[0] * 5 + [1] * 3, [0] * 4, [0] * 7]
    assert rows[0]["word_starts"].tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    assert "label" not in rows[0]


def test_a_long_document_is_cut_into_full_rows_and_a_rest(split):
    """Rows of 3: [b 0 0][0 e] [b 1 1][e] ...; read ahead by one, the rest begins with what the row before predicted."""
    rows = Rows(split, "fit", 3, 3)
    found = Counter(tuple(rows[i]["tokens"].tolist()) for i in range(len(rows)))
    assert found == Counter({(1, 100, 101): 1, (102, 2, 2): 1, (1, 110, 111): 1, (1, 120, 121): 1, (122, 123, 124): 1,
                             (2,): 1, (1, 130, 2): 1})
    ahead = Rows(split, "fit", 5, 4)
    spans = [ahead[i]["tokens"][ahead[i]["document_ids"] == d].tolist()
             for i in range(len(ahead)) for d in set(ahead[i]["document_ids"])]
    assert sorted(spans) == [
        [1, 100, 101, 102, 2], [1, 110, 111, 2], [1, 120, 121, 122, 123], [1, 130, 2], [123, 124, 2]]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("stride", [1, 2, 3, 7, 16, 1000])
def test_every_input_and_target_is_in_a_row_once(tmp_path, monkeypatch, stride, ahead):
    """Documents of 2 to 60 tokens over several shards and blocks, each token unlike all others."""
    monkeypatch.setattr(fitting, "BLOCK", 17)
    draw = np.random.default_rng(stride)
    lengths = draw.integers(0, 59, 50)
    ends = lengths.cumsum()
    documents = [list(range(3 + end - n, 3 + end)) for n, end in zip(lengths.tolist(), ends.tolist(), strict=True)]
    split = write_store(tmp_path, {"train": documents}, n_shards=3)["train"]
    rows = Rows(split, "fit", stride + ahead, stride)
    inputs, targets = Counter(), Counter()
    for i in range(len(rows)):
        tokens, ids = rows[i]["tokens"], rows[i]["document_ids"]
        goes_on = ids[1:] == ids[:-1]
        own = tokens[:-1][goes_on] if ahead else tokens
        assert 0 < len(own) <= stride
        inputs.update(own.tolist())
        targets.update(tokens[1:][goes_on].tolist())
    texts = Counter(sum(documents, []))
    if ahead:  # all but eos is an input, all but bos a target
        assert inputs == texts + Counter({1: 50}) and targets == texts + Counter({2: 50})
    else:
        assert inputs == texts + Counter({1: 50, 2: 50})
    assert rows.n_inputs == inputs.total() and rows.n_padding == len(rows) * stride - inputs.total()


def test_rooms_are_those_of_best_fit_decreasing_item_by_item():
    """Rows and what is left in each, against the algorithm as it is told: the fullest row with room, else a new one."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        capacity = int(draw.integers(1, 40))
        sizes = draw.integers(1, capacity + 1, draw.integers(0, 80))
        rooms = []
        for size in sorted(sizes.tolist(), reverse=True):
            fitting_rooms = [room for room in rooms if room >= size]
            room = min(fitting_rooms, default=capacity)
            if fitting_rooms:
                rooms.remove(room)
            rooms.append(room - size)
        rows = best_fit(sizes, capacity)
        assert sorted((capacity - np.bincount(rows, sizes)).tolist() if len(sizes) else []) == sorted(rooms)
        assert np.array_equal(np.unique(rows, return_index=True)[1], np.sort(np.unique(rows, return_index=True)[1]))


def test_work_grows_with_lengths_and_not_with_documents(monkeypatch):
    """100,000 documents of 100 lengths: at most three groups a length are made, each filled log2(capacity) times."""
    calls, insort = [], fitting.insort
    monkeypatch.setattr(fitting, "insort", lambda rooms, room: (calls.append(room), insort(rooms, room)))
    sizes = np.random.default_rng(0).integers(1, 101, 100_000)
    rows = best_fit(sizes, 128)
    assert len(calls) < 3 * 100 * 7 and np.bincount(rows, sizes).max() == 128
    assert sizes.sum() / (128 * (rows.max() + 1)) > 0.999


def test_cutting_by_hand():
    assert cut(np.array([5, 0, 1, 9]), 4, 4).tolist() == [[0, 4], [4, 5], [5, 6], [6, 10], [10, 14], [14, 15]]
    assert cut(np.array([5, 0, 1, 9]), 5, 4).tolist() == [[0, 5], [6, 11], [10, 15]]
    assert cut(np.array([6]), 5, 4).tolist() == [[0, 5], [4, 6]]


def test_the_plan_is_made_once_and_kept_beside_the_shards(tmp_path, monkeypatch):
    store = write_store(tmp_path, {"train": [[5] * n for n in (3, 9, 4)]})
    first = Rows(store["train"], "fit", 9, 8)
    assert [file.name for file in tmp_path.glob("*plan*")] == ["train-fit-9-8.plan"]
    monkeypatch.setattr(fitting, "write_plan", None)  # not called again
    again = pickle.loads(pickle.dumps(Rows(store["train"], "fit", 9, 8)))
    assert [again[i]["tokens"].tolist() for i in range(len(again))] == [
        first[i]["tokens"].tolist() for i in range(len(first))]


@pytest.mark.parametrize("size", [0, 5, 8, 24, -8])
def test_a_torn_plan_is_made_again(tmp_path, size):
    split = write_store(tmp_path, {"train": [[5] * n for n in (3, 9, 4)]})["train"]
    file = tmp_path / "train-fit-9-8.plan"
    expected = [Fitted(split, 9, 8)[i] for i in range(len(Fitted(split, 9, 8)))]
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    again = Fitted(split, 9, 8)
    assert [again[i] for i in range(len(again))] == expected and file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_to_is_enough(tmp_path, monkeypatch):
    split = write_store(tmp_path, {"train": [[5] * n for n in (3, 9, 4)]})["train"]

    def read_only(file, mode="r", *rest):
        if "w" in mode:
            raise OSError(errno.EROFS, "Read-only file system")
        return open(file, mode, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", read_only)
        rows = Fitted(split, 9, 8)
    assert not list(tmp_path.glob("*plan*"))
    assert [rows[i] for i in range(len(rows))] == [Fitted(split, 9, 8)[i] for i in range(len(rows))]


def labelled_rows(folder, kind, documents, length):
    writer = Writer(folder, TOKENIZER, kind=kind)
    for document, encoded in documents:
        writer.add_documents("train", encoded, [document])
    return Rows(writer.finish()["train"], "single", length, None)


@pytest.mark.parametrize("length", range(3, 16))
def test_the_longer_of_two_texts_is_cut_first(tmp_path, length):
    """Against taking one token after the other from the longer one, of equal ones from the second."""
    rng = np.random.default_rng(length)
    pairs = [(0, 0), (0, 9), (9, 0), (4, 4), (5, 4), (4, 5), *rng.integers(0, 12, (40, 2)).tolist()]
    given = [(Document("?", second="?"), [([100 + i for i in range(a)], None), ([200 + i for i in range(b)], None)])
             for a, b in pairs]
    rows, n_cut = labelled_rows(tmp_path, "class", given, length), 0
    for number, (a, b) in enumerate(pairs):
        while a + b + 3 > length:
            a, b, n_cut = (a - 1, b, n_cut + 1) if a > b else (a, b - 1, n_cut + 1)
        row = rows[number]
        assert row["tokens"].tolist() == [1, *range(100, 100 + a), 2, *range(200, 200 + b), 2]
        assert row["second"] == a + 2 and len(row["document_ids"]) == len(row["tokens"])
    assert rows.n_cut == n_cut


def test_rows_with_labels(tmp_path):
    one = labelled_rows(tmp_path / "a", "classes", [(Document("?", ("x", "y")), [([100], None)])], 8)[0]
    assert one["label"] == [0, 1] and "second" not in one and "tags" not in one
    number = labelled_rows(tmp_path / "b", "number", [(Document("?", 2.5), [([100], None)])], 8)[0]
    assert number["label"] == 2.5
    tagged = Document("a b c", ("X", "Y", "X"), words=("a", "b", "c"))
    rows = labelled_rows(tmp_path / "c", "tags", [(tagged, [([100, 101, 102, 103], [0, -1, 1, 2])])] * 2, 5)
    for number in range(2):
        assert rows[number]["tokens"].tolist() == [1, 100, 101, 102, 2] and "label" not in rows[number]
        assert rows[number]["tags"].tolist() == [-100, 0, -100, 1, -100] and rows[number]["tags"].dtype == np.int64
    with pytest.raises(UserError, match="data.row_length=2 is too short for a document with a label"):
        labelled_rows(tmp_path / "d", "class", [(Document("?", "x"), [([100], None)])], 2)
