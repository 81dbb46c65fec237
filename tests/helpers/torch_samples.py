"""Samples of torch's operators from torch's own database of them, with numbers of the full range put in, read and compared.

torch's tests describe each operator by the types it takes and samples of its arguments (`OpInfo`). A sample is a small program
of its tensors; many are read as one program, so that tracing costs little for each.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch.utils import _pytree as pytree

from tilewright.compiler import compile as compiled
from tilewright.compiler import optimise
from tilewright.dtype import from_torch
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions
from tilewright.frontends import torch as frontend
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph
from tilewright.ir.verify import verify

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.uint16, torch.uint32, torch.uint64)
Form = Literal["as read", "after the rules", "compiled"]
FORMS: tuple[Form, ...] = get_args(Form)

# Operators whose result is not a function of the arguments, or is no tensor of a shape that they fix.
NO_FUNCTIONS = """bernoulli cauchy empty empty_like empty_permuted empty_strided exponential geometric log_normal multinomial
    new_empty new_empty_strided normal rand_like randint randint_like randn randn_like resize_ resize_as_ uniform
    nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.rrelu
    nn.functional.feature_alpha_dropout nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d
    svd_lowrank pca_lowrank to_sparse item nonzero unique unique_consecutive masked_select argwhere equal allclose
    combinations corrcoef cov complex polar view_as_complex stft linspace"""
# Of the same shape and type, element by element; what is out of the type's range, C++ and torch leave undefined.
CONVERSIONS = ("byte", "char", "int", "long", "short")

# Of one tensor and of two, taken with numbers of the full range of each type that torch takes.
UNARY = """abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh deg2rad digamma erf erfc exp exp2 expm1 floor frac
    isfinite isinf isnan lgamma log log10 log1p log2 logical_not nan_to_num neg positive rad2deg reciprocal relu round rsqrt sgn
    sigmoid sign signbit sin sinh sqrt square tan tanh trunc"""
BINARY = """add atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor div eq fmax fmin fmod ge gt le
    logaddexp logical_and logical_or logical_xor lt maximum minimum mul ne pow remainder sub true_divide xlogy"""
# Their sums of products depend on the order where one goes past the type's range, and so on the library.
PRODUCTS = """__rmatmul__ addbmm addmm addmv addr baddbmm bmm dot einsum ger inner linalg.multi_dot matmul mm mv
    nn.functional.bilinear nn.functional.linear outer tensordot vdot"""
SUMS = ("cumsum", "mean", "sum")
REDUCTIONS = "all amax amin any argmax argmin cumsum max mean min prod std sum var"


@dataclass(frozen=True, eq=False)
class Sample:
    """One call of an operator."""

    name: str
    f: Any
    tensors: tuple[torch.Tensor, ...]
    tree: Any
    places: tuple[int, ...]
    leaves: tuple[Any, ...]
    elementwise: bool = False

    def __call__(self, *tensors: torch.Tensor) -> Any:
        filled = list(self.leaves)
        for place, t in zip(self.places, tensors, strict=True):
            filled[place] = t
        args, kwargs = pytree.tree_unflatten(filled, self.tree)
        return self.f(*args, **kwargs)

    def described(self) -> str:
        """The call as text."""
        filled: list[Any] = list(self.leaves)
        for place, t in zip(self.places, self.tensors, strict=True):
            filled[place] = f"{str(t.dtype)[6:]}{list(t.shape)}"
        args, kwargs = pytree.tree_unflatten(filled, self.tree)
        return f"{self.name}{args}{kwargs or ''}"


def sample(name: str, f: Any, args: Sequence[Any], kwargs: dict[str, Any], elementwise: bool = False) -> Sample:
    """A call of `f`, its tensors apart from its other arguments."""
    leaves, tree = pytree.tree_flatten((tuple(args), kwargs))
    places = tuple(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
    return Sample(name, f, tuple(leaves[i].detach() for i in places), tree, places, tuple(leaves), elementwise)


def specials(dtype: torch.dtype) -> list[float | int]:
    """Numbers of a type at which operators differ."""
    if dtype is torch.bool:
        return [0, 1]
    if dtype.is_floating_point:
        i = torch.finfo(dtype)
        some = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 7.0, 30.0, 100.0, i.max, i.tiny, i.eps, 0.1, float("inf")]
        return [*some, *(-x for x in some), float("nan")]
    i = torch.iinfo(dtype)
    return [
        x for x in (i.min, i.min + 1, i.max, i.max - 1, 0, 1, 2, 3, 5, 7, 8, 31, 32, 33, -1, -2, -3, -7) if i.min <= x <= i.max
    ]


def filled(t: torch.Tensor, dice: random.Random, ends: bool = True) -> torch.Tensor:
    """A tensor of the same kind whose elements are of the full range, a half of them special ones.

    `ends`: the largest finite float and the smallest normal one, too.
    """
    if t.dtype not in DTYPES or t.numel() == 0:
        return t
    g = torch.Generator().manual_seed(dice.randrange(1 << 30))
    count = t.numel()
    if t.dtype is torch.bool:
        return (torch.rand(count, generator=g) > 0.5).reshape(t.shape)
    if t.dtype.is_floating_point:
        plain = (torch.randn(count, generator=g) * 2.0 ** torch.randint(-4, 5, (count,), generator=g)).to(t.dtype)
    else:
        i = torch.iinfo(t.dtype)
        low, high = max(i.min, -(1 << 62)), min(i.max, 1 << 62)
        plain = torch.randint(low, high, (count,), generator=g).to(t.dtype)
    some = specials(t.dtype)
    if not ends and t.dtype.is_floating_point:
        some = [x for x in some if abs(x) not in (torch.finfo(t.dtype).max, torch.finfo(t.dtype).tiny)]
    values = [dice.choice(some) for _ in range(count)]
    special = torch.tensor(values, dtype=t.dtype if t.dtype is not torch.uint64 else torch.float64).to(t.dtype)
    bits, chosen = _bits(t.dtype), torch.rand(count, generator=g) < 0.5
    return torch.where(chosen, special.view(bits), plain.view(bits)).view(t.dtype).reshape(t.shape)


def _bits(dtype: torch.dtype) -> torch.dtype:
    return {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(dtype, dtype)


def elementwise(op: Any) -> bool:
    """Tell whether an operator works element by element."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    return isinstance(op, (BinaryUfuncInfo, UnaryUfuncInfo)) or op.name in ("clamp", "where", "lerp", "addcmul")


