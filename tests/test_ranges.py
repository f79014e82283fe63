"""Values that no run can mean are refused while a run is composed, by name and with what would do."""

import re

import pytest

import lmzoo
from lmzoo.ranges import check_ranges


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trainer.max_steps=0", "trainer.max_steps=0 must be between 1 and"),
        ("trainer.max_tokens=-1", "trainer.max_tokens=-1.0 must be above 0"),
        ("trainer.max_epochs=nan", "trainer.max_epochs=nan is not a finite number"),
        ("trainer.log_every_n_steps=0", "trainer.log_every_n_steps=0 must be between 1 and"),
        ("data.row_length=-1", "data.row_length=-1 must be between 1 and"),
        ("data.batch_size=1000000000000", "data.batch_size=1000000000000 must be between"),
        ("data.num_workers=-1", "data.num_workers=-1 must be between 0 and"),
        ("data.packing=tight", "data.packing=tight is not one of stream, "),
        ("model.n_heads=-1", "model.n_heads=-1 must be between 1 and"),
        ("model.n_layers=1000000000000", "model.n_layers=1000000000000 must be between"),
        ("model.dropout=1.5", "model.dropout=1.5 must be between 0 and 1"),
        ("model.attention_dropout=-1", "model.attention_dropout=-1 must be between 0 and 1"),
        ("optim.lr=inf", "optim.lr=inf is not a finite number"),
        ("optim.lr=-1", "optim.lr=-1.0 must be between 0 and 1000"),
        ("optim.weight_decay=-1", "optim.weight_decay=-1.0 must be between 0 and"),
        ("schedule.warmup_fraction=2", "schedule.warmup_fraction=2 must be between 0 and 1"),
        ("task.label_smoothing=-1", "task.label_smoothing=-1 must be between 0 and 1"),
        ("checkpoint.keep_last=-1", "checkpoint.keep_last=-1 must be between 0 and"),
        ("logger.wandb.mode=onlin", "logger.wandb.mode=onlin is not one of offline, online, disabled"),
        ("trainer.devices=0", "trainer.devices=0 must be between 1 and"),
        ("trainer.devices=-3", "trainer.devices=-3 must be between 1 and"),
        ("trainer.devices=1000000000000", "trainer.devices=1000000000000 must be between 1 and"),
        *[(f"trainer.devices={value}", "should be a whole number or a list (each a whole number) or 'auto'")
          for value in ("1e12", "true", "[]", "[0.5]", "abc", "null", "{a: 1}")],
        ("data.micro_batch_size=true", "data.micro_batch_size=True should be a whole number or 'auto' or null"),
        ("data.micro_batch_size=2.5", "data.micro_batch_size=2.5 should be a whole number or 'auto' or null"),
        ("data.micro_batch_size=all", "data.micro_batch_size='all' should be a whole number or 'auto' or null"),
        ("data.micro_batch_size=0", "data.micro_batch_size=0 must be between 1 and"),
        ("tokenizer.vocab_size=90000000", "tokenizer.vocab_size=90000000 must be between 2 and 10000000"),
        ("tokenizer.special=5", "tokenizer.special=5 should be a mapping or null"),
        ("optim.optimizer.betas=[1,2]", "optim.optimizer.betas[1]=2 must be between 0 and 1"),
        ("optim.optimizer.betas=[nan,0.5]", "optim.optimizer.betas[0]=nan is not a finite number"),
        ("callbacks.metrics.every_n_steps=-1", "callbacks.metrics.every_n_steps=-1 must be between 1 and"),
        ("callbacks.guard.stop_after=-1", "callbacks.guard.stop_after=-1 must be between 1 and"),
        *[(f"callbacks.checkpoints.{word}=-1", f"callbacks.checkpoints.{word}=-1 must be ")
          for word in ("every_n_steps", "every_minutes", "keep_last", "keep_best")],
        ("seed=-1", "seed=-1 must be between 0 and"),
        ("tokenizer.vocab_size=null", "tokenizer.vocab_size=None should be a whole number"),
        ("model.vocab_size=3", "model.vocab_size=3 is less than tokenizer.vocab_size=2048: leave it out"),
        ("data.row_length=null", "data.row_length=None should be a whole number"),
        ("tokenizer.special={bos: 1}", "tokenizer.special.bos=1 should be a text"),
        ("tokenizer.special={a: [b]}", "tokenizer.special.a=['b'] should be a text"),
        ("model.embed.n_types=-1", "model.embed.n_types=-1 must be between 0 and"),
        ("model.embed.n_types=1000000000000000", "model.embed.n_types=1000000000000000 must be"),
        ("model.embed.d_embed=-1", "model.embed.d_embed=-1 must be between 1 and"),
        ("model.embed.scale=0", "model.embed.scale=0 must be between 1e-06 and"),
        ("model.attention.scale=1e30", "model.attention.scale=1e+30 must be between 1e-06 and"),
        ("model.norm.eps=-1", "model.norm.eps=-1 must be between 0 and 1"),
        ("model.norm.eps=1e30", "model.norm.eps=1e+30 must be between 0 and 1"),
        ("model.init.std=1e30", "model.init.std=1e+30 must be between 0 and"),
        ("optim.optimizer.eps=1e30", "optim.optimizer.eps=1e+30 must be between 0 and 1"),
        ("trainer.max_epochs=1e30", "trainer.max_epochs=1e+30 must be between 0 and"),
        ("trainer.max_tokens=1e30", "trainer.max_tokens=1e+30 must be between 0 and"),
        ("model=null", "model=null: there is no such option"),
        ("schedule=", "schedule=: there is no such option"),
        ("recipe=foo", "recipe=foo: this follows from model=, task= and size="),
        ("published=gpt-xl", "published=gpt-xl: this follows from"),
    ],
)
def test_a_value_out_of_range_is_refused(word, message):
    with pytest.raises(lmzoo.UserError, match=re.escape(message)):
        lmzoo.compose("model=gpt", "task=clm", word)


