"""Gemms split again and timed as a whole against the folded form: joined ones by store, any by product and epilogue, and
those with a computed operand by prologue and product. Attentions over paged caches, by the blocks' copies and the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from tilewright.hardware.target import Target
from tilewright.ir.anchor import operands_of, rebuilt, stores_of
from tilewright.ir.build import convert, slice_
from tilewright.ir.expression import make_gemm
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import VIEWS, Acc, Concat, Convert, Dequantize, Gather, Gemm, Param, Slice, Transpose
from tilewright.lowering.pieces import joined, kernels_of, offered, own_of, whole_of
from tilewright.schedule.candidate import (
    ATTENTION,
    CPU,
    GEMM,
    GPU,
    MATRIX_LIBRARIES,
    Candidate,
    Kernel,
    Refusal,
    Runner,
    Schedule,
    concerns,
    discover,
    planned,
)
from tilewright.schedule.cost import passes, predict, predict_us
from tilewright.schedule.problem import AnyProblem, AttentionProblem, FusionProblem, Problem, fusion_of, problem_of
from tilewright.schedule.recipe import Built, Parts, Split, describe, recipe_of
from tilewright.schedule.search import DEPTH, search

PART_BUDGET_S = 0.1
PART_WITHIN_S = 1.0  # by the clock, where compiling or checking what is then too slow takes seconds


@dataclass(frozen=True)
class Piece:
    """A problem of its own.

    Attributes:
        problem: the problem.
        places: index of each of its sources among the gemm's sources and, behind them, the results of earlier pieces.
    """

    problem: AnyProblem
    places: tuple[int, ...]


def columns_read(store: Node) -> tuple[int, int] | None:
    """The one range of acc's columns that a store reads; None if it reads several, or all."""
    ranges: set[tuple[int, int]] = set()
    for n in toposort((store,)):
        if any(isinstance(s.op, Acc) for s in n.src):
            if not isinstance(n.op, Slice):
                return None
            ranges.add((n.op.start[-1], n.op.stop[-1]))
    return ranges.pop() if len(ranges) == 1 else None


def by_store(problem: Problem) -> list[Piece]:
    """A gemm for each store, each of which reads one range of columns (see `columns_read`)."""
    op, acc = problem.op, Node(Acc(problem.op.acc_type))
    pieces: list[Piece] = []
    for store in op.stores:
        read = columns_read(store)
        assert read is not None
        rhs = _columns(op.rhs, len(op.rhs.shape) - 1, *read)
        narrow = Node(Acc(Gemm(op.acc_dtype, op.lhs, rhs, ()).acc_type))
        alone = substitute((store,), {slice_(acc, -1, *read): narrow})
        pieces.append(_product(problem, make_gemm(op.acc_dtype, op.lhs, rhs, alone, problem.node.src)))
    return pieces


def by_epilogue(problem: Problem) -> list[Piece]:
    """The product alone, and then what its stores do with it, as a fusion that gives all results.

    What lies between has the narrower type to which all stores convert sums first, if there is one: half the bytes, and kernels
    that give no other type can make it.
    """
    op, own = problem.op, problem.node.src
    acc = Node(Acc(op.acc_type))
    sums, roots = acc, op.stores
    kind = problem.first_conversion()
    if kind is not None and kind.bits < acc.dtype.bits:
        narrow = Node(Acc(replace(op.acc_type, dtype=kind)))
        found = _converted_first(op.stores, acc, narrow)
        if all(any(not isinstance(n.op, (Acc, *VIEWS)) for n in toposort((root,))) for root in found):
            sums, roots, acc = convert(acc, kind), found, narrow
    product = _product(problem, make_gemm(op.acc_dtype, op.lhs, op.rhs, (sums,), own))
    result = Node(Param(len(own), sums.tensor))
    roots = substitute(roots, {acc: result})
    read = [n for n in toposort(roots) if isinstance(n.op, Param)]
    region, order = fusion_of(read, roots)
    places = tuple(n.op.index for n in order if isinstance(n.op, Param))
    weights = tuple(i < len(own) and problem.weights[i] for i in places)
    return [product, Piece(replace(region, weights=weights), places)]


