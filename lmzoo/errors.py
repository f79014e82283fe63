"""The one error that a user is meant to read."""


class UserError(Exception):
    """A mistake of the user in one line: what is wrong, where, what to do; a command prints it and exits with 2."""

    exit_code = 2


class Diverged(UserError):
    """A run that cannot go on, though nothing was mistyped: its steps are not finite. A command exits with 1."""

    exit_code = 1
