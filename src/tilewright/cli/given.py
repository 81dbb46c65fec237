"""The program that a verb is about and the data it runs on, as the command line gives them."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tilewright.cli.options import F, all_of, file_options, fill_options, inputs_option
from tilewright.errors import InputError
from tilewright.progress import said

if TYPE_CHECKING:
    from tilewright.frontends import LoadOptions
    from tilewright.ir.graph import Graph
    from tilewright.report.measure.inputs import Feed


@dataclass(frozen=True)
class Given:
    """A program and the sources of its input data.

    Attributes:
        file: the program.
        batch, input_dims: extents that it leaves open.
        dims: bounds of extents that stay open; a verb that runs the program does so in the middle of them.
        allow_calls: a `.tw` file may call any operator of torch.
        fixed: value of an input of one element by name, with which it is read.
        follow_links: an ONNX model's data are read through any symbolic link.
        seed: of random data.
        fill0, fill1: names of inputs that are filled with 0, with 1.
        inputs: an .npz file of inputs by name, and of extents that are left open.
    """

    file: Path
    batch: int | None = None
    input_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, "tuple[int, ...]"])
    dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, "tuple[int, ...]"])
    allow_calls: bool = False
    fixed: Mapping[str, bool | float] = field(default_factory=dict[str, "bool | float"])
    follow_links: bool = False
    seed: int = 0
    fill0: tuple[str, ...] = ()
    fill1: tuple[str, ...] = ()
    inputs: Path | None = None

    def load(self, *, leave_open: bool = False) -> Graph:
        """The program, checked to have the shapes asked for and to fit in memory. Extents that stay open have the middle of
        their bounds, unless they are left so.

        Raises:
            InputError: it cannot be read, does not fit, or has no input whose first axis `batch` could be, and no extent of
                one of the names in `dims`.
        """
        from tilewright.frontends import load
        from tilewright.report.measure.inputs import check_memory

        options = self.options()
        with progress(f"reading {self.file.name}"):
            graph = load(self.file, options)
        if options.dims:
            from tilewright.ir.dims import spelt
            from tilewright.ir.instance import dims_of, instance

            scope = dims_of(graph)
            found = options.scope.dims | (scope.dims if scope is not None else {})
            left = [name for name in self.dims if spelt(name) not in found]
            if left:
                hint = f"it has {', '.join(found)}" if found else "leave --dim out: it leaves none open"
                raise InputError(f"no open extent of the program is called {left[0]!r}", where="--dim", hint=hint)
            if leave_open:
                return graph
            graph = graph if scope is None else instance(graph, scope.within(0.5))
        check_memory(graph)
        return graph

    def options(self) -> LoadOptions:
        """Options for reading the program.

        Raises:
            InputError: the file of inputs cannot be read.
        """
        from tilewright.frontends import LoadOptions

        seen: Mapping[str, tuple[int, ...]] = {}
        if self.inputs is not None:
            from tilewright.report.measure.inputs import npz_shapes

            seen = npz_shapes(self.inputs)
        return LoadOptions(
            self.input_dims,
            self.batch,
            allow_calls=self.allow_calls,
            fixed=self.fixed,
            seen_dims=seen,
            follow_links=self.follow_links,
            dims=self.dims or False,
        )

    def feeds(self, graph: Graph) -> list[Feed]:
        """A value for each input of the program's graph."""
        from tilewright.report.measure.inputs import make_feeds, read_npz

        given = None if self.inputs is None else read_npz(self.inputs, graph)
        return make_feeds(graph, seed=self.seed, fill0=self.fill0, fill1=self.fill1, given=given)


def given_options(*, data: bool = False) -> Callable[[F], F]:
    """A decorator that gathers FILE and how to read it, and with `data` what it runs on, into one argument `given`."""

    def decorate(f: F) -> F:
        @functools.wraps(f)
        def gathered(**said: Any) -> Any:
            taken = {name: said.pop(name) for name in Given.__dataclass_fields__ if name in said}
            return f(given=Given(**taken), **said)

        options = (file_options, fill_options, inputs_option) if data else (file_options,)
        return all_of(*options)(cast("F", gathered))

    return decorate


def progress(what: str, within_s: float | None = None) -> AbstractContextManager[Callable[[int, int, str], None]]:
    """A progress bar with what is left of a time; where standard error is no terminal a line every few seconds, without
    importing what draws."""
    if not sys.stderr.isatty():
        return said(what, None if within_s is None else time.monotonic() + within_s)
    from tilewright.report.text.console import progress as bar

    return bar(what, within_s)
