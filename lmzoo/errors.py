"""The one error that a user is meant to read."""


class UserError(Exception):
    """A mistake of the user in one line: what is wrong, where, what to do; a command prints it and exits with 2."""