def by_operands(problem: Problem) -> list[Piece]:
    """Fusions that compute the operands, one result each, and then the product of what lies in memory."""
    op, own = problem.op, problem.node.src
    pieces: list[Piece] = []
    made: dict[Node, Node] = {}
    for root in (op.lhs, op.rhs):
        node = computed(root, problem.weights)
        if node is None or node in made:
            continue
        pieces.append(_alone(problem, node))
        made[node] = Node(Param(len(own) + len(made), node.tensor))
    lhs, rhs = substitute((op.lhs, op.rhs), made)
    values = (*own, *made.values())
    product = make_gemm(op.acc_dtype, lhs, rhs, op.stores, values)
    places = tuple(values.index(s) for s in product.src)
    weights = tuple(i < len(own) and problem.weights[i] for i in places)
    return [*pieces, Piece(replace(problem_of(product), weights=weights), places)]


def by_pages(problem: AttentionProblem) -> list[Piece]:
    """Fusions that copy the blocks that tables pick, one result each, and then the attention over what lies in memory."""
    node, own = problem.node, problem.node.src
    pieces: list[Piece] = []
    made: dict[Node, Node] = {}
    for n in picked(problem):
        pieces.append(_alone(problem, n))
        made[n] = Node(Param(len(own) + len(made), n.tensor))
    values = (*own, *made.values())
    rest = rebuilt(node, substitute(operands_of(node), made), stores_of(node), values)
    places = tuple(values.index(s) for s in rest.src)
    weights = tuple(i < len(own) and problem.weights[i] for i in places)
    return [*pieces, Piece(replace(problem_of(rest), weights=weights), places)]


def picked(problem: AttentionProblem) -> list[Node]:
    """The blocks that tables pick in an attention's operands."""
    return [n for n in toposort(operands_of(problem.node)) if isinstance(n.op, Gather)]


def _alone(problem: Problem | AttentionProblem, node: Node) -> Piece:
    """A fusion that computes one node of an operand and gives it as its only result."""
    region, order = fusion_of([n for n in toposort((node,)) if isinstance(n.op, Param)], (node,))
    places = tuple(n.op.index for n in order if isinstance(n.op, Param))
    return Piece(replace(region, weights=tuple(problem.weights[i] for i in places)), places)


def computed(root: Node, weights: Sequence[bool]) -> Node | None:
    """The value of an operand that a function, a select or a narrowing cast of what is no weight gives, before it is viewed,
    widened or dequantised; None if it is read as it lies."""
    node = root
    while isinstance(node.op, (*VIEWS, Dequantize)) or (
        isinstance(node.op, Convert) and node.src[0].dtype.bits <= node.dtype.bits
    ):
        node = node.src[0]
    given = [n.op.index for n in toposort((node,)) if isinstance(n.op, Param)]
    return None if isinstance(node.op, Param) or not node.src or all(weights[i] for i in given) else node


def _converted_first(stores: Sequence[Node], acc: Node, narrow: Node) -> tuple[Node, ...]:
    """Stores all of which convert `acc`, or ranges of it, to the type of `narrow` first, over that in its place."""
    raw, known = {acc: narrow}, dict[Node, Node]()
    for n in toposort(stores):
        if isinstance(n.op, Slice) and n.src[0] in raw:
            raw[n] = Node(n.op, raw[n.src[0]])
        elif isinstance(n.op, Convert) and n.src[0] in raw:
            known[n] = raw[n.src[0]]
    return tuple(substitute(stores, known))


def _product(problem: Problem, node: Node) -> Piece:
    """A gemm over the problem's own stand-in sources as a problem of its own."""
    places = tuple(problem.node.src.index(s) for s in node.src)
    part = problem_of(node)
    return Piece(replace(part, weights=tuple(problem.weights[i] for i in places)), places)


