"""A checkpoint of shares becomes one file, which is what the run goes on from."""

import pytest
import torch
from lmzoo.tools.merge_checkpoint import merge

from lmzoo import UserError, checkpoint


def test_shares_become_a_file_that_is_the_runs_newest(tmp_path):
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    weight = torch.randn(4, 3)
    state = {"state_dict": {"net.a": weight}, "optimizer_states": [], "global_step": 7, "lmzoo": {}}
    checkpoint.write_shares(state, folder / "step-000007.ckpt")
    assert "merged-000007.ckpt: give it" in merge(tmp_path / "run")
    found = checkpoint.find(tmp_path / "run")
    assert found == folder / "merged-000007.ckpt"
    assert torch.equal(torch.load(found, weights_only=True)["state_dict"]["net.a"], weight)
    with pytest.raises(UserError, match="merged-000007.ckpt is one file already"):
        merge(tmp_path / "run")
    found.write_text("somebody's")
    with pytest.raises(UserError, match="merged-000007.ckpt is there already"):
        merge(folder / "step-000007.ckpt")
    assert found.read_text() == "somebody's"
