"""The program that a verb is about and the data it runs on, as the command line gives them."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tilewright.cli.errors import interrupted
from tilewright.cli.options import INPUT_DIM, F, all_of, file_options, fill_options, inputs_option
from tilewright.cli.ranks import rank
from tilewright.errors import InputError, say
from tilewright.progress import said

if TYPE_CHECKING:
    import numpy as np

    from tilewright.frontends import LoadOptions
    from tilewright.ir.dims import Scope
    from tilewright.ir.graph import Graph
    from tilewright.ir.types import TensorType
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

    def load(self, *, leave_open: bool = False, mesh: str | None = None) -> Graph:
        """The program, checked to have the shapes asked for and to fit in memory. Extents that stay open have the middle of
        their bounds, unless they are left so. With a mesh it is read as a program for that.

        Raises:
            InputError: it cannot be read, does not fit, or has no input whose first axis `batch` could be, and no extent of
                one of the names in `dims`.
        """
        from tilewright.frontends import load
        from tilewright.frontends._plan import as_mesh
        from tilewright.report.measure.inputs import check_memory

        options = self.options() if mesh is None else replace(self.options(), mesh=as_mesh(mesh))
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
            if scope is not None:
                graph = instance(graph, _amid(scope))
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
        """A value for each input of the program's graph.

        Raises:
            InputError: a file or a name is wrong, or an array of the file does not fit its input.
        """
        from tilewright.ir.state import caller_inputs
        from tilewright.report.measure.inputs import make_feeds, read_npz

        given = None if self.inputs is None else read_npz(self.inputs, graph)
        feeds = make_feeds(graph, seed=self.seed, fill0=self.fill0, fill1=self.fill1, given=given)
        for node, feed in zip(caller_inputs(graph), feeds, strict=True):
            if given and feed.shown.name in given:
                self._fit(feed, node.tensor)
        return feeds

    def _fit(self, feed: Feed, wanted: TensorType) -> None:
        """See that an array of `inputs` can be an input of a type, before the program is compiled for it.

        Raises:
            InputError: it cannot, with what the command line can do about its shape.
        """
        from tilewright.runtime.arrays import from_user

        name, shape = feed.shown.name, cast("np.ndarray", feed.value).shape
        try:
            from_user(feed.value, wanted, name, "cpu")
        except InputError as error:
            if not error.what.startswith("shape "):
                raise
            first_alone = shape[1:] == wanted.shape[1:] and len(shape) == len(wanted.shape)
            if name in self.input_dims:
                hint = f"{INPUT_DIM} @{name} {' '.join(map(str, shape))}, or leave it out: open axes are those of the array"
            elif self.batch is not None and first_alone:
                hint = f"--batch {shape[0]}, or leave it out: open axes are those of the array"
            else:
                hint = f"an array of {list(wanted.shape)} in {self.inputs}; for other extents export the model with these open"
            raise InputError(error.what, where=error.where, hint=hint) from None


def _amid(scope: Scope) -> dict[str, int]:
    """Values in the middle of dims' bounds for which a program holds; smaller ones, which is said, where it does not for these.

    Raises:
        InputError: there are none among some.
    """
    middle = scope.within(1 / 2)
    refused = scope.failing(middle)
    if not refused:
        return middle
    found = next((v for v in (scope.within(2.0**-k) for k in range(2, 12)) if not scope.failing(v)), None)
    if found is None:
        at = ", ".join(f"{name}={value}" for name, value in middle.items())
        hint = "other bounds: --dim NAME=LOW:HIGH"
        raise InputError(f"the program does not take {at}, but only where {refused[0]}", where="--dim", hint=hint)
    say(f"--dim: the program holds where {refused[0]}, and is run at {', '.join(f'{n}={v}' for n, v in found.items())}")
    return found


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


@contextmanager
def progress(
    what: str, within_s: float | None = None, kept: Callable[[], str] | None = str
) -> Generator[Callable[[int, int, str], None]]:
    """A progress bar with what is left of a time; where standard error is no terminal a line every few seconds, without
    importing what draws.

    Where Ctrl-C ends it, a line says how far it had come, and what `kept` says of its results; none if that is None.
    """
    if rank():  # the first one of a job shows what all do
        yield lambda done, total, following: None
        return
    far = ""
    try:
        with _bar(what, within_s) as show:

            def noted(done: int, total: int, following: str) -> None:
                nonlocal far
                far = f", {done:,} of {total:,} done"
                show(done, total, following)

            yield noted
    except KeyboardInterrupt:
        if kept is not None:
            interrupted(": ".join(filter(None, (f"interrupted while {what}{far}", kept()))))
        raise


def _bar(what: str, within_s: float | None) -> AbstractContextManager[Callable[[int, int, str], None]]:
    if not sys.stderr.isatty():
        return said(what, None if within_s is None else time.monotonic() + within_s)
    from tilewright.report.text.console import progress as bar

    return bar(what, within_s)
