"""Free text and paths reach the run as they were typed, through Hydra, OmegaConf and the run folder's YAML."""

from functools import reduce

import hydra
import pytest
from omegaconf import OmegaConf

from lmzoo import literal
from lmzoo.errors import UserError
from lmzoo.literal import load, plain, prepared, quote, restore, save
from lmzoo.schema import register
from marks import slow_but

FREE = {  # every word that is text or a path, but for lists
    "train": ("name", "run_dir", "ckpt", "init_from", "tokenizer.path", "tokenizer.special.bos", "data.path",
              "data.name", "data.val_path", "data.test_path", "data.field", "data.text_column", "data.label_column",
              "data.pair_column", "data.target_column", "data.words_column", "data.tags_column", "data.label_separator",
              "data.cache_dir", "data.reader.delimiter", "logger.wandb.project", "logger.wandb.group",
              "logger.wandb.name", "logger.wandb.notes"),
    "generate": ("ckpt", "stop", "prompts_path", "out_path"),
    "evaluate": ("ckpt", "data.path", "data.cache_dir"),
}  # fmt: skip
LISTS = ("tags", "trust", "tokenizer.add", "data.path", "data.val_path", "data.test_path")
NASTY = [
    "Hello, world!", "it's", "'quoted'", '"quoted"', "''", '"', "'", "x = 3", "a=b=c", "=", "", " lead",
    "trail ", "\ttab", "two\nlines", "\nfirst", "last\n", "\r\n", "[MASK] is", "[a, b",
    "[not a list] at all", "{a: b}", "{}", "(a|b)", "${x}", r"\${x}", r"\\${x}", "${oc.env:HOME}", "${x",
    "$", "$$ {", "a}b{c", "${a}${b}", "back\\", "back\\\\", '\\"', '\\\\"', '"${a}"\\', r"C:\new\table",
    "+plus", "~tilde", "-dash", "--multirun", "#hash", "a: b", "a,b", "choice(a,b)", "range(3)", "null",
    "true", "1e-3", "0x1F", "glob(*)", "*.txt", "中文/路径.txt", "你好，世界！", "🎉", "@!%^&*|;<>?`", "/a b/c.txt",
    "???", "????", "??", "??${oc.decode:?}", "<s>", "p/#?%:", ";", ",", "\x01", "\u2028",
]  # fmt: skip
TEXTS = [text for text in NASTY if text != "null"]  # null takes them away


def composed(*words, command="train"):
    register()
    with hydra.initialize_config_module("lmzoo.conf", version_base="1.3"):
        return hydra.compose(command, prepared(words))


def prompted(text):
    register()
    with hydra.initialize_config_module("lmzoo.conf", version_base="1.3"):
        return hydra.compose("generate", prepared([f"prompt={text}"])).prompt


@pytest.mark.parametrize("text", NASTY)
def test_prompts_are_literal(text):
    assert prompted(text) == text


@pytest.mark.parametrize("command", slow_but(["generate", "evaluate"], FREE))
def test_every_free_text_is_literal_through_the_run_folder_too(command, tmp_path):
    """Each word has had each value once in the end."""
    for at in range(len(TEXTS)):
        typed = dict(zip(FREE[command], TEXTS[at:] + TEXTS[:at], strict=False))
        config = composed(*(f"{key}={text}" for key, text in typed.items()), command=command)
        found = {key: reduce(lambda node, word: node[word], key.split("."), config) for key in typed}
        assert found == typed
        save(restore({"all": list(found.values())}), tmp_path / "config.yaml")
        assert plain(load(tmp_path / "config.yaml"))["all"] == list(typed.values())


def test_items_of_lists_are_literal():
    """In whichever quotes the text has not; what has both can't be an item with a comma."""
    items = [text for text in TEXTS if text and not {"'", '"'} <= set(text)]
    written = ", ".join(f"'{text}'" if '"' in text else f'"{text}"' for text in items)
    config = composed(*(f"{word}=[{written}]" for word in LISTS))
    assert all(plain(OmegaConf.select(config, word)) == items for word in LISTS)


def test_null_is_none():
    taken = [word for word in FREE["train"] if word not in ("logger.wandb.project", "data.reader.delimiter")]
    config = composed(*(f"{word}=null" for word in (*taken, *LISTS[:3])))
    assert [OmegaConf.select(config, word) for word in taken] == [None] * len(taken)
    assert [list(OmegaConf.select(config, word)) for word in LISTS[:3]] == [[], [], []]


@pytest.mark.parametrize("word", ["run_dir=\udcff", "tags=a\udc80b", "name=a\0", "data.path.x\ud800=1", "tags=\x85"])
def test_what_is_no_text_is_refused(word):
    with pytest.raises(UserError, match="is no text that a run can note") as refusal:
        prepared([word])
    assert str(refusal.value).isprintable()


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