def _columns(root: Node, axis: int, start: int, stop: int) -> Node:
    """An operand restricted to part of an axis; one of several side by side is picked as it is."""
    if isinstance(root.op, Transpose):
        return Node(root.op, _columns(root.src[0], root.op.perm[axis], start, stop))
    if isinstance(root.op, Concat) and root.op.axis == axis:
        at = 0
        for part in root.src:
            if (at, at + part.shape[axis]) == (start, stop):
                return part
            at += part.shape[axis]
    return slice_(root, axis, start, stop)


@dataclass(frozen=True)
class Plan:
    """The ways in which a gemm or an attention can be split, by name.

    Pieces are chosen by searches of their own, with random weights, which a GPU reads from memory, as it does most models',
    and a CPU where the last call left them. The whole is then verified and timed as any other candidate is. A kernel's schedule
    names its pieces, so that none of them is searched for twice.
    """

    problem: Problem | AttentionProblem
    target: Target
    ways: tuple[str, ...]

    def schedules(self) -> tuple[Schedule, ...]:
        return tuple(Schedule.of(at=way) for way in self.ways)

    def build(self, schedule: Schedule) -> Kernel:
        """A kernel for each piece: those that `schedule` names, if it is one of a kernel built before; else the fastest.

        Raises:
            UnsupportedError: a piece's candidate is gone, or refuses.
        """
        problem, target, others = self.problem, self.target, _others()
        pieces = pieces_of(problem, schedule)
        # For a GPU the first point of each candidate is compiled beforehand (`schedule/ahead.py`); further ones take seconds.
        cold, depth = (False, DEPTH) if target.kind == "cpu" else (True, 1)
        fastest = partial(search, budget_s=PART_BUDGET_S, candidates=others, within_s=PART_WITHIN_S, cold=cold, depth=depth)
        problems = [p.problem for p in pieces]
        kernels = kernels_of(problems, schedule, target, lambda p, on: fastest(p, on).kernel, others)
        releasable = frozenset(
            i
            for i, weight in enumerate(problem.weights)
            if weight and all(p.places.index(i) in k.releasable for k, p in zip(kernels, pieces, strict=True) if i in p.places)
        )

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            return in_order(pieces, kernels, weights, len(problem.outputs))

        return whole_of(CANDIDATE.name, own_of(schedule), problems, kernels, prepare, releasable)

    def leading(self) -> Schedule | None:
        """The operands by steps of their own, where that is expected to take less than computing them in every tile that reads
        them: unmeasured, each piece by the first kernel that takes it. Blocks are copied where no generated kernel reads them
        where they lie. None where it is not."""
        way = next((w for w in (OPERANDS, PAGES) if w in self.ways), None)
        if way is None:
            return None
        whole = _first(self.problem, self.target)
        if whole is not None and whole[0].preference < min(MATRIX_LIBRARIES) and (way == PAGES or self.target.kind == "cpu"):
            return None  # packing computes each element once, as a step of its own would, and saves the pass
        split_us, kernels = 0.0, list[tuple[str, Schedule]]()
        for piece in _pieces(self.problem, way):
            first = _first(piece.problem, self.target)
            if first is None:
                return None
            split_us += _expected_us(*first, piece.problem, self.target)
            kernels.append((first[0].name, first[1]))
        fused_us = math.inf if whole is None or way == PAGES else _expected_us(*whole, self.problem, self.target)
        return joined(Schedule.of(at=way), kernels) if way == PAGES or split_us < fused_us else None

    def pieces(self) -> list[AnyProblem]:
        """The problems that searches are made for."""
        return list(dict.fromkeys(p.problem for s in self.schedules() for p in pieces_of(self.problem, s)))

    def offers(self, schedule: Schedule) -> bool:
        if schedule["at"] not in self.ways:
            return False
        return offered([p.problem for p in pieces_of(self.problem, schedule)], schedule, self.target, _others())


