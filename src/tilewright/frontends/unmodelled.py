"""The way for a front end to say that it holds no meaning for an operation as it stands, which then becomes a `call`."""

from __future__ import annotations


class Unmodelled(Exception):  # noqa: N818 - a signal to the reader, never an error of the user's
    """No meaning is written for this form of an operation; `reason` says why, for the note that reports the call."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)
