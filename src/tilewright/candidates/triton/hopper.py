"""Gemms on Hopper: warp-specialised, persistent, fed and emptied by TMA (`_hopper_text.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from tilewright.candidates.triton import _module as module
from tilewright.candidates.triton._casts import pointer_type
from tilewright.candidates.triton._hopper_form import Form
from tilewright.candidates.triton._hopper_plan import Plan, plan_of
from tilewright.candidates.triton._hopper_ptx import Rewrite, narrowed, paired, rewriting, unsigned, widest_products
from tilewright.candidates.triton._hopper_run import runner
from tilewright.candidates.triton._hopper_space import form_of, plan_for, point_of, points, work
from tilewright.candidates.triton._hopper_text import Writer
from tilewright.dtype import F8E4M3FN, F8E5M2, U8, DType
from tilewright.hardware.target import Target
from tilewright.ir.access import Unsupported
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import GPU, Kernel, Runner
from tilewright.schedule.cost import Work
from tilewright.schedule.problem import Problem, ProblemKind
from tilewright.schedule.schedule import Schedule

# Hopper keeps about 14 bits of a sum of 8-bit float products (DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.2).
SHORT_SUM_BITS = 14
MOST_SPILLED = 64  # bytes of a thread, a few loads a tile
MOST_TRIED = 12  # points; the ranking is better than what is left of them
TMA_TYPES = {"bf16": "bf16", "f16": "fp16", "s8": "i8", "u8": "i8", "f8e4m3fn": "fp8e4nv", "f8e5m2": "fp8e5"}


@dataclass(frozen=True)
class Built:
    """Machine code and the names of its arguments, in order."""

    kernel: Any
    names: tuple[str, ...]


class Hopper:
    """Found by file name; see `schedule.candidate.Candidate`."""

    name = "hopper"
    kinds = frozenset[ProblemKind]({"gemm"})
    devices = GPU
    preference = 4

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if "sm_90" not in target.features:
            return "wgmma and TMA as they are used here are Hopper's (sm_90)"
        if not module.installed():
            return module.INSTALL
        plan = plan_of(problem)
        if isinstance(plan, str):
            return plan
        if not points(problem, plan, target):
            return "no tile fits shared memory"
        return None

    def schedules(self, problem: Problem, target: Target) -> Iterable[Schedule]:
        plan = _plan(problem)
        found = points(problem, plan, target)[:MOST_TRIED]
        return (_with_bits(problem, p.schedule(plan.tile_k)) for p in found)

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        return work(problem, _plan(problem), point_of(schedule), target)

    def build(self, problem: Problem, schedule: Schedule, target: Target) -> Kernel:
        point = point_of(schedule)
        plan = plan_for(_plan(problem), point)
        form = form_of(problem, plan, point)
        built = compiled(form, tuple(t.dtype for t in problem.types), target.index)
        needs = module.needs(built.kernel)
        if needs.spills > MOST_SPILLED:
            raise Unsupported(f"{needs.spills} bytes of a thread's values have no register")
        device = torch.device(target.device)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            return runner(problem, plan, form, built.kernel, built.names, point.blocks, point.shared_tiles, weights, device)

        packed = [m for m in (plan.lhs, plan.rhs) if m.constant and m.source is None]
        side_inputs = {int(n[1:]) for n in built.names if n[0] == "p" and n[1:].isdigit()}
        return Kernel(
            self.name,
            schedule,
            prepare,
            workspace_bytes=8 * point.blocks * point.tile_m * point.tile_n if point.shared_tiles else 0,
            packed_bytes=sum(m.copied_bytes for m in packed),
            unread=frozenset(i for m in packed for i in _sources(m.root) if i not in side_inputs),
            roundoff=2.0 ** (1 - SHORT_SUM_BITS) if _short(plan) else 0.0,
            registers=needs.registers,
            spills=needs.spills,
            shared_bytes=needs.shared_bytes,
        )


def _plan(problem: Problem) -> Plan:
    plan = plan_of(problem)
    assert isinstance(plan, Plan)
    return plan


def _short(plan: Plan) -> bool:
    return plan.lhs.dtype in (F8E4M3FN, F8E5M2)


def _with_bits(problem: Problem, schedule: Schedule) -> Schedule:
    short = _short(_plan(problem))
    return Schedule((*schedule.knobs, ("acc_bits", SHORT_SUM_BITS))) if short else schedule


def _sources(root: Any) -> Iterable[int]:
    from tilewright.ir.graph import toposort

    return (n.op.index for n in toposort((root,)) if isinstance(n.op, Param))


def signature(form: Form, names: Iterable[str], types: tuple[DType, ...]) -> dict[str, str]:
    """Triton's type of each argument of a form's kernel."""
    found: dict[str, str] = {}
    for name in names:
        if name == "a_desc":
            found[name] = _descriptor(TMA_TYPES[form.lhs.dtype.name], form.lhs.box(form.rows, form.tile_k))
        elif name == "b_desc":
            found[name] = _descriptor(TMA_TYPES[form.rhs.dtype.name], form.rhs.box(form.unit, form.tile_k))
        elif name.endswith("_desc"):
            out = form.outs[int(name[1:-5])]
            what = (out.access.root, out.view) if name[0] == "c" else out.fetched
            assert what is not None and what[1] is not None
            found[name] = _descriptor(pointer_type(what[0].dtype)[1:], what[1].box)
        elif name == "partial":
            found[name] = "*i32" if form.acc.is_integer else "*fp32"
        elif name == "arrived":
            found[name] = "*i32"
        elif name[1:].isdigit():
            at = int(name[1:])
            found[name] = pointer_type(types[at] if name[0] == "p" else form.outs[at].access.root.dtype)
        else:
            found[name] = "i32"
    return found


def _descriptor(kind: str, box: Iterable[int]) -> str:
    from triton.experimental.gluon import language as gl

    extents = list(box)
    element = gl.dtype(re.sub(r"^([iu])(?=\d)", lambda m: {"i": "int", "u": "uint"}[m[1]], kind))
    layout = gl.NVMMASharedLayout.get_default_for(extents, element)
    return f"tensordesc<{kind}{extents},{layout!r}>"


def compiled(form: Form, types: tuple[DType, ...], device: int = 0) -> Built:
    """A form's machine code; `types` are those of the gemm's sources. Once it has run it is loaded on one device."""
    writer = Writer(form, lambda n: f"p{n.op.index}")  # pyright: ignore[reportAttributeAccessIssue]
    names = tuple(writer.arguments)
    kinds = tuple(signature(form, names, types).items())
    return Built(_machine_code(writer.write(), kinds, form.chained, _Rewritten.of(form), device), names)


@dataclass(frozen=True)
class _Rewritten:
    """What is rewritten in a form's PTX."""

    widest: bool
    columns: int | None
    lhs_unsigned: bool
    rhs_unsigned: bool
    paired: bool

    @classmethod
    def of(cls, form: Form) -> _Rewritten:
        widest = form.acc.is_integer and form.shape_n == 256
        columns = form.tile_n if form.tile_n < form.shape_n else None
        return cls(widest, columns, form.lhs.dtype is U8, form.rhs.dtype is U8, form.paired)

    def rewrites(self) -> list[Rewrite]:
        """In order."""
        found: list[Rewrite] = [widest_products] if self.widest else []
        if self.columns is not None:
            found.append(partial(narrowed, columns=self.columns))
        if self.lhs_unsigned or self.rhs_unsigned:
            found.append(partial(unsigned, lhs=self.lhs_unsigned, rhs=self.rhs_unsigned))
        return [*found, paired] if self.paired else found


@lru_cache(maxsize=512)
def _machine_code(text: str, kinds: tuple[tuple[str, str], ...], chained: bool, rewritten: _Rewritten, device: int) -> Any:
    """Triton's compiled kernel of a text, which loads itself once, on the device that is then the current one."""
    with rewriting(*rewritten.rewrites()):
        return module.compiled(
            module.module(text).gemm,
            dict(kinds),
            module.Arch("cuda", 90, 32),
            num_warps=4,
            launch_pdl=chained,
            enable_fp_fusion=False,
        )


CANDIDATE = Hopper()
