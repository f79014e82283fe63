"""`data.micro_batch_size=auto`: the rows of a forward are halved until memory holds them, and nothing else changes.

Run as a script this file is one of two ranks, which have not the same memory.
"""

import shutil

import pytest
import torch

import lmzoo
import ranks
from conftest import SMALL
from lmzoo import UserError, checkpoint
from lmzoo.literal import save
from lmzoo.models import Decoder
from lmzoo.parts import quiet
from lmzoo.ranks import RANK_CONFIG
from marks import slow_but

FULL = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."


def limit(patch, rows, error=RuntimeError, message=FULL):
    """Let decoders fail above so many rows; the numbers of rows that are tried go into the list that comes back."""
    tried, forward = [], Decoder.forward

    def limited(net, input_ids, *args, **more):
        if input_ids.is_meta:  # a pass without memory, ahead of all
            return forward(net, input_ids, *args, **more)
        tried.append(len(input_ids))
        if len(input_ids) > rows:
            raise error(message)
        return forward(net, input_ids, *args, **more)

    patch.setattr(Decoder, "forward", limited)
    return tried


MORE = ("model=gpt", "task=clm", "data.batch_size=12", "trainer.max_steps=3")


def weights(folder):
    return checkpoint.read(checkpoint.find(folder))["state_dict"]


@pytest.mark.parametrize(("error", "message"), slow_but(
    [(MemoryError, "")], [(RuntimeError, FULL), (MemoryError, ""), (torch.OutOfMemoryError, "CUDA out of memory.")]
))  # fmt: skip
def test_halved_until_it_fits(words, tmp_path, monkeypatch, capsys, error, message):
    """12, 6, then 3 rows: the run, bit for bit, of `micro_batch_size=3`, dropout included."""
    lmzoo.fit(lmzoo.compose(*words(tmp_path / "given", *MORE, "data.micro_batch_size=3")))
    tried = limit(monkeypatch, 4, error, message)
    lmzoo.fit(lmzoo.compose(*words(tmp_path / "auto", *MORE, "data.micro_batch_size=auto")))
    assert tried[:3] == [12, 6, 3] and set(tried[3:]) <= {1, 2, 3}
    assert "data.micro_batch_size=auto: 3 rows a forward\n" in capsys.readouterr().out
    given, found = weights(tmp_path / "given"), weights(tmp_path / "auto")
    assert all(torch.equal(value, found[name]) for name, value in given.items())


def test_a_resumed_run_keeps_its_own(words, tmp_path, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        limit(patch, 4)
        lmzoo.fit(lmzoo.compose(*words(tmp_path / "run", *MORE, "data.micro_batch_size=auto")))
        shutil.copytree(tmp_path / "run", tmp_path / "moved")
        lmzoo.fit(lmzoo.compose(f"ckpt={tmp_path / 'run'}", "trainer.max_steps=5"))
    tried = limit(monkeypatch, 12)
    lmzoo.fit(lmzoo.compose(f"ckpt={tmp_path / 'moved'}", "trainer.max_steps=5"))
    assert max(tried) == 3
    one, other = weights(tmp_path / "run"), weights(tmp_path / "moved")
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_is_no_matter_of_memory_is_told(words, tmp_path, monkeypatch):
    limit(monkeypatch, 0, message="the matrices do not fit")
    with pytest.raises(RuntimeError, match="the matrices do not fit"):
        lmzoo.fit(lmzoo.compose(*words(tmp_path / "run", *MORE, "data.micro_batch_size=auto")))


def test_not_even_one_row(words, tmp_path, monkeypatch):
    tried = limit(monkeypatch, 0)
    with pytest.raises(UserError, match="data.micro_batch_size=auto: not one row fits"):
        lmzoo.fit(lmzoo.compose(*words(tmp_path / "run", *MORE, "data.micro_batch_size=auto")))
    assert tried == [12, 6, 3, 1]


def of_rank(folder, corpus, rank):
    """The rows of the forwards of a rank that has memory for 4 of them, or for 2."""
    with pytest.MonkeyPatch.context() as patch:
        tried = limit(patch, (4, 2)[rank])
        given = {word.partition("=")[0]: word for word in (
            *SMALL, *MORE, f"data.path={corpus}", f"run_dir={folder / 'run'}", "data.micro_batch_size=auto",
            "trainer=ddp", "trainer.accelerator=cpu", "trainer.limit_val_batches=1")}  # fmt: skip
        config = lmzoo.compose(*given.values())
        config.callbacks.pop("progress")
        save(config, folder / f"{rank}.yaml")
        patch.setenv(RANK_CONFIG, str(folder / f"{rank}.yaml"))  # else its LOCAL_RANK counts for nothing
        quiet()
        lmzoo.fit(config)
    return tried


@pytest.mark.slow
def test_ranks_agree_on_the_least(tmp_path, corpus, monkeypatch):
    """6 rows of 12 each; 3 fit one rank alone, so both try 1."""
    monkeypatch.setenv("SMALL_CORPUS", str(corpus))
    for tried in ranks.run(__file__, tmp_path):
        assert tried[:3] == [6, 3, 1] and set(tried[3:]) == {1}


if __name__ == "__main__":
    import os

    ranks.save(of_rank(ranks.folder(), os.environ["SMALL_CORPUS"], ranks.rank()))
