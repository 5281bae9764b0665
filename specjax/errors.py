"""Errors a user meets: one line that says what was got, what was expected and what to do."""

from __future__ import annotations


class SpecjaxError(Exception):
    """Base of every error that the command line prints as one line (no traceback).

    Attributes:
        exit_code: the process exit code that the command line returns for it.
    """

    exit_code = 1


class UsageError(SpecjaxError, ValueError):
    """A wrong call: an unknown name, an option that cannot be honoured, a bad input file."""

    exit_code = 2


class CheckpointError(SpecjaxError):
    """A checkpoint that cannot be read: missing, truncated, of a wrong shape or unknown kind."""

    exit_code = 2


class RowError(SpecjaxError, ValueError):
    """One row that cannot be served; the other rows go on. Its text becomes the row's ``error``."""


class Terminated(BaseException):
    """The process was asked to end (SIGTERM) where nothing is to be kept."""
