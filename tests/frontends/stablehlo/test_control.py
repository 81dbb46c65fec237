"""Loops and conditionals in StableHLO and HLO, against JAX."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from against_jax import agree, calls, gemms, run, text
from jax import lax

import tilewright
from tilewright import compiler
from tilewright.deadline import Budget
from tilewright.errors import InputError
from tilewright.frontends import load, stablehlo
from tilewright.frontends.stablehlo import control as _stablehlo_control
from tilewright.ir.ops import Call, Select
from tilewright.ir.text import parse, print_with_literals
from tilewright.report.explain.findings import fallback

A = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32) / 2
X = np.random.default_rng(2).standard_normal((3, 4)).astype(np.float32)


def powers(x: object, a: object, n: int) -> object:
    return lax.fori_loop(0, n, lambda i, y: jnp.tanh(y @ a) + i, x)


@pytest.mark.parametrize("kind", ["stablehlo", "hlo", "optimised"])
def test_a_loop_of_few_constant_trips_is_unrolled(kind: str) -> None:
    graph = agree(lambda x, a: powers(x, a, 5), X, A, kinds=(kind,), ulps=8, depth=8)[kind]
    assert not calls(graph)
    assert len(gemms(graph)) == 5


def test_a_long_loop_runs_as_the_data_says() -> None:
    graph = agree(lambda x, a: powers(x, a, 100), X, A, ulps=16, depth=16)["stablehlo"]
    assert [c.target for c in calls(graph)] == ["stablehlo.while"]
    assert any("while at" in note and "as the data says" in note for note in graph.notes)
    again = parse(*print_with_literals(graph))
    assert all(a is b for a, b in zip(graph.outputs, again.outputs, strict=True))


@pytest.mark.parametrize("start", [0.0, 3.0, 1e4])
def test_how_often_a_loop_runs_may_depend_on_data(start: float) -> None:
    def halved(x: object, a: object) -> object:
        def body(state: tuple) -> tuple:  # type: ignore[type-arg]
            v, n, m = state
            return v / 2, n + 1, lax.cond(v > 2, lambda m: m @ a, lambda m: m + v, m)

        return lax.while_loop(lambda s: s[0] > 0.5, body, (x, 0, a))

    graph = agree(halved, np.float32(start), A, ulps=16, depth=16)["stablehlo"]
    assert [c.target for c in calls(graph)] == ["stablehlo.while"]


def test_a_scan_stacks_what_it_gives() -> None:
    def scanned(x: object, a: object) -> object:
        return lax.scan(lambda c, row: (c @ a + row, c.sum()), jnp.zeros(4, jnp.float32), x)

    long = np.tile(X, (40, 1))
    for rows in (X, long):
        agree(scanned, rows, A, ulps=32, depth=32)


@pytest.mark.parametrize("flag", [True, False])
def test_small_branches_are_selected_and_others_called(flag: bool) -> None:
    small = agree(lambda p, x: lax.cond(p, lambda: x + 1, lambda: x * 2), np.array(flag), X)["stablehlo"]
    assert not calls(small)
    assert any(isinstance(n.op, Select) for n in small.nodes())
    large = agree(lambda p, x, a: lax.cond(p, lambda: x @ a, lambda: x), np.array(flag), X, A, ulps=4, depth=4)["stablehlo"]
    assert [c.target for c in calls(large)] == ["stablehlo.case"]
    known = load(text("stablehlo", lambda x, a: lax.cond(jnp.array(flag), lambda: x @ a, lambda: x), X, A))
    assert not calls(known)
    assert len(gemms(known)) == flag


@pytest.mark.parametrize("index", [-5, 0, 1, 2, 7])
def test_a_switch_takes_its_last_branch_past_the_others(index: int) -> None:
    branches = [lambda x, a: x @ a, lambda x, a: x - 1, lambda x, a: -x]
    agree(lambda i, x, a: lax.switch(i, branches, x, a), np.int32(index), X, A, ulps=4, depth=4)
    agree(lambda i, x: lax.switch(i, [lambda x: x, lambda x: x - 1, lambda x: -x], x), np.int32(index), X)


def test_random_numbers_of_jax_are_read() -> None:
    agree(lambda k: (jax.random.bits(k, (5,)), jax.random.uniform(k, (3, 2))), np.array([1, 7], np.uint32), ulps=1)


def test_complex_numbers_are_carried() -> None:
    z = (X + 1j * X[::-1]).astype(np.complex64)
    f = lambda z, n: lax.while_loop(lambda s: s[1] < n, lambda s: (s[0] * s[0] + z, s[1] + 1), (z, 0))[0]  # noqa: E731
    wanted = np.asarray(jax.jit(f)(z, 3))
    (got,) = run(load(text("stablehlo", f, z, np.int32(3))), np.stack([z.real, z.imag], -1), np.int32(3))
    np.testing.assert_allclose(torch.view_as_complex(got).numpy(), wanted, rtol=1e-5)


def test_a_compiled_program_holds_a_loop() -> None:
    f = lambda x, a, n: lax.while_loop(lambda s: s[1] < n, lambda s: (jnp.tanh(s[0] @ a), s[1] + 1), (x, 0))[0] @ a  # noqa: E731
    compiled = tilewright.compile(text("stablehlo", f, X, A, np.int32(3)), budget_s=0, cache=False)
    for n in (0, 1, 7):
        got = compiled(torch.from_numpy(X), torch.from_numpy(A), torch.tensor(n, dtype=torch.int32))
        np.testing.assert_allclose(got.numpy(), np.asarray(f(X, A, n)), rtol=1e-4, atol=1e-5)


def test_regions_are_compiled_with_the_program_around_them() -> None:
    """A body's products are steps with kernels, as those beside the loop are, and loops in loops are, too."""

    def scanned(x: object, a: object, n: object) -> object:
        def cell(c: object, row: object) -> tuple:  # type: ignore[type-arg]
            c = lax.fori_loop(0, n, lambda i, c: c + i, jnp.tanh(c @ a + row))
            return c, lax.cond(c.sum() > 0, lambda c: c @ a, lambda c: -c, c)

        return lax.scan(cell, jnp.zeros((1, 4), jnp.float32), x)

    rows = np.tile(X, (30, 1))[:, None]
    program = text("stablehlo", scanned, rows, A, np.int32(2))
    compiled = tilewright.compile(program, budget_s=0, cache=False)
    (loop,) = [s for s in compiled.steps if s.within]
    condition, body = loop.within
    assert not any(s.within for s in condition.steps)
    assert [len(s.within) for s in body.steps if s.within] == [2, 2]
    products = [s.decision for p in (body, *body.steps[-1].within) for s in p.steps if s.part.kind == "gemm"]
    assert products
    assert all(d is not None and d.kernel.candidate != "reference" for d in products)
    for n in (2, 0, 3):
        for got, wanted in zip(compiled(rows, A, np.int32(n)), jax.jit(scanned)(rows, A, np.int32(n)), strict=True):
            np.testing.assert_allclose(got, np.asarray(wanted), rtol=1e-4, atol=1e-4)
    assert any("its regions as programs of" in f.why for f in fallback(compiled, {}))


