"""Mixtures: shares that are exact in every block, counts against brute force, an order that only the step sets."""

import csv
import pickle
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lmzoo
from lmzoo import data
from lmzoo.data import DataModule
from lmzoo.data.labelled import Document
from lmzoo.data.mixture import BLOCK, Mixed, Mixture, Texts, apportion, naming
from lmzoo.data.packing import JoinedRows
from lmzoo.errors import UserError
from small_store import TOKENIZER, Writer, write_store

MIXTURES = [((100, 7), (0.7, 0.3)), ((5000, 1, 30), (1, 1, 1)), ((13,), (2.5,)), ((10, 2000, 40, 500), (8, 1, 0.01, 2))]


@pytest.mark.parametrize(("weights", "counts"), [
    ((0.5, 0.5), (512, 512)), ((1, 1, 1), (342, 341, 341)), ((0.7, 0.3), (717, 307)), ((3,), (1024,)),
    ((1, 1023), (1, 1023)), ((2, 1), (683, 341)), ((1e-9, 1e-9), (512, 512)), ((0.1,) * 10, (103,) * 4 + (102,) * 6)])
def test_shares_by_hand(weights, counts):
    """1024 / 3 = 341.33: all remainders are alike, so the first gets the row; of 716.8 and 307.2 the first does."""
    assert apportion(weights, 1024).tolist() == list(counts)


def source_of(rows, sizes):
    return np.searchsorted(np.cumsum(sizes), rows, side="right")


