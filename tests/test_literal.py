"""Free text and paths reach the run as they were typed, through Hydra, OmegaConf and the run folder's YAML."""

import hydra
import pytest
from omegaconf import OmegaConf

from lmzoo import literal
from lmzoo.errors import UserError
from lmzoo.literal import load, plain, prepared, quote, restore, save
from lmzoo.schema import register

NASTY = [
    "Hello, world!", "it's", "'quoted'", '"quoted"', "''", '"', "'", "x = 3", "a=b=c", "=", "", " lead",
    "trail ", "\ttab", "two\nlines", "\nfirst", "last\n", "\r\n", "[MASK] is", "[a, b",
    "[not a list] at all", "{a: b}", "{}", "(a|b)", "${x}", r"\${x}", r"\\${x}", "${oc.env:HOME}", "${x",
    "$", "$$ {", "a}b{c", "${a}${b}", "back\\", "back\\\\", '\\"', '\\\\"', '"${a}"\\', r"C:\new\table",
    "+plus", "~tilde", "-dash", "--multirun", "#hash", "a: b", "a,b", "choice(a,b)", "range(3)", "null",
    "true", "1e-3", "0x1F", "glob(*)", "*.txt", "中文/路径.txt", "你好，世界！", "🎉", "@!%^&*|;<>?`", "/a b/c.txt",
]  # fmt: skip
PATHS = [text for text in NASTY if text != "null"]  # null takes a path away


def composed(*words):
    register()
    with hydra.initialize_config_module("lmzoo.conf", version_base="1.3"):
        return hydra.compose("train", prepared(words))


def prompted(text):
    register()
    with hydra.initialize_config_module("lmzoo.conf", version_base="1.3"):
        return hydra.compose("generate", prepared([f"prompt={text}"])).prompt


@pytest.mark.parametrize("text", NASTY)
def test_prompts_are_literal(text):
    assert prompted(text) == text


def test_paths_columns_and_folders_are_literal():
    keys = ("data.path", "tokenizer.path", "data.field", "data.label_column", "ckpt", "init_from", "run_dir")
    for at in range(0, len(PATHS), len(keys)):
        typed = dict(zip(keys, PATHS[at:] + PATHS, strict=False))
        config = composed(*(f"{key}={text}" for key, text in typed.items()))
        assert {key: OmegaConf.select(config, key) for key in keys} == typed


def test_null_takes_a_path_away_but_is_a_prompt():
    assert composed("data.path=null").data.path is None
    assert prompted("null") == "null"


def test_lists_of_paths_and_tags():
    assert composed("data.path=[a, 'b c.txt',d/*.txt]").data.path == ["a", "b c.txt", "d/*.txt"]
    listed = """data.path=["/a/co,mma.txt",'b, "c"', it's.txt , 'open, "", "]"]"""
    assert composed(listed).data.path == ["/a/co,mma.txt", 'b, "c"', "it's.txt", "'open", "]"]
    assert composed("tags=one,it's two").tags == ["one", "it's two"]
    assert composed("tags=[one,two]").tags == ["one", "two"]


def test_sets_have_names_and_literal_paths():
    data = composed("data.val_path=a", "data.val_path.x=it's, ${x}.txt", "+data.val_path.y=[a, 'b, c']",
                    "data.test_path.z=*.txt").data
    assert plain(data.val_path) == {"x": "it's, ${x}.txt", "y": ["a", "b, c"]}
    assert plain(data.test_path) == {"z": "*.txt"}
    assert composed("data.val_path.x=null").data.val_path == {"x": None}


@pytest.mark.parametrize("name", ["", "loss", "a/b", "a.b", "1", "-a", "a b", "中", "a" * 65])
def test_a_name_that_no_metric_can_have(name):
    with pytest.raises(UserError, match=f"^data.val_path.{name}: '{name}' would stand in val/NAME/loss"):
        prepared([f"data.val_path.{name}=x.txt"])


def test_a_file_with_brackets_is_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[a,b]").touch()
    assert composed("data.path=[a,b]").data.path == "[a,b]"


@pytest.mark.parametrize("word", ["optim.lr=1,2", "model=gpt,llama", "-m", "--help", "+x=[1,2]", "hydra.run.dir=x"])
def test_other_words_are_left_to_hydra(word):
    assert quote(word) == word


def test_free_text_is_not_swept_but_numbers_are():
    """Under -m a comma is a choice in a number, and a comma in a text."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parse = OverridesParser.create().parse_override
    assert parse(quote("optim.lr=1e-3,3e-4")).is_sweep_override()
    assert not parse(quote("data.path=a,b")).is_sweep_override()
    assert not parse(quote("prompt=a,b")).is_sweep_override()


def test_a_sweeps_run_dir_is_the_folder_of_its_jobs():
    assert prepared(["-m", "run_dir=a b"]) == ["-m", 'hydra.sweep.dir="a b"']


def test_saved_configurations_come_back_literal(tmp_path):
    saved = restore({"texts": NASTY, "deep": {"text": "${texts}", "n": 3, "x": 1e-3, "none": None, "yes": True}})
    save(saved, tmp_path / "config.yaml")
    again = plain(load(tmp_path / "config.yaml"))
    assert again == {"texts": NASTY, "deep": {"text": "${texts}", "n": 3, "x": 1e-3, "none": None, "yes": True}}
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_saving_resolves_interpolations(tmp_path):
    save(OmegaConf.create({"a": 1, "b": "${a}"}), tmp_path / "config.yaml")
    assert plain(load(tmp_path / "config.yaml")) == {"a": 1, "b": 1}


def test_missing_values_are_an_error():
    with pytest.raises(Exception, match="model.d_model|Missing"):
        literal.plain(OmegaConf.create({"model": {"d_model": "???"}}))
