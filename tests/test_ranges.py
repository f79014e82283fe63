"""Values that no run can mean are refused while a run is composed, by name and with what would do."""

import pytest

import lmzoo
from lmzoo.ranges import check_ranges


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trainer.max_steps=0", "trainer.max_steps=0 must be between 1 and"),
        ("trainer.max_tokens=-1", r"trainer.max_tokens=-1.0 must be above 0"),
        ("trainer.max_epochs=nan", "trainer.max_epochs=nan is not a finite number"),
        ("trainer.log_every_n_steps=0", "trainer.log_every_n_steps=0 must be between 1 and"),
        ("data.row_length=-1", "data.row_length=-1 must be between 1 and"),
        ("data.batch_size=1000000000000", "data.batch_size=1000000000000 must be between"),
        ("data.num_workers=-1", "data.num_workers=-1 must be between 0 and"),
        ("data.packing=tight", "data.packing=tight is not one of stream, isolate, single"),
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
        ("seed=-1", "seed=-1 must be between 0 and"),
        ("model=null", "model=null: there is no such option"),
        ("schedule=", "schedule=: there is no such option"),
        ("recipe=foo", "recipe=foo: this follows from model=, task= and size="),
        ("published=gpt-xl", "published=gpt-xl: this follows from"),
    ],
)
def test_a_value_out_of_range_is_refused(word, message):
    with pytest.raises(lmzoo.UserError, match=message.replace("(", r"\(")):
        lmzoo.compose("model=gpt", "task=clm", word)


def test_what_is_in_range_passes():
    check_ranges({"trainer": {"max_steps": 1, "max_tokens": None}, "model": {"dropout": 0.0}, "seed": 2**32 - 1})