def test_what_is_in_range_passes():
    check_ranges({"trainer": {"devices": -1}, "device": "cuda:1"})
    check_ranges({"trainer": {"devices": [0, 2]}, "data": {"micro_batch_size": None, "path": ["a", "b"]}})
    check_ranges({"trainer": {"max_steps": 1, "max_tokens": None}, "model": {"dropout": 0.0}, "seed": 2**32 - 1})


PAIRS = [
    (("trainer.max_time=00:01:00:00", "size=base"), "trainer.max_time=00:01:00:00 ends a run early, but does not say"),
    (("trainer=fsdp", "optim=adafactor", "optim.optimizer._target_=torch.optim.Adafactor"),
     "trainer=fsdp: torch.optim.Adafactor needs whole matrices"),
    (("trainer=fsdp", "trainer.precision=16-mixed"), "trainer=fsdp: its ranks have no loss scale in common"),
    (("trainer=fsdp", "data.micro_batch_size=auto"), "trainer=fsdp: its ranks cannot try data.micro_batch_size=auto"),
]


@pytest.mark.parametrize(("pair", "message"), PAIRS, ids=[" ".join(pair) for pair, _ in PAIRS])
def test_words_that_do_not_go_together(pair, message):
    with pytest.raises(lmzoo.UserError, match=message):
        lmzoo.compose("model=gpt", "task=clm", *pair)
    for word in pair:
        alone = (word, "size=tiny")[: 1 if word.startswith("size") else 2]
        assert lmzoo.compose("model=gpt", "task=clm", *alone)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("optim.layer_decay=0",), "optim.layer_decay=0.0 must be above 0"),
        (("optim.layer_decay=1.1",), "optim.layer_decay=1.1 must be between 0 and 1"),
        (("schedule=wsd", "schedule.decay_fraction=2"), "schedule.decay_fraction=2 must be between 0 and 1"),
        (("schedule=wsd", "schedule.decay_steps=-1"), "schedule.decay_steps=-1 must be between 0 and"),
        (("schedule=wsd", "schedule.decay=cubic"), "schedule.decay='cubic' should be one of 'linear', '1-sqrt'"),
        (("optim=muon", "optim.optimizer.momentum=2"), "optim.optimizer.momentum=2 must be between 0 and 1"),
        (("optim=muon", "optim.optimizer.ns_steps=100"), "optim.optimizer.ns_steps=100 must be between 1 and 99"),
        (("optim=muon", "optim.optimizer.lr_ratio=0"), "optim.optimizer.lr_ratio=0 must be above 0"),
        (("optim=muon", "optim.optimizer.lr_ratio=1e30"), "optim.optimizer.lr_ratio=1e+30 must be between 0 and"),
        (("optim=adafactor", "optim.optimizer.d=1e30"), "optim.optimizer.d=1e+30 must be between 0 and"),
        (("optim=adafactor", "optim.optimizer.d=0"), "optim.optimizer.d=0 must be above 0"),
        (("optim=adafactor", "optim.optimizer.eps=[1e30,1e-3]"), "optim.optimizer.eps[0]=1e+30 must be between"),
        (("optim=adafactor", "optim.optimizer.beta2_decay=1"), "optim.optimizer.beta2_decay=1 must be between"),
        (("optim=muon", "optim.optimizer.hidden=[]"), "optim.optimizer.hidden: MuonAdamW is given this"),
    ],
    ids=str,
)
def test_words_of_optimizers_and_schedules(words, message):
    with pytest.raises(lmzoo.UserError, match=re.escape(message)):
        lmzoo.compose("model=gpt", "task=clm", *words)


GPT, T5 = ("model=gpt", "task=clm"), ("model=t5", "task=span_corruption")
CLASSES = ("model=bert", "task=classification")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *[((*GPT, f"model/position=rotary_{kind}", f"model.position.{word}"), f"model.position.{word} must be between ")
          for kind, word in (("yarn", "slow=0"), ("yarn", "fast=-1"), ("yarn", "trained_len=0"), ("llama3", "low=0"),
                             ("llama3", "high=-1"), ("ntk", "theta=1"), ("linear", "scaling=0"),
                             ("linear", "fraction=2"))],
        ((*GPT, "model/position=rotary", "model.position.theta=1e30"), "model.position.theta=1e+30 must be between"),
        ((*GPT, "model/attention=grouped_query", "model.attention.group=-1"), "model.attention.group=-1 must be"),
        ((*T5, "model.position.n_buckets=0"), "model.position.n_buckets=0 must be between"),
        ((*T5, "model.cross.scale=0"), "model.cross.scale=0 must be between"),
        ((*T5, "task.mean_span=1e30"), "task.mean_span=1e+30 must be between"),
        ((*T5, "task.mean_span=32"), "task.mean_span=32 is no shorter than a row, data.row_length=32"),
        ((*CLASSES, "task.class_weights=[0,0,0]"), "task.class_weights=[0, 0, 0] leave nothing to learn"),
        ((*CLASSES, "task.class_weights=[-1,1]"), "task.class_weights[0]=-1 must be between"),
        (("model=transformer", "task=seq2seq", "task.n_beams=0"), "task.n_beams=0 must be between 1 and"),
        (("model=transformer", "task=seq2seq", "task.max_answer=0"), "task.max_answer=0 must be between 1 and"),
    ],
    ids=str,
)
def test_words_of_parts_and_tasks(words, message):
    with pytest.raises(lmzoo.UserError, match=re.escape(message)):
        lmzoo.compose(*words)
