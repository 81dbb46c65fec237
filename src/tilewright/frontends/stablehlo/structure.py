"""Lowerings of what joins operations together: calls, fusions, composites, tuples, tokens, asynchronous pairs, custom calls."""

from __future__ import annotations

from tilewright.dtype import S32
from tilewright.errors import InputError
from tilewright.frontends.stablehlo.elementwise import elementwise_target
from tilewright.frontends.stablehlo.module import mlir_type, tensor_type
from tilewright.frontends.stablehlo.registry import LOWERINGS, Site, Value, lowers, one_or_all
from tilewright.frontends.stablehlo.scaled_dot import TARGET, scaled_dot
from tilewright.ir.build import convert, extents, input_, map_
from tilewright.ir.types import TensorType

ELIDED = "tilewright.elided."
"""Custom call that stands, once HLO text is prepared, for a constant whose value the text leaves out."""

# Custom calls that only say where or how a value is kept.
_IDENTITIES = (
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "LayoutConstraint",
    "MoveToDevice",
    "MoveToHost",
    "annotate_device_placement",
    "xla.sdy.FuncResultSharding",
    "xla.sdy.Sharding",
)
_TOP_K = ("TopK", "mhlo.topk")


@lowers(
    "mhlo.copy",
    "mhlo.domain",
    "mhlo.add_dependency",
    "sdy.sharding_constraint",
    "sdy.reshard",
    "stablehlo.optimization_barrier",
)
def _identity(site: Site) -> Value:
    """Drop the token of a dependency: where a value is kept, and when it is computed, is nothing the graph says."""
    results = len(site.op.results)
    return one_or_all(list(site.values[:results]))


@lowers("stablehlo.create_token", "stablehlo.after_all")
def _token(site: Site) -> Value:
    return None


@lowers("func.call", "mhlo.call")
def _call(site: Site) -> Value:
    return one_or_all(site.reader.call(site.op.string("callee"), site.values, site.op.where))


@lowers("stablehlo.composite")
def _composite(site: Site) -> Value:
    """A composite is its decomposition."""
    return one_or_all(site.reader.call(site.op.string("decomposition"), site.values, site.op.where))


@lowers("mhlo.fusion")
def _fusion(site: Site) -> Value:
    """A fusion is its body: what it says about scheduling is the source compiler's."""
    return one_or_all(site.reader.region(site.op, site.values))


@lowers("stablehlo.async_start")
def _async_region(site: Site) -> Value:
    """The results of what is started, for `async_done` to pick up."""
    return site.reader.region(site.op, site.values)


@lowers("mhlo.async_start")
def _async_start(site: Site) -> Value:
    """The results of what is started, for `async_done` to pick up."""
    return site.reader.call(site.op.string("called_computation"), site.values, site.op.where)


@lowers("mhlo.async_done", "mhlo.async_update", "stablehlo.async_done")
def _async_done(site: Site) -> Value:
    (started,) = site.values
    return one_or_all(started) if isinstance(started, list) and site.op.name.endswith("done") else started


@lowers("stablehlo.tuple")
def _tuple(site: Site) -> Value:
    return list(site.values)


@lowers("stablehlo.get_tuple_element")
def _get_tuple_element(site: Site) -> Value:
    (whole,) = site.values
    index = site.op.integer("index")
    if not isinstance(whole, list) or not 0 <= index < len(whole):
        raise InputError(f"element {index} is taken of something that has none", where=site.op.where)
    return whole[index]


@lowers("stablehlo.get_dimension_size")
def _dimension_size(site: Site) -> Value:
    return convert(extents((site.nodes[0].shape[site.op.integer("dimension")],), single=True), S32)


@lowers("mhlo.topk")
def _top_k(site: Site) -> Value:
    return _largest(site, site.op.integer("k"), site.outs)


@lowers("stablehlo.custom_call")
def _custom_call(site: Site) -> Value:
    """Known targets: annotations, elementwise functions, top-k, scaled-dot, and constants that the text leaves out."""
    target = site.op.string("call_target_name")
    if target.startswith(ELIDED):
        return _elided(site, target.removeprefix(ELIDED))
    if target.startswith(TARGET):
        return scaled_dot(site)
    if target in _IDENTITIES:
        results = [r.type for r in site.op.results]
        if results != [v.type for v in site.op.operands[: len(results)]]:
            raise site.refuse(f"{target!r} changes the type of its operand", hint="read the program before it is partitioned")
        return _identity(site)
    if target == "shape_assertion":
        return _asserted(site)
    function = elementwise_target(target, len(site.values))
    if function is not None:
        return map_(function, *site.nodes)
    if target in LOWERINGS and target.startswith("stablehlo."):  # of an operation that has sizes as operands
        return LOWERINGS[target](site)
    if target in _TOP_K and len(site.values) == 1:
        return _custom_top_k(site)
    raise site.refuse(
        f"custom call to {target!r} cannot be expressed",
        hint="read the program before a compiler for one machine rewrote it, e.g. jax.jit(f).lower(…).as_text()",
    )


def _asserted(site: Site) -> Value:
    """Nothing, if what a program says of its open extents holds.

    Raises:
        InputError: it does not.
    """
    told = site.reader.known.listed(site.nodes[0])
    if told is not None and not told[0]:
        what = site.op.string("error_message").partition("Using the following")[0].partition(", but found")[0]
        raise InputError(
            what.rstrip(" ."), where=site.op.where, hint='bounds that the program allows: Dim("b", low, high, multiple_of)'
        )
    return []


def _elided(site: Site, label: str) -> Value:
    """An input called as the constant is: its value has to be given."""
    found = site.reader.elided.get(label)
    if found is None:
        found = input_(label, site.out.dtype, site.out.shape)
        site.reader.elided[label] = found
    return found


def _custom_top_k(site: Site) -> Value:
    raw = [t for r in site.op.results for t in _leaves(r.type)]
    outs = [tensor_type(t, site.op.where) for t in raw]
    if len(outs) != 2 or not outs[0].shape:
        raise site.refuse("a top-k with other results than values and indices")
    return _largest(site, outs[0].shape[-1], outs)


def _leaves(raw: object) -> list[object]:
    count = getattr(raw, "num_types", None)
    return [raw] if count is None else [raw.get_type(i) for i in range(count)]  # type: ignore[attr-defined]


def _largest(site: Site, k: int, outs: list[TensorType]) -> Value:
    """The k largest along the last axis, and where they stand, by the decomposition of chlo.top_k."""
    (x,) = site.nodes
    types = ", ".join(map(mlir_type, outs))
    text = (
        f"func.func @main(%x: {mlir_type(x.tensor)}) -> ({types}) {{\n"
        f"  %v, %i = chlo.top_k(%x, k = {k}) : {mlir_type(x.tensor)} -> ({types})\n"
        f"  return %v, %i : {types}\n}}"
    )
    return list(site.reader.expand(text, [x], site.op))