def plan(problem: Problem | AttentionProblem, target: Target) -> Plan | Refusal:
    """Take gemms with something to take apart: computed operands, several stores, or work between product and store; attentions
    of which a table picks keys or values; else a refusal."""
    if isinstance(problem, AttentionProblem):
        return (
            Plan(problem, target, (PAGES,))
            if picked(problem)
            else Refusal("keys and values are in no blocks that a table picks", "inapplicable")
        )
    op = problem.op
    ways: list[str] = []
    if any(computed(root, problem.weights) is not None for root in (op.lhs, op.rhs)):
        ways.append(OPERANDS)
    if len(op.stores) > 1 and all(columns_read(s) is not None for s in op.stores):
        ways.append("stores")
    if any(not isinstance(n.op, (Acc, *VIEWS)) for s in op.stores for n in toposort((s,))):
        ways.append("epilogue")
    if ways:
        return Plan(problem, target, tuple(ways))
    if len(op.stores) > 1:
        return Refusal("a store reads more than one range of columns")
    why = "nothing stands between product and store, and no operand is computed, so there is nothing to take apart"
    return Refusal(why, "inapplicable")


def in_order(pieces: Sequence[Piece], kernels: Sequence[Kernel], weights: Mapping[int, torch.Tensor], count: int) -> Runner:
    """A runner of a gemm's pieces one after the other, of which the last `count` results are the gemm's."""
    runners = [
        k.prepare({at: weights[i] for at, i in enumerate(p.places) if i in weights})
        for k, p in zip(kernels, pieces, strict=True)
    ]

    def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values = list(sources)
        for r, p in zip(runners, pieces, strict=True):
            values += r([values[i] for i in p.places])
        return values[-count:]

    def recipe(parts: Parts) -> Split:
        each = zip(runners, kernels, strict=True)
        return Split(tuple(recipe_of(r, parts) or Built.of(k) for r, k in each))

    return describe(run, recipe)


OPERANDS, PAGES = "operands", "pages"


def pieces_of(problem: Problem | AttentionProblem, schedule: Schedule) -> list[Piece]:
    """The problems into which a point splits a gemm or an attention."""
    return _pieces(problem, str(schedule["at"]))


def _pieces(problem: Problem | AttentionProblem, way: str) -> list[Piece]:
    if isinstance(problem, AttentionProblem):
        return by_pages(problem)
    ways = {OPERANDS: by_operands, "stores": by_store, "epilogue": by_epilogue}
    return ways[way](problem)


def _others() -> list[Candidate]:
    return [c for c in discover() if c.name != CANDIDATE.name]


def _first(problem: AnyProblem, target: Target) -> tuple[Candidate, Schedule] | None:
    """The candidate that comes first where nothing is measured, and its first point."""
    for c in (c for c in _others() if concerns(c, problem, target)):  # they come by preference
        plan = planned(c, problem, target)
        point = None if isinstance(plan, Refusal) else next(iter(plan.schedules()), None)
        if point is not None:
            return c, point
    return None


def _expected_us(candidate: Candidate, point: Schedule, problem: AnyProblem, target: Target) -> float:
    """Predict the microseconds of a kernel. Those that are not generated for the problem compute its operands op by op."""
    if isinstance(problem, FusionProblem):
        return predict_us(passes(problem.roots, together=candidate.preference < min(MATRIX_LIBRARIES)), target)
    us = predict(candidate, problem, point, target) or math.inf
    if isinstance(problem, Problem) and candidate.preference >= min(MATRIX_LIBRARIES):
        roots = [n for n in (computed(r, problem.weights) for r in (problem.op.lhs, problem.op.rhs)) if n is not None]
        us += predict_us(passes(roots, together=False), target) if roots else 0.0
    return us


CANDIDATE = Candidate("split", GEMM | ATTENTION, CPU | GPU, 50, plan)
