"""Kernels that multiply by one quantised weight, for certain numbers of rows, to which all others are padded or cut."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, cast

import torch

from tilewright.compiler import optimise
from tilewright.dtype import BF16, F32, DType, from_torch
from tilewright.errors import InputError
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.build import input_
from tilewright.ir.few_bits import quantised_linear
from tilewright.ir.graph import Graph, Node
from tilewright.ir.literal import Literal
from tilewright.ir.ops import Const
from tilewright.ir.types import TensorType
from tilewright.m_dispatch import MOST_ROWS, AnyRows, compile_rows
from tilewright.program import Program
from tilewright.progress import Progress
from tilewright.runtime.quantized_weight import QuantizedWeight
from tilewright.schedule.ahead import Ahead, Job
from tilewright.schedule.buckets import Buckets
from tilewright.schedule.packed import unwritten
from tilewright.schedule.problem import AnyProblem

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

FEW_ROWS = 32  # for which kernels on Hopper scale sums rather than weights
MOST_ROWS_OF_A_CPU = 512  # where a row costs the same in any number of them, and checking a kernel takes seconds

Run = Callable[[Sequence[torch.Tensor]], Sequence[object]]


@dataclass(frozen=True)
class Signature:
    """All that a kernel depends on but the rows: layers of one signature share what was decided.

    Attributes:
        shape: [out, in] of the weight.
        codes, scales: their types.
        group_size: codes that share a scale.
        parts: whether there are zero points, and offsets.
        factor: what all scales are: "multiply" by a factor, "divide" by one, or "" for neither.
        activations, bias: types of the input and of the bias (None if there is none).
        quantize_activations: activations are quantised to 8 bits, a scale a row, before they are multiplied.
        device: the device that runs it.
    """

    shape: tuple[int, int]
    codes: DType
    scales: DType
    group_size: int
    parts: tuple[bool, bool]
    factor: str
    activations: DType
    bias: DType | None
    quantize_activations: bool
    device: str

    @staticmethod
    def of(
        weight: QuantizedWeight, activations: torch.dtype, bias: torch.dtype | None, *, quantize_activations: bool
    ) -> Signature:
        """The signature of a product.

        Raises:
            InputError: activations or bias are no floats of 16, 32 or 64 bits.
        """
        types = from_torch(activations), None if bias is None else from_torch(bias)
        for what, t in zip(("activations", "a bias"), types, strict=True):
            if t is not None and not (t.is_float and 16 <= t.bits <= 64):
                raise InputError(f"{what} of {t} for a quantised weight", hint="f16, bf16, f32 or f64")
        return Signature(
            weight.shape,
            weight.code_type,
            BF16 if weight.scales.dtype.itemsize == 1 else from_torch(weight.scales.dtype),  # which holds 8-bit ones
            weight.group_size,
            (weight.zero_points is not None, weight.offsets is not None),
            "" if weight.factor is None else "divide" if weight.divides else "multiply",
            *types,
            quantize_activations,
            str(weight.packed.device),
        )


CONSTANTS = ("codes", "scales", "zero_points", "offsets", "factor")


def constants_of(signature: Signature, value: Callable[[str], torch.Tensor]) -> dict[str, Node]:
    """The constants of a product by name, those of `CONSTANTS` that a weight has; `value` is asked for one when it is read."""
    (out, inner), (zeros, offsets) = signature.shape, signature.parts
    groups = -(-inner // signature.group_size)
    types = [
        TensorType(signature.codes, (out, inner)),
        TensorType(signature.scales, (out, groups)),
        TensorType(signature.codes, (out, groups)) if zeros else None,
        TensorType(F32, (out, groups)) if offsets else None,
        TensorType(F32, (1,)) if signature.factor else None,
    ]
    named = [(name, t) for name, t in zip(CONSTANTS, types, strict=True) if t is not None]
    return {name: Node(Const(Literal(t, lambda name=name: value(name), name))) for name, t in named}


def value_of(weight: QuantizedWeight, name: str) -> torch.Tensor:
    """The value of a constant: codes are unpacked, one to a byte."""
    value: torch.Tensor = getattr(weight, name)
    return (value.to(torch.bfloat16) if name == "scales" and value.itemsize == 1 else value).detach()


def graph_at(signature: Signature, constants: Mapping[str, Node]) -> Callable[[int], Graph]:
    """The product as a program for each number of rows, or for an open one: inputs x [rows, in] and bias [out], result
    [rows, out] of x's type.

    For few rows weights are not rounded to x's type once they are scaled, where a kernel scales sums of codes instead: that is
    more exact, and faster (`keeps_digits`).
    """
    out, inner = signature.shape

    def at(rows: int) -> Graph:
        x = input_("x", signature.activations, (rows, inner))
        bias = None if signature.bias is None else input_("bias", signature.bias, (out,))
        y = quantised_linear(
            x,
            constants["codes"],
            constants["scales"],
            signature.group_size,
            zero_point=constants.get("zero_points"),
            offset=constants.get("offsets"),
            factor=constants.get("factor"),
            divides=signature.factor == "divide",
            bias=bias,
            quantize_activations=signature.quantize_activations,
        )
        graph = Graph("linear", (x,) if bias is None else (x, bias), (y,), ("y",))
        return optimise(graph, excess_precision=True) if keeps_digits(signature, rows) else graph

    return at


def keeps_digits(signature: Signature, rows: int) -> bool:
    """Tell whether weights stay as they are once they are scaled, though x has fewer digits: 4-bit ones, for few rows, on
    Hopper."""
    can = signature.codes.bits == 4 and not signature.quantize_activations and "sm_90" in detect(signature.device).features
    return can and rows <= FEW_ROWS


@cache
def rungs(most: int) -> tuple[int, ...]:
    """Numbers of rows that kernels are made for: 1 to 8, a few up to 64; from there the powers of two for a CPU, which cuts
    more rows into such pieces, and for a GPU steps of an eighth or less, to which rows are filled up."""
    small = [r for r in (*range(1, 9), 16, 24, 32, 48, 64) if r <= most]
    if most <= MOST_ROWS_OF_A_CPU:
        return *small, *(1 << i for i in range(7, most.bit_length()))
    large = [(8 + i) << shift for shift in range(3, most.bit_length() - 4) for i in range(1, 9)]
    return *small, *(r for r in large if r <= most)


def pieces(rows: int, most: int) -> list[tuple[int, int]]:
    """The rows to do at a time, with the rung for each piece."""
    steps, found = rungs(most), list[tuple[int, int]]()
    while rows:
        at = bisect_left(steps, rows)
        if at == len(steps) or (most <= MOST_ROWS_OF_A_CPU and steps[at] != rows and rows > 64):
            at -= 1
        count = min(rows, steps[at])
        found.append((count, steps[at]))
        rows -= count
    return found


_tables: dict[Signature, Buckets] = {}
_shared: dict[Signature, _Shared] = {}
_sharing = threading.Lock()


@dataclass(frozen=True)
class _Shared:
    """All that layers of one signature have in common: programs over constants that have no values, and what was chosen.

    Attributes:
        rows: the programs.
        constants: the constants by name.
    """

    rows: AnyRows
    constants: Mapping[str, Node]

    @staticmethod
    def of(signature: Signature) -> _Shared | None:
        """Programs that layers of a signature share; None where a constant is so small that they are written for its value."""
        with _sharing:
            if signature not in _shared:
                try:
                    constants, target = constants_of(signature, _no_value), detect(signature.device)
                    rows = AnyRows(graph_at(signature, constants), target, dims=True)
                    rows.table = _tables.get(signature) or _known_table(signature, target)
                except _NoValueError:
                    return None
                _shared[signature] = _Shared(rows, constants)
            return _shared[signature]


class _NoValueError(Exception):
    """A constant that stands for those of many layers was read."""


def _no_value(name: str) -> torch.Tensor:
    raise _NoValueError(name)


def _known_table(signature: Signature, target: Target) -> Buckets | None:
    """The table that `tune` measured in another process."""
    constants = constants_of(_bare(signature), _no_value)
    rows = AnyRows(graph_at(_bare(signature), constants), target, last=most_rows(target), dims=True)
    return rows.table if rows.recall() else None


def _bare(signature: Signature) -> Signature:
    """The signature of the product alone: what is added for offsets is another one."""
    return replace(signature, parts=(signature.parts[0], False))


class Kernels:
    """Kernels for one weight and one type of activations.

    Attributes:
        signature: what they depend on.
    """

    def __init__(self, signature: Signature, weight: Callable[[], QuantizedWeight]) -> None:
        self.signature: Signature = signature
        self._weight = weight
        target = detect(signature.device)
        self._gpu, self._most = target.kind != "cpu", most_rows(target)
        self._shared = _Shared.of(signature)
        if self._shared is not None:
            self._rows = self._shared.rows
        else:
            constants = constants_of(signature, lambda name: value_of(weight(), name))
            self._rows = AnyRows(graph_at(signature, constants), target, dims=True)
            self._rows.table = _tables.get(signature)
        self._programs: dict[int, Program] = {}
        self._ready: dict[int, Run] = {}
        self._making = threading.Lock()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [rows, in] by the weight, [rows, out], in memory of its own.

        Raises:
            InputError: a CUDA graph is being captured, and there is no kernel for so many rows yet.
        """
        rows = x.shape[0]
        side = () if bias is None else (bias,)
        run = self._ready.get(rows)
        if run is not None:
            return self._result(run, (x, *side))
        if not rows:
            return x.new_empty((0, self.signature.shape[0]))
        cut = pieces(rows, self._most)
        self.make([rung for _, rung in cut])
        results: list[torch.Tensor] = []
        start = 0
        for count, rung in cut:
            part = x[start : start + count]
            if rung > count:
                part = torch.cat((part, x.new_zeros((rung - count, x.shape[1]))))
            results.append(self._result(self._ready[rung], (part, *side))[:count])
            start += count
        return results[0] if len(results) == 1 else torch.cat(results)

    @staticmethod
    def _result(run: Run, values: Sequence[torch.Tensor]) -> torch.Tensor:
        (result,) = run(values)
        assert isinstance(result, torch.Tensor)
        return result

    def prepare(self, rows: Iterable[int]) -> None:
        """Make the kernels for so many rows.

        Raises:
            InputError: as `make`.
        """
        self.make([rung for count in rows for _, rung in pieces(count, self._most)])

    def make(self, rungs: Sequence[int]) -> None:
        """Make, check and keep the kernels of these rungs that there are none of yet; codes are unpacked once for all of them.

        Raises:
            InputError: a CUDA graph is being captured.
        """
        if all(rung in self._ready for rung in rungs):
            return
        if self._gpu and torch.cuda.is_current_stream_capturing():
            raise InputError(
                f"a CUDA graph is being captured, and no kernel is ready for {rungs[0]} rows",
                hint="run the module once with so many rows before, or call its prepare()",
            )
        with self._making:
            missing = [r for r in dict.fromkeys(rungs) if r not in self._ready]
            made = _elsewhere(self._made, missing) if self._gpu else self._made(missing)
            self._programs.update(made)
            self._ready.update({rung: program.run for rung, program in made.items()})

    def to_build(self, rows: Iterable[int]) -> tuple[list[AnyProblem], list[Job]]:
        """The result of `AnyRows.to_build` for so many rows together."""
        rungs = dict.fromkeys(rung for count in rows for _, rung in pieces(count, self._most))
        found = [self._rows.to_build(rung) for rung in rungs if rung not in self._ready]
        return [p for problems, _ in found for p in problems], [job for _, jobs in found for job in jobs]

    def _made(self, rungs: Sequence[int]) -> dict[int, Program]:
        target = detect(self.signature.device)
        if self._gpu and len(rungs) > 1:
            compile_first(*self.to_build(rungs), target)
        made, known = dict[int, Program](), dict[Node, "Value"]()
        if self._shared is not None:
            weight = self._weight()
            known |= {node: value_of(weight, name) for name, node in self._shared.constants.items()}
        with unwritten(cast("list[torch.Tensor]", [*known.values()])):
            for rung in rungs:
                if self._gpu:
                    compiled(self._rows.problems(rung), target)
                made[rung] = self._rows.over(rung, known)
        for program in made.values():
            program.own_graphs = False  # from the next line on
            program.drop_weights()  # what is packed is needed no more: the codes can be unpacked again
        return made

    def candidates(self) -> dict[int, str]:
        """The candidate that multiplies, by the rows of each kernel that is ready."""
        found: dict[int, str] = {}
        for rung, program in sorted(self._programs.items()):
            kernels = [s.decision.kernel for s in program.steps if s.decision is not None]
            found[rung] = max(kernels, key=lambda k: k.packed_bytes).candidate
        return found


