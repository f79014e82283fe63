"""Hold every `_target_` of a configuration against the signature of what it names, before anything is built.

lmzoo's own classes are read from their source with `ast`, so that a misspelt word is refused within a second, without
importing torch. Others (`torch.nn.LayerNorm`, `torch.optim.AdamW`) are looked at once torch has been imported anyway.
"""

import ast
import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from itertools import accumulate
from pathlib import Path

from .errors import UserError

CONF = Path(str(files("lmzoo.conf")))
TARGET = re.compile(r"_target_: (lmzoo[\w.]+)")
HYDRA_WORDS = {"_args_", "_convert_", "_recursive_"}
# words of a node that its owner reads and takes away before the target is called
OWNERS_WORDS = {"task": {"family", "head", "labels"}}
# words that an owner hands over though they have defaults
HANDED = {
    "task": {"seed", "total_steps", "packing"}, "task.head": {"n_classes"}, "data.reader": {"path", "kind"},
    "optim.optimizer": {"params", "lr", "weight_decay"},
}  # fmt: skip
# what may stand below a word: the classes of lmzoo that files of these groups of conf/ name, and those of torch that
# are of a kind; all others have to be named, or their modules, in `trust`
GROUPS = {"model": ("model", "task"), "task": ("model", "task"), "tokenizer": ("tokenizer",), "data": ("data",),
          "optim": ("optim",), "schedule": ("schedule",), "callbacks": ("callbacks",), "measure": ("measure",)}
OF_TORCH = {"model": "torch.nn.Module", "task": "torch.nn.Module", "optim": "torch.optim.Optimizer"}
RECIPE = re.compile(r"model\..*|task\.head|tokenizer\.kind|optim\.optimizer")
WHOLE = ("model", "task")  # what is made at once, where parts are recipes
WHOLES = ("lmzoo.models", "lmzoo.tasks")
LISTS = ("list", "tuple", "Sequence")
MAPPINGS = ("dict", "Mapping")
PLAIN = {"int": int, "float": (int, float), "str": str, "Path": str, "bool": bool}


def nearest(word: str, words) -> str:
    """`; did you mean X?` for the word that is spelt most alike, or the whole list where none is."""
    words = sorted(words)
    if match := difflib.get_close_matches(word, words, n=1, cutoff=0.5):
        return f"; did you mean {match[0]}?"
    return f"; choose from {', '.join(words)}" if words else ""


def check(config: dict, imported: bool = False) -> None:
    """Refuse an unknown or ill-typed word below any `_target_` of the plain dict `config` (UserError).

    `imported=False` looks at lmzoo's own targets and imports nothing, `imported=True` at all the others. A target that
    neither belongs at its place nor is named in `config["trust"]` is refused before its module would be imported.
    """
    trust = tuple(config.get("trust") or ())
    for path, node in targets(config):
        target, name = node["_target_"], node["_target_"].rpartition(".")[2]
        check_place(path, target, trust)
        if not imported:
            check_owners(path, node, name)
        if target.startswith("lmzoo.") is imported:
            continue
        known = imported_signature(target, path, trust) if imported else source_signature(target, path)
        words = set(node) - {"_target_", "_partial_"} - OWNERS_WORDS.get(path, set())
        for word in sorted(words) if known is not None else ():
            if word not in known:
                given = set(known) - handed(path, node)
                raise UserError(f"{path}.{word}: {name} has no such word{nearest(word, given)}")
            if expected := misfit(node[word], known[word]):
                raise UserError(f"{path}.{word}={node[word]!r} should be {expected}")


def check_place(path: str, target: str, trust: Iterable[str]) -> None:
    """Refuse what does not belong at its place: one of lmzoo that conf/ never names there, or a stranger."""
    if belongs(target, trust):
        return
    place = re.split(r"[.\[]", path)[0]
    package, torchs = target.partition(".")[0], OF_TORCH.get(place, "").rpartition(".")[0]
    if package == "lmzoo":
        whole = [f"lmzoo.{path}s"] if path in WHOLE else WHOLES
        known = [name for name in named(GROUPS.get(place, ())) if belongs(name, whole) is (path in WHOLE)]
        found = target in known or where(target)
        if found is None:
            raise UserError(f"{path}._target_={target}: there is no such class or function")
        if found is not True and found not in map(where, known):  # by another name
            raise UserError(f"{path}._target_={target}: this is no part for {path}{nearest(target, known)}")
    elif not torchs or not belongs(target, [torchs]):
        of_torch = f" or of {torchs}" * bool(torchs)
        raise UserError(f"{path}._target_={target}: take a class of lmzoo that belongs there (that conf/{place} names)"
                        f"{of_torch}, or trust=[{package}] if it is yours or you trust its code")


@cache
def named(groups: tuple[str, ...]) -> list[str]:
    """The classes and functions of lmzoo that files in some groups of conf/ name."""
    files = (file for group in groups for file in CONF.glob(f"{group}/**/*.yaml"))
    return sorted({target for file in files for target in TARGET.findall(file.read_text(encoding="utf-8"))})