def of_numbers(op: Any) -> bool:
    """Tell whether any number may be put in for any other: the arguments are no indices, sizes or the like."""
    from torch.testing._internal.opinfo.core import ReductionOpInfo

    return elementwise(op) or isinstance(op, ReductionOpInfo)


def samples_of(op: Any, dtype: torch.dtype, most: int, seed: int = 0) -> Iterator[Sample]:
    """Calls of an operator with tensors of a type: torch's own samples, and with other numbers where any will do."""
    dice = random.Random(f"{op.name} {op.variant_test_name} {dtype} {seed}")
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            given = list(op.sample_inputs("cpu", dtype, requires_grad=False))
        except Exception:  # a sample maker that needs what is not here
            return
    dice.shuffle(given)
    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
    for s in given[:most]:
        one = sample(name, op.op, (s.input, *s.args), s.kwargs, elementwise(op))
        if any(t.layout is not torch.strided or t.is_complex() or t.is_quantized for t in one.tensors) or not one.tensors:
            continue
        yield one
        if of_numbers(op):
            full = tuple(filled(t, dice) for t in one.tensors)
            if op.name in ("div", "lcm") and dtype in (torch.int32, torch.int64):  # torch dies of the lowest divided by -1
                full = tuple(t.clamp(min=torch.iinfo(dtype).min + 1) if t.dtype is dtype else t for t in full)
            yield replace(one, tensors=full)
        elif op.name in PRODUCTS.split() and dtype.is_floating_point:
            yield replace(one, tensors=tuple(filled(t, dice, ends=False) for t in one.tensors))


