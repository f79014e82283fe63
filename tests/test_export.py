"""A run becomes a folder that transformers opens, and comes back."""

import pytest
import torch
from lmzoo.tools.export import export

import lmzoo


def test_export_and_back(gpt_run, tmp_path):
    export(str(gpt_run), str(tmp_path / "hf"))
    ours, back = lmzoo.load(gpt_run), lmzoo.load(tmp_path / "hf")
    ids = torch.tensor([ours.tokenizer.encode("the cat sat on a mat")])
    assert torch.allclose(ours(ids), back(ids), atol=1e-5)
    assert back.tokenizer.encode("the dog ran") == ours.tokenizer.encode("the dog ran")


def test_a_folder_that_holds_something_is_refused(gpt_run):
    with pytest.raises(lmzoo.UserError, match="not empty"):
        export(str(gpt_run), str(gpt_run))