def where(target: str) -> tuple[str, str] | None:
    """(module, name) by which lmzoo defines a class or function, whatever it is called; None where it doesn't."""
    module, node = definition(*target.rpartition(".")[::2]) or ("", None)
    return (module, getattr(node, "name", "")) if belongs(module, ["lmzoo"]) else None


def handed(path: str, node: dict) -> set[str]:
    """The words that a part is given by its owner."""
    words = HANDED.get(path, set())
    if node["_target_"].startswith("lmzoo.") and (node.get("_partial_") or path == "task"):
        words = words | handed_over(node["_target_"])
    return words


def check_owners(path: str, node: dict, name: str) -> None:
    """Refuse words that are not the user's to give: what a part is handed by its owner, and how Hydra makes it."""
    if given := sorted(handed(path, node) & node.keys()):
        raise UserError(f"{path}.{given[0]}: {name} is given this by other words of the run; leave it out")
    if RECIPE.fullmatch(path) and "_partial_" not in node:
        raise UserError(f"{path}: add _partial_: true, since it is called later, as often as it is needed ({name})")
    given = sorted(HYDRA_WORDS & node.keys())
    if given or node.get("_partial_", True) is not True or path in WHOLE and "_partial_" in node:
        raise UserError(f"{path}.{(given or ['_partial_'])[0]}: leave it out; lmzoo itself knows how to call {name}")


def belongs(name: str, modules: Iterable[str]) -> bool:
    """Whether a dotted name is one of `modules` or stands below one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def targets(node, path: str = ""):
    """Every (dotted path, mapping) below `node` that has a `_target_`."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield path, node
        for key, child in node.items():
            yield from targets(child, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for i, child in enumerate(node):
            yield from targets(child, f"{path}[{i}]")


def misfit(value, annotation: str | None) -> str | None:
    """What `value` should have been, or None where it fits or the annotation says nothing that can be checked."""
    if annotation is None:
        return None
    options = split(annotation)
    return None if any(fits(value, option) for option in options) else english(options)


def fits(value, option: str) -> bool:
    """Whether a plain value can be what one alternative of an annotation says; True where that can't be known."""
    head, _, inner = option.partition("[")
    if option == "None":
        return value is None
    if head == "Literal":
        return value in ast.literal_eval(f"[{inner}")
    if head.endswith("Tensor"):
        return False
    if head in LISTS:
        return isinstance(value, list) and fit_each(value, arguments(option))
    if head in MAPPINGS:
        return isinstance(value, dict)
    if option == "recipe":  # a part inside a part
        return isinstance(value, dict) and isinstance(value.get("_target_"), str)
    if option in PLAIN:
        return isinstance(value, PLAIN[option]) and (option == "bool" or not isinstance(value, bool))
    return True


def fit_each(values: list, wanted: list[str]) -> bool:
    """Whether the items of a list are what `list[A]` or `tuple[A, B]` says, for [A] or [A, B]."""
    wanted = wanted * len(values) if len(wanted) == 1 else wanted
    known = wanted and "..." not in wanted
    return not known or len(values) == len(wanted) and not any(map(misfit, values, wanted))


def arguments(option: str) -> list[str]:
    """`tuple[A, B | C]` -> ["A", "B | C"]; none for `tuple`."""
    inner = getattr(ast.parse(option, mode="eval").body, "slice", None)
    return [ast.unparse(node) for node in getattr(inner, "elts", [inner] if inner else [])]


def split(annotation: str) -> list[str]:
    """The alternatives of `A | B | None`, as text."""

    def walk(node):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return walk(node.left) + walk(node.right)
        return [ast.unparse(node)]

    try:
        return walk(ast.parse(annotation, mode="eval").body)
    except SyntaxError:
        return ["object"]


def english(options: list[str]) -> str:
    """`a whole number or null` for ["int", "None"]."""
    names = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "None": "null"}
    names |= dict.fromkeys(LISTS, "a list") | dict.fromkeys(MAPPINGS, "a mapping")
    names |= {"Path": "a path", "recipe": "a part, words with a _target_"}

    def name(option: str) -> str:
        head, _, inner = option.partition("[")
        if head in LISTS and (wanted := arguments(option)):
            number = f" of {len(wanted)}" if len(wanted) > 1 else ""
            return f"a list{number} (each {' or '.join(dict.fromkeys(english(split(one)) for one in wanted))})"
        choices = inner.removesuffix("]")
        return "one of " * ("," in choices) + choices if head == "Literal" else names.get(head, option)

    return " or ".join(name(option) for option in options if not option.endswith("Tensor"))


# --- signatures: {parameter: annotation as text, or None}; the whole is None where any word is taken

def source_signature(target: str, path: str) -> dict[str, str | None] | None:
    """The parameters of one of lmzoo's own classes or functions, read from the source."""
    found = definition(*target.rpartition(".")[::2])
    if found is None or not belongs(found[0], ["lmzoo"]):
        raise UserError(f"{path}._target_={target}: there is no such class or function")
    return parameters(*found)


