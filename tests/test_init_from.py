"""A run that begins from a checkpoint: its net, its tokenizer, and new text."""

import shutil

import pytest
import torch

import lmzoo
from lmzoo import UserError
from lmzoo.checkpoint.loading import PER_ID
from marks import slow_but


def test_init_from_takes_the_net_and_the_tokenizer(gpt_run, words, tmp_path, corpus):
    """Only dropout, backend and max_len may be changed; with steps of size 0 the net is still the checkpoint's."""
    every = words(tmp_path / "run", "task=clm", f"init_from={gpt_run}", "optim.lr=0", "trainer.max_steps=1")
    given = [word for word in every if not word.startswith(("model.", "tokenizer.", "size="))]
    config = lmzoo.compose(*given, "model.dropout=0.3")
    assert (config.model.d_model, config.model.dropout, config.tokenizer.vocab_size) == (32, 0.3, 400)
    net, _ = lmzoo.fit(config)
    before = lmzoo.load(gpt_run).state_dict()
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    for word in ("model.d_model=64", "model=gpt", "model/position=rotary", "tokenizer.vocab_size=500", "size=base"):
        with pytest.raises(UserError, match="are the checkpoint's"):
            lmzoo.compose(*given, word)


@pytest.mark.parametrize("exported", slow_but([False], [False, True]))
def test_a_checkpoint_goes_on_with_new_text_and_new_tokens(gpt_run, words, tmp_path, capsys, exported):
    """A run of its own: from step 0, in the order of its data; old rows are the checkpoint's, new ones their mean.

    A folder of Hugging Face's is a checkpoint as well.
    """
    if exported:
        pytest.importorskip("transformers")
        lmzoo.hf.to_hf(lmzoo.load(gpt_run), tmp_path / "exported")
        gpt_run = tmp_path / "exported"
    text = tmp_path / "new.txt"
    text.write_text("\n\n".join(f"<user> hello {i} <bot> {'good day ' * (i % 9)}" for i in range(60)), encoding="utf-8")
    every = words(tmp_path / "run", "task=clm", f"init_from={gpt_run}", "optim.lr=0", "trainer.max_steps=1")
    given = [word for word in every if not word.startswith(("model.", "tokenizer.", "size=", "data.path="))]
    net, _ = lmzoo.fit(lmzoo.compose(*given, f"data.path={text}", "tokenizer.add=[<user>,<bot>]"))
    old, before = lmzoo.load(gpt_run), lmzoo.load(gpt_run).state_dict()
    n = len(old.tokenizer)
    assert f"vocabulary {n} -> {n + 2}" in capsys.readouterr().out
    assert net.vocab_size == max(400, n + 2) and net.tokenizer.encode("<bot>") == [n + 1]
    assert net.tokenizer.encode("so <user>") == [*old.tokenizer.encode("so "), n]
    for key, value in net.state_dict().items():
        if key in PER_ID:
            assert torch.equal(value[:n], before[key][:n])
            torch.testing.assert_close(value[n:n + 2], before[key][:n].mean(0).expand(2, -1))
        else:
            assert torch.equal(value, before[key])
    again = lmzoo.load(tmp_path / "run")
    assert again.tokenizer.hash == net.tokenizer.hash
    new = [word for word in given if not word.startswith("run_dir=")]
    assert lmzoo.compose(*new, f"init_from={tmp_path / 'run'}").tokenizer.add == []  # they are in the vocabulary
    resumed = lmzoo.compose(f"ckpt={tmp_path / 'run'}", "trainer.max_steps=2")
    assert lmzoo.fit(resumed)[0].tokenizer.hash == net.tokenizer.hash


def test_which_run_the_last_is_is_said(gpt_run, tmp_path, monkeypatch, caplog):
    shutil.copytree(gpt_run, tmp_path / "runs/tool/run")
    monkeypatch.chdir(tmp_path)
    config = lmzoo.compose("task=classification", "init_from=last")
    assert caplog.messages == ["last is runs/tool/run"] and config.init_from == "runs/tool/run/checkpoints/last.ckpt"


def test_tokens_are_added_to_a_checkpoint_only(words, tmp_path):
    with pytest.raises(UserError, match="tokenizer.add: tokens are added to a checkpoint's vocabulary"):
        lmzoo.compose(*words(tmp_path, "model=gpt", "task=clm", "tokenizer.add=[<a>]"))


def test_a_wrong_pair_by_init_from_is_refused(gpt_run):
    with pytest.raises(UserError, match="task=mlm needs a model of family encoder, but the net of init_from"):
        lmzoo.compose("task=mlm", f"init_from={gpt_run}")


@pytest.mark.parametrize("word", ["tokenizer=byte", "tokenizer.path=other.json", "model.d_model=64", "model=gpt"])
def test_another_net_or_tokenizer_than_the_checkpoints_is_refused(gpt_run, word):
    with pytest.raises(UserError, match=f"^{word.partition('=')[0]}: leave it out: with init_from= the net and its"):
        lmzoo.compose("task=clm", f"init_from={gpt_run}", word)


def test_a_word_of_the_checkpoints_head_is_refused_by_that_of_the_tasks(gpt_run):
    with pytest.raises(UserError, match=r"given; of the task's own head it is task\.head\.dropout$"):
        lmzoo.compose("task=classification", f"init_from={gpt_run}", "model.head.dropout=0")
