"""A compiled program as users hold it: an executable that accounts for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import msgspec

from tilewright.errors import LOGGER, InputError, check_type
from tilewright.hardware.target import Target
from tilewright.ir.artefact import Container
from tilewright.ir.graph import label_of
from tilewright.ir.state import caller_inputs
from tilewright.report.schema import Explain, Perf, to_json
from tilewright.runtime.artefact.read import load
from tilewright.runtime.background import Background
from tilewright.runtime.executable import Executable
from tilewright.runtime.prepare import chooser
from tilewright.runtime.steps import Decide, Posed, Step, kernel_step
from tilewright.schedule.cache import user_cache
from tilewright.schedule.chooser import Chooser
from tilewright.schedule.measure import synchronize
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.search import Decision
from tilewright.schedule.tuning_database import TuningDatabase
from tilewright.threads import limited

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from tilewright.ir.evaluate import Value
    from tilewright.ir.graph import Node

R = TypeVar("R", bound=msgspec.Struct)


@dataclass(frozen=True, repr=False, eq=False)
class Report(Generic[R]):
    """A report on a program. Printed, it is the text that the command line shows, as wide as the terminal.

    Attributes:
        facts: what it says, as data; the fields are those of the command line's `--json`.
    """

    facts: R
    _print: Callable[[Console], None]

    def __str__(self) -> str:
        from tilewright.report.text.console import printed

        return printed(self._print)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def to_json(self) -> str:
        """The facts as JSON text."""
        return to_json(self.facts)


class Program(Executable):
    """A compiled program: call it with the inputs in order, or by name; see `Executable` for what it takes and gives.

    `program.explain()` says what became of each product and why, `program.perf()` how long each step takes; both are shown by
    `print`, and a notebook shows the program itself. `program.steps` are the steps.

    Attributes:
        search: the search that goes on behind it, after `compile(..., background=True)`; printed, how far it is.
    """

    search: Background | None = None

    def search_on(self, chooser: Callable[[], Chooser]) -> None:
        """Go on searching in a thread: better kernels take the place of the present ones between calls."""
        self.search = Background(self, self._ready, chooser)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the search in the background is over, for so long at most; tell whether it is, or there was none.

        Raises:
            Exception: whatever ended the search. The program runs on with the kernels that it has.
        """
        return self.search is None or self.search.wait(timeout_s)

    def rechosen(self, steps: Sequence[Step], which: Callable[[Decision], bool], choose: Decide) -> tuple[Step, ...]:
        """Steps of this program, with other kernels for those whose decisions are meant and whose weights were not dropped."""
        made, chosen = list(steps), dict[AnyProblem, Decision]()
        with limited(self.threads):
            for i, step in enumerate(steps):
                if step.decision is not None and which(step.decision):
                    one = self.posed(step)
                    if all(s in self._ready for s in one.sources if s.constant):
                        if one.problem not in chosen:
                            chosen[one.problem] = choose(one.problem, one.weights)
                        made[i] = kernel_step(self.graph, one, self._ready, chosen[one.problem])
        synchronize(self.target.device)
        return tuple(made)

    def with_constants(self, values: Mapping[Node, Value]) -> Self | None:
        made = super().with_constants(values)
        if made is not None:
            made.search = None
        return made

    def posed(self, step: Step) -> Posed:
        """The problem that a step does, with its weights, as far as they were not dropped."""
        return Posed.of(step.part, self._ready)

    def drop_weights(self) -> int:
        if self.search is not None:
            self.search.stop()  # it packs weights
        return super().drop_weights()

    def __deepcopy__(self, memo: dict[int, object]) -> Executable:
        if self.search is not None:
            memo[id(self.search)] = None  # a copy stays as it is
        return super().__deepcopy__(memo)

    def explain(self, *, everything: bool = False) -> Report[Explain]:
        """Account for every product: what is folded into it, what is not and why, which kernel does it, why others do not; and
        say what to change in the model.

        The cost of what is not folded is estimated from the machine's rates; these are measured once (seconds) and kept.

        Args:
            everything: print each account whole, with all candidates, as `tilewright explain -v`; the facts are the same.
        """
        from tilewright.report.explain.explain import explain_program
        from tilewright.report.text.explain_text import print_explain

        facts = explain_program(self, self.source.name, self._ceilings())
        return Report(facts, lambda out: print_explain(out, facts, everything=everything))

    def perf(self, *args: object, iterations: int | None = None, **inputs: object) -> Report[Perf]:
        """Time the program and each of its steps, for a few seconds in all. State that calls write is then as it was before.

        Args:
            args, inputs: as for a call; random data if there are none.
            iterations: runs of the whole and of each step; as many as a few seconds allow if None.

        Raises:
            InputError: an input is missing, unknown, or of another shape or type; `iterations` is not positive.
        """
        from tilewright.report.measure.inputs import make_feeds
        from tilewright.report.measure.perf import measure
        from tilewright.report.text.perf_table import print_perf

        if iterations is not None and iterations < 1:
            raise InputError(f"{iterations} runs", where="iterations", hint="1 or more, or None")
        values = self.bind(args, inputs) if args or inputs else ()
        given = {label_of(n): v for n, v in zip(caller_inputs(self.graph), values, strict=False)}
        feeds = make_feeds(self.source, given=given)
        measured = measure(self, self.source.name, feeds, self._ceilings(), iterations=iterations, check=self._ceilings)
        return Report(measured.report, lambda out: print_perf(out, measured))

    def _repr_html_(self) -> str:
        from tilewright.report.html.notebook import notebook

        return notebook(self)

    def _ceilings(self, times_us: Sequence[float] | None = None) -> Target:
        """The target with its measured rates, corrected by what steps were seen to reach."""
        from tilewright.report.measure.work import measured_ceilings

        target, notes = measured_ceilings(self, times_us)
        for note in notes:
            LOGGER.info("%s", note)
        return target


