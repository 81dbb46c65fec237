"""Programs whose Python branches on data, traced on the way that the example inputs take, with that way checked at each call.

torch.export refuses `if x.sum() > 0`, `.tolist()` and `x[mask]`. Here the module runs once on its example inputs, and what
Python learns from tensors is written down; then it is exported with Python told the same again. Each tensor that was asked
becomes an operand of one operator, `tilewright::as_traced`, which compares it at every call with what the trace knew. A call
that would go another way ends in an error (`compile` then has torch run the module itself), never in another way's result.

A number that is a float stays a tensor as long as Python only calculates with it or compares it; a selection by a mask stays a
selection of as many elements.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import torch
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tilewright.errors import AnotherWayError, UnsupportedError
from tilewright.frontends.torch.around import replaced

COMPARED = "tilewright.as_traced.default"  # the operator that compares
ANOTHER_WAY = "compile again with such inputs as examples, and call the program whose way it is"
_TORCH = str(Path(torch.__file__).parent)
_T = cast(Any, torch.Tensor)
_LEARNS = (_T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__index__)
_PICKS = (torch.nonzero, _T.nonzero, torch.argwhere, _T.argwhere)
_MASKED = (torch.masked_select, _T.masked_select)
# What these ask, as a tensor of one element that is asked.
_QUESTIONS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    torch.is_nonzero: lambda x: x,
    _T.is_nonzero: lambda x: x,
    _T.__contains__: lambda x, element: (x == element).any(),
    **dict.fromkeys((torch.allclose, _T.allclose), lambda *a, **k: torch.isclose(*a, **k).all()),
}
# These take sizes and bounds, where a tensor of one element is a number.
_SIZED = {
    *(torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.narrow, torch.linspace, torch.tril, torch.triu),
    *(_T.new_zeros, _T.new_ones, _T.new_full, _T.new_empty, _T.view, _T.reshape, _T.expand, _T.narrow, _T.repeat, _T.unflatten),
    *(_T.split, _T.chunk, torch.split, torch.chunk, torch.reshape, _T.tril, _T.triu, torch.nn.functional.pad),
}


class Ways(TorchFunctionMode):
    """A record of what Python learns from tensors; replayed where `known` holds an earlier one.

    Attributes:
        told: of each place in the source, as file and line, what was learnt there, in order.
        seen: the tensors that were asked, and what of them is compared; places; values.
    """

    def __init__(self, known: Mapping[str, Sequence[object]] | None = None, *, floats_stay: bool = True) -> None:
        super().__init__()
        self._floats_stay = floats_stay
        self._left = None if known is None else {place: deque(values) for place, values in known.items()}
        self.told: dict[str, list[object]] = defaultdict(list)
        self.seen: list[tuple[torch.Tensor, str, object]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("out") is not None:  # it is written to as well, which what stands for these does not
            return func(*args, **named)
        if func in _QUESTIONS:
            answer = _QUESTIONS[func](*args, **named)
            return self._told(answer, lambda: bool(answer))
        if func in _LEARNS and isinstance(args[0], torch.Tensor):
            return self.learnt(func, args[0])
        if func in _PICKS or (func is torch.where and len(args) + len(named) == 1):
            x = args[0] if args else next(iter(named.values()))
            picked = self._positions(x)
            apart = func is torch.where or named.get("as_tuple", False)
            return (picked.unbind(1) if x.dim() else (picked.reshape(-1),)) if apart else picked
        if func in _MASKED:
            x, mask = torch.broadcast_tensors(args[0], args[1] if len(args) > 1 else named["mask"])
            return x[self._positions(mask).unbind(1)]
        if func is _T.__getitem__:
            one = isinstance(args[1], torch.Tensor) and args[1].dtype not in (torch.bool, torch.uint8)
            return func(args[0], self._whole(args[1]) if one else self._index(args[1]))  # of one number torch takes a view
        if func is _T.__setitem__:
            return func(args[0], self._index(args[1], masks=isinstance(args[2], torch.Tensor) and args[2].dim() > 0), args[2])
        if func in (torch.repeat_interleave, _T.repeat_interleave):
            return self._repeated(*args, **named)
        if func in (torch.bincount, _T.bincount):
            return self._counts(*args, **named)
        if func in _SIZED:
            keep = args[:1] if func not in (torch.arange, torch.zeros, torch.ones, torch.full, torch.empty) else ()
            args = (*keep, *pytree.tree_map(self._whole, tuple(args[len(keep) :])))
            named = {k: v if k == "fill_value" else pytree.tree_map(self._whole, v) for k, v in named.items()}
        return func(*args, **named)

    def learnt(self, func: Callable[..., Any], x: torch.Tensor) -> object:
        """The value that a method of a tensor gives Python, or gave when it was recorded."""
        if func in (_T.item, _T.tolist) and self._floats_stay and x.is_floating_point() and x.numel() <= _FEW:
            if x.dim() and func is _T.tolist:
                return [self.learnt(func, row) for row in x.unbind()]
            # Python goes on with the tensor, as a double where torch would round: a comparison is asked for in its turn.
            number = x.reshape(())
            return number if x.dtype is torch.get_default_dtype() else number.double()
        return self._told(x, lambda: func(x))

    def _told(self, x: torch.Tensor, ask: Callable[[], object]) -> Any:
        place = _place()
        if self._left is None:
            value = ask()
        elif self._left.get(place):
            value = self._left[place].popleft()
        else:
            raise UnsupportedError(f"what Python learns from a tensor differs as it is exported ({place})", hint=_HINT)
        if isinstance(value, complex):
            raise UnsupportedError(f"the program asks for a complex number ({place})", hint=_HINT)
        self.told[place].append(value)
        self.seen.append((x.clone(), place, value))  # as it is now: what was asked may be written to
        return value

    def _positions(self, mask: torch.Tensor) -> torch.Tensor:
        """The positions where a mask is true, as rows, with their number checked."""
        truth = mask != 0
        count = truth.sum()
        size = cast(int, self._told(count, lambda: int(count)))
        return torch.nonzero_static(truth, size=size)

    def _index(self, index: Any, masks: bool = True) -> Any:
        """An index with its masks as positions, and tensors as the ends of slices as numbers."""
        several = isinstance(index, tuple)
        found: list[Any] = []
        for i in cast("tuple[Any, ...]", index if several else (index,)):
            if isinstance(i, slice):
                i = slice(*(self._whole(b) for b in (i.start, i.stop, i.step)))
            if masks and isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) and i.dim() > 0:
                found += self._positions(i).unbind(1)
                several = several or i.dim() > 1
            else:
                found.append(self._whole(i) if _is_position(i) else i)
        return tuple(found) if several else found[0]

    def _counts(self, x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
        """torch.bincount with its length checked."""
        most = x.max() + 1 if x.numel() else x.sum()
        length = max(cast(int, self._told(most, lambda: int(most))), minlength)
        if weights is None:
            ones = torch.ones_like(x, dtype=torch.int64)
        else:
            ones = weights if weights.dtype is torch.float32 else weights.double()
        return torch.zeros(length, dtype=ones.dtype).scatter_add(0, x.to(torch.int64), ones)

    def _repeated(
        self, x: torch.Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
    ) -> torch.Tensor:
        """torch.repeat_interleave with the length of its result checked, where a tensor gives the counts."""
        counts, x = (x, torch.arange(len(x), device=x.device)) if repeats is None else (repeats, x)
        if not isinstance(counts, torch.Tensor):
            return torch.repeat_interleave(x, counts, dim, output_size=output_size)
        x, dim = (x.reshape(-1), 0) if dim is None else (x, dim)
        ends = counts.reshape(-1).expand(x.shape[dim]).cumsum(0)
        total = ends[-1:].sum()
        size = cast(int, self._told(total, lambda: int(total)))
        picks = torch.searchsorted(ends, torch.arange(size, device=x.device), right=True)
        return x.index_select(dim, picks.clamp(max=max(x.shape[dim] - 1, 0)))

    def _whole(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dim() == 0 and not x.is_floating_point():
            return self._told(x, lambda: int(x))
        return x


def _is_position(index: object) -> bool:
    """Tell whether an index is a tensor that holds one whole number."""
    return isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype in _WHOLE


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
_HIDDEN = 1e30  # which masks put in place of a score; beside it every other number would be small
_FEW = 256  # numbers of a list that are calculated with; more are compared as one
_HINT = "torch.where instead of `if`, no .item(), no masks that pick elements"


def _place() -> str:
    """The line of the program that asks: the first that is neither torch's nor this file's."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TORCH)):
        frame = frame.f_back
    parts = frame.f_code.co_filename.replace("\\", "/").split("/")
    return f"{'/'.join(parts[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}"


