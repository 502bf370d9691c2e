"""Errors of a user's function. They end the job with a traceback, because another attempt would
raise them again."""

from __future__ import annotations


class FunctionError(Exception):
    """The context cannot work with the function or with an object that it registered."""


class MeshChanges(Exception):
    """The attempt is over after a step on which all ranks agreed, because the mesh changes. The
    function is unwound, so that what follows its loop runs once, at the end of the job."""


class AttemptEnded(BaseException):
    """Unwinds the user's function once its attempt is over. It is a BaseException, so that no
    `except Exception` in the function stops it; `cause` is the exception that is reported."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
