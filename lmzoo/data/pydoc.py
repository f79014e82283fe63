"""The text that every Python carries: the language reference (`pydoc_data.topics`) and the library's docstrings.

All of it is read with `ast`; nothing of what is read is imported. It makes two sources that work offline at once: about
two megabytes of English to pretrain on, and a classification task (which package does a docstring come from?).
"""

import ast
import hashlib
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from .corpus import Document

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}


def read_pydoc(path: str | None = None) -> Iterator[Document]:
    """The topics and the docstrings of the running Python (or of the library folder `path`), each text once."""
    library = _library(path)
    seen = set()
    for text in [*_topics(library), *(text for _, text in _docstrings(library))]:
        if text not in seen:
            seen.add(text)
            yield Document(text)


def read_docstrings(path: str | None = None, n_classes: int = 20, shortest: int = 40) -> Iterator[Document]:
    """Docstrings with the standard-library package or module they come from: the `n_classes` that have most of them.

    Docstrings under `shortest` characters say too little and are left out, and so is every text that occurs in two
    packages; one that occurs more than once in a package is kept once. A hash of the text sends 80 % to training,
    10 % to validation and 10 % to the test, so no text is in two splits and the split is the same everywhere.
    """
    packages = defaultdict(set)
    for package, text in _docstrings(_library(path)):
        if len(text) >= shortest:
            packages[text].add(package)
    unique = [(text, *names) for text, names in packages.items() if len(names) == 1]
    counts = Counter(package for _, package in unique)
    largest = sorted(counts, key=lambda package: (-counts[package], package))[:n_classes]
    for text, package in unique:
        if package in largest:
            tenth = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) * 10 >> 64
            yield Document(text, package, {0: "test", 1: "val"}.get(tenth, "train"))


def _library(path: str | None) -> Path:
    library = Path(path).expanduser() if path else Path(sysconfig.get_path("stdlib"))
    if not any(library.glob("*.py")):
        raise UserError(f"{library} holds no Python sources to read documentation from: use data=text data.path=...")
    return library


def _topics(library: Path) -> Iterator[str]:
    """The pages of `help("topics")`, by name: one dictionary of literals in `pydoc_data/topics.py`."""
    file = library / "pydoc_data" / "topics.py"
    tree = ast.parse(file.read_bytes()) if file.is_file() else ast.Module([], [])
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            yield from (topics[name].strip() for name in sorted(topics))


def _docstrings(library: Path) -> Iterator[tuple[str, str]]:
    """(top-level package or module, docstring) of every module, class and function, in the order of files."""
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).parts
        if SKIPPED.intersection(parts) or parts[0].startswith("config-"):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):  # old escapes in strings
                tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue  # a template or a deliberately broken file
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = (ast.get_docstring(node) or "").strip()
                if text:
                    yield parts[0].removesuffix(".py"), text
