"""Modules whose Python branches on data: right on the way that was traced, and run by torch or refused on any other."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from against_torch import Of
from torch import nn
from torch.utils import _pytree as pytree

import tilewright
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.frontends.torch.export import exported
from tilewright.frontends.torch.taken import differs_as_traced

X = torch.tensor([[1.0, -1.0, 2.0], [3.0, 4.0, -5.0]])
Y = torch.tensor([[2.0, -3.0, 1.0], [0.5, 9.0, -1.0]])  # goes X's way in all that follow
Z = torch.tensor([[-7.0, 1.0, -2.0], [-3.0, -4.0, 5.0]])  # another way


def of_a_loop(x: torch.Tensor) -> torch.Tensor:
    total = x
    for i, sign in enumerate(x[0].sign().long().tolist()):
        total = total + i * sign
    return total


def of_sizes(x: torch.Tensor) -> torch.Tensor:
    count = (x > 0).sum()
    return torch.zeros(count) + x[x > 0] + torch.arange(count) + x.flatten()[:count]


def of_positions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows, columns = torch.where(x > 0)
    again = x.clone()
    again[x > 0] = x[rows, columns] * 2
    return rows, columns, x.gt(0).nonzero(), again, torch.masked_select(x, x > 0)


def of_what_is_written_to(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positive = (x.sum() > 0).long()
    y = x + 1 if positive else x - 1
    return y, positive.fill_(1)


def of_a_count(x: torch.Tensor) -> torch.Tensor:
    left = (x[:, 0] > 0).sum()
    while left:
        x, left = x * 2, left.sub_(1)
    return x


def of_experts(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(3)
    for (row,) in (x.amax(1) > 1.5).nonzero():
        total = total + x[row] * x[row, row]
    return total


WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "a branch": lambda x: x + 1 if x.sum() > 0 else x - 1,
    "a branch on a number": lambda x: x + 1 if x.sum().item() > 0 else x - 1,
    "several branches": lambda x: (x.exp() if x[0, 0] > 0 else x) + (1 if bool((x < -6).any()) else 2),
    "a loop over numbers": of_a_loop,
    "numbers as sizes": of_sizes,
    "a mask that picks": of_positions,
    "counts": lambda x: torch.bincount((x > 0).long().flatten(), minlength=4) + (x > 0).sum().item(),
    "what is written to afterwards": of_what_is_written_to,
    "a loop that counts down": of_a_count,
    "a number cut off": lambda x: x * int(x.sum().clamp(-3.5, 0.5)) + int(x[0, 0].sign() * 1.5),
    "an element in it": lambda x: x + 1 if 2.0 in x else x - 1,
    "alike": lambda x: x + 1 if torch.allclose(x.sum(), x.sum().abs(), rtol=1e-3) else x - 1,
    "not zero": lambda x: x + 1 if torch.is_nonzero(x.sum() > 0) else x - 1,
    "counts of repeats": lambda x: (
        x.repeat_interleave((x[0] > 0).long(), dim=1) + (x > 0).long().flatten().repeat_interleave((x > 0).long().flatten())[:1]
    ),
    "a tensor of one number that picks": of_experts,
    "an index": lambda x: [x.sum(), x.prod()][int(x[0, 0] > 0)],
}


def of_experts(x: torch.Tensor) -> torch.Tensor:
    """A mixture that loops over those experts that tokens go to."""
    to = torch.nn.functional.one_hot((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long(), 4)
    out = torch.zeros_like(x)
    for expert in (to.sum(0) > 0).nonzero():
        (tokens,) = torch.where(to.T[expert[0]])
        out.index_add_(0, tokens, x[tokens] * (expert + 1))
    return out


WAYS["experts with tokens"] = of_experts


def test_a_mixture_that_loops_over_its_experts_takes_any_routing() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    model.set_experts_implementation("eager")
    ids = torch.arange(7)[None]
    program = tilewright.compile(model, example_inputs={"input_ids": ids}, budget_s=0, cache=False)
    assert any("is read as grouped products" in n for n in program.source.notes)
    assert model.config._experts_implementation == "eager"
    for given in (ids, ids + 20):
        torch.testing.assert_close(program(given), model(given).logits.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["at once", "half way", "as it is set back"])
def test_experts_that_cannot_be_set_are_traced_as_they_stand(where: str) -> None:
    class Model(Of):
        """A model like transformers' without experts: it has the method, which raises."""

        def __init__(self) -> None:
            super().__init__(lambda x: x * 2 if x.sum() > 0 else x)
            self.config = SimpleNamespace(_experts_implementation="eager")

        def set_experts_implementation(self, how: str) -> None:
            if where == "at once" or (where == "as it is set back" and how == "eager"):
                raise ValueError(f"no such implementation: {how}")
            self.config._experts_implementation = how
            if where == "half way":
                raise KeyError(how)

    model = Model()
    program = tilewright.compile(model, example_inputs=(X,), budget_s=0, cache=False)
    assert model.config._experts_implementation == "eager"
    torch.testing.assert_close(program(Y), Y * 2)
    with pytest.warns(UserWarning, match="another way"):
        torch.testing.assert_close(program(Z), model(Z))