@contextmanager
def as_taken(module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Generator[list[str]]:
    """A context in which `module` goes the way that these inputs take, and compares at each call what that depends on.

    The module runs once here, and its buffers are then as they were.

    Yields:
        list: the places in its source that learn from data, once it was traced.
    """
    own, places, thread = module.forward, list[str](), threading.get_ident()

    def taken(ways: Ways | None) -> object:
        with _as_exported(), ways or nullcontext():
            return _run_apart(module, args, kwargs)

    stay = True
    first = Ways()
    if not _alike(taken(None), taken(first)):  # Python does more with a number than calculate
        stay, first = False, Ways(floats_stay=False)
        taken(first)

    @functools.wraps(own)
    def forward(*args: object, **kwargs: object) -> object:
        if threading.get_ident() != thread:  # another one runs the module meanwhile
            return own(*args, **kwargs)
        with Ways(first.told, floats_stay=stay) as ways, _lists_by(ways):
            out = own(*args, **kwargs)
        places[:] = dict.fromkeys(place for _, place, _ in ways.seen)
        return _compared(out, ways)

    instance = vars(module).get("forward")
    module.forward = forward
    try:
        yield places
    finally:
        if instance is None:
            del module.forward
        else:
            module.forward = instance


def _run_apart(module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Results that a module returns for copies of these inputs, with its buffers and torch's random numbers as they were."""
    with _state_kept(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
        return module.forward(*pytree.tree_map(_own, tuple(args)), **pytree.tree_map(_own, dict(kwargs)))


def differs_as_traced(module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> float:
    """The largest difference between what a module returns and what it returns where it is told that it is being traced.

    Relative to the largest number of the same result; of integers, the part of them that differ. 0 where it cannot be told so.
    """
    try:
        wanted = _run_apart(module, args, kwargs)
        with _as_exported():
            given = _run_apart(module, args, kwargs)
    except Exception:  # only with traced tensors, then
        return 0.0
    pairs = zip(pytree.tree_leaves(given), pytree.tree_leaves(wanted), strict=False)
    return max((_apart(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)), default=0.0)


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The relative distance of a result from b, where b holds numbers at all."""
    if a.shape != b.shape or not b.numel():
        return 0.0
    if not b.is_floating_point() and not b.is_complex():
        return (a != b).double().mean().item()
    a, b = (torch.view_as_real(t.to(torch.complex128)) if b.is_complex() else t.double() for t in (a, b))
    held = b.isfinite()
    if bool((held & ~(a.abs() < _HIDDEN) & (b.abs() < _HIDDEN)).any()):
        return math.inf
    held &= b.abs() < _HIDDEN
    return ((a - b)[held].abs().max() / b[held].abs().max().clamp(min=1e-6)).item() if bool(held.any()) else 0.0


def _compared(out: object, ways: Ways) -> object:
    """The module's results, the smallest of them only once what was learnt is seen to be the same."""
    if not ways.seen:
        return out
    leaves, tree = pytree.tree_flatten(out)
    sizes = {i: t.numel() for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and not t.is_complex()}
    if not sizes:
        raise UnsupportedError("the program returns no tensor that holds numbers", hint=_HINT)
    tensors = [x.detach() for x, _, _ in ways.seen]
    said = [json.dumps([place, value]) for _, place, value in ways.seen]
    first = min(sizes, key=sizes.__getitem__)
    leaves[first] = torch.ops.tilewright.as_traced(leaves[first], tensors, said)
    return pytree.tree_unflatten(leaves, tree)


@contextmanager
def _lists_by(ways: Ways) -> Generator[None]:
    """A traced tensor makes a list of itself by asking each element; here it asks once for all of them."""
    with replaced(FakeTensor, {"tolist": lambda x: ways.learnt(_T.tolist, x)}):  # pyright: ignore[reportUnknownArgumentType]
        yield


@contextmanager
def _state_kept(module: torch.nn.Module) -> Generator[None]:
    """The module's buffers are afterwards as they were, whether they are written to or exchanged."""
    held = [(m, name, b, b.clone()) for m in module.modules() for name, b in m.named_buffers(recurse=False)]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, before in held:
                setattr(owner, name, buffer.copy_(before))


def _alike(one: object, other: object) -> bool:
    """Tell whether two runs gave the same, up to rounding."""
    pairs = list(zip_longest(pytree.tree_leaves(one), pytree.tree_leaves(other)))
    return all(_near(a, b) for a, b in pairs)


def _near(a: object, b: object) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return isinstance(b, torch.Tensor) or type(a) is type(b)
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    tolerance = 1e-3 * a.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(a, b, rtol=1e-3, atol=tolerance, equal_nan=True)


def _own(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


@contextmanager
def _as_exported() -> Generator[None]:
    """A context in which torch says that it is exporting, as it does later."""
    with replaced(torch.compiler, {"_is_compiling_flag": True, "_is_exporting_flag": True}):
        yield


def note(place: str) -> str:
    """The sentence of a report on a place that learns from data."""
    return f"what {place} learns from the data is fixed to what the example inputs gave, and compared at each call"


_Traced = torch.library.Library("tilewright", "FRAGMENT")
_Traced.define("as_traced(Tensor x, Tensor[] seen, str[] said) -> Tensor")


def _as_traced(x: torch.Tensor, seen: Sequence[torch.Tensor], said: Sequence[str]) -> torch.Tensor:
    """x, once each tensor was seen to be what the trace knew of it.

    Raises:
        AnotherWayError: one is another, so that the program would go another way than the one that was traced.
    """
    for t, one in zip(seen, said, strict=True):
        place, known = cast("tuple[str, object]", json.loads(one))
        value: object = t.tolist() if isinstance(known, list) else t.reshape(()).item()
        if not isinstance(known, list):
            with suppress(ValueError, OverflowError):  # NaN and infinity are no int
                value = type(cast(float, known))(cast(float, value))
        shown = json.dumps(value), json.dumps(known)  # where NaN is NaN, and zeros have signs
        if shown[0] != shown[1]:
            shown = shown[0][:80], shown[1][:80]
            raise AnotherWayError(
                f"these inputs take another way: {shown[0]}, and {shown[1]} was traced", where=place, hint=ANOTHER_WAY
            )
    return x.clone()


_Traced.impl("as_traced", _as_traced, "CompositeExplicitAutograd")


def _of_shapes(x: torch.Tensor, seen: Sequence[torch.Tensor], said: Sequence[str]) -> torch.Tensor:
    return torch.empty_like(x)


_Traced.impl("as_traced", _of_shapes, "Meta")
