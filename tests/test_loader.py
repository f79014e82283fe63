import numpy as np
import pytest
import torch
from lmzoo.tasks.clm import Shift
from lmzoo.tasks.mlm import Masking
from lmzoo.tasks.span_corruption import Corruption

from lmzoo.data.loader import Collated, Loader, RowLoader
from lmzoo.data.mixture import MixedRows, Mixture
from lmzoo.data.packing import Rows
from lmzoo.data.sampler import Batches, Shuffled, Windows, permute
from lmzoo.data.shards import Store
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte
from small_store import Writer, write_store

TOKENIZER = byte((), 512, sentinels=0)
N_TOKENS, N_ROWS = 205, 26  # ceil((205 - 1) / 8)


def show(examples):
    """A collator whose batches show everything that it was given."""
    tokens = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(e["tokens"]) for e in examples], True, -1)
    return {"input_ids": tokens, "labels": tokens.clone(), "key": [e["key"] for e in examples]}


def plain(window):
    return [(m["micro"], m["key"], m["input_ids"].tolist(), m["labels"].tolist()) for m in window]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    writer = Writer(tmp_path_factory.mktemp("store"), TOKENIZER)
    writer.add("train", [(list(range(5, 3 + N_TOKENS)), None)], ["?"], [None])
    writer.finish(None, None)
    return Collated(Rows(Store(writer.folder)["train"], "stream", length=9, stride=8), show, seed=3)


def loader(dataset, rank=0, world=1, batch_size=6, **settings):
    return Loader(dataset, Windows(Shuffled(N_ROWS, 3), batch_size, 2, rank, world), **settings)


@pytest.mark.parametrize("gpu", [True, False])
def test_batches_are_pinned_for_a_gpu(dataset, monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for made in (loader(dataset), RowLoader(dataset, Batches(np.arange(N_ROWS), 2))):
        assert made.pin_memory == gpu


def test_a_window_is_one_step(dataset):
    windows = list(loader(dataset))
    assert [len(window) for window in windows] == [3, 3, 3, 3, 1]  # 26 rows by 6, by 2
    assert [[micro["micro"] for micro in window] for window in windows][0] == [0, 1, 2]
    keys = [key for window in windows for micro in window for key in micro["key"]]
    assert keys == [(3, 0, row) for row in permute(np.arange(N_ROWS), N_ROWS, (3, 0))]
    row = keys[0][2]
    assert windows[0][0]["input_ids"][0].tolist() == dataset.rows.split.read(row * 8, row * 8 + 9).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_where_its_state_says(dataset, workers):
    reference = loader(dataset)
    expected = [plain(window) for _ in range(3) for window in reference]
    first, got = loader(dataset, num_workers=workers), []
    for window in first:
        got.append(plain(window))
        if len(got) == 3:  # workers have run ahead by now
            break
    assert first.state_dict()["step"] == 3 and all(type(value) is int for value in first.state_dict().values())
    second = loader(dataset, num_workers=workers)
    second.load_state_dict(first.state_dict())
    got += [plain(window) for _ in range(2) for window in second]
    assert len(got) == 10 and got == expected[:10]  # the rest of the epoch, and all of the next


def collators():
    ordinary = np.arange(512) > 3
    return (Shift(0, isolate=True, fit=True), Masking(ordinary, 3, 0, 0.15, 0.8, 0.1, whole_word=True),
            Corruption(range(511, 400, -1), 0, 2, 0, 0.15, 3.0))


def collate_thrice(examples):
    """The batches of all collators in one."""
    batches = [collator(examples) for collator in collators()]
    return {f"{name} {i}": value for i, batch in enumerate(batches) for name, value in batch.items()}


def mixed_rows(folder):
    documents = [list(range(5, 5 + n % 60)) for n in range(3, 300, 7)]
    stores = {name: write_store(folder / name, {"train": documents}, words=True, n_shards=2) for name in "ab"}
    return MixedRows(Mixture(stores, {"a": 1, "b": 2}), "fit", 33, 32)


@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_make_the_batches_that_the_process_itself_makes(tmp_path, context, workers):
    """Of a mixture of two stores of two shards each, documents fitted in rows, by each collator."""
    rows = mixed_rows(tmp_path)
    windows = [Windows(rows.order(3, by_length=False), 8, 4) for _ in range(2)]
    windows[0].step = windows[1].step = 3 * len(windows[0]) - 3
    dataset = Collated(rows, collate_thrice, seed=3)
    own, theirs = Loader(dataset, windows[0]), Loader(dataset, windows[1], workers, multiprocessing_context=context)
    pairs = list(zip(own, theirs, strict=True))
    assert len(pairs) == 3
    for expected, window in pairs:
        for one, other in zip(expected, window, strict=True):
            assert one.keys() == other.keys() and len(one) > 8
            assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)


def test_loading_a_state_of_other_steps_is_refused(dataset):
    with pytest.raises(UserError, match="cannot resume: the checkpoint was made with batch_size=6, this run has 12"):
        loader(dataset, batch_size=12).load_state_dict(loader(dataset).state_dict())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_share_a_step(dataset, world):
    ranks = [list(loader(dataset, rank, world)) for rank in range(world)]
    for step, window in enumerate(loader(dataset)):
        shares = [windows[step] for windows in ranks]
        assert len(set(map(len, shares))) == 1
        micros = sorted((micro for share in shares for micro in share), key=lambda micro: micro["micro"])
        assert plain(micros[:len(window)]) == plain(window)
        assert all((micro["labels"] == -100).all() for micro in micros[len(window):])
        assert not any((micro["labels"] == -100).any() for micro in micros[:len(window)])


def test_loaders_leave_the_global_random_numbers_alone(dataset):
    state = torch.get_rng_state()
    assert len(list(loader(dataset))) == 5 and len(list(RowLoader(dataset, Batches(np.arange(N_ROWS), 4)))) == 7
    assert torch.equal(torch.get_rng_state(), state)
