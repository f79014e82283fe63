"""Every file of conf/ says what it is, and every option of every group composes with something."""

import pytest

import lmzoo
from lmzoo.checks import CONF, groups, model_family, task_families
from lmzoo.literal import plain

FILES = sorted(CONF.rglob("*.yaml"))
TASKS = {"encoder": "mlm", "decoder": "clm", "encoder-decoder": "span_corruption"}
MODELS = {"encoder": "bert", "decoder": "gpt", "encoder-decoder": "t5"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(CONF).as_posix())
def test_begins_with_one_comment_line(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    if lines[0].startswith("# @package"):
        lines = lines[1:]
    assert lines[0].startswith("# ") and len(lines[0]) > 15
    assert not lines[1].startswith("#")
    assert max(map(len, lines)) <= 140


def words(group: str, option: str) -> tuple[str, ...]:
    """A command line that chooses this option."""
    if group == "model":
        return f"model={option}", f"task={TASKS[model_family(option)]}"
    if group == "task":
        return f"model={MODELS[task_families(option)[0]]}", f"task={option}"
    if group == "published":
        model, _, size = option.rpartition("-")
        return f"model={model}", f"size={size}", f"task={TASKS[model_family(model)]}"
    if group == "recipe":
        task, _, size = option.rpartition("-")
        return *words("task", task), f"size={size}"
    if group == "experiment":
        return (f"experiment={option}",)
    if option == "mixture":
        return "model=gpt", "task=clm", "data=mixture", "data.sources.one.weight=1", "data.sources.one.kind=pydoc"
    if group == "model/cross":
        return "model=t5", "task=span_corruption", f"{group}={option}"
    if group == "task/head":
        return "model=t5", "task=classification", f"{group}={option}"
    if group == "model/head" and option in ("masked", "pooler"):  # a pooler gives no logits of tokens
        return "model=bert", "task=mlm" if option == "masked" else "task=classification", f"{group}={option}"
    return "model=gpt", "task=clm", f"{group}={option}"


@pytest.mark.parametrize(("group", "option"), [
    (group, option) for group in groups() for option in groups()[group]
    if group not in ("adapter", "measure")  # which need a base, and a net
])  # fmt: skip
def test_every_option_composes(group, option):
    if (group, option) == ("sweep", "optuna"):
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    config = plain(lmzoo.compose(*words(group, option)))
    assert config["model"]["_target_"].startswith("lmzoo.models.")
    assert config["task"]["_target_"].startswith("lmzoo.tasks.")


def test_published_files_and_recipes_belong_to_something():
    for option in groups()["published"]:
        assert option.rpartition("-")[0] in groups()["model"]
    for option in groups()["recipe"]:
        task, _, size = option.rpartition("-")
        assert task in groups()["task"] and size in groups()["size"]


def test_every_task_has_a_recipe_for_the_default_size():
    assert {f"{task}-tiny" for task in groups()["task"]} <= set(groups()["recipe"])