_compiled: dict[tuple[AnyProblem, str], Ahead] = {}  # who was asked to compile for a problem and a device


def compile_first(problems: Iterable[AnyProblem], chosen: Iterable[Job], target: Target) -> None:
    """Begin to compile for a GPU, in several processes, what will be tried first for problems, and chosen points; each problem
    once. It goes on while the first of them are checked (`compiled`)."""
    if target.kind == "cpu":
        return
    jobs = {job[0]: job for job in chosen if (job[0], target.device) not in _compiled}
    wanted = [p for p in dict.fromkeys(problems) if (p, target.device) not in _compiled and p not in jobs]
    if jobs or wanted:
        begun = Ahead(wanted, target, first=True, chosen=list(jobs.values()))
        _compiled.update({(p, target.device): begun for p in (*jobs, *wanted)})


def compiled(problems: Iterable[AnyProblem], target: Target) -> None:
    """Wait until what was begun for these problems is compiled, or failed; for each no longer than compiling one may take."""
    for problem in problems:
        begun = _compiled.get((problem, target.device))
        if begun is not None:
            begun.wait(problem)


def _elsewhere(make: Callable[[Sequence[int]], dict[int, Program]], rungs: Sequence[int]) -> dict[int, Program]:
    """Make kernels in a thread of their own: what it allocates outlives the call, and torch may have turned this thread to
    memory that it takes back afterwards (when it warms up what it will capture)."""

    def made() -> dict[int, Program]:
        with torch.no_grad():
            programs = make(rungs)
        torch.cuda.synchronize()
        return programs

    other = _other.get()
    if other is not None:
        return other.submit(made).result()
    with ThreadPoolExecutor(1) as other:
        return other.submit(made).result()


_other: ContextVar[ThreadPoolExecutor | None] = ContextVar("other", default=None)


@contextmanager
def one_thread() -> Generator[None]:
    """A block in which one thread makes all kernels that are made elsewhere."""
    with ThreadPoolExecutor(1) as other:
        token = _other.set(other)
        try:
            yield
        finally:
            _other.reset(token)


def tune(signature: Signature, weight: QuantizedWeight, *, budget_s: float = 30.0, progress: Progress | None = None) -> Buckets:
    """Measure which kernels serve which rows of a signature, unless a process did before; kernels made from now on go by that.

    Raises:
        InputError: no time.
    """
    last = most_rows(detect(signature.device))
    constants = constants_of(_bare(signature), lambda name: value_of(weight, name))
    graphs = graph_at(_bare(signature), constants)
    program = compile_rows(graphs, last=last, dims=True, device=signature.device, budget_s=budget_s, progress=progress)
    assert program.table is not None
    with _sharing:
        _tables[signature] = program.table
        _shared.pop(signature, None)
    return program.table


def most_rows(target: Target) -> int:
    """Rows that are multiplied at once, at most."""
    return MOST_ROWS_OF_A_CPU if target.kind == "cpu" else MOST_ROWS