def own_samples(count: int, seed: int = 0) -> Iterator[Sample]:
    """Calls of elementwise operators and reductions, by random types, shapes and axes, with numbers of the full range."""
    dice = random.Random(seed)
    names = [(n, 1) for n in UNARY.split()] + 2 * [(n, 2) for n in BINARY.split()] + [(n, 0) for n in REDUCTIONS.split()]
    while count:
        name, arity = dice.choice(names)
        dtype, f = dice.choice(DTYPES), getattr(torch, name)
        shape = [dice.choice((0, 1, 2, 3, 5, 7)) for _ in range(dice.randrange(4))]
        x = filled(torch.zeros(shape, dtype=dtype), dice)
        if arity == 1:
            yield sample(name, f, (x,), {}, True)
        elif arity == 2:
            like = [d if dice.random() < 0.7 else 1 for d in shape]
            other = dtype if dice.random() < 0.6 else dice.choice(DTYPES)
            y = filled(torch.zeros(like, dtype=other), dice)
            yield sample(name, f, (x, dice.choice(specials(dtype)) if dice.random() < 0.2 else y), {}, True)
        else:
            axis = dice.randrange(-len(shape), len(shape)) if shape else 0
            keeps = {"keepdim": True} if name != "cumsum" and dice.random() < 0.5 else {}
            yield sample(name, f, (x, axis), keeps)
        count -= 1


