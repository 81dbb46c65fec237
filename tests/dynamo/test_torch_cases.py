"""Torch's own tests of backends (pytorch, test/dynamo/test_backends.py), asked of this one by its name."""

import pytest
import torch
from torch._dynamo.backends.debugging import ExplainWithBackend
from torch._dynamo.testing import same

from tilewright import dynamo
from tilewright.dynamo.backend import NAME, tilewright


def test_a_model_by_the_backends_name():
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 10), torch.nn.Sigmoid()).eval()
    x = torch.randn(2, 10)
    for options in (None, {"budget_s": 0}, {"pack": False, "budget_s": 0}):
        torch._dynamo.reset()
        got = torch.compile(model, backend="tilewright", options=options)(x)
        assert same(model(x), got, tol=1e-4)


def test_a_convolution_with_its_norm():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8, eps=0.001), torch.nn.ReLU())
    x = torch.randn(2, 3, 12, 12)
    for training in (False, True):
        model.train(training)
        other = torch.nn.Sequential(*model)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        wanted = model(x)
        statistics = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(before)
        assert same(wanted, torch.compile(other, backend="tilewright")(x), tol=1e-4)
        assert all(same(statistics[k], v, tol=1e-4) for k, v in model.state_dict().items())


def test_nested_arguments_and_numbers():
    def f(a, bc, d):
        b, c = bc
        return a / d - b / c

    a, b, c = (torch.full((2,), float(n)) for n in (1, 2, 3))
    for d in (4, 5):
        wanted, got = f(a, (b, c), d), torch.compile(f, backend="tilewright", fullgraph=True)(a, (b, c), d)
        assert same(wanted, got)
        assert (wanted.size(), wanted.stride(), wanted.dtype) == (got.size(), got.stride(), got.dtype)


def test_a_sum_in_place_of_two_types():
    def f(a, b):
        x = torch.cos(a)
        x += b
        return torch.sin(x)

    a, b = torch.randn(10), torch.randn(10, dtype=torch.float64)
    assert same(f(a, b), torch.compile(f, backend="tilewright")(a, b))


def test_the_name_is_listed_and_looked_up():
    from torch._dynamo import list_backends, lookup_backend

    dynamo.register()
    assert NAME in list_backends(exclude_tags=()) and NAME in list_backends()
    assert callable(lookup_backend(NAME))


def test_the_function_itself_is_a_backend():
    calls = []

    def counting(module, inputs, **given):
        calls.append(module)
        return tilewright(module, inputs, **given)

    x = torch.randn(3, 3)
    assert same(torch.compile(torch.relu, backend=counting)(x), torch.relu(x))
    assert len(calls) == 1


def test_explain_with_the_backend():
    def inner(x):
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.sin(x)

    def f(x):
        return torch.sigmoid(torch.cos(inner(torch.cos(torch.sigmoid(x)))))

    explaining = ExplainWithBackend("tilewright")
    x = torch.randn(5)
    assert same(torch.compile(f, backend=explaining)(x), f(x))
    said = explaining.output()
    assert (said.graph_count, said.graph_break_count, said.op_count) == (4, 3, 6)
    assert "Graph Count" in str(said)


def test_a_function_is_compiled_anew_for_other_options():
    def f(x):
        return x + x

    x = torch.tensor(2.0)
    assert torch.compile(f, backend="tilewright", options={"most": 1})(x) == 4
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="most of 0"):
        torch.compile(f, backend="tilewright", options={"most": 0})(x)
