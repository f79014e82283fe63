import random
from types import SimpleNamespace

import lightning
import pytest
import torch
from lmzoo.tasks.classification import Classification

import downstream_run
from lmzoo.data import DataModule
from lmzoo.data.shards import Store
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte
from small_store import Writer

TOKENIZER = byte((), 512, sentinels=0)
N_TOKENS = {"train": 205, "val": 37}


class Shift:
    """The simplest collator: rows of T + 1 tokens, T apart."""

    def window(self, row_length):
        return row_length + 1, row_length

    def __call__(self, examples):
        tokens = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(e["tokens"]) for e in examples], True, -1)
        return {"input_ids": tokens, "labels": tokens[:, 1:], "key": [e["key"] for e in examples]}


class Documents(Shift):
    def window(self, row_length):
        return row_length, None


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    writer = Writer(tmp_path_factory.mktemp("store"), TOKENIZER)
    for split, n in N_TOKENS.items():
        writer.add(split, [(list(range(5, 3 + n)), None)], ["é" * n], [None])
    writer.finish(None, 1.25)
    return Store(writer.folder)


def module(store, rank=0, world=1, collator=None, **changes):
    config = {"packing": "stream", "row_length": 8, "batch_size": 6, "micro_batch_size": 2, "num_workers": 0} | changes
    made = DataModule(store, TOKENIZER, collator or Shift(), config, seed=3)
    made.trainer = SimpleNamespace(global_rank=rank, world_size=world)
    return made


def test_numbers(store):
    data = module(store)
    assert data.n_rows("train") == 26 and data.n_rows("val") == 5  # ceil((205 - 1) / 8), ceil((37 - 1) / 8)
    assert data.n_tokens("train") == 205 and data.n_bytes("val") == 74
    assert data.n_rows("test") == data.n_tokens("test") == data.n_bytes("test") == 0 and data.test_dataloader() == []
    assert data.steps_per_epoch == 5 and data.tokens_per_step == 48 and data.xz_bits_per_byte == 1.25
    assert data.micro_batch_size == 2 and data.labels is None


def test_numbers_of_whole_documents(tmp_path):
    writer = Writer(tmp_path, TOKENIZER)
    writer.add("train", [([7] * n, None) for n in (2, 4, 30)], ["?"] * 3, ["b", "a", "b"])
    writer.finish(None, None)
    data = module(Store(tmp_path), collator=Documents(), packing="single", batch_size=2)
    assert data.n_rows("train") == 3 and data.steps_per_epoch == 2 and data.labels == ["a", "b"]
    assert data.tokens_per_step == round(2 * (4 + 6 + 8) / 3)


def test_devices_change_the_rows_of_a_forward_only_if_those_were_left_open(store):
    assert [module(store, 0, world, micro_batch_size=None).micro_batch_size for world in (1, 2, 3, 4)] == [6, 3, 2, 1]
    assert [module(store, 0, world).micro_batch_size for world in (1, 2, 3)] == [2, 2, 2]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_reads_each_row_once_in_order(store, world):
    batches = sorted((b for rank in range(world) for b in module(store, rank, world).val_dataloader()),
                     key=lambda batch: batch["micro"])
    batches = [batch for batch in batches if (batch["labels"] != -100).any()]  # without fillers
    assert [key for batch in batches for key in batch["key"]] == [(3, 0, row) for row in range(5)]
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize(("limit", "read"), [(1, 2), (2, 4), (3, 5), (None, 5)])
def test_a_limit_counts_batches_of_all_ranks(store, world, micro, limit, read):
    """Batches of batch_size rows, whatever a forward holds: 2 of 2 rows are the first 4 rows."""
    parts = [module(store, rank, world, batch_size=2, micro_batch_size=micro) for rank in range(world)]
    for part in parts:
        part.limits = {"val": limit}
    batches = [batch for part in parts for batch in part.val_dataloader() if (batch["labels"] != -100).any()]
    assert sorted(row for batch in batches for *_, row in batch["key"]) == list(range(read))
    assert {part.n_evaluated("val") for part in parts} == {read} and parts[0].n_evaluated("train") == 26