def results(value: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def difference(given: torch.Tensor, wanted: torch.Tensor, others: Iterable[torch.Tensor] = ()) -> str | None:
    """Say what is wrong with a result: elements that are neither those wanted nor those of another result that is as right."""
    if given.dtype != wanted.dtype or given.shape != wanted.shape:
        return f"{given.dtype}{list(given.shape)} for {wanted.dtype}{list(wanted.shape)}"
    off = _off(given, wanted)
    if off.any():
        for other in others:
            off = off & _off(given, other)
    return _at(given, wanted, off) if off.any() else None


def _off(given: torch.Tensor, wanted: torch.Tensor, ulps: float = 8.0, depth: float = 64.0) -> torch.Tensor:
    """Elements that differ: floats by more than `ulps` of their own rounding step and `depth` steps of the largest value."""
    if wanted.is_complex():
        given, wanted = torch.view_as_real(given.resolve_conj()), torch.view_as_real(wanted.resolve_conj())
    if not wanted.dtype.is_floating_point:
        bits = _bits(wanted.dtype)
        return given.view(bits) != wanted.view(bits)
    a, b = given.to(torch.float64), wanted.to(torch.float64)
    step = from_torch(wanted.dtype).epsilon
    off = (a.isnan() != b.isnan()) | (b.isinf() & (a != b)) | (a.isinf() & (a != b))
    finite = b.isfinite() & a.isfinite()
    if finite.any():
        largest = b[finite].abs().max().clamp(max=1e3)
        bound = ulps * step * b.abs() + depth * step * largest + float(torch.finfo(wanted.dtype).tiny)
        off |= finite & ((a - b).abs() > bound)
    return off | ((a == 0) & (b == 0) & (a.signbit() != b.signbit()))


def _at(given: torch.Tensor, wanted: torch.Tensor, off: torch.Tensor) -> str:
    place = tuple(int(i) for i in off.nonzero()[0][: given.dim()])
    return f"{int(off.sum())} of {off.numel()} differ; at {place} {given[place].item()}, not {wanted[place].item()}"


def _as_right(s: Sample, place: int, given: torch.Tensor) -> Iterator[torch.Tensor]:
    """Results that are as right, where torch's own answer is not the only one that torch gives or C++ leaves it open."""
    for again in (_strided(s), _in_a_crowd(s), _one_by_one(s), _wider(s)):
        if again is not None and again[place].shape == given.shape:
            yield again[place].to(given.dtype)
    if s.name in SUMS and given.dtype.is_floating_point:
        # Terms that cancel leave what their order makes of them: the error is relative to the terms, added in f32 or wider.
        wanted, sizes = results(s(*s.tensors))[place].double(), _again(s, [t.double().abs() for t in s.tensors])
        terms = s.tensors[0].numel() * (sizes[place] if sizes else wanted.abs())
        step = 2.0 ** (-52 if given.dtype is torch.float64 else -23)
        near = (given.double() - wanted).abs() <= step * terms
        yield torch.where(near & terms.isfinite(), given, wanted.to(given.dtype))
    if s.name in CONVERSIONS and s.tensors[0].is_floating_point():
        # torch's vectors and scalars truncate to 32 bits, of int64 to 64, and what these do not hold is undefined in C++.
        most = 2.0 ** (63 if given.dtype is torch.int64 else 31)
        whole = s.tensors[0].double().trunc()
        yield torch.where((whole >= -most) & (whole < most), ~given, given)
    if s.name == "nn.functional.interpolate.bicubic" and given.dtype is torch.uint8:
        # in fixed point where the machine has AVX2, in f32 elsewhere: torch's own tests let them differ by one
        wanted = results(s(*s.tensors))[place]
        yield torch.where((given.int() - wanted.int()).abs() <= 1, given, ~given)
    if s.name == "masked.logsumexp" and not given.dtype.is_floating_point:
        # Converted from f32 at its end: numbers beyond 64 bits are undefined in C++, and saturate here.
        ends = torch.iinfo(given.dtype)
        yield torch.where((given == ends.min) | (given == ends.max), given, ~given)
    extreme = s.name.removeprefix("masked.").split(".")[0] in ("amax", "amin", "aminmax", "max", "min")
    product = s.name in PRODUCTS.split() and given.dtype in (torch.float32, torch.float64) and all(t.numel() for t in s.tensors)
    if product or (extreme and _both_zeros(s.tensors[0])):
        # Of zeros of both signs torch's extreme is one by their order. Where every product is a zero, the library for these
        # types begins a sum at 0, at the first of them, or at the bias.
        wanted = results(s(*s.tensors))[place]
        yield torch.where((given == 0) & (wanted == 0), given, wanted)


def _both_zeros(x: torch.Tensor) -> bool:
    """Tell whether a tensor holds zeros of both signs."""
    return x.dtype.is_floating_point and len(set(x[x == 0].signbit().tolist())) == 2


def _strided(s: Sample) -> list[torch.Tensor] | None:
    """torch's answer for the same numbers with gaps between them, which its scalar code takes."""
    return _again(s, [torch.stack([t, t], -1)[..., 0] for t in s.tensors])


def _in_a_crowd(s: Sample) -> list[torch.Tensor] | None:
    """torch's answer for the same numbers many times over, so that its vectors take every one.

    They differ from the scalars in the sign of zeros (maximum, softshrink) and in NaN for large quotients (fmod, remainder).
    """
    if not s.elementwise:
        return None
    shape = torch.broadcast_shapes(*(t.shape for t in s.tensors))
    many = _again(s, [t.expand(shape).expand(64, *shape).contiguous() for t in s.tensors])
    return None if many is None else [t[0] if t.shape == (64, *shape) else t for t in many]


def _one_by_one(s: Sample) -> list[torch.Tensor] | None:
    """torch's answer for each number alone: scalar code also where types differ, which torch converts side by side first."""
    if not s.elementwise:
        return None
    shape = torch.broadcast_shapes(*(t.shape for t in s.tensors))
    columns = zip(*(t.expand(shape).reshape(-1, 1).unbind() for t in s.tensors), strict=True)
    each = [_again(s, column) for column in columns]
    if not each or any(one is None or [t.shape for t in one] != [(1,)] for one in each):
        return None
    return [torch.cat([one[0] for one in each if one is not None]).reshape(shape)]


def _wider(s: Sample) -> list[torch.Tensor] | None:
    """torch's answer where what lies between is f32: of `mvlgamma`, whose samples are not all in its domain, and `erf`, which
    makes 0 of small numbers of 16 bits.
    """
    narrow = (torch.float16, torch.bfloat16)
    if not (s.name == "erf" or s.name.startswith("mvlgamma")) or not any(t.dtype in narrow for t in s.tensors):
        return None
    return _again(s, [t.float() if t.dtype in narrow else t for t in s.tensors])


def _again(s: Sample, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return results(s(*tensors))
    except Exception:  # torch refuses it
        return None


class _Calls(torch.nn.Module):
    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__()
        self.samples = samples

    def forward(self, inputs: list[tuple[torch.Tensor, ...]]) -> list[list[torch.Tensor]]:
        return [results(s(*own)) for s, own in zip(self.samples, inputs, strict=True)]


@dataclass(frozen=True)
class Finding:
    """The verdict on a sample: "right", "wrong", "refused" or "crash"."""

    sample: Sample
    status: str
    said: str = ""


def compared(samples: Sequence[Sample], form: Form = "as read") -> list[Finding]:
    """Samples read as one program and compared with eager torch; halves of them where the whole cannot be read.

    Its meaning is compared, as it is read or after the rules, or what the kernels compute that are chosen for it unmeasured.
    """
    runnable: list[tuple[Sample, list[torch.Tensor]]] = []
    for s in samples:
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wanted = [t.clone() for t in results(s(*(t.clone() for t in s.tensors)))]
        except Exception:  # torch refuses it
            continue
        if wanted and all(t.layout is torch.strided and not t.is_quantized for t in wanted):
            runnable.append((s, wanted))
    return _compared(runnable, form)


def _run(graph: Graph, inputs: Sequence[torch.Tensor], form: Form) -> list[Any]:
    if form == "compiled":
        return pytree.tree_leaves(compiled(graph, budget_s=0, cache=False)(*inputs))
    return evaluate(optimise(graph) if form == "after the rules" else graph, inputs)


@functools.lru_cache(maxsize=4)  # the forms of one program are compared one after another
def _read(samples: tuple[Sample, ...]) -> Graph:
    inputs = [s.tensors for s in samples]
    return verify(frontend.load(_Calls(samples), LoadOptions(example_inputs=(inputs,))))


def _compared(runnable: Sequence[tuple[Sample, list[torch.Tensor]]], form: Form) -> list[Finding]:
    if not runnable:
        return []
    samples = tuple(s for s, _ in runnable)
    inputs = [s.tensors for s in samples]
    try:
        graph = _read(samples)
        given = iter(_run(graph, pytree.tree_leaves(inputs), form))
        found: list[Finding] = []
        names = list(graph.output_names)
        if len(names) != sum(len(w) for _, w in runnable):
            raise RuntimeError(f"{len(names)} results for {sum(len(w) for _, w in runnable)}")
        for s, wanted in runnable:
            own = [next(given) for _ in wanted]
            pairs = enumerate(zip(own, wanted, strict=True))
            said = [d for i, (g, w) in pairs if (d := difference(g, w, _as_right(s, i, g))) is not None]
            found.append(Finding(s, "wrong" if said else "right", "; ".join(said)[:300]))
        return found
    except Exception as error:
        if len(runnable) > 1:
            half = len(runnable) // 2
            return _compared(runnable[:half], form) + _compared(runnable[half:], form)
        typed = isinstance(error, (UnsupportedError, InputError))
        status = "refused" if typed else "crash"
        return [Finding(samples[0], status, f"{type(error).__name__}: {error}".replace("\n", " ")[:300])]
