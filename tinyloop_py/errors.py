"""The exceptions, and the text of the last failure on this thread."""

import threading


class Error(RuntimeError):
    """Anything that tinyloop could not do; the text says what was given and what is allowed."""


class InvalidArgumentError(Error, ValueError):
    """A value outside its range."""


class ArgumentTypeError(Error, TypeError):
    """A value of the wrong type or shape."""


class OutOfMemoryError(Error, MemoryError):
    """No memory; the text contains "out of memory"."""


_thread = threading.local()


def remember(text: str) -> None:
    """Makes `text` this thread's last error."""
    _thread.last_error = text


def last_error() -> str:
    """What the last failing call on this thread said; empty before the first failure."""
    text: str = getattr(_thread, "last_error", "")
    return text


def failure(kind: type[Error], text: str) -> Error:
    """An exception to raise, remembered as this thread's last error."""
    remember(text)
    return kind(text)
