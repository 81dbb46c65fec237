"""Products whose operands and side inputs are computed, of any extents and types."""

from tilewright.dtype import BF16, F16, F32, PRED, S32, DType
from tilewright.ir.anchor import operands_of, rebuilt, stores_of
from tilewright.ir.build import const, convert, input_, map_, reshape, swap_last
from tilewright.ir.expression import Sources
from tilewright.ir.graph import Graph, Node, substitute, toposort
from tilewright.ir.ops import Convert, Input, Select, gemm
from tilewright.ir.pattern import rewrite
from tilewright.rules.computed import compute_operand_where_it_is_read, compute_side_input_in_the_store
from tilewright.schedule.problem import Problem, problem_of


def prologues(d: DType, m: int, k: int) -> dict[str, Node]:
    """Operands [m, k] of type d, computed."""
    x, y = input_("x", d, (m, k)), input_("y", d, (m, k))
    if d.is_integer:
        return {
            "masked": Node(Select(), input_("p", PRED, (m, k)), x, const(1, d)),
            "bounded": map_("minimum", map_("maximum", x, const(-7, d)), y),
            "narrowed": Node(Convert(d, "saturate"), input_("wide", S32, (m, k))),
        }
    return {
        "silu": map_("multiply", map_("silu", x), y),
        "relu": map_("relu", x),
        "exponential": map_("exponential", map_("negate", map_("abs", x))),
        "masked": Node(Select(), input_("p", PRED, (m, k)), x, const(0.0, d)),
        "by a row": map_("multiply", x, input_("r", d, (k,))),
        "by a column": map_("add", x, input_("c", d, (m, 1))),
        "narrowed": convert(map_("tanh", input_("wide", F32, (m, k))), d),
        "of heads": map_("negate", reshape(input_("h", d, (m * k,)), (m, k))),
        "turned": swap_last(map_("clamp", const(-1.0, d), input_("t", d, (k, m)), const(0.75, d))),
    }


def sides(d: DType, m: int, n: int) -> dict[str, Node]:
    """Expressions that are added to a product [m, n]."""
    c = input_("side", d, (m, n))
    return {
        "beta": map_("multiply", c, const(0.5, d)),
        "masked": Node(Select(), input_("sp", PRED, (m, n)), c, const(-1.0, d)),
        "biases": map_("add", input_("b0", d, (n,)), input_("b1", d, (n,))),
        "turned": map_("abs", swap_last(input_("st", d, (n, m)))),
        "a column": map_("negate", input_("sc", d, (m, 1))),
        "a function": map_("silu", c),
    }


def folded(result: Node) -> Problem:
    """The one gemm that a program becomes."""
    inputs = tuple(n for n in toposort((result,)) if isinstance(n.op, Input))
    graph = Graph("g", inputs, (result,), ("out",))
    (node,) = rewrite(graph, [compute_operand_where_it_is_read, compute_side_input_in_the_store]).outputs
    return problem_of(node)


def problem(d: DType, name: str, m: int, k: int, n: int, side: str | None = None, right: str | None = None) -> Problem:
    """[m, k] @ [k, n], the left operand computed, maybe the right one too, and maybe what is added."""
    b = input_("b", d, (k, n))
    if right is not None:
        made = prologues(d, n, k)[right]
        own = {x: input_(f"right_{x.op.label}", x.dtype, x.shape) for x in toposort((made,)) if isinstance(x.op, Input)}
        b = swap_last(substitute((made,), own)[0])
    product = gemm(prologues(d, m, k)[name], b, out_dtype=d if d in (BF16, F16) else None)
    if side is None:
        return folded(product)
    sources = Sources(product.src)
    store = map_("add", stores_of(product)[0], sources.param(sides(product.dtype, m, n)[side]))
    return folded(rebuilt(product, operands_of(product), [store], sources.nodes))
