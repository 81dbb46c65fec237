"""Exported programs whose extents stay open, against the module itself."""

import pytest
import torch
from torch import nn
from torch.export import Dim as TorchDim
from torch.export import export
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tilewright import Dim, errors
from tilewright.compiler import compile
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.frontends.torch.symbols import Symbols
from tilewright.ir.dims import Scope
from tilewright.ir.instance import dims_of

SHAPES = ((1, 1), (1, 6), (5, 1), (3, 17), (7, 32))


class Causal(nn.Module):
    """An attention with places, a causal mask made of `arange`, and products of the extents."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(32, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        b, s, _ = x.shape
        at = torch.arange(s)
        x = x + self.places(at)
        q, k, v = (t.view(b, s, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = at[:, None] >= at[None]
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = self.out(y.transpose(1, 2).reshape(b * s, 16)).view(b, s, 16)
        return y / s + x[:, -1:], y.reshape(-1)


@torch.no_grad()
def agrees(program, module, shapes=SHAPES):
    for b, s in shapes:
        x = torch.randn(b, s, 16, generator=torch.Generator().manual_seed(b * s))
        wanted, found = module(x), program(x)
        for w, f in zip(wanted, found, strict=True):
            torch.testing.assert_close(f, w, rtol=1e-4, atol=1e-5)


def test_an_export_with_open_extents_is_compiled_once():
    module = Causal().eval()
    b, s = TorchDim("b", min=1, max=8), TorchDim("s", min=1, max=32)
    exported = export(module, (torch.randn(3, 9, 16),), dynamic_shapes={"x": {0: b, 1: s}})
    program = compile(exported, dims=True, budget_s=0)
    assert program.dims == {"x_0": Dim("x_0", 1, 8), "x_1": Dim("x_1", 1, 32)}
    assert str(program.source.outputs[1].type) == "f32[x_0*x_1*16]"
    agrees(program, module)
    assert program.compiled == 1
    assert any("upper" in g for g in program.guards)  # the mask became causality


def test_dims_are_named_and_narrowed_by_an_inputs_axis():
    module = Causal().eval()
    program = compile(
        module,
        example_inputs=(torch.randn(3, 9, 16),),
        dims={"x.0": Dim("batch", 1, 8), "x.1": (2, 32)},
        budget_s=0,
    )
    assert program.dims == {"batch": Dim("batch", 1, 8), "x_1": Dim("x_1", 2, 32)}
    agrees(program, module, [(1, 2), (8, 32)])
    with pytest.raises(InputError, match=r"axis 0 is 9, outside batch 1\.\.8"):
        program(torch.randn(9, 4, 16))


def test_what_is_left_open_wrongly_is_refused():
    module = Causal().eval()
    x = torch.randn(3, 9, 16)
    with pytest.raises(InputError, match=r"no extent of the inputs is called 'y\.0'"):
        compile(module, example_inputs=(x,), dims={"y.0": (1, 8)}, budget_s=0)
    exported = export(module, (x,), dynamic_shapes={"x": {0: TorchDim("b", min=1, max=8)}})
    with pytest.raises(InputError, match=r"no extent that the program leaves open is called 'x\.1'"):
        load(exported, LoadOptions(dims={"x.1": (1, 8)}))
    with pytest.raises(InputError, match="the program was exported for 1 to 8"):
        load(exported, LoadOptions(dims={"x.0": (10, 20)}))


@pytest.mark.parametrize("key", [3, None, ("x", 0)])
def test_a_name_that_is_none_is_refused(key):
    with pytest.raises(InputError, match=r"an argument of type \w+ \(a name in dims\)\n  try: .*\"x.0\""):
        compile(nn.Linear(4, 2), example_inputs=(torch.randn(3, 4),), dims={key: (1, 4)})


def test_an_extent_that_bounds_leave_one_value_is_a_number():
    module, x = nn.Linear(4, 2).eval(), torch.randn(3, 4)
    program = compile(module, example_inputs=(x,), dims={"input.0": (3, 3), "input.1": (4, 4)}, budget_s=0)
    torch.testing.assert_close(program(x), module(x))
    assert str(program.input_types["input"]) == "f32[3,4]"
    for bounds in ((1, 1), (4, 9)):
        with pytest.raises(InputError, match=r"the example has 3 there, outside input_0 .*\(input.0\)\n  try: an example"):
            compile(module, example_inputs=(x,), dims={"input.0": bounds})
    for axis in ("²", "00", "-1", ""):
        with pytest.raises(InputError, match=r"no extent of the inputs is called .*\n  try: there are input.0, input.1"):
            compile(module, example_inputs=(x,), dims={f"input.{axis}": (1, 9)})


def cached(rows, length):
    cache = DynamicCache(config=LLAMA.config)
    with torch.no_grad():
        LLAMA(torch.arange(rows * length).view(rows, length) % 96, past_key_values=cache)
    return cache


LLAMA = LlamaForCausalLM(
    LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
).eval()
HELD = [f"past_key_values_{which}_cache_{layer}" for which in ("key", "value") for layer in range(2)]


OPEN = {f"{name}.{a}": dim for a, dim in ((0, Dim("b", 1, 8)), (2, Dim("n", 1, 64))) for name in HELD}


@torch.no_grad()
@pytest.mark.parametrize("dims", [True, {**OPEN, "input_ids.0": Dim("b", 1, 8)}], ids=["all", "named"])
def test_a_growing_cache_stays_open(dims):
    """Torch gives each of its tensors a length of its own."""
    given = {"input_ids": torch.tensor([[5], [7]]), "past_key_values": cached(2, 5)}
    program = compile(LLAMA, example_inputs=given, dims=dims, budget_s=0)
    assert len(program.dims) == 2
    assert dims is not True or any("are taken for equal, as in the example" in n for n in program.source.notes)
    for rows, length in ((2, 5), (3, 5), (4, 17)):
        ids, layers = torch.randint(0, 96, (rows, 1)), cached(rows, length).layers
        held = [*(layer.keys for layer in layers), *(layer.values for layer in layers)]
        found = program(input_ids=ids, **dict(zip(HELD, held, strict=True)))
        wanted = LLAMA(ids, past_key_values=cached(rows, length)).logits
        torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)
    assert program.compiled == 1
    with pytest.raises(InputError, match=r"axis 2 is 16, and .* is 17 here"):
        program(input_ids=ids, **dict(zip(HELD, [t[:, :, i:] for i, t in enumerate(held)], strict=True)))


def test_statistics_over_an_open_axis():
    class Spread(nn.Module):
        def forward(self, x):
            y = x / torch.sqrt((x * x).sum(0, keepdim=True) / 8 + 1e-5)  # of a number of rows that is none of the axis'
            return *torch.var_mean(x, 0), x.std(0), x.var(0, correction=0.5), y

    module = Spread()
    program = compile(module, example_inputs=(torch.randn(6, 8),), dims={"x.0": (2, 64)}, budget_s=0)
    for rows in (6, 2, 8, 33):
        for x in (torch.randn(rows, 8), torch.full((rows, 8), torch.inf)):
            x[:-1] = torch.randn(rows - 1, 8)
            torch.testing.assert_close(program(x), module(x), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_without_dims_extents_are_bound_as_before():
    module = Causal().eval()
    exported = export(module, (torch.randn(3, 9, 16),), dynamic_shapes={"x": {0: TorchDim("b", min=1, max=8)}})
    assert dims_of(load(exported, LoadOptions(input_dims={"x": (2, 9, 16)}))) is None


def test_products_quotients_and_maxima_of_symbols_are_read():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.zeros(6, 10), static_shapes=False)
    a, b = fake.shape
    scope = Scope()
    read = Symbols(scope, mode.shape_env.var_to_range, {str(a.node.expr): Dim("a", 2, 64), str(b.node.expr): Dim("b", 2, 64)})
    values = {"a": 6, "b": 10}
    for wanted, symbolic in ((60, a * b), (25, (a * b) // 2 - 5), (1, b % 3), (46, a * a + b), (7, 7)):
        found = read(symbolic)
        assert (found if isinstance(found, int) else found.at(values)) == wanted
    assert str(read(a * b)) == "a*b"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flip(0),
        lambda x: x.flip(0, 1),
        lambda x: x.std(0),
        lambda x: x.var(0, correction=0),
        lambda x: x[torch.tensor([1, 0, -1])],
        lambda x: x.T.topk(x.shape[0], 1)[0],
    ],
    ids=["flip", "flip of both", "std", "var", "index", "topk of all"],
)
def test_one_reading_serves_all_lengths(function):
    class Module(nn.Module):
        def forward(self, x):
            return function(x)

    program = compile(Module(), example_inputs=(torch.randn(5, 4),), dims={"x.0": (2, 64)}, budget_s=0)
    for rows in (2, 3, 9, 64):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(program(x), function(x), rtol=1e-5, atol=1e-6)
    assert program.compiled == 1


def test_what_torch_would_have_to_run_with_an_open_extent_is_refused():
    class Sampled(nn.Module):
        def forward(self, x):
            return torch.nn.functional.interpolate(x[None, None], size=(x.shape[0] * 2, 4), mode="bicubic")

    with pytest.raises((UnsupportedError, InputError)):
        compile(Sampled(), example_inputs=(torch.randn(5, 4),), dims={"x.0": (2, 9)}, budget_s=0)


class Of(nn.Module):
    """A function of a layer's result."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    "function",
    [lambda y: y[: y.shape[0] // 2], lambda y: y[::2], lambda y: y[1::2]],
    ids=["half", "every second", "the others"],
)
@pytest.mark.parametrize("low", [1, 3])
def test_a_part_of_an_open_extent_may_be_one_or_none(function, low):
    """A part of which torch.export's own guards say that it may not."""
    module = Of(function).eval()
    program = compile(module, example_inputs=(torch.randn(4, 8),), dims={"x.0": (low, 64)}, budget_s=0)
    for rows in (low, 3, 5, 17, 64):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(program(x), module(x), rtol=1e-4, atol=1e-5)
    assert program.compiled <= 2


def test_the_bounds_that_torch_suggests_are_told():
    with pytest.raises(InputError, match=r"bounds as torch suggests: x_0 = Dim\('x_0', min=3, max=64\)"):
        compile(Of(lambda y: y[-3:-1]).eval(), example_inputs=(torch.randn(4, 8),), dims={"x.0": (1, 64)}, budget_s=0)


def test_a_comparison_that_holds_for_one_length_is_no_number_that_is_asked(caplog, monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    program = compile(Of(lambda y: y[-2:]).eval(), example_inputs=(torch.randn(4, 8),), dims={"x.0": (2, 64)}, budget_s=0)
    with caplog.at_level("WARNING", "tilewright"):
        for rows in (2, 3, 9, 64):
            assert program(torch.randn(rows, 8)).shape == (2, 4)
    assert program.compiled == 2
    assert "read and rewritten anew" not in caplog.text


def test_as_many_elements_as_the_data_say():
    module = Of(lambda y: (y > 0).nonzero()).eval()
    x = torch.randn(4, 8)
    program = compile(module, example_inputs=(x,), dims={"x.0": (1, 64)}, budget_s=0)
    torch.testing.assert_close(program(x), module(x))
    many = torch.randn(64, 8)
    with pytest.raises(InputError, match="these inputs take another way"):
        program(many)


def test_a_value_of_no_dim_is_refused():
    program = compile(nn.Linear(4, 2).eval(), example_inputs=(torch.randn(3, 4),), dims={"input.0": (1, 9)}, budget_s=0)
    with pytest.raises(InputError, match=r"no dim is called 'rows' \(Linear\)\n  try: there are input_0"):
        program.at(rows=3)
