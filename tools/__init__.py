"""Small programs around training, each with --help: python -m lmzoo.tools.NAME"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from lmzoo import UserError
from lmzoo.checks import explain


class Parser(argparse.ArgumentParser):
    """A parser that takes words before, between and behind options, and answers a mistake by one line."""

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        return self.parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"lmzoo: {message}; --help says more\n")


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser whose help is the tool's docstring as it stands."""
    return Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def trusting(arguments: argparse.ArgumentParser) -> None:
    """Let a tool that opens a checkpoint be told what trust= says in training."""
    arguments.add_argument("--trust", nargs="+", action="extend", default=[], metavar="MODULE",
                           help="modules of your own whose classes the checkpoint may name, as my_package")  # fmt: skip


def new_file(file: str | Path, suffix: str = "") -> Path:
    """The path of a file that a tool will write, before any work; UserError where that can't be, or something is.

    What a user names is never replaced: it may be anybody's.
    """
    file = Path(file)
    if suffix and file.suffix != suffix:
        raise UserError(f"{file}: name a file that ends in {suffix}")
    try:
        file.touch(exist_ok=False)
        file.unlink()
    except FileExistsError:
        raise UserError(f"{file} is there already, and nothing is overwritten: name a new file") from None
    except OSError as error:
        raise UserError(f"{file} can't be written ({error.strerror}): name a file in a folder of yours") from None
    return file


def check_own(words: Iterable[str], own: Mapping[str, str]) -> None:
    """Refuse a word of training that a tool says itself, by what to say instead: `own` of it."""
    for word in words:
        name = word.lstrip("+~").partition("=")[0]
        if name in own:
            raise UserError(f"{word}: this tool says {name} itself: {own[name]}")


def answer(tool: Callable[..., str], *arguments: object) -> None:
    """Print what `tool(*arguments)` says; a user's mistake, or the disk's, is one line on stderr and exit code 2, as
    Ctrl-C is one."""
    try:
        print(tool(*arguments))
    except (UserError, OSError) as error:
        print(f"lmzoo: {explain(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as end:
        print(f"lmzoo: {str(end) or 'interrupted'}", file=sys.stderr)
        sys.exit(getattr(end, "exit_code", 130))