def test_loops_in_loops_keep_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, passed = list[float](), [0.0]
    decider, began = compiler.chooser, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + passed[0])

    def noted(graph: object, target: object, budget: Budget, *rest: object) -> object:
        shares.append(budget.left_s())
        passed[0] += shares[-1]  # a search takes all that it may
        return decider(graph, target, Budget(0), *rest)  # type: ignore[arg-type]

    def nested(x: object, n: object) -> object:
        def step(i: object, y: object) -> object:
            for _ in range(3):
                y = lax.fori_loop(0, n, lambda i, y: y @ A, y)
            return lax.switch(n, [lambda y: lax.sort(y) @ A, lambda y: jnp.cumsum(y, 0), lambda y: y @ A + 1], y.sum() + y)

        return lax.fori_loop(0, n, step, x)

    monkeypatch.setattr(compiler, "chooser", noted)
    tilewright.compile(text("stablehlo", nested, A, np.int32(2)), budget_s=8, cache=False)
    assert len(shares) >= 9 and 7.5 < sum(shares) <= 8 and 3.5 < shares[0] <= 4


@pytest.mark.parametrize("trips", [0, 3])
def test_what_a_caller_writes_to_results_of_regions_is_no_constant(trips: int) -> None:
    """Results are the caller's own also where a branch gives a constant, or a loop that never runs what it began with."""
    held = np.arange(12, dtype=np.float32).reshape(3, 4)

    def given(x: object, n: object) -> tuple:  # type: ignore[type-arg]
        chosen = lax.cond(n > 2, lambda x: (held + 1, x @ A), lambda x: (lax.sort(x), held + 2), x)
        return *chosen, lax.fori_loop(0, n, lambda i, y: jnp.tanh(y @ A), held + 3)

    n = np.int32(trips)
    wanted = jax.jit(given)(X, n)
    program = text("stablehlo", given, X, n)
    compiled = tilewright.compile(program, budget_s=0, cache=False)
    assert sum(len(s.within) for s in compiled.steps) == 4
    for _ in range(2):
        for got, right in zip(compiled(torch.from_numpy(X), torch.tensor(n)), wanted, strict=True):
            np.testing.assert_allclose(got.numpy(), np.asarray(right), rtol=1e-4, atol=1e-5)
            got.zero_()


def test_a_loop_without_end_ends_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stablehlo_control, "MAX_TRIPS", 50)
    graph = load(text("stablehlo", lambda n: lax.while_loop(lambda i: i != n, lambda i: i + 2, 0), np.int32(7)))
    with pytest.raises(InputError, match=r"a loop runs more than 50 times \(stablehlo.while\)"):
        run(graph, np.int32(7))
    (call,) = calls(graph)
    with pytest.raises(InputError, match=r"a payload that takes s32\[\], s32\[\] is given other values"):
        stablehlo.evaluate_call(call, [torch.zeros(2)])
    odd = Call("stablehlo", "stablehlo.while", "func.func @main() { return }", ())
    with pytest.raises(InputError, match="holds no loop or conditional"):
        stablehlo.evaluate_call(odd, [])