def load_program(
    path: str | PathLike[str],
    *,
    trust: bool = False,
    device: str | torch.device | None = None,
    budget_s: float = 20.0,
    threads: int | None = None,
) -> Program:
    """Read a program that `Program.save` wrote, ready to run. Its weights are the file's memory, mapped.

    On another chip than it was compiled for, on another device or by another version of Tilewright it is compiled again from
    its graph, which is logged as a warning.

    Args:
        path: a .twp file.
        trust: run the file's machine code although no key of this user on this machine signed it.
        device: where to run; None is the kind of device that it was compiled for.
        budget_s: seconds that measuring kernels may take if it is compiled again.
        threads: threads for its calls on a CPU; None is as many as it was compiled for, but no more than the machine has for
            this process.

    Returns:
        Program: results are equal to those of the program that was saved. Graphs between rules (`trace`) are not kept.

    Raises:
        InputError: the file cannot be read, is no saved program, or is damaged; or its code is not signed and `trust` is not
            given; or `threads` is no number of them.
        UnsupportedError: a step that a library or Triton runs has no kernel here.
    """
    check_type(path, (str, PathLike), "path", '"model.twp"')
    return load(Container(Path(path)), Program, trust=trust, device=device, budget_s=budget_s, threads=threads)


def search_behind(program: Program, budget_s: float, *, cache: bool) -> bool:
    """Search better kernels for a program in a thread, as `compile(..., background=True)` does, unless it was done or another
    program's search that began so is under way; tell whether it began."""
    with _one_search:
        if program.search is not None or any(_goes_on(p) for p in _searching):
            return False
        known = TuningDatabase(program.target, user_cache()) if cache else None
        program.search_on(lambda: chooser(program.graph, program.target, budget_s, None, known))
        _searching[:] = [program]
        return True


def _goes_on(program: Program) -> bool:
    try:
        return not program.wait(0)
    except Exception:  # what ended it was logged
        return False


_searching: list[Program] = []
_one_search = threading.Lock()