def test_what_cannot_work_is_refused_at_once(store):
    with pytest.raises(UserError, match="has 205 tokens, not enough for one row of 301"):
        module(store, row_length=300)
    with pytest.raises(UserError, match="data.batch_size=6 is not divisible by data.micro_batch_size=4: .*=3 or 6"):
        module(store, micro_batch_size=4)
    with pytest.raises(UserError, match="was made with tokenizer"):
        DataModule(store, byte((), 512, sentinels=1), Shift(), {}, seed=0)


class Record(lightning.LightningModule):
    """Writes down what Lightning hands it."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.read = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, window, index):
        self.optimizers().step()
        self.read.append([key for micro in window for key in micro["key"]])

    def validation_step(self, batch, index):
        assert batch["key"][0][1] == 0


def fit(store, tmp_path, steps, ckpt=None, data=None):
    recorder = Record()
    words = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(words, False)
    trainer = lightning.Trainer(max_steps=steps, max_epochs=-1, accelerator="cpu", use_distributed_sampler=False,
                                num_sanity_val_steps=0, check_val_every_n_epoch=None, val_check_interval=4, **quiet)
    trainer.fit(recorder, datamodule=data or module(store), ckpt_path=ckpt)
    trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
    return recorder.read


@pytest.mark.parametrize("stop", [3, 5, 7])  # within an epoch, at its end, in the second
def test_lightning_resumes_in_the_order(store, tmp_path, stop):
    whole = fit(store, tmp_path, 12)
    assert [len(step) for step in whole] == [6, 6, 6, 6, 2] * 2 + [6, 6]
    assert fit(store, tmp_path, stop) == whole[:stop]
    assert fit(store, tmp_path, 12, tmp_path / f"{stop}.ckpt") == whole[stop:]
    with pytest.raises(UserError, match="made with batch_size=6, this run has 12"):
        fit(store, tmp_path, 13, tmp_path / f"{stop}.ckpt", module(store, batch_size=12))


def test_lightning_trains_without_validation(tmp_path):
    writer = Writer(tmp_path, TOKENIZER)
    writer.add("train", [([7] * 100, None)], ["?"], [None])
    writer.finish(None, None)
    assert len(fit(None, tmp_path, 5, data=module(Store(tmp_path)))) == 5


def test_texts_of_like_length_share_a_batch_and_each_gets_what_it_gets_alone(tmp_path):
    """In training and in evaluation, which reads the shortest first and each text once; to 1e-5."""
    draw, tested = random.Random(0), downstream_run.task(Classification, "bert")
    texts = ["x" * draw.randint(1, 30) for _ in range(150)]
    writer = Writer(tmp_path, downstream_run.TOKENIZER, kind="class")
    for split in ("train", "val"):
        ids = [(downstream_run.TOKENIZER.encode(text), None) for text in texts]
        writer.add(split, ids, texts, [*"abc"] * 50)
    config = {"packing": "single", "row_length": 64, "batch_size": 8, "micro_batch_size": 4}
    data = DataModule(writer.finish(), downstream_run.TOKENIZER, tested.collator, config, seed=3)
    alone = []
    for row in range(150):
        batch = tested.collator([data.rows["val"][row] | {"key": (0, 0, row)}])
        alone.append(tested.logits(batch)[0])
    for batches in (list(data.val_dataloader()), [micro for window in data.train_dataloader() for micro in window]):
        samples = torch.cat([batch["sample"] for batch in batches])
        assert samples.sort().values.tolist() == list(range(150))
        with torch.no_grad():
            found = torch.cat([tested.logits(batch) for batch in batches])
        torch.testing.assert_close(found, torch.stack(alone)[samples], rtol=0, atol=1e-5)
        n_padded = sum(int((1 - batch["attention_mask"]).sum()) for batch in batches)
        assert n_padded < 0.2 * sum(batch["attention_mask"].numel() for batch in batches)
    lengths = [int(n) for batch in data.val_dataloader() for n in batch["attention_mask"].sum(1)]
    assert lengths == sorted(lengths)
