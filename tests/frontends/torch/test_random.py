"""Random small programs of elementwise operators, views and products, read and compared with eager torch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from against_torch import agree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DTYPES = (torch.float64, torch.float32, torch.int64, torch.int8, torch.bool)
Tensors = list[torch.Tensor]
Step = Callable[[Tensors], torch.Tensor]

OF_FLOATS = (torch.tanh, torch.sigmoid, torch.erf, torch.sin, torch.relu, torch.abs, torch.nn.functional.gelu)
OF_NUMBERS = (torch.neg, torch.abs, torch.sign, lambda a: a + 3, lambda a: 1 - a, lambda a: a * 2.5, lambda a: a > 0)
OF_PAIRS = (torch.add, torch.mul, torch.maximum, torch.minimum, torch.eq, torch.lt, torch.logical_xor)
REDUCTIONS = (torch.sum, torch.amax, torch.any)


def is_number(x: torch.Tensor) -> bool:
    return x.dtype is not torch.bool


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Step], Tensors]:
    """Steps that each append a tensor computed from earlier ones, and the inputs. Run eagerly as they are drawn."""
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    inputs: Tensors = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.sampled_from((0, 1, 2, 3, 5)), max_size=4))
        x = torch.randn(shape, generator=generator) * 3
        inputs.append(x.to(draw(st.sampled_from(DTYPES))))
    pool, steps = list(inputs), list[Step]()
    for _ in range(draw(st.integers(1, 8))):
        step = draw(drawn_step(pool))
        pool.append(step(pool))
        steps.append(step)
    return steps, inputs


@st.composite
def drawn_step(draw: st.DrawFn, pool: Tensors) -> Step:
    i = draw(st.integers(0, len(pool) - 1))
    x = pool[i]
    kinds: dict[str, Callable[[], Step]] = {
        "one": lambda: _one(draw, x, i),
        "two": lambda: _two(draw, pool, i),
        "view": lambda: _view(draw, x, i),
        "product": lambda: _product(draw, pool, i),
        "reduce": lambda: _reduce(draw, x, i),
        "cast": lambda: _cast(draw, x, i),
    }
    return kinds[draw(st.sampled_from(sorted(kinds)))]()


def _one(draw: st.DrawFn, x: torch.Tensor, i: int) -> Step:
    if not is_number(x):
        return lambda pool: ~pool[i]
    f = draw(st.sampled_from(OF_FLOATS if x.is_floating_point() and draw(st.booleans()) else OF_NUMBERS))
    return lambda pool: f(pool[i])


def _two(draw: st.DrawFn, pool: Tensors, i: int) -> Step:
    def fits(y: torch.Tensor) -> bool:
        try:
            torch.broadcast_shapes(pool[i].shape, y.shape)
        except RuntimeError:
            return False
        return True

    j = draw(st.sampled_from([j for j, y in enumerate(pool) if fits(y)]))
    if draw(st.booleans()):
        return lambda pool: torch.where(pool[i] > 0, pool[i], pool[j])
    f = draw(st.sampled_from(OF_PAIRS))
    return lambda pool: f(pool[i], pool[j])


def _view(draw: st.DrawFn, x: torch.Tensor, i: int) -> Step:
    axis = draw(st.integers(0, max(x.dim() - 1, 0)))
    order = draw(st.permutations(range(x.dim())))
    start, step = draw(st.integers(-3, 3)), draw(st.integers(1, 3))
    views: dict[str, Step] = {
        "permute": lambda pool: pool[i].permute(order),
        "flatten": lambda pool: pool[i].reshape(-1),
        "unsqueeze": lambda pool: pool[i].unsqueeze(axis - x.dim() - 1),
        "squeeze": lambda pool: pool[i].squeeze(),
        "expand": lambda pool: pool[i].expand(2, *pool[i].shape),
    }
    if x.dim():
        views["slice"] = lambda pool: pool[i][(slice(None),) * axis + (slice(start, None, step),)]
        views["cat"] = lambda pool: torch.cat([pool[i], pool[i]], axis - x.dim())
        views["flip"] = lambda pool: pool[i].flip(axis)
        if x.shape[axis]:
            views["select"] = lambda pool: pool[i].select(axis, start % x.shape[axis])
            views["split"] = lambda pool: pool[i].split(2, axis)[-1]
    return views[draw(st.sampled_from(sorted(views)))]


def _product(draw: st.DrawFn, pool: Tensors, i: int) -> Step:
    """Multiply a value by itself transposed, or by a matrix of ones where it is a vector."""
    x = pool[i]
    if not is_number(x) or x.dim() == 0:
        return _view(draw, x, i)
    if x.dim() == 1:
        return lambda pool: pool[i] @ torch.ones(x.shape[0], 3, dtype=x.dtype)
    if draw(st.booleans()):
        return lambda pool: pool[i] @ pool[i].mT
    return lambda pool: torch.nn.functional.linear(pool[i], pool[i].reshape(prod(x.shape[:-1]), x.shape[-1]))


def _reduce(draw: st.DrawFn, x: torch.Tensor, i: int) -> Step:
    filled = [axis for axis, d in enumerate(x.shape) if d]
    if not filled:
        return lambda pool: pool[i].sum()
    axis, keep = draw(st.sampled_from(filled)), draw(st.booleans())
    if x.is_floating_point() and draw(st.booleans()):
        return lambda pool: pool[i].softmax(axis)
    f = draw(st.sampled_from(REDUCTIONS))
    return lambda pool: f(pool[i], axis, keepdim=keep)


def _cast(draw: st.DrawFn, x: torch.Tensor, i: int) -> Step:
    # A float outside an integer's range is undefined in torch, so floats only become floats or truth.
    targets = [d for d in DTYPES if d.is_floating_point or d is torch.bool or not x.is_floating_point()]
    target = draw(st.sampled_from(targets))
    return lambda pool: pool[i].to(target)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs())
def test_a_random_program_means_what_torch_means(program: tuple[list[Step], Tensors]) -> None:
    steps, inputs = program

    def run(*args: torch.Tensor) -> Tensors:
        pool = list(args)
        for step in steps:
            pool.append(step(pool))
        return pool[len(args) :]

    agree(run, *inputs, ulps=64, depth=64)