@pytest.mark.parametrize(("sizes", "weights"), MIXTURES)
@pytest.mark.parametrize("batch_size", [24, 1000, 1024, 3000])
def test_each_block_has_each_sources_share(sizes, weights, batch_size):
    order, steps = Mixed(sizes, weights, seed=3), -(-3 * BLOCK // batch_size)
    for first in (0, 10**9 // BLOCK * BLOCK):  # a first step that begins a block, whatever the batch
        read = [order.read(step, batch_size)[0] for step in range(first, first + steps)]
        assert all(len(rows) == batch_size for rows in read)
        sources = source_of(np.concatenate(read), sizes)
        for block in range(3 if first == 0 or batch_size == BLOCK else 0):
            counts = np.bincount(sources[block * BLOCK:(block + 1) * BLOCK], minlength=len(sizes))
            assert counts.tolist() == apportion(weights, BLOCK).tolist()


@pytest.mark.parametrize(("sizes", "weights"), MIXTURES)
def test_rows_seen_are_those_that_were_read(sizes, weights):
    """By brute force at every step over several blocks."""
    order, seen = Mixed(sizes, weights, seed=1), np.zeros(len(sizes), int)
    for step in range(80):
        assert order.seen(step, 48).tolist() == seen.tolist()
        seen += np.bincount(source_of(order.read(step, 48)[0], sizes), minlength=len(sizes))
    assert seen.sum() == 80 * 48


@pytest.mark.parametrize(("sizes", "weights"), MIXTURES)
def test_each_source_has_its_own_epochs(sizes, weights):
    """As they are read, each n rows of a source are a permutation, of the epoch it says, unlike the one before."""
    order = Mixed(sizes, weights, seed=2)
    rows, epochs = (np.concatenate(part) for part in zip(*(order.read(step, 160) for step in range(100)), strict=True))
    sources, starts = source_of(rows, sizes), np.cumsum((0, *sizes))
    for source, n in enumerate(sizes):
        own, which = rows[sources == source] - starts[source], epochs[sources == source]
        assert np.array_equal(which, np.arange(len(own)) // n)
        passes = [own[begin:begin + n].tolist() for begin in range(0, len(own), n)]
        assert all(sorted(one) == list(range(n)) for one in passes[:-1])
        assert len(set(passes[-1])) == len(passes[-1])
        assert n < 10 or all(one != other for one, other in zip(passes, passes[1:], strict=False))


def test_the_order_depends_on_the_seed_and_blocks_differ():
    sizes, weights = (1000, 1000), (1, 1)
    read = {seed: Mixed(sizes, weights, seed).read(0, 2 * BLOCK)[0] for seed in (0, 1)}
    assert (read[0] == read[1]).mean() < 0.01
    sources = source_of(read[0], sizes)
    assert 0.4 < (sources[:BLOCK] == sources[BLOCK:]).mean() < 0.6
    assert 0.4 < np.mean(sources[1:] == sources[:-1]) < 0.6  # not one source after the other


def test_steps_of_any_size_read_the_same_sequence():
    order = Mixed(*MIXTURES[1], seed=5)
    whole = [np.concatenate(part) for part in zip(*(order.read(step, 7) for step in range(300)), strict=True)]
    for batch_size in (1, 64, 1024, 2100):
        parts = [order.read(step, batch_size) for step in range(min(40, 2100 // batch_size))]
        for one, part in zip(whole, zip(*parts, strict=True), strict=True):
            assert np.array_equal(np.concatenate(part), one[:len(parts) * batch_size])


def test_far_steps_cost_no_more(monkeypatch):
    """Numbers that are permuted for ten steps at 10 and at 10^9, a block's own order among them."""
    from lmzoo.data import sampler

    sent, network = [], sampler._feistel
    monkeypatch.setattr(sampler, "_feistel", lambda value, *rest: (sent.append(len(value)), network(value, *rest))[1])
    order, work = Mixed((10**6 + 3, 10**9), (1, 3), seed=0), []
    for first in (10, 10**9):
        sent.clear()
        for step in range(first, first + 10):
            order.read(step, 32)
        order.seen(first, 32)
        work.append(sum(sent))
    assert all(0 < one < 4 * 320 + 2 * BLOCK for one in work)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Sources of 50 documents of 20 tokens and of 9 of 30; only the first has a test split."""
    folder = tmp_path_factory.mktemp("stores")
    stores = {"code": write_store(folder / "code", {"train": [[10] * 18] * 50, "val": [[11] * 18] * 5, "test": [[12]]},
                                  text="ab", n_shards=3),
              "wiki": write_store(folder / "wiki", {"train": [[20] * 28] * 9, "val": [[21] * 28] * 2}, text="abc")}
    return Mixture(stores, {"code": 3, "wiki": 1})


@pytest.mark.parametrize("kind", ["class", "classes", "tags", "number"])
def test_labels_are_numbered_over_all_sources(tmp_path, kind):
    """Here x, y and x, z are those of the sources."""
    stores, tokenizer = {}, TOKENIZER
    for name, other in (("one", "z"), ("two", "y")):
        writer = Writer(tmp_path / name, tokenizer, kind=kind)
        label = {"class": other, "classes": ("x", other), "tags": ("x", other), "number": 2.0}[kind]
        document = Document("a b", label, words=("a", "b"))
        writer.add_documents("train", tokenizer.encode_firsts([("a", "b")]), [document])
        stores[name] = writer.finish()
    own = Mixture(stores, {"one": 1, "two": 1})
    rows = pickle.loads(pickle.dumps(JoinedRows(own.sets("train"), "single", 16, None)))
    assert own.kind == kind
    found = [rows[number]["tags"].tolist() if kind == "tags" else rows[number]["label"] for number in range(2)]
    x, y, z = range(3) if kind != "class" else (None, 0, 1)
    assert own.labels == {"class": ["y", "z"], "number": None}.get(kind, ["x", "y", "z"])
    assert found == {"class": [z, y], "classes": [[x, z], [x, y]], "number": [2.0, 2.0],
                     "tags": [[-100, x, -100, z, -100], [-100, x, -100, y, -100]]}[kind]


def test_a_mixture_is_its_stores_together(mixture):
    assert mixture.splits == ["train", "val", "test"] and mixture.labels is None and mixture.xz_bits_per_byte is None
    train = mixture["train"]
    assert (train.n_tokens, train.n_documents, train.n_bytes) == (50 * 20 + 9 * 30, 59, 50 * 2 + 9 * 3)
    assert mixture["test"].n_tokens == 3
    assert [train.span(document) for document in (0, 1, 49, 50, 58)] == [
        (0, 20), (20, 40), (980, 1000), (1000, 1030), (1240, 1270)]
    assert train.read(980, 1000).tolist() == [1] + [10] * 18 + [2]
    assert train.read(*train.span(50)).tolist() == [1] + [20] * 28 + [2]
    assert np.concatenate(list(train.lengths())).tolist() == [20] * 50 + [30] * 9
    other = Mixture(mixture.stores, {"code": 3, "wiki": 2})
    assert len({mixture.name, other.name, mixture.stores["code"].name}) == 3


@pytest.mark.parametrize("packing", ["stream", "isolate", "fit", "single"])
def test_rows_are_those_of_one_source_after_the_other(mixture, packing):
    rows = JoinedRows(mixture.sets("val"), packing, 17, 16)
    assert len(rows) == sum(map(len, rows.sources.values()))
    expected = [part[i] for part in rows.sources.values() for i in range(len(part))]
    for i, row in enumerate(expected):
        assert rows[i]["tokens"].tolist() == row["tokens"].tolist() and not {11, 21} <= set(row["tokens"].tolist())
    for word in ("n_cut", "n_inputs", "n_padding"):
        assert getattr(rows, word) == sum(getattr(part, word) for part in rows.sources.values())


class Inputs:
    """A collator that shows its rows."""

    def window(self, row_length):
        return row_length, row_length

    def __call__(self, examples):
        tokens = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(e["tokens"]) for e in examples], True, 0)
        return {"input_ids": tokens, "labels": tokens.clone(), "key": [e["key"] for e in examples]}


def module(mixture, rank=0, world=1, **changes):
    config = {"packing": "stream", "row_length": 10, "batch_size": 12, "micro_batch_size": 3}
    made = DataModule(mixture, TOKENIZER, Inputs(), config | changes, seed=3)
    made.trainer = SimpleNamespace(global_rank=rank, world_size=world)
    return made


def keys(windows):
    micros = [micro for window in windows for micro in window if (micro["labels"] != -100).any()]
    return [key for micro in micros for key in micro["key"]]


def test_a_run_reads_the_shares_and_says_so(mixture):
    run = module(mixture)
    loader = run.train_dataloader()
    assert len(loader) == run.steps_per_epoch == 11  # 100 + 27 rows by 12
    read = keys([window for _ in range(20) for window in loader])
    assert len(read) == 20 * 11 * 12  # every step is full
    for steps in (0, 1, 50, 220):
        counts = Counter("code" if row < 100 else "wiki" for _, _, row in read[:12 * steps])
        assert run.seen(steps) == {name: counts[name] for name in ("code", "wiki")}
        assert run.rows_read(steps) == 12 * steps and run.tokens_read(steps) == 120 * steps
    assert abs(Counter(row < 100 for _, _, row in read)[True] / len(read) - 0.75) < 0.01
    assert max(epoch for _, epoch, row in read if row >= 100) == len(read) // 4 // 27
    assert run.tokens_per_step == 120


def test_ranks_and_micro_batches_do_not_change_the_order(mixture):
    expected = keys(module(mixture).train_dataloader())
    for world, size in ((1, 12), (1, 1), (2, 3), (3, 2), (4, 3), (5, 12)):
        ranks = [list(module(mixture, rank, world, micro_batch_size=size).train_dataloader()) for rank in range(world)]
        for step in range(11):
            micros = sorted((micro for rank in ranks for micro in rank[step]), key=lambda micro: micro["micro"])
            assert keys([micros]) == expected[12 * step:12 * step + 12]


def test_a_run_goes_on_within_a_block(mixture):
    """After 30 steps: 360 rows into the first block, in the third epoch of the loader."""
    reference = module(mixture).train_dataloader()
    expected = keys([window for _ in range(9) for window in reference])
    again = module(mixture).train_dataloader()
    again.load_state_dict({"step": 30, "batch_size": 12, "n_rows": 127})
    assert keys([window for _ in range(6) for window in again]) == expected[30 * 12:88 * 12]


def test_validation_reads_all_sources_once(mixture):
    batches = [batch for loader in module(mixture).val_dataloader() for batch in loader]
    assert [key for batch in batches for key in batch["key"]] == [(3, 0, row) for row in range(10 + 6)]
    tokens = sum(int((batch["input_ids"] != 0).sum()) for batch in batches)
    assert tokens == 5 * 20 + 2 * 30 == module(mixture).n_tokens("val")


def test_a_source_without_a_row_is_named(mixture):
    with pytest.raises(UserError, match="the training text of data.sources.wiki has 270 tokens, not enough"):
        module(mixture, row_length=300)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A text of 300 documents and one of 100; every tenth document is held out by the files themselves."""
    folder = tmp_path_factory.mktemp("files")
    for name, n in (("code", 300), ("wiki", 100)):
        for part, documents in (("train", range(n)), ("val", range(n, n + n // 10))):
            text = "\n".join(f"{name} {i:04} {'words ' * 10}".strip() for i in documents)
            (folder / f"{name}-{part}.txt").write_text(text, encoding="utf-8")
    return folder


def node(files, name, weight, **more):
    return {"reader": {"_target_": "lmzoo.data.corpus.Text", "split": "line"}, "path": str(files / f"{name}-train.txt"),
            "val_path": str(files / f"{name}-val.txt"), "val_fraction": 0.0, "weight": weight} | more


def mixed_config(tmp_path, **sources):
    tokenizer = {"kind": {"_target_": "lmzoo.tokenizer.byte", "_partial_": True}, "vocab_size": 512, "sample_mb": 64}
    node = {"sources": sources, "cache_dir": str(tmp_path), "processes": 1}
    return {"data": node, "tokenizer": tokenizer, "task": {}}


def test_each_source_is_prepared_by_itself(files, tmp_path):
    """Sources of the same files share a store, and still are two sources."""
    wiki, code, copy = node(files, "wiki", 1), node(files, "code", 2), node(files, "code", 1)
    config = mixed_config(tmp_path, wiki=wiki, code=code, copy=copy)
    made = data.prepare(config, data.prepare_tokenizer(config))
    assert list(made.stores) == ["code", "copy", "wiki"] and made.weights == {"code": 2, "copy": 1, "wiki": 1}
    assert [store["train"].n_documents for store in made.stores.values()] == [300, 300, 100]
    assert made.stores["code"].folder == made.stores["copy"].folder and made["val"].n_documents == 30 + 30 + 10
    again = mixed_config(tmp_path, code=code, copy=copy, wiki=wiki)
    assert data.prepare(again, data.prepare_tokenizer(again)).name == made.name  # in whichever order they are typed


@pytest.mark.parametrize(("megabytes", "expected"), [(64, (0, 200, 100)), (0.009, (0, 70, 35)), (64, (1, 300, 100))])
def test_a_tokenizer_is_trained_in_the_proportion_of_the_weights(files, megabytes, expected):
    """Documents are of equal size: 100 of wiki go with 200 of code at a third, and with all 300 at a quarter."""
    weights = ({"code": 2, "wiki": 1}, {"code": 3, "wiki": 1})[expected[0]]
    sources = {name: node(files, name, weight) for name, weight in weights.items()}
    for source in sources.values():
        source["val_path"] = None
    texts = list(Texts({"data": {"sources": sources}}).sample(megabytes))
    counts = Counter(text.split()[0] for text in texts)
    for name, n in zip(("code", "wiki"), expected[1:], strict=True):
        assert abs(counts[name] - n) <= 3 * n**0.5


def test_a_mistake_names_its_source(files, tmp_path):
    wiki = node(files, "wiki", 1, path=str(files / "nope.txt"))
    config = mixed_config(tmp_path, code=node(files, "code", 2), wiki=wiki)
    for act in (data.prepare_tokenizer, lambda config: data.prepare(config, TOKENIZER)):
        with pytest.raises(UserError, match=r"^data.sources.wiki.path=.*nope.txt matches no file"):
            act(config)


@pytest.mark.parametrize(("message", "expected"), [
    ("data.path=data.path.txt matches no file", "data.sources.a.path=data.path.txt matches no file"),
    ("/x/my-data.path: no (set data.val_path, or data.val_fraction=0, or data.reader.split)",
     "/x/my-data.path: no (set data.sources.a.val_path, or data.sources.a.val_fraction=0, or "
     "data.sources.a.reader.split)"),
    ("/x/data.txt is no text", "data.sources.a: /x/data.txt is no text"),
    ("cannot write (data.cache_dir names another)", "data.sources.a: cannot write (data.cache_dir names another)")])
def test_a_mistake_is_said_in_the_words_of_its_source(message, expected):
    with pytest.raises(UserError) as caught, naming("a"):
        raise UserError(message)
    assert str(caught.value) == expected


def test_copies_are_left_out_of_each_source_by_itself(tmp_path, caplog):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"both\nboth\nboth\n{name}")
        (tmp_path / f"{name}-val.txt").write_text("of its own")
    reader = {"_target_": "lmzoo.data.corpus.Text", "split": "line"}
    sources = {name: {"reader": reader, "path": str(tmp_path / f"{name}.txt"), "weight": 1, "deduplicate": True,
                      "val_path": str(tmp_path / f"{name}-val.txt"), "val_fraction": 0.0} for name in ("a", "b")}
    made = data.prepare(mixed_config(tmp_path / "cache", **sources), TOKENIZER)
    assert [store["train"].n_documents for store in made.stores.values()] == [2, 2]
    for name in ("a", "b"):
        assert f"data.path={tmp_path}/{name}.txt: left out 2 documents (8 bytes) whose text had come before in it" in \
            caplog.text


def test_a_run_logs_what_it_has_seen_and_goes_on(files, words, tmp_path, capsys):
    """12 steps of 4 rows at once, and in two goes: the same weights; metrics.csv counts each source's rows."""
    given = [f"data.sources.{name}.{word}" for name, weight in (("code", 3), ("wiki", 1))
             for word in (f"weight={weight}", f"path={files / f'{name}-*.txt'}", "reader.split=line")]
    given += ["model=gpt", "task=clm", "data=mixture", "data.packing=fit", "schedule=constant"]

    def run(name, *more):
        typed = [word for word in words(tmp_path / name, *given, *more) if not word.startswith("data.path=")]
        net, _ = lmzoo.fit(lmzoo.compose(*typed))
        return net.state_dict()

    whole = run("whole", "trainer.max_steps=12")
    assert "source code" in (table := capsys.readouterr().out) and "source wiki" in table and "lost" in table
    with (tmp_path / "whole" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    seen = [(int(row["seen/code"]), int(row["seen/wiki"])) for row in rows]
    assert [sum(row) for row in seen] == [4 * int(row["step"]) for row in rows] and seen[-1][1] > 4
    assert all(b >= a for one, two in zip(seen, seen[1:], strict=False) for a, b in zip(one, two, strict=True))
    run("two", "trainer.max_steps=7")
    net, _ = lmzoo.fit(lmzoo.compose(f"ckpt={tmp_path / 'two'}", "trainer.max_steps=12"))
    assert all(torch.equal(value, whole[key]) for key, value in net.state_dict().items())
