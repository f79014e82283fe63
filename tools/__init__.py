"""Small programs around training, each with --help: python -m lmzoo.tools.NAME"""

import argparse
import sys
from collections.abc import Callable

from lmzoo import UserError


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser whose help is the tool's docstring as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def answer(tool: Callable[..., str], *arguments: object) -> None:
    """Print what `tool(*arguments)` says; a user's mistake is one line on stderr and exit code 2."""
    try:
        print(tool(*arguments))
    except UserError as error:
        print(f"lmzoo: {error}", file=sys.stderr)
        sys.exit(2)
