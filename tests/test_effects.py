"""What is typed and would change nothing is refused, with the word that decides; alone, each of the two is a wish."""

import pytest

import lmzoo

GPT = ("model=gpt", "task=clm", "data=text", "data.path=corpus.txt")
CLASSES = ("model=bert", "task=classification", "data=csv", "data.path=c.csv")
MIXTURE = ("model=gpt", "task=clm", "data=mixture",
           *[f"data.sources.{name}.{word}" for name in "ab" for word in ("weight=1", f"path={name}.txt")])
NONE = "data.val_fraction=0"
IDLE = [  # (the run, the word that decides, what is typed for nothing, the reason)
    (GPT, "trainer=ddp", "checkpoint.sharded=true", "only ranks with shares of the weights write folders"),
    (GPT, "data.val_path=v.txt", "data.val_fraction=0.1", "nothing is held out where val_path names the text"),
    (GPT, "data.val_path.x=v.txt", "data.val_fraction=0.1", "nothing is held out where val_path names the text"),
    (MIXTURE, "data.sources.a.val_path=v.txt", "data.sources.a.val_fraction=0.1", "nothing is held out where val_path"),
    (GPT, "tokenizer.path=t.json", "tokenizer=bpe", "the tokenizer is that of tokenizer.path=t.json, as it is"),
    (("model=bert", "task=mlm"), "tokenizer.path=t", "tokenizer.kind.lowercase=false", "the tokenizer is that of"),
    (GPT, "tokenizer.path=t.json", "tokenizer.sample_mb=1", "the tokenizer is that of tokenizer.path=t.json"),
    (GPT, "tokenizer=byte", "tokenizer.sample_mb=1", "tokenizer=byte learns from no text"),
    (GPT, "schedule.warmup_steps=5", "schedule.warmup_fraction=0.1", "schedule.warmup_steps=5 takes its place"),
    ((*GPT, "schedule=wsd"), "schedule.decay_steps=0", "schedule.decay_fraction=0.1", "schedule.decay_steps=0 takes"),
    (CLASSES, "task.labels=classes", "task.z_loss=1e-3", "with task.labels=classes there is no softmax over classes"),
    (GPT, "model/attention=grouped_query", "model.n_kv_heads=4", "n_kv_heads=4 contradicts n_heads=4 / "),
    (GPT, "model/attention=multi_query", "model.n_kv_heads=4", "n_kv_heads=4 contradicts n_heads=4 / "),
    *[(GPT, NONE, word, "there is no validation (data.val_fraction=0 and no data.val_path)") for word in (
        "checkpoint.monitor=val/accuracy", "checkpoint.keep_best=2", "trainer.limit_val_batches=1",
        "trainer.val_before_training=true", "trainer.patience=2")],
    (MIXTURE, NONE, "trainer.patience=2", "there is no validation"),
    (GPT, "logger.wandb.mode=disabled", "logger.wandb.watch=all", "logger.wandb.mode=disabled keeps no histograms"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "decides", "idle", "reason"), IDLE, ids=[f"{d} {i}" for _, d, i, _ in IDLE])
def test_a_word_without_effect_is_refused(run, decides, idle, reason):
    with pytest.raises(lmzoo.UserError) as refusal:
        lmzoo.compose(*run, decides, idle)
    assert str(refusal.value).startswith(f"{idle.partition('=')[0]}: {reason}")
    assert lmzoo.compose(*run, decides)
    assert lmzoo.compose(*run, idle) if idle != "checkpoint.sharded=true" else lmzoo.compose(*run, "trainer=fsdp", idle)


@pytest.mark.parametrize("words", [("model=bert", "task=classification"), ("experiment=copy",)], ids=" ".join)
def test_a_source_with_splits_of_its_own_holds_nothing_out(words):
    with pytest.raises(lmzoo.UserError, match="^data.val_fraction: this source says itself which of its texts are"):
        lmzoo.compose(*words, "data.val_fraction=0.5")
    assert lmzoo.compose(*words, "trainer.patience=2")


@pytest.mark.parametrize("words", [
    (*GPT[:2], "data=jsonl", "data.path=p.jsonl", "data.split_column=split", NONE, "trainer.patience=3"),
    (*MIXTURE, "data.sources.a.val_path=v.txt", "data.val_fraction=0.1"),  # b holds out
    (*MIXTURE, NONE, "data.sources.a.val_path=v.txt", "trainer.patience=2"),
    (*GPT[:2], "data=arrow", "data.path=folder", NONE, "trainer.patience=2"),  # which may hold its own
    (*GPT, NONE, "trainer.val_before_training=false"),
    (*GPT, "model/attention=grouped_query", "model.attention.group=2", "model.n_kv_heads=2"),
    (*GPT, "experiment=bert_base_2018", "model=bert", "task=mlm", "schedule.warmup_steps=null",
     "schedule.warmup_fraction=0.1"),
    ("model=bert", "task=regression", "data.path=c.csv"),
], ids=" ".join)  # fmt: skip
def test_a_word_with_an_effect_stays(words):
    assert lmzoo.compose(*words)


def test_rows_of_one_length_cannot_be_grouped_by_it():
    for run in (GPT, MIXTURE):
        with pytest.raises(lmzoo.UserError, match="^data.group_by_length: only a task that reads a text, a pair or a"):
            lmzoo.compose(*run, "data.group_by_length=false")
    assert not lmzoo.compose(*CLASSES, "data.group_by_length=false").data.group_by_length
