"""Imports run one way: what each room of the house may import of the others, read from the source with `ast`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = {  # torch-free
    "config", "checks", "choices", "effects", "literal", "measures", "mixing", "ranges", "ranks", "runs", "schema",
    "signatures", "sweep", "texts",
}  # fmt: skip
PUBLIC = {"UserError", "build", "compose", "decoding", "fit", "hf", "load"}
ROOMS = {  # room: what it may import of lmzoo, beside itself and `errors`
    "lmzoo": set(),
    "errors": set(),
    "blocks": set(),
    "models": {"blocks", "decoding"},  # the latter where `generate` is called
    "decoding": {"blocks", "choices", "models", "tokenizer"},
    "tokenizer": set(),
    "draws": set(),
    "environment": set(),
    "data": {"draws", "literal", "tokenizer"},
    "optim": set(),
    "adapters": {"optim"},
    "plan": {"blocks", "memory", "optim"},
    "checkpoint": {"adapters", "load", "signatures", "tokenizer"},
    "engines": {"adapters", "checkpoint", "optim"},
    "memory": {"adapters", "blocks", "checkpoint", "engines", "optim"},
    "callbacks": {"checkpoint"},
    "hf": {"checkpoint", "tokenizer"},
    "likelihood": {"blocks", "checks", "data", "decoding", "load", "texts"},
    "programs": {"blocks"},
    "tasks": {"blocks", "callbacks", "draws", "optim", "decoding", "checkpoint", "tokenizer", "literal", "texts"},
    **dict.fromkeys(CONFIG, CONFIG | {"checkpoint", "load"}),
    "parts": CONFIG | {"adapters", "callbacks", "checkpoint", "data", "engines", "memory", "optim", "tokenizer"},
    "origin": CONFIG | {"checkpoint", "load"},
    "train": CONFIG | {"origin", "adapters", "engines", "environment", "parts", "checkpoint", "data", "plan", "load"},
    "evaluate": CONFIG | {"parts", "checkpoint", "data", "likelihood", "load"},
    "generate": CONFIG | {"decoding", "parts", "load"},
}
OUTSIDE = {"blocks": {"torch"}, "models": {"torch"}, "decoding": {"torch"},
           "tokenizer": {"tokenizers", "hydra", "jinja2"}}  # fmt: skip
STANDARD = {"__future__", *__import__("sys").stdlib_module_names}
HEAVY = {"torch", "lightning", "wandb", "transformers", "torchmetrics", "matplotlib", "numpy", "tokenizers"}


def modules():
    """(full name, package, parsed source) of every module of lmzoo."""
    for folder, package in (("lmzoo", "lmzoo"), ("tasks", "lmzoo.tasks"), ("tools", "lmzoo.tools")):
        for file in sorted((ROOT / folder).rglob("*.py")):
            inside = file.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *(part for part in inside if part != "__init__")])
            parent = name if file.stem == "__init__" else name.rpartition(".")[0]
            yield name, parent, ast.parse(file.read_text(encoding="utf-8"))


def imported(parent: str, node: ast.stmt) -> list[str]:
    """Full names of the modules (of lmzoo's root: of the names) that an import statement reads."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    above = parent.split(".")[: len(parent.split(".")) - node.level + 1] if node.level else []
    source = ".".join(filter(None, [*above, node.module]))
    return [f"lmzoo.{alias.name}" for alias in node.names] if source == "lmzoo" else [source]


def room(name: str) -> str:
    return (name.split(".") + ["lmzoo"])[1] if name != "lmzoo" else "lmzoo"


MODULES = list(modules())


@pytest.mark.parametrize(("name", "parent", "tree"), MODULES, ids=[name for name, _, _ in MODULES])
def test_imports_keep_to_the_table(name, parent, tree):
    allowed = ROOMS.get(room(name))
    for node in ast.walk(tree):
        for source in imported(parent, node):
            top = source.split(".")[0]
            if top == "lmzoo" and allowed is not None:
                assert room(source) in allowed | {room(name), "errors"}, f"{name} imports {source}"
            if top == "lmzoo":
                assert room(source) != "tools" or room(name) == "tools", f"{name} imports {source}"
            if top != "lmzoo" and room(name) in OUTSIDE:
                assert top in OUTSIDE[room(name)] | STANDARD, f"{name} imports {source}"
            assert top not in ("tasks", "tools", "conf", "tests"), f"{name} imports {source}"


def test_every_room_stands_in_the_table():
    assert {room(name) for name, _, _ in MODULES} - {"tools", "conf"} == set(ROOMS)


@pytest.mark.parametrize("name", ["lmzoo", *sorted(f"lmzoo.{word}" for word in CONFIG | {"parts", "train"})])
def test_what_answers_a_mistake_imports_nothing_heavy_at_its_top(name):
    _, parent, tree = next(module for module in MODULES if module[0] == name)
    tops = {source.split(".")[0] for node in tree.body for source in imported(parent, node)}
    assert not tops & HEAVY


def test_nothing_in_lmzoo_names_a_task():
    """Tasks are found by `_target_` only."""
    for name, parent, tree in MODULES:
        if room(name) not in ("tasks", "tools"):
            for node in ast.walk(tree):
                assert not any(room(source) == "tasks" for source in imported(parent, node)), name


def test_the_public_names():
    import lmzoo

    assert set(lmzoo.__all__) == PUBLIC and set(dir(lmzoo)) >= PUBLIC
    for name in sorted(PUBLIC):
        assert getattr(lmzoo, name) is not None
    with pytest.raises(AttributeError):
        lmzoo.nothing_of_the_kind  # noqa: B018
