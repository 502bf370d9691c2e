"""What a user's function can do wrong. All are the user's errors: they end the job with a
traceback, for another attempt would meet them again."""

from __future__ import annotations


class FunctionError(Exception):
    """The function, or what it registered, is not what the context can work with."""


class Unwound(BaseException):
    """Goes through the user's function once its attempt is over. No `except Exception` of theirs
    stops it, and what it was raised for is what is told."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