def handed_over(target: str) -> set[str]:
    """Words of one of lmzoo's recipes that its caller gives: those without a default; of a block all but keywords."""
    module, node = definition(*target.rpartition(".")[::2]) or ("", None)
    init, words = initialiser(node) if isinstance(node, ast.ClassDef) else node, set()
    if isinstance(init, ast.FunctionDef):
        placed = [p.arg for p in init.args.posonlyargs + init.args.args]
        words = set(placed if belongs(module, ["lmzoo.blocks"]) else placed[: len(placed) - len(init.args.defaults)])
        if not init.args.vararg:
            return words
    bases = [base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)]
    return words | (handed_over(f"{module}.{bases[0]}") if bases else set())


def initialiser(node: ast.ClassDef) -> ast.FunctionDef | None:
    """The `__init__` of a class, where it has one of its own."""
    return next((child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"), None)


def parameters(module: str, node: ast.stmt) -> dict[str, str | None] | None:
    """Of a function, or of a class: its `__init__`'s or dataclass fields, and its bases' where `**` hands them on."""
    of_block = belongs(module, ["lmzoo.blocks"])
    if isinstance(node, ast.FunctionDef):
        return own_parameters(node, of_block)
    if not isinstance(node, ast.ClassDef):
        return None
    init = initialiser(node)
    words = own_parameters(init, of_block, skip=1) if init else dataclass_fields(node)
    if init and not init.args.kwarg:
        return words
    for base in node.bases:
        found = definition(module, base.id) if isinstance(base, ast.Name) else None
        inherited = parameters(*found) if found else {} if not init else None
        if inherited is None:
            return None
        words = inherited | words
    return words


def own_parameters(function: ast.FunctionDef, of_block: bool = False, skip: int = 0) -> dict[str, str | None]:
    """The parameters as they are annotated. Of a block those without annotation are recipes, which may be left out
    where the default is None."""
    a, unknown = function.args, "recipe" if of_block else None
    placed, defaults = (a.posonlyargs + a.args)[skip:], {}
    defaults |= dict(zip(reversed([p.arg for p in placed]), reversed(a.defaults), strict=False))
    defaults |= {p.arg: default for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)}
    found = {}
    for p in placed + a.kwonlyargs:
        optional = isinstance(defaults.get(p.arg), ast.Constant) and defaults[p.arg].value is None
        found[p.arg] = ast.unparse(p.annotation) if p.annotation else unknown and unknown + " | None" * optional
    return found


def dataclass_fields(node: ast.ClassDef) -> dict[str, str | None]:
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return {}
    return {child.target.id: ast.unparse(child.annotation) for child in node.body if isinstance(child, ast.AnnAssign)}


@cache
def locate(module: str):
    """The import system's spec of a module, found without importing it or its parents; None where there is none."""
    path = spec = None
    for name in accumulate(module.split("."), "{}.{}".format):
        spec = next((found for finder in sys.meta_path if (found := finder.find_spec(name, path))), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


@cache
def source(module: str) -> ast.Module | None:
    """The parsed source of a module, or None."""
    spec = locate(module)
    is_text = spec and str(spec.origin).endswith(".py")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8")) if is_text else None


def definition(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """(module, statement) that defines `name`, followed through `from .x import name`; None where there is none."""
    tree = source(module)
    for node in tree.body if tree else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return module, node
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if name == (alias.asname or alias.name):
                relative = "." * node.level + (node.module or "")
                home = importlib.util.resolve_name(relative, locate(module).parent)
                return definition(home, alias.name) if (home, alias.name) != (module, name) else None
    return None


def imported_signature(target: str, path: str, trust: Iterable[str] = ()) -> dict[str, str | None] | None:
    """The parameters of a class or function of any package, imported; of torch only of a class that `path` can hold."""
    module, _, name = target.rpartition(".")
    kind = OF_TORCH.get(re.split(r"[.\[]", path)[0], "")
    try:
        found = getattr(importlib.import_module(module), name)
        if not belongs(str(getattr(found, "__module__", None)), trust):  # what a module has imported from elsewhere
            torchs, _, wanted = kind.rpartition(".")
            if not (torchs and isinstance(found, type) and issubclass(found, getattr(sys.modules[torchs], wanted))):
                raise AttributeError
        every = inspect.signature(found).parameters.values()
    except (ImportError, AttributeError):
        of = "" if belongs(target, trust) or not kind else f" that is a {kind}"
        raise UserError(f"{path}._target_={target}: there is no such class{of or ' or function'}") from None
    except ValueError:  # builtins without a signature
        return None
    if any(p.kind is p.VAR_KEYWORD for p in every):
        return None
    return {p.name: None if p.annotation is p.empty else text(p.annotation) for p in every}


def text(annotation) -> str:
    """`int`, `float | None`, ... as one would write it."""
    return annotation.__name__ if type(annotation) is type else str(annotation)
