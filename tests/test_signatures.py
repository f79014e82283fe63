"""Words below `_target_` are held against the signature of the class, without importing lmzoo's own."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lmzoo
from lmzoo import UserError
from lmzoo.signatures import check, check_place, imported_signature, misfit, nearest, source_signature


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (8, "int"), (None, "int | None"), (1, "float"), (1e-3, "float"), (True, "bool"), ("x", "str"),
        ([1, 2], "list[int]"), ("first", "Literal['first', 'last']"), (0.9, "float | Tensor"),
        ([0.9, 0.95], "tuple[float, float]"), ("x", "Tokenizer"), ({"_target_": "a.B"}, "Callable"), (3, None),
        ("a/b", "str | Path"),
    ],
)  # fmt: skip
def test_fitting_values(value, annotation):
    assert misfit(value, annotation) is None


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (8.5, "int", "a whole number"), ("abc", "float", "a number"), (True, "int", "a whole number"),
        (1, "bool", "true or false"), (True, "float", "a number"), (None, "float", "a number"), (3, "str", "a text"),
        ("x", "int | None", "a whole number or null"), ("mean", "Literal['first', 'last']", "one of 'first', 'last'"),
        (3, "list[int]", "a list (each a whole number)"), ("abc", "float | Tensor", "a number"),
        ([1, "a"], "Sequence[str] | None", "a list (each a text) or null"), ({"a": 1}, "list", "a list"),
        ([0.9], "tuple[float, float]", "a list of 2 (each a number)"), (5, "Mapping | None", "a mapping or null"),
        (5, "str | Path", "a text or a path"), ({"a": 1}, "Literal['a'] | None", "'a' or null"),
        ({"a": 1}, "int", "a whole number"),
    ],
)  # fmt: skip
def test_misfits(value, annotation, expected):
    assert misfit(value, annotation) == expected


def test_source_signatures_are_those_of_the_imported_classes():
    """Everything that conf/ names, read from the source and by import, has the same words."""
    import inspect
    import re

    from hydra.utils import get_object

    from lmzoo.checks import CONF

    named = {name for file in CONF.rglob("*.yaml") for name in re.findall(r"_target_: (lmzoo[\w.]+)", file.read_text())}
    assert len(named) > 20
    for target in sorted(named):
        read, found = source_signature(target, "here"), get_object(target)
        parameters = inspect.signature(found).parameters.values()
        plain = {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        assert plain <= set(read), target
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            assert plain == set(read), target


def test_bases_words_are_known_where_a_class_hands_them_on():
    read = source_signature("lmzoo.tasks.mlm.MaskedLM", "task")
    assert {"rate", "label_smoothing", "z_loss", "seed"} <= set(read)
    assert read["rate"] == "float"


def test_imported_signatures():
    read = imported_signature("torch.nn.LayerNorm", "model.norm")
    assert read["eps"] == "float" and read["bias"] == "bool"


def test_unknown_words_name_the_nearest():
    with pytest.raises(UserError) as refusal:
        check({"schedule": {"_target_": "lmzoo.optim.cosine", "_partial_": True, "warmup_step": 3}})
    assert str(refusal.value) == "schedule.warmup_step: cosine has no such word; did you mean warmup_steps?"


def test_lists_of_recipes_are_walked():
    layers = [{"_target_": "lmzoo.optim.cosine", "end": 0.1}, {"_target_": "lmzoo.optim.cosine", "end": "low"}]
    with pytest.raises(UserError, match=r"^schedule\[1\].end='low' should be a number$"):
        check({"schedule": layers})


def test_a_target_that_is_not_there():
    with pytest.raises(UserError, match="model._target_=lmzoo.models.Decodr"):
        check({"model": {"_target_": "lmzoo.models.Decodr"}})
    with pytest.raises(UserError, match="model.norm._target_=torch.nn.LayerNrm: there is no such class"):
        check({"model": {"norm": {"_target_": "torch.nn.LayerNrm"}}}, imported=True)


PLACES = {  # what belongs at each, and nothing else of these rooms
    "data.reader": "Text Jsonl Csv Parquet Saved Hub read_pydoc read_docstrings read_exercise",
    "data.sources.a.reader": "Text Jsonl Csv Parquet Saved Hub read_pydoc read_docstrings read_exercise",
    "callbacks.x": "LargestMicroBatch Preemption LastValidation Metrics FirstValidation Guard Progress Checkpoints",
    "tokenizer.kind": "train_bpe train_wordpiece train_unigram char byte",
    "optim.optimizer": "MuonAdamW Adafactor",
    "schedule": "constant linear cosine inverse_sqrt wsd",
    "model": "", "model.init": "", "task": "", "task.head": "",
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_only_what_belongs_at_a_place_is_admitted_there(place):
    """Of all functions and classes of five rooms, where they are defined and where a room hands them on."""
    refused, allowed = 0, PLACES[place].split()
    for room in ("data", "callbacks", "tokenizer", "optim", "checkpoint"):
        for file in Path(lmzoo.__file__).with_name(room).glob("*.py"):
            module = f"lmzoo.{room}" + f".{file.stem}" * (file.stem != "__init__")
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                found = [alias.name for alias in getattr(node, "names", ())] or [getattr(node, "name", None)]
                for name in (name for name in found if name and name not in allowed):
                    with pytest.raises(UserError, match=f"^{place}._target_={module}.{name}: "):
                        check_place(place, f"{module}.{name}", ())
                    refused += 1
    assert refused > 300


@pytest.mark.parametrize(
    ("place", "target"),
    [("optim.optimizer", "lmzoo.optim.muon.MuonAdamW"), ("model", "lmzoo.models.decoder.Decoder"),  # by whichever name
     ("model.head", "lmzoo.blocks.head.Classifier"), ("model.attention[1]", "lmzoo.blocks.attention.GroupedQuery")],
)  # fmt: skip
def test_what_belongs_at_a_place_is_admitted_there(place, target):
    """The head of a fine-tuned net is that of its task; a part is known under any name."""
    check_place(place, target, ())


def test_a_module_that_a_stored_configuration_names_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "surprise.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for target, word in (("lmzoo.data.opening.imported", "module"), ("lmzoo.data.shards.write_meta", "folder")):
        reader = {"_target_": target, word: "surprise"}
        for config in ({"data": {"reader": reader}}, {"data": {"sources": {"a": {"reader": reader}}}}):
            with pytest.raises(UserError, match="this is no part for data"):
                check(config)
    assert "surprise" not in sys.modules


@pytest.mark.parametrize(
    ("place", "target"),
    [("model.norm", "torch.nn.functional.gelu"), ("model.norm", "torch.nn.attention._fa4.register_flash_attention_fa4"),
     ("model.init", "torch.nn.modules.module.torch.load"), ("optim.optimizer", "torch.optim.lr_scheduler.StepLR"),
     ("optim.optimizer", "torch.optim.swa_utils.AveragedModel"), ("model.norm", "torch.nn.Module.load_state_dict")],
)  # fmt: skip
def test_of_torch_only_the_kind_that_a_place_holds_is_admitted(place, target):
    import torch  # noqa: F401

    with pytest.raises(UserError, match=f"{place}._target_={target}: there is no such class"):
        imported_signature(target, place)
    assert imported_signature("torch.optim.AdamW", "optim.optimizer")["eps"] == "float"


@pytest.mark.parametrize("path", ["model.ffn", "model.ffn.activation", "task.head", "optim.optimizer"])
def test_a_recipe_that_would_be_called_at_once_is_refused(path):
    config = {"_target_": "mine.Part"}
    for name in reversed(path.split(".")):
        config = {name: config}
    with pytest.raises(UserError, match=f"^{path}: add _partial_: true"):
        check(config | {"trust": ["mine"]})


def test_parameters_of_blocks_without_annotation_are_recipes():
    """Those with the default None may be null."""
    read = source_signature("lmzoo.blocks.attention.Attention", "here")
    assert read["qk_norm"] == "recipe | None" and read["d_model"] == "int"
    assert source_signature("lmzoo.blocks.ffn.FeedForward", "here")["activation"] == "recipe"


def test_nearest():
    assert nearest("lrr", ["lr", "weight_decay"]) == "; did you mean lr?"
    assert nearest("zzz", ["b", "a"]) == "; choose from a, b"
    assert nearest("zzz", []) == ""


def test_reading_lmzoos_signatures_imports_no_torch():
    code = """
import sys
from lmzoo.signatures import source_signature
assert "n_heads" in source_signature("lmzoo.models.EncoderDecoder", "model")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
