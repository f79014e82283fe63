"""What ends a command with a line instead of a traceback, and how names and files come into such a line."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

STOPPED = 75  # EX_TEMPFAIL, the exit code that asks for a rerun: told to go, the command has kept what it had done


class UserError(Exception):
    """A mistake of the user in one line: what is wrong, where, what to do; a command prints it and exits with 2."""

    exit_code = 2


def few(names: Iterable[object], most: int = 12, longest: int = 40) -> str:
    """The first of some names, shortened, and how many more there are: a line stays a line whatever they are."""
    names = [name if len(name) <= longest else f"{name[:longest]}..." for name in map(str, names)]
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Diverged(UserError):
    """A run that cannot go on, though nothing was mistyped: its steps are not finite. A command exits with 1."""

    exit_code = 1


class Lost(UserError):
    """A run of several processes of which one has died. A command exits with 1."""

    exit_code = 1


class Interrupted(KeyboardInterrupt):
    """A command that was ended by Ctrl-C or a signal: what it prints, and the code that it exits with."""

    def __init__(self, said: str, exit_code: int):
        super().__init__(said)
        self.exit_code = exit_code


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Let what the disk says of a file that is being written name it: of a full disk, Python's error does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
