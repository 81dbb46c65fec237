"""Advice on products: their types, their shapes, and products that could be one or none."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from tilewright.dtype import F32, F64
from tilewright.ir.anchor import acc_of, stores_of
from tilewright.ir.expression import depends_on_acc, linear_in, outside
from tilewright.ir.graph import Node, toposort
from tilewright.ir.join import manner_of
from tilewright.ir.ops import (
    VIEWS,
    Acc,
    Attention,
    Const,
    Convert,
    Dequantize,
    Gemm,
    Input,
    Item,
    Map,
    Param,
    Quantize,
    gemm,
    maker_of,
)
from tilewright.ir.shown import op_name
from tilewright.ir.types import TensorType
from tilewright.report.explain.advice.case import UNKNOWN, Case, Found, Saving
from tilewright.report.explain.folded import done_by
from tilewright.report.words import listing
from tilewright.runtime.steps import Step
from tilewright.schedule.candidate import MATRIX_LIBRARIES, Refusal, concerns, discover, planned
from tilewright.schedule.cost import predict
from tilewright.schedule.problem import Problem, problem_of

TILE = 64  # extents that are multiples of it waste nothing in any kernel's tiles
STEP = 16  # between the extents that are tried above one that is none
SMALL = 24  # a head of fewer columns is what the task has classes, not a choice
WASTED = 0.1  # of the time: less is not worth another shape
ADDING = ("add", "subtract")


def wasted_tiles(case: Case) -> Iterator[Found]:
    """Extents of weights that leave a good part of a kernel's tiles empty: rounded up they would take no longer."""
    for i, _, node in case.products(Gemm):
        problem = problem_of(node)
        assert isinstance(problem, Problem)
        if case.ceilings is None or problem.rhs.source is None or not problem.weights[problem.rhs.source]:
            continue
        for name, extent in (("columns", problem.N), ("terms a sum", problem.K)):
            better = _rounded_up(case, problem, name, extent)
            if better is None:
                continue
            up, wasted = better
            down = f" or {extent // TILE * TILE}" if extent > TILE else ""
            why = (
                f"its weight has {extent} {name}; the cost model expects {up} to take no longer, for tiles of the kernel are "
                f"partly empty: {wasted * 100:.0f} % of the time"
            )
            change = f"use {up}{down} in place of {extent}; or pad the weight with zeros to {up}"
            yield Found("wasted-tiles", f"a shape of {extent} {name} wastes tiles", why, change, (i,), UNKNOWN)


