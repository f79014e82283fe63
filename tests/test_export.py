"""A run becomes a folder that transformers opens, and comes back."""

import os
import sys

import pytest
import torch
from lmzoo.tools.export import export

import lmzoo
import models


def test_export_and_back(gpt_run, tmp_path):
    export(str(gpt_run), str(tmp_path / "hf"))
    ours, back = lmzoo.load(gpt_run), lmzoo.load(tmp_path / "hf")
    ids = torch.tensor([ours.tokenizer.encode("the cat sat on a mat")])
    assert torch.allclose(ours(ids), back(ids), atol=1e-5)
    assert back.tokenizer.encode("the dog ran") == ours.tokenizer.encode("the dog ran")


@pytest.mark.parametrize(("place", "reason"), [
    ("full", "full is not empty: give a new folder"), ("file", "file is a file; give a new folder"),
    ("file/x", "file is a file; give a new folder"), ("file/x/y", "file is a file; give a new folder"),
])  # fmt: skip
def test_where_no_folder_can_be_made(tmp_path, place, reason):
    """Said before the run is looked for; by `to_hf` too."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").write_text("mine")
    for write in (lambda folder: export("/nowhere", folder), lambda folder: lmzoo.hf.to_hf(models.make("gpt"), folder)):
        with pytest.raises(lmzoo.UserError) as refusal:
            write(str(tmp_path / place))
        assert str(refusal.value).endswith(reason)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root
    with pytest.raises(lmzoo.UserError, match="nothing can be written to"):
        lmzoo.hf.to_hf(models.make("gpt"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_without_transformers_that_is_all_that_is_said(gpt_run, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (lambda: lmzoo.hf.to_hf(models.make("gpt"), tmp_path / "new"), lambda: lmzoo.hf.from_hf(tmp_path),
                 lambda: lmzoo.hf.read_config(tmp_path), lambda: export(str(gpt_run), tmp_path / "new")):
        with pytest.raises(lmzoo.UserError) as refusal:
            call()
        assert str(refusal.value) == "Hugging Face's formats need transformers: pip install 'lmzoo[hf]'"
    assert not (tmp_path / "new").exists()