@pytest.mark.parametrize("name", WAYS)
def test_the_way_that_was_traced_is_right_and_any_other_an_error_without_the_module(name: str) -> None:
    way = WAYS[name]
    graph = load(Of(way), LoadOptions(example_inputs=(X,)))
    program = tilewright.compile(graph, budget_s=0, cache=False)
    for x in (X, Y):
        for got, wanted in zip(pytree.tree_leaves(program(x)), pytree.tree_leaves(way(x)), strict=True):
            torch.testing.assert_close(got, wanted)
    assert any("torch/test_taken.py" in n and "compared at each call" in n for n in program.source.notes)
    if name != "counts":
        with pytest.raises(
            InputError, match=r"these inputs take another way: .* was traced \(.*taken\.py:\d+ in .*\)\n  try: comp"
        ):
            program(Z)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", WAYS)
def test_a_module_runs_by_itself_on_any_other_way(name: str) -> None:
    program = tilewright.compile(Of(WAYS[name]), example_inputs=(X,), budget_s=0, cache=False)
    with pytest.warns(UserWarning, match="torch ran the module itself") if name != "counts" else nullcontext():
        got = program(Z.numpy())
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(WAYS[name](Z)), strict=True):
        torch.testing.assert_close(torch.as_tensor(a), b)


def test_a_number_that_is_only_calculated_with_may_be_another() -> None:
    program = tilewright.compile(
        Of(lambda x: x * x.sum().item() + x.max().item() ** 2), example_inputs=(X,), budget_s=0, cache=False
    )
    for x in (X, Y, Z):
        torch.testing.assert_close(program(x), x * x.sum() + x.max() ** 2)