def _rounded_up(case: Case, problem: Problem, name: str, extent: int) -> tuple[int, float] | None:
    """The extent above this one that takes no longer and costs least for each of its elements, and the part of the time that is
    wasted beside it; None if little is. What is saved is not said: padded products took as long when they were measured."""
    empty = -extent % TILE
    if extent < SMALL or empty / (extent + empty) < WASTED:  # what else makes it slow, such as threads without work, is no tile
        return None
    m, n, k = problem.M, problem.N, problem.K
    own = plain_us(case, problem, m, n, k)
    best: tuple[int, float] | None = None
    for up in range(-(-extent // STEP) * STEP, extent + TILE, STEP):
        us = plain_us(case, problem, m, *((up, k) if name == "columns" else (n, up))) if up > extent else None
        if own and us is not None and us <= own:
            wasted = 1 - us / up * extent / own
            best = (up, wasted) if wasted >= max(WASTED, 0.0 if best is None else best[1]) else best
    return best


def plain_us(case: Case, problem: Problem, m: int, n: int, k: int) -> float | None:
    """The time that the cost model expects of a product of these extents by a constant weight, by the best generated kernel."""
    lhs = Node(Input("a", TensorType(problem.lhs.dtype, (m, k))))
    rhs = Node(Input("b", TensorType(problem.rhs.dtype, (k, n))))
    op = gemm(lhs, rhs, acc_dtype=problem.acc.dtype).op
    assert isinstance(op, Gemm) and case.ceilings is not None
    plain = Problem(op, (lhs.tensor, rhs.tensor), (False, True))
    found: list[float] = []
    for candidate in discover(kind=case.ceilings.kind):
        if candidate.preference >= MATRIX_LIBRARIES.start or not concerns(candidate, plain, case.ceilings):
            continue
        plan = planned(candidate, plain, case.ceilings)
        point = None if isinstance(plan, Refusal) else next(iter(plan.schedules()), None)
        us = None if point is None else predict(candidate, plain, point, case.ceilings)
        found += [] if us is None else [us]
    return min(found, default=None)


def products_in_f64(case: Case) -> Iterator[Found]:
    """Products of doubles."""
    for i, step, node in case.products(Gemm):
        if not isinstance(node.op, Gemm) or node.op.lhs.dtype is not F64 or step.decision is None:
            continue
        peaks = case.ceilings.peak_gops if case.ceilings is not None else {}
        double, single = peaks.get("f64", 0.0), peaks.get("f32", 0.0)
        fraction = 1 - double / single if double and single > double else 0.5
        saving = case.part(i, fraction, "the measured rates of f64 and f32" if double else "half of its bytes")
        why = "its operands are f64, which no model needs for inference, and for which there is no generated kernel"
        change = "convert the model and its inputs to f32: model.float(), or a Cast less in the file"
        yield Found("product-in-f64", "a product is computed in f64", why, change, (i,), saving)


def epilogues_in_f64(case: Case) -> Iterator[Found]:
    """Products of narrower types, with operations behind them that a model computes in doubles."""
    for i, step, node in case.products(Gemm, Attention):
        names = names_in_f64(step)
        if names and done_by(step) != "generated":
            title = f"{listing(names)} behind {'a product' if isinstance(node.op, Gemm) else 'an attention'} in f64"
            why = "no generated kernel computes in f64, so torch does what follows the sums operation by operation"
            change = (
                "leave the conversion to f64 out (.double(), a Cast in the file): sums are f32, and so is what is made of them"
            )
            yield Found("epilogue-in-f64", title, why, change, (i,), case.above_limit(i))


def names_in_f64(step: Step) -> list[str]:
    """The functions of doubles behind a product whose own type is narrower."""
    node = step.part.nodes[0]
    if not isinstance(node.op, (Gemm, Attention)) or acc_of(node).dtype is F64:
        return []
    found = (n for n in toposort(stores_of(node)) if n.dtype is F64 and isinstance(n.op, Map))
    return list(dict.fromkeys(op_name(n) for n in found))


def mixed_operands(case: Case) -> Iterator[Found]:
    """Products of a 16-bit operand by one of f32, which run at the rate of f32."""
    for i, step, _ in case.products(Gemm):
        problem = step.decision.problem if step.decision is not None else None
        if not isinstance(problem, Problem) or case.ceilings is None:
            continue
        sides = (problem.lhs, problem.rhs)
        stored = [s.stored.dtype for s in sides]
        narrow = next((d for d in stored if d.is_float and d.bits == 16), None)
        wide = next((n for n, d in zip(("left operand", "weight"), stored, strict=True) if d.name == "f32"), None)
        if narrow is None or wide is None or any(s.dtype is not F32 for s in sides):
            continue
        rates = [case.ceilings.peak_gops.get(name, 0.0) for name in (narrow.name, "f32")]
        saving = UNKNOWN
        if rates[0] > rates[1] > 0:
            saving = case.part(i, 1 - rates[1] / rates[0], f"the measured rates of f32 and {narrow}")
        why = f"its {wide} is f32 and the other operand {narrow}, so both are multiplied in f32"
        change = f"convert its {wide} to {narrow}, too: a Cast to f32, or a norm that computes in f32, lacks its Cast back"
        yield Found("mixed-operands", f"a product of {narrow} by f32 runs at the rate of f32", why, change, (i,), saving)


def _depths(case: Case) -> dict[Node, int]:
    """The number of products before each node on the longest path."""
    depth: dict[Node, int] = {}
    for node in case.program.graph.nodes():
        depth[node] = max((depth[s] for s in node.src), default=0) + isinstance(node.op, Gemm)
    return depth


def siblings_apart(case: Case) -> Iterator[Found]:
    """Products of one value by several weights that were not joined, with what keeps them apart."""
    depth, groups = _depths(case), dict[tuple[Node, int], list[tuple[int, Node]]]()
    for i, _, node in case.products(Gemm):
        op = node.op
        assert isinstance(op, Gemm)
        if outside(op.rhs, node.src).constant:
            groups.setdefault((_root(outside(op.lhs, node.src)), depth[node]), []).append((i, node))
    for (root, _), members in groups.items():
        if root.constant or len(members) < 2:
            continue
        why = _apart([node for _, node in members])
        if why is None:
            continue
        steps = tuple(i for i, _ in members)
        change = "give them one scale for what they read, and their weights scales of one kind, so that they become one product"
        yield Found("siblings-apart", "products of one value are kept apart", why, change, steps, _joined_saving(case, members))


def _root(node: Node) -> Node:
    """The value that an operand is made of by views, casts and quantisation."""
    while isinstance(node.op, (*VIEWS, Convert, Quantize, Dequantize)):
        node = node.src[0]
    return node


def _apart(nodes: Sequence[Node]) -> str | None:
    """The sentence on what keeps products of one value from being one; None where that is no scale."""
    ops = [n.op for n in nodes if isinstance(n.op, Gemm)]
    lefts = {outside(op.lhs, n.src) for op, n in zip(ops, nodes, strict=True)}
    if len(lefts) > 1:
        scales = {_scales(left) for left in lefts}
        return "each quantises what they read with a scale of its own" if len(scales) > 1 else None
    manners = {manner_of(op.rhs) for op in ops}
    blocks = {d.op.block for op in ops for d in toposort((op.rhs,)) if isinstance(d.op, Dequantize)}
    if len(manners) > 1 and len(blocks) > 1:
        return "the scales of their weights stand for blocks of different sizes"
    shapes = {s.src[1].tensor.rank for op in ops for s in toposort((op.rhs,)) if isinstance(s.op, Dequantize)}
    return "the scales of their weights lie along different axes" if len(manners) > 1 and len(shapes) > 1 else None


def _scales(node: Node) -> tuple[Node, ...]:
    found: list[Node] = []
    while isinstance(node.op, (*VIEWS, Convert, Quantize, Dequantize)):
        found += node.src[1:]
        node = node.src[0]
    return tuple(found)


def _joined_saving(case: Case, members: Sequence[tuple[int, Node]]) -> Saving:
    """The time of the products less that of one product with all their columns, by the cost model."""
    decisions = [case.program.steps[i].decision for i, _ in members]
    if case.ceilings is None or any(d is None or not isinstance(d.problem, Problem) for d in decisions):
        return UNKNOWN
    problems = [d.problem for d in decisions if d is not None and isinstance(d.problem, Problem)]
    first = problems[0]
    if len({(p.lhs.dtype, p.rhs.dtype, p.M, p.K) for p in problems}) > 1:
        return UNKNOWN
    apart = [plain_us(case, p, p.M, p.N, p.K) for p in problems]
    one = plain_us(case, first, first.M, sum(p.N for p in problems), first.K)
    known = [us for us in apart if us is not None]
    if one is None or len(known) < len(apart):
        return UNKNOWN
    return Saving(max(0.0, sum(known) - one), f"the cost model expects {sum(known):,.1f} µs apart, {one:,.1f} as one product")


def shared_weights(case: Case) -> Iterator[Found]:
    """Products by one weight that do not depend on each other: one product of all their rows would read it once."""
    depth, groups = _depths(case), dict[tuple[Node, int], list[tuple[int, Node]]]()
    for i, _, node in case.products(Gemm):
        op = node.op
        assert isinstance(op, Gemm)
        weight = outside(op.rhs, node.src)
        if weight.constant and not outside(op.lhs, node.src).constant:
            groups.setdefault((weight, depth[node]), []).append((i, node))
    for (weight, _), members in groups.items():
        if len(members) < 2 or case.ceilings is None or not case.ceilings.read_gbps:
            continue
        bound = [i for i, _ in members if _memory_bound(case, i)]
        if len(bound) < len(members):
            continue
        size = _stored_bytes(weight)
        us = (len(members) - 1) * size / case.ceilings.read_gbps / 1e3
        own = [t.us for t in (case.folded.times[i] for i in dict.fromkeys(i for i, _ in members)) if t.us is not None]
        least = sum(own) - max(own, default=0.0)  # one product of all rows takes the longest of them, at least
        basis = f"{size / 1e6:,.1f} MB are read {len(members)} times, at the measured bandwidth"
        if us > least:  # a cache is faster
            us, basis = least, f"all but one of them: a cache holds some of the {size / 1e6:,.1f} MB that each reads"
        saving = Saving(us, basis) if own else UNKNOWN
        why = f"{len(members)} products by one weight do not depend on each other, and each reads it from memory"
        change = "concatenate their inputs along the rows (a batch), multiply once, and split the result"
        steps = tuple(i for i, _ in members)
        yield Found("weight-read-again", "one weight is read for several products", why, change, steps, saving)


def _memory_bound(case: Case, i: int) -> bool:
    group = case.folded.group_of(i)
    return group is not None and case.folded.groups[group].memory_bound


def _stored_bytes(node: Node) -> int:
    return sum(n.tensor.size_bytes for n in toposort((node,)) if isinstance(n.op, Const))


def linear_chains(case: Case) -> Iterator[Found]:
    """Two weights in a row with nothing between them: low-rank adapters that were not merged, and layers without activation."""
    made_by = {node: i for i, _, node in case.products(Gemm)}
    for i, _, node in case.products(Gemm):
        first = _plain_left(case, node)
        if first is None or first not in made_by:
            continue
        j = made_by[first]
        base = _added_to(case, node, first)
        if base is not None and base in made_by:
            why = (
                f"x A B is added to x W: with A and B merged into W ({case.folded.names[made_by[base]]}) one product does "
                "what three do"
            )
            change = "merge the adapter before exporting (merge_and_unload of peft): W + A B"
            yield Found(
                "adapter-not-merged",
                "a low-rank adapter is not merged into its weight",
                why,
                change,
                (j, i),
                case.whole([j, i]),
            )
            continue
        saving = _merged_saving(case, j, i)
        if saving is not None:
            why = "its left operand is another product by a weight, with nothing but a scale or a bias between"
            change = (
                "multiply the two weights once and use the product, or put back the activation that is missing between them"
            )
            yield Found(
                "linear-chain", "two linear layers follow each other without an activation", why, change, (j, i), saving
            )


def _plain_left(case: Case, node: Node) -> Node | None:
    """The product that a product's left operand is, seen through views; None if anything that is not linear stands between, or
    something else reads what stands there."""
    op = node.op
    assert isinstance(op, Gemm)
    if not outside(op.rhs, node.src).constant:
        return None
    operand = [n.op for n in toposort((op.lhs,)) if isinstance(n.op, Param)]
    if len(operand) != 1 or any(not isinstance(n.op, (Param, *VIEWS)) for n in toposort((op.lhs,))):
        return None
    index = operand[0].index
    left = node.src[index]
    again = any(isinstance(n.op, Param) and n.op.index == index for n in toposort(stores_of(node)))
    if again or not _read_once(case, left):
        return None
    while isinstance(left.op, VIEWS):
        left = left.src[0]
        if not _read_once(case, left):
            return None
    if isinstance(left.op, Item) or not isinstance(left.op, Gemm) or not outside(left.op.rhs, left.src).constant:
        return None
    return left if _is_linear(left) else None


def _is_linear(node: Node) -> bool:
    """Tell whether a product's one store only scales and shifts by constants."""
    stores = stores_of(node)
    held = depends_on_acc(stores)
    return len(stores) == 1 and _constant(stores[0], node) and _affine(stores[0], node, held)


def _constant(root: Node, node: Node) -> bool:
    """Tell whether an expression of a node reads constants alone, beside acc."""
    return all(node.src[n.op.index].constant for n in toposort((root,)) if isinstance(n.op, Param))


def _affine(root: Node, node: Node, held: Collection[Node]) -> bool:
    """Tell whether an expression of a node only scales what some of its values hold, by constants, and adds to it."""
    for n in toposort((root,)):
        at = [i for i, s in enumerate(n.src) if s in held]
        if not at or isinstance(n.op, VIEWS) or (isinstance(n.op, Map) and n.op.fn in ADDING):
            continue
        if isinstance(n.op, Convert):  # to integers it rounds, to 8 bits it quantises
            ok = n.dtype.is_float and n.dtype.bits >= 16
        else:
            others = (s for i, s in enumerate(n.src) if i not in at)
            ok = isinstance(n.op, Map) and linear_in(n, at) and all(_constant(s, node) for s in others)
        if not ok:
            return False
    return True


def _read_once(case: Case, node: Node) -> bool:
    """Tell whether one operand of one node is all that reads a value, which is no output."""
    return node not in case.program.graph.outputs and sum(r.src.count(node) for r in case.reasons.readers(node)) == 1


def _adds(node: Node, other: Node) -> bool:
    """Tell whether a product's one store adds another value to its sums, each scaled by constants, and no more of them."""
    stores = stores_of(node)
    leaves = {n for n in toposort(stores) if isinstance(n.op, Param) and maker_of(node.src[n.op.index]) is other}
    ours, theirs = depends_on_acc(stores), set(leaves)
    for n in toposort(stores):
        if any(s in theirs for s in n.src):
            theirs.add(n)
    for n in toposort(stores) if len(stores) == 1 else ():
        sides = sorted(n.src, key=lambda s: s in theirs) if isinstance(n.op, Map) and n.op.fn in ADDING else [n]
        if [(s in ours, s in theirs) for s in sides] != [(True, False), (False, True)]:
            continue
        if not _affine(sides[0], node, ours) or not _affine(sides[1], node, theirs):
            continue
        rest, seen = [stores[0]], {n}
        while rest:  # what is read but through this sum
            one = rest.pop()
            if one not in seen:
                seen.add(one)
                rest += one.src
        if not any(isinstance(one.op, Acc) or one in leaves for one in seen):
            return True
    return False


def _added_to(case: Case, node: Node, first: Node) -> Node | None:
    """The product of the same value by another weight to which a linear product is added; None if there is none."""
    left = _root(outside(first.op.lhs, first.src)) if isinstance(first.op, Gemm) else None

    def alike(other: Node) -> bool:
        op = other.op
        return isinstance(op, Gemm) and outside(op.rhs, other.src).constant and _root(outside(op.lhs, other.src)) is left

    if _is_linear(node) and _read_once(case, node):
        for reader in case.reasons.readers(node):
            if alike(reader) and _adds(reader, node):
                return reader
    for n in toposort(stores_of(node)):
        source = maker_of(node.src[n.op.index]) if isinstance(n.op, Param) else node
        if source in (node, first) or not alike(source) or not _is_linear(source):
            continue
        if _read_once(case, source) and _adds(node, source):
            return source
    return None


def _merged_saving(case: Case, first: int, second: int) -> Saving | None:
    """The saving of one product in place of two in a row; None if it would be none."""
    decisions = [case.program.steps[i].decision for i in (first, second)]
    one, two = (d.problem if d is not None else None for d in decisions)
    if not isinstance(one, Problem) or not isinstance(two, Problem) or case.ceilings is None:
        return None
    merged = plain_us(case, two, two.M, two.N, one.K)
    us = [case.folded.times[i].us for i in (first, second)]
    if merged is None or None in us or one.K * two.N >= one.K * one.N + two.K * two.N:
        return None
    both = sum(t for t in us if t is not None)
    return (
        Saving(both - merged, f"{both:,.1f} µs for both; the cost model expects {merged:,.1f} of one")
        if both > merged
        else None
    )
