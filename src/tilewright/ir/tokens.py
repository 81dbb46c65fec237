"""Tokens of a text that is being read: the part that the readers of graphs (`text`) and of gemm lines (`notation`) share."""


class Tokens:
    """Tokens (kind, text, place) and the number of the next one; the last is the text's end, which nothing accepts."""

    tokens: list[tuple[str, str, int]]
    at: int

    def peek(self) -> tuple[str, str]:
        """Kind and text of the next token."""
        return self.tokens[self.at][:2]

    def accept(self, kind: str, text: str | None = None) -> str | None:
        """Take the next token if it is of a kind, and has a text if one is given; gives its own text, else None."""
        got, found, _ = self.tokens[self.at]
        if got != kind or (text is not None and text != found):
            return None
        self.at += 1
        return found
