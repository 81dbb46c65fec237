"""The graph after each stage, as text and as a picture, in a folder; and the constants too large for the texts."""

from __future__ import annotations

from pathlib import Path

from tilewright.errors import InputError
from tilewright.files import write_whole
from tilewright.ir.graph import Graph
from tilewright.ir.literal import Literal
from tilewright.ir.literal_file import FILE, arrays_of
from tilewright.ir.text import print_with_literals
from tilewright.report.html.picture import picture
from tilewright.report.measure.inputs import write_npz


class Dump:
    """Writes `NN-STAGE.tw` and `NN-STAGE.svg` for each stage it is called with, and the large constants that the texts name
    once for all of them to `constants.npz`; the folder is made if missing.

    Raises:
        InputError: the folder cannot be made, or a file in it not written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = 0
        self._literals: dict[str, Literal] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot be made a folder: {error.strerror}", where=str(folder)) from error

    def __call__(self, stage: str, graph: Graph) -> None:
        name = f"{self._written:02}-{stage}"
        self._written += 1
        known = len(self._literals)
        text, literals = print_with_literals(graph, self._literals)
        if len(literals) > known:
            write_npz(self._folder / FILE, dict(arrays_of(v, k) for k, v in literals.items()))
        write_whole(self._folder / f"{name}.tw", text.encode())
        write_whole(self._folder / f"{name}.svg", picture(graph, f"{graph.name}, {stage}").encode())
