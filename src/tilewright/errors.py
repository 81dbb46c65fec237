"""Every error Tilewright raises on purpose: what went wrong, where, and what to try. What is no error is logged.

The command line prints errors in one or two lines and exits with code 2; anything else that escapes is a bug.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

LOGGER = logging.getLogger("tilewright")
"""The logger above all those of the package. Nothing in the package writes to standard error by itself: Python shows warnings
where the program that uses the package sets up no logging, and the command line shows what is at least INFO."""


class TilewrightError(Exception):
    """Base class. `what` is a sentence, `where` a place in the input, `hint` something to try."""

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        advice = f"\n  try: {self.hint}" if self.hint else ""
        return visible(f"{self.what}{place}{advice}")


class InputError(TilewrightError):
    """A file, model or argument from outside is missing, malformed or hostile."""


class AnotherWayError(InputError):
    """These inputs lead a program another way than the one that was traced."""


class TypeMismatchError(TilewrightError):
    """Shapes or dtypes do not fit together."""


class UnsupportedError(TilewrightError):
    """Well-formed input that Tilewright cannot express at all, not even as an opaque call."""


def noted(error: Exception, said: str) -> Exception:
    """The error with more said in its sentence; in a note, where it is no plain one of these."""
    if isinstance(error, (InputError, TypeMismatchError, UnsupportedError)) and not isinstance(error, AnotherWayError):
        return type(error)(f"{error.what}; {said}", where=error.where, hint=error.hint)
    error.add_note(said)
    return error


def visible(text: str) -> str:
    """Text with every character that has no shape of its own written out by its code; lines and tabs stay.

    What stands in files (names, above all) is printed: controls would steer the terminal, and marks of direction would show
    something else than what is there.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


_said: set[str] = set()


def say(line: str) -> None:
    """Log a warning, once a process; nothing for an empty one."""
    if line and line not in _said:
        _said.add(line)
        with contextlib.suppress(OSError, ValueError):  # standard error is closed, and a handler writes there
            LOGGER.warning("%s", visible(line))


def check_type(value: object, of: type | tuple[Any, ...], where: str, hint: str) -> None:
    """See that an argument of a public function is what it should be; truth values are no numbers.

    Raises:
        InputError: `value`, given as the argument `where`, is no `of`.
    """
    if not isinstance(value, of) or (isinstance(value, bool) and of is int):
        raise InputError(f"an argument of type {type(value).__name__}", where=where, hint=hint)


def counted(count: int, noun: str) -> str:
    """A count with its noun, such as "1 input" and "2 inputs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


class RewriteError(TilewrightError):
    """A rule broke the graph's type or did not converge: a bug in the rule named.

    Attributes:
        rules: names of the rules that may have the bug.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None, rules: tuple[str, ...] = ()) -> None:
        super().__init__(what, where=where, hint=hint)
        self.rules = rules


class PeerError(TilewrightError):
    """Another rank of the same program failed, ended, did not come in time, or runs in other circumstances than this one."""


class MissingDependencyError(TilewrightError):
    """An optional package is needed for this input and is not installed."""