NUMBERS: dict[str, Callable[[torch.Tensor], bool]] = {
    "is itself": lambda x: x[0].item() == x[0].item() and x.tolist()[0] <= 3.0,
    "equals itself": lambda x: (lambda v: v == v)(x[0].item()),
    "a float": lambda x: isinstance(x[0].item(), float) == (x[0].item() == 2.0),
    "floats": lambda x: isinstance(x.tolist()[0], float) == (x.tolist()[0] == 2.0),
    "an int": lambda x: isinstance(x.nan_to_num(-1.0).long()[0].item(), int) == bool(x[0] == 2.0),
    "a bool": lambda x: isinstance((x > 0)[0].item(), bool) == bool(x[0] == 2.0),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("first", [2.0, float("nan")])
def test_what_python_asks_of_a_number_is_as_it_runs(name: str, first: float) -> None:
    def way(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if NUMBERS[name](x) else x - 1

    one, other = torch.tensor([first, 1.0]), torch.tensor([float("nan") if first == 2.0 else 2.0, 1.0])
    program = tilewright.compile(Of(way), example_inputs=(one,), budget_s=0, cache=False)
    torch.testing.assert_close(program(one), way(one), equal_nan=True)
    with pytest.warns(UserWarning, match="another way"):
        torch.testing.assert_close(program(other), way(other), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numbers_of_another_type_that_are_only_calculated_with_may_be_others(dtype: torch.dtype) -> None:
    of = Of(lambda x, s: x * s[0].item() + sum(s.tolist()) ** 2)
    program = tilewright.compile(of, example_inputs=(X, X[0].to(dtype)), budget_s=0, cache=False)
    for s in (X[1].to(dtype), Y[0].to(dtype)):
        torch.testing.assert_close(program(X, s), of(X, s))


class Cache(nn.Module):
    """Replaces rows of what it keeps, and branches on data: after that on what it keeps, or on the input alone."""

    def __init__(self, on_kept: bool) -> None:
        super().__init__()
        self.on_kept = on_kept
        self.register_buffer("rows", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.rows[at] = x * 2
        return x * 2 if (self.rows.sum() if self.on_kept else x.sum()) > 0 else x


@pytest.mark.parametrize("on_kept", [False, True])
def test_what_a_module_keeps_is_not_written_to_by_a_call_that_ends(on_kept: bool) -> None:
    module, at = Cache(on_kept), torch.tensor([1])
    program = tilewright.compile(module, example_inputs=(X[:1], at), budget_s=0, cache=False)
    program(X[:1], at)
    alone = replace(program, uncompiled=None)
    with pytest.raises(InputError, match="another way"):
        alone(Z[:1] * 9, at)
    torch.testing.assert_close(module.rows, torch.zeros(4, 3).index_copy(0, at, X[:1] * 2))
    other = copy.deepcopy(module)
    with pytest.warns(UserWarning, match="another way"):
        torch.testing.assert_close(program(Z[:1] * 9, at), other(Z[:1] * 9, at))
    torch.testing.assert_close(module.rows, other.rows)
    assert bool(program._at_risk) == on_kept  # nothing is copied where the comparison can come before the write


def test_a_number_that_leaves_the_range_of_a_tensor_on_the_way_is_fixed() -> None:
    program = tilewright.compile(
        Of(lambda x: x * (x[0, 0].item() * 1e30 * 1e30 * 1e-60) * (x.sum() > -99)), example_inputs=(X,), budget_s=0, cache=False
    )
    torch.testing.assert_close(program(X), X)
    with pytest.warns(UserWarning, match=r"another way: 2.0, and 1.0 was traced"):
        program(Y)


def test_weights_that_are_counted_keep_torchs_type() -> None:
    count = Of(lambda x: torch.bincount((x > 0).long().flatten(), x.long().flatten()))
    program = tilewright.compile(count, example_inputs=(X,), budget_s=0, cache=False)
    torch.testing.assert_close(program(Y), count(Y))


def test_buffers_that_are_exchanged_are_as_they_were() -> None:
    class Exchanges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return x + self.calls if x.sum() > 0 else x

    module = Exchanges()
    held = module.calls
    program = tilewright.compile(module, example_inputs=(X,), budget_s=0, cache=False)
    assert module.calls is held and float(held) == 0
    torch.testing.assert_close(program(Y), Y + 1)


class Counts(nn.Module):
    """Branches on a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) if x.sum() > 0 else x


def test_names_and_buffers_are_those_of_the_module() -> None:
    module = Counts()
    program = tilewright.compile(module, example_inputs=(X,), budget_s=0, cache=False)
    assert not torch.nn.modules.module._global_buffer_registration_hooks  # which a trace that fails leaves behind
    assert int(module.calls) == 0 and list(program.input_types) == ["x"] and "forward" not in vars(module)
    torch.testing.assert_close(program(Y), module.linear(Y))
    assert int(module.calls) == 1 and set(program.state) == {"calls"}


def test_a_module_that_computes_something_else_while_it_is_traced_is_refused() -> None:
    class Traced(nn.Module):
        def __init__(self, there: float) -> None:
            super().__init__()
            self.there, self.runs = there, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return x * self.there if torch.compiler.is_compiling() else x

    with pytest.raises(UnsupportedError, match=r"something else while it is traced: .* differ by 1 of(.|\n)*try: example inp"):
        load(Traced(2.0), LoadOptions(example_inputs=(X,)))
    same = Traced(1.001)
    load(same, LoadOptions(example_inputs=(X,)))
    plain = Traced(1.0)
    torch.export.export(plain, (X,), strict=False)
    assert same.runs == plain.runs + 2  # once as it is, once as it is traced
    silent = Of(lambda x: x * 2)
    assert exported(silent, LoadOptions(example_inputs=(X,)), asks := []) and not asks


DYNAMO_MEETS_IT_HERE = """
import torch
from tilewright.frontends.torch.around import asking
own, asks = torch.compiler.is_compiling, []
with asking(asks):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    with asking(inner := []):
        own()
    torch.compiler.is_compiling()
assert not own() and own is torch.compiler.is_compiling and len(asks) == len(inner) == 1
told = torch.compile(lambda x: x + 1 if torch.compiler.is_compiling() else x, backend="eager", fullgraph=True)
assert told(torch.ones(2)).tolist() == [2, 2]
"""


def test_dynamo_knows_who_asks_though_it_began_within_a_trace() -> None:
    """It fills its tables of functions once in a process."""
    ran = subprocess.run([sys.executable, "-c", DYNAMO_MEETS_IT_HERE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


LOW = torch.finfo(torch.float32).min
TOLD: dict[str, tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object]]] = {
    "integers": (lambda x: x.int(), lambda x: x.int() * 2),
    "complex numbers": (lambda x: torch.complex(x, x), lambda x: torch.complex(x, -x)),
    "no numbers": (lambda x: x, lambda x: x * float("nan")),
    "hidden numbers": (lambda x: x.masked_fill(x < 0, LOW), lambda x: x.masked_fill(x < 0, LOW) * (x.abs() + 1).clamp(max=1.5)),
    "others hidden": (lambda x: x.masked_fill(x < 0, LOW), lambda x: x.masked_fill(x > 0, LOW)),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_differs_as_traced_is_seen_in_results_of_any_type(name: str) -> None:
    plain, told = TOLD[name]
    assert differs_as_traced(Of(lambda x: told(x) if torch.compiler.is_compiling() else plain(x)), (X,), {}) > 0.3
    assert differs_as_traced(Of(lambda x: (plain(x), torch.compiler.is_compiling())), (X,), {}) == 0


def test_an_exported_program_that_asks_is_refused_with_what_to_give() -> None:
    program = torch.export.export(Of(lambda x: x * (x > 0).sum().item()), (X,), strict=False)
    with pytest.raises(UnsupportedError, match=r"depends on the data(.|\n)*give the module itself"):
        load(program, LoadOptions())


def test_a_cast_that_changes_nothing_leaves_a_module_as_it_is() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.router = self.router.to(torch.float32)
            return self.router(x)

    module = Casts()
    program = tilewright.compile(module, example_inputs=(X,), budget_s=0, cache=False)
    torch.testing.assert_close(program(Y), module(Y))
