"""Linear layers with weights of a few bits: any shape and type, state dicts, torch.compile, derivatives, refusals."""

import copy
import dataclasses
import gc
import io
import itertools
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx import H200
from torch._dynamo.backends.debugging import aot_eager
from torch.autograd import forward_ad
from torch.library import opcheck

import tilewright
from tilewright import any_shape
from tilewright.dtype import S4
from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.hardware.detect import detect
from tilewright.linear import kernels, op
from tilewright.linear.kernels import MOST_ROWS_OF_A_CPU, pieces, rungs
from tilewright.m_dispatch import MOST_ROWS
from tilewright.runtime.quantized_weight import QuantizedWeight, pack
from tilewright.schedule import ahead, packed

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 3e-4}


def arguments(layer, x):
    parts = layer.packed, layer.scales, layer.zero_points, layer.offsets, layer.order, layer.factor, layer.bias
    return x, *parts, layer.code_type, layer.group_size, layer.divides, layer.quantize_activations


def right(layer, x):
    """The result in f64 on the dequantised weights, rounded to the type of the product first, as the graph says."""
    if layer.offsets is None:
        weight = layer.weight.dequantize(x.dtype)
    else:
        weight = layer.weight.dequantize()
    y = x.double() @ weight.double().t()
    return y if layer.bias is None else y + layer.bias.double()


def error(layer, x):
    y, expected = layer(x).detach(), right(layer, x).detach()
    assert y.dtype == x.dtype and y.shape == expected.shape
    return float((y.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("scheme", ["w4g64", "w4g32z", "w8", "w8g32z", "w4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_shape_of_activations(scheme, dtype):
    model = torch.nn.Sequential(torch.nn.Linear(128, 72, bias=scheme != "w8")).to(dtype)
    tilewright.quantize_(model, scheme)
    (layer,) = model
    for shape in [(128,), (1, 128), (2, 3, 128), (70, 128)]:
        assert error(layer, torch.randn(shape).to(dtype)) < LIMIT[dtype], shape
    assert layer(torch.randn(4, 0, 128).to(dtype)).shape == (4, 0, 72)
    strided = torch.randn(128, 6).to(dtype).t()
    assert error(layer, strided) < LIMIT[dtype]
    assert set(layer.candidates(dtype)) == {1, 6, 64}


def test_offsets_and_an_order():
    codes = torch.randint(-8, 8, (40, 100), dtype=torch.int8)
    weight = QuantizedWeight.of(codes, torch.rand(40, 4), S4, 32, offsets=torch.randn(40, 4), order=torch.randperm(100))
    layer = tilewright.Linear(weight, torch.randn(40))
    for rows in (1, 5):
        assert error(layer, torch.randn(rows, 100)) < 2e-6
    assert "reordered" in repr(layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_in_8_bits(dtype):
    model = torch.nn.Sequential(torch.nn.Linear(128, 64)).to(dtype)
    tilewright.quantize_(model, "a8w4g32")
    (layer,) = model
    x = torch.randn(5, 128).to(dtype)
    x[3] = 0
    scale = x.float().abs().amax(1, keepdim=True) / 127
    codes = torch.where(scale > 0, (x.float() / scale).round(), 0)
    expected = (codes * scale).double() @ layer.weight.dequantize().double().t() + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=LIMIT[dtype], atol=2e-3 if dtype != torch.float32 else 1e-5)
    assert layer.scheme == "a8w4g32"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([MOST_ROWS, MOST_ROWS_OF_A_CPU]))
def test_rows_are_cut_and_filled_up(rows, most):
    cut = pieces(rows, most)
    assert sum(count for count, _ in cut) == rows
    for count, rung in cut:
        assert 1 <= count <= rung <= most and rung in rungs(most)
    waste = sum(rung - count for count, rung in cut)
    assert waste <= max(15, rows / 8 if most == MOST_ROWS else 15)
    if rows and rows & (rows - 1) == 0 and rows <= most:
        assert cut == [(rows, rows)]


def test_many_rows_give_what_few_give():
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 24), group_size=32)
    x = torch.randn(700, 64)
    torch.testing.assert_close(layer(x), torch.cat([layer(x[i : i + 7]) for i in range(0, 700, 7)]), rtol=1e-5, atol=1e-5)


def test_layers_of_one_form_are_searched_once(monkeypatch):
    from tilewright.schedule import buckets as rows

    searched = []
    inner = rows.search
    monkeypatch.setattr(rows, "search", lambda p, *a, **k: searched.append(str(p)) or inner(p, *a, **k))
    layers = [tilewright.Linear.from_float(torch.nn.Linear(96, 56), group_size=48) for _ in range(3)]
    x = torch.randn(3, 96)
    for layer in layers:
        assert error(layer, x) < 2e-6
    assert len(searched) == 1
    assert error(layers[0], torch.randn(2, 96)) < 2e-6
    assert len(searched) == 2


def test_layers_of_one_form_share_steps_as_long_as_one_of_them_lives(monkeypatch):
    """Programs of another layer are the first one's over constants of its own; the first one's are kept by nobody else."""
    made, real = [], any_shape.prepare
    monkeypatch.setattr(any_shape, "prepare", lambda *args, **how: made.append(args) or real(*args, **how))
    floats, counts = [torch.nn.Linear(40, 24) for _ in range(3)], []
    layers = [tilewright.Linear.from_float(each, group_size=8) for each in floats]
    for layer in layers:
        layer.prepare([1, 3, 17])
        counts.append(len(made))
    first, second, third = (b - a for a, b in itertools.pairwise([0, *counts]))
    assert third == second < first
    assert all(error(layer, torch.randn(3, 40)) < 2e-6 for layer in layers)
    programs = [
        weakref.ref(op.kernels_for(each.weight, torch.float32, torch.float32, quantize_activations=False)) for each in layers
    ]
    del layer, layers
    gc.collect()
    assert not any(p() for p in programs)
    other = tilewright.Linear.from_float(floats[0], group_size=8)
    other.prepare([1, 3, 17])
    assert len(made) - counts[-1] == first and error(other, torch.randn(17, 40)) < 2e-6


def test_codes_are_kept_packed_alone():
    """Once kernels are ready nobody holds a code a byte."""
    layer = tilewright.Linear.from_float(torch.nn.Linear(160, 96))
    layer.prepare([1, 4])
    run = op.kernels_for(layer.weight, torch.float32, torch.float32, quantize_activations=False)
    for rung in (1, 4):
        program = run._programs[rung]
        assert all(n.dtype.name != "s4" for n in program._ready)


@torch.no_grad()  # what is to be differentiated keeps the weight
def test_kernels_go_with_the_weight_and_follow_its_changes():
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 16), group_size=32)
    x = torch.randn(2, 64)
    before = layer(x)
    made = weakref.ref(op.kernels_for(layer.weight, torch.float32, torch.float32, quantize_activations=False))
    other = tilewright.Linear.from_float(torch.nn.Linear(64, 16), group_size=32)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x)) and not torch.equal(layer(x), before)
    assert made() is None
    layer.scales.mul_(2)
    assert error(layer, x) < 2e-6
    made = weakref.ref(op.kernels_for(layer.weight, torch.float32, torch.float32, quantize_activations=False))
    del layer
    assert made() is None


def test_state_dicts_copies_and_files():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8, bias=False))
    tilewright.quantize_(model, "w4g32z")
    x = torch.randn(3, 64)
    expected = model(x)
    state = model.state_dict()
    assert all(isinstance(t, torch.Tensor) for t in state.values())
    assert {"0.packed", "0.scales", "0.zero_points", "0.bias", "2.packed"} <= set(state) and "2.bias" not in state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    torch.manual_seed(2)
    again = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8, bias=False))
    tilewright.quantize_(again, "w4g32z")
    assert not torch.equal(again(x), expected)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    wrong = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8, bias=False))
    tilewright.quantize_(wrong, "w4g64")
    with pytest.raises(InputError, match="holds u4 codes, f32 scales per 32, this module s4 codes, f32 scales per 64"):
        wrong.load_state_dict(state)
    other = tilewright.Linear(pack(torch.randn(32, 64), "s4", group_size=32, zero_point=True), torch.zeros(32))
    with pytest.raises(InputError, match="holds u4 codes, f32 scales per 32, this module s4 codes, f32 scales per 32"):
        other.load_state_dict({k[2:]: v for k, v in state.items() if k.startswith("0.")})


def test_float_weights_are_loaded_before():
    model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    floats = model.state_dict()
    tilewright.quantize_(model, "w8")
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"0\.weight is a float weight: load it before tilewright\.quantize_"):
            model.load_state_dict(floats, strict=strict)


def test_conversions_touch_the_bias_alone():
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 16), group_size=32)
    weight = layer.weight.dequantize()
    layer.bfloat16()
    assert layer.scales.dtype == torch.float32 and layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.weight.dequantize(), weight)
    assert error(layer, torch.randn(2, 64).bfloat16()) < 3e-3
    layer.to("meta")
    assert layer.packed.is_meta and layer.scales.is_meta and layer.scales.dtype == torch.float32


@pytest.mark.parametrize("scheme", ["w4g32", "w4g32z", "a8w4g32"])
def test_torch_takes_the_operation(scheme):
    model = torch.nn.Sequential(torch.nn.Linear(64, 16))
    tilewright.quantize_(model, scheme)
    shapes = [(2, 3, 64), (64,), (5, 64)] if scheme == "w4g32" else [(2, 64)]
    for shape in shapes:
        x = torch.randn(shape, requires_grad=shape == (5, 64))
        opcheck(torch.ops.tilewright.linear.default, arguments(model[0], x))
    model.requires_grad_(False)
    opcheck(torch.ops.tilewright.linear_without_derivative.default, arguments(model[0], x.detach()))


def test_autocast_decides_the_type_as_it_does_for_torch_s_own():
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 16), group_size=32)
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert torch.equal(y, layer(x.bfloat16())) and y.dtype == torch.bfloat16


def test_derivatives():
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 16), group_size=32)
    layer.bias.requires_grad_(True)
    x = torch.randn(2, 3, 64, requires_grad=True)
    given_ = torch.randn(2, 3, 16)
    layer(x).backward(given_)
    torch.testing.assert_close(x.grad, given_ @ layer.weight.dequantize())
    torch.testing.assert_close(layer.bias.grad, given_.sum((0, 1)))


@pytest.mark.parametrize("scheme", ["w8", "w4g32z", "f4g32"])
def test_derivatives_forward_and_within_transforms(scheme):
    """Torch takes a tangent that an operation does not know for zero."""
    f = torch.nn.Sequential(torch.nn.Linear(64, 16))
    tilewright.quantize_(f, scheme)
    dense = torch.nn.Sequential(torch.nn.Linear(64, 16))
    dense.load_state_dict({"0.weight": f[0].weight.dequantize(), "0.bias": f[0].bias})
    x, v = torch.randn(3, 64), torch.randn(3, 64)
    func = torch.func
    for what in (
        lambda f: func.jvp(f, (x,), (v,)),
        lambda f: func.jvp(lambda b: func.functional_call(f, {"0.bias": b}, (x,)), (f[0].bias.detach(),), (v[0, :16],)),
        lambda f: func.vmap(f)(x),
        lambda f: func.grad(lambda x: f(x).square().sum())(x),
        lambda f: func.jvp(func.grad(lambda x: f(x).square().sum()), (x,), (v,)),
        lambda f: (func.jacfwd(f)(x), func.jacrev(f)(x)),
        lambda f: torch.compile(lambda x, v: func.jvp(f, (x,), (v,)), backend="eager", fullgraph=True)(x, v),
    ):
        torch.testing.assert_close(what(f), what(dense), rtol=1e-4, atol=1e-5)
    for needed in (True, False):
        f.requires_grad_(needed)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent
        torch.testing.assert_close(tangent, v @ f[0].weight.dequantize().t())
    assert torch.autograd.gradcheck(f, (torch.randn(2, 64).double().requires_grad_(),), check_forward_ad=True)


@pytest.mark.parametrize("scheme", ["a8w4g32", "a8f8"])
def test_activations_in_8_bits_are_differentiated_as_if_they_were_not(scheme):
    f = torch.nn.Sequential(torch.nn.Linear(64, 16))
    tilewright.quantize_(f, scheme)
    x, v = torch.randn(3, 64), torch.randn(3, 64)
    x[1] = 0
    y, tangent = torch.func.jvp(f, (x,), (v,))
    torch.testing.assert_close(y, f(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tangent, v @ f[0].weight.dequantize().t())


def test_the_operation_alone_refuses_tangents():
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 16), group_size=32)
    with (
        forward_ad.dual_level(),
        pytest.raises(UnsupportedError, match=r"tilewright::linear has no forward derivative\n  try: call"),
    ):
        torch.ops.tilewright.linear_without_derivative(*arguments(layer, forward_ad.make_dual(*torch.randn(2, 3, 64))))


def test_one_compiled_graph_serves_every_number_of_rows():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    tilewright.quantize_(model, "w4g32")
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return aot_eager(graph, inputs)

    fast = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for rows in (2, 3, 70, 5):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(fast(x), model(x))
    assert len(compiled) == 1


def test_exported_programs_hold_it():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    tilewright.quantize_(model, "w4g32z")
    rows = torch.export.Dim("rows", min=1, max=4096)
    exported = torch.export.export(model, (torch.randn(3, 64),), dynamic_shapes=({0: rows},))
    x = torch.randn(6, 64)
    torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.parametrize("scheme", ["w4g32", "w4g32z", "a8w8", "f4g32"])
@pytest.mark.parametrize("target", [detect("cpu"), H200], ids=["cpu", "H200"])
def test_an_open_graph_poses_the_problems_of_each_number_of_rows(target, scheme, monkeypatch):
    """Choices are kept, and come with the package, by problem. On Hopper few rows have another graph."""
    pytest.importorskip("triton")
    model = torch.nn.Sequential(torch.nn.Linear(96, 64).bfloat16())
    tilewright.quantize_(model, scheme)
    signature = model[0].kernels(None).signature
    monkeypatch.setattr(kernels, "detect", lambda device: target)
    at = kernels.graph_at(signature, kernels.constants_of(signature, lambda name: kernels.value_of(model[0].weight, name)))
    by_number, of_open = kernels.AnyRows(at, target), kernels.AnyRows(at, target, dims=True)
    for rows in (1, 2, 8, 32, 48, 512, 4096):
        assert of_open.problems(rows) == by_number.problems(rows)
    assert of_open.compiled == 1 + kernels.keeps_digits(signature, 1) and by_number.compiled == 7


def test_a_table_over_the_rows_serves_layers_made_later(monkeypatch):
    monkeypatch.setattr(kernels, "MOST_ROWS_OF_A_CPU", 4)
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 48), group_size=32)
    table = layer.tune(budget_s=0.5)
    try:
        assert table.buckets[0].first == 1 and table.buckets[-1].last == 4
        assert f"to 4 {table.buckets[-1].family.name}" in repr(table) and len(repr(table)) < 500
        later = tilewright.Linear.from_float(torch.nn.Linear(64, 48), group_size=32)
        for rows in (1, 3, 9):
            assert error(later, torch.randn(rows, 64)) < 2e-6
        assert set(later.candidates()) <= {1, 2, 3, 4}
        assert later.candidates()[3] == table.at(3).family.candidate.name
    finally:
        kernels._tables.clear()


class Owner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.again = self.first
        self.attention = torch.nn.MultiheadAttention(64, 4)
        self.inner = torch.nn.ModuleList([torch.nn.Linear(64, 8), torch.nn.Linear(64, 8, device="meta")])
        self.wide = torch.nn.Linear(64, 8).double()
        self.none = torch.nn.Linear(64, 8)  # of nothing, without torch's warning that it cannot be initialised
        self.none.out_features, self.none.bias = 0, torch.nn.Parameter(torch.empty(0))
        self.none.weight = torch.nn.Parameter(torch.empty(0, 64))
        self.eight = torch.nn.Linear(64, 8)
        self.eight.weight = torch.nn.Parameter(torch.zeros(8, 64).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x):
        return self.inner[0](self.again(self.first(x)))


def test_what_is_replaced_and_what_is_not():
    model = Owner()
    report = tilewright.quantize_(model, "w4g32", filter=lambda name, module: name != "inner.0")
    assert dict(report.layers) == {"first": "w4g32", "again": "w4g32", "wide": "w4g32"}
    assert model.first is model.again and isinstance(model.first, tilewright.Linear)
    assert report.skipped == {
        "inner.0": "the filter says no",
        "inner.1": "its weight has no data yet",
        "none": "its weight is empty",
        "eight": "its weight is float8_e4m3fn already",
        "attention.out_proj": "a NonDynamicallyQuantizableLinear, whose owner may read its weight",
    }
    assert report.bytes_before == 64 * 64 * 4 + 8 * 64 * 8
    assert report.bytes_after == sum(m.weight.nbytes for m in (model.first, model.wide))
    assert str(report).startswith("3 layers quantised, 5 not; 0.0 MB of weights are 0.0 MB now\n  ")
    assert model(torch.randn(2, 64)).shape == (2, 8)
    assert "Linear(in_features=64, out_features=64, bias=True, w4g32)" in repr(model)


def test_torch_s_encoder_goes_on_working():
    """It hands the weights of its linear layers to one fused operation once it does not train."""
    model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.nn.Linear(64, 8)).eval()
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        report = tilewright.quantize_(model, "w4g32")
        assert model(x).shape == (2, 3, 8)
    assert report.skipped["0.linear1"] == "torch.nn.TransformerEncoderLayer reads its weight itself"
    assert list(report.layers) == ["1"]


def test_weights_from_elsewhere_are_put_in():
    model = Owner()
    weights = {"first": pack(torch.randn(64, 64), "s4"), "inner.0": pack(torch.randn(8, 64), "s8", group_size=None)}
    report = tilewright.quantize_(model, weights)
    assert dict(report.layers) == {"first": "w4", "again": "w4", "inner.0": "w8"}
    assert model.again is model.first
    assert report.skipped["wide"] == report.skipped["inner.1"] == "no weight of that name is given"
    assert error(model.inner[0], torch.randn(3, 64)) < 2e-6
    tilewright.quantize_(model, {"inner.1": pack(torch.randn(8, 64), "s4")})
    assert not model.inner[1].packed.is_meta
    with pytest.raises(TypeMismatchError, match=r"a weight of shape \[8, 64\] for a layer of \[64, 64\] \(attention2\)"):
        model.attention2 = torch.nn.Linear(64, 64)
        tilewright.quantize_(model, {"attention2": weights["inner.0"]})
    with pytest.raises(InputError, match="no layer of the model has a name of the checkpoint"):
        tilewright.quantize_(Owner(), {"elsewhere": weights["first"]})


@pytest.mark.parametrize("scheme", ["w3g64", "w4g0", "w4g", "int4", "w4g64zz", "a4w4", "W4"])
def test_schemes_that_do_not_exist(scheme):
    with pytest.raises(InputError, match=rf"no scheme '{scheme}'\n  try: w4g32, w4g64, w4g128, w8, w8g128 \(any group"):
        tilewright.quantize_(torch.nn.Sequential(torch.nn.Linear(8, 8)), scheme)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((None,), r"an argument of type NoneType \(model\)\n  try: a torch.nn.Module"),
        ((torch.zeros(2),), r"an argument of type Tensor \(model\)"),
        ((Owner, None), r'an argument of type NoneType \(scheme\)\n  try: "w4g64", or what tilewright.read_checkpoint gives'),
        ((Owner, ["w4g64"]), r"an argument of type list \(scheme\)"),
        ((Owner, "llama.safetensors"), r"no scheme 'llama.safetensors'\n  try: tilewright.read_checkpoint\(path\)"),
        ((Owner, {"first": torch.zeros(64, 64)}), r"an argument of type Tensor \(first\)\n  try: tilewright.pack\(weight\)"),
        ((Owner, {}), "the checkpoint holds no quantised layer\n  try: load its weights into the model, then .*quantize_"),
        ((Owner, {"mlp.up": pack(torch.ones(1, 8))}), "a name of the checkpoint\n  try: the model has first, .*has mlp.up"),
        ((torch.nn.Sequential, {"up": pack(torch.ones(1, 8))}), "try: the model holds no torch.nn.Linear; the checkpoint has"),
    ],
)
def test_arguments_of_another_kind(arguments, said):
    model, *others = (a() if isinstance(a, type) else a for a in arguments)
    with pytest.raises(InputError, match=said):
        tilewright.quantize_(model, *others)


def test_a_filter_is_called():
    with pytest.raises(InputError, match=r'an argument of type list \(filter\)\n  try: lambda name, module: name != "lm_head"'):
        tilewright.quantize_(Owner(), filter=["first"])


def test_a_shared_weight_is_quantised_and_counted_once():
    model = torch.nn.ModuleDict({n: torch.nn.Linear(64, 32) for n in "ab"} | {"c": torch.nn.Embedding(16, 64)})
    model["b"].weight = model["a"].weight
    model["d"] = torch.nn.Linear(64, 16, bias=False)
    model["d"].weight = model["c"].weight
    report = tilewright.quantize_(model, "w4g32")
    assert model["a"].packed is model["b"].packed and model["a"].bias is not model["b"].bias
    packed = [model[n].weight.nbytes for n in "ad"]
    assert report.bytes_before == 64 * 32 * 4 + 64 * 16 * 4
    assert report.bytes_after == sum(packed) + 64 * 16 * 4 and report.held == ("d",)
    assert "\n  d: the float weight stays in memory, since another module holds it, too\n" in str(report)


def test_floats_go_as_their_layers_are_replaced():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 32) for _ in range(3)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []
    tilewright.quantize_(model, "w4g32", filter=lambda name, module: alive.append([w() is not None for w in weights]) or True)
    assert alive == [[True, True, True], [False, True, True], [False, False, True]]


def test_what_was_given_and_not_taken_is_said():
    report = tilewright.quantize_(Owner(), {n: pack(torch.randn(64, 64)) for n in ("first", "gate", "up", "down", "out")})
    assert report.unused == ("gate", "up", "down", "out")
    assert "\n  no layer of the model took gate, up, down, ...\n  left in float: " in str(report)
    assert str(tilewright.quantize_(torch.nn.ReLU())) == "0 layers quantised: the model holds no torch.nn.Linear"


def test_layers_that_only_look_like_one_are_named():
    class Conv1D(torch.nn.Module):  # as some language models have it: the weight is [in, out]
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64, 8))

    model = torch.nn.Sequential(torch.nn.Embedding(4, 64), Conv1D(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    report = tilewright.quantize_(model, "w8")
    assert report.skipped == {"1": "a Conv1D, no torch.nn.Linear"} and list(report.layers) == ["3"]
    assert str(report).startswith("1 layer quantised, 1 not; 0.0 MB of weights are")


def test_a_layer_with_hooks_stays():
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.utils.spectral_norm(torch.nn.Linear(8, 4)))
    assert tilewright.quantize_(model, "w8").skipped == {"1": "it has hooks, which would be lost"}


def test_activations_in_64_bits():
    """Torch has such after `model.double()`: nothing is rounded on the way."""
    for scheme in ("w4g32", "w8g32z"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 16)).double()
        tilewright.quantize_(model, scheme)
        assert error(model[0], torch.randn(3, 64).double()) < 1e-7  # the oracle's weights are rounded to f32
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 16), group_size=32).double()
    assert layer.bias.dtype == torch.float64
    x = torch.randn(2, 64, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    assert layer(x.detach().float()).dtype == torch.float32


def test_what_cannot_be_done_is_said():
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 16), group_size=32)
    with pytest.raises(InputError, match=r"x of shape \[2, 63\]\n  try: \[..., 64\]"):
        layer(torch.randn(2, 63))
    for x, kind in ((np.ones((2, 64), np.float32), "ndarray"), (np.ones((2, 63)), "ndarray"), ([[1.0] * 64], "list")):
        with pytest.raises(
            InputError, match=rf"an argument of type {kind} \(x\)\n  try: a tensor \[..., 64\]: torch.from_numpy"
        ):
            layer(x)
    with pytest.raises(InputError, match=r"activations of f8e4m3fn for a quantised weight\n  try: f16, bf16, f32 or f64"):
        layer(torch.randn(2, 64).to(torch.float8_e4m3fn))
    with pytest.raises(InputError, match="activations of s32 for a quantised weight"):
        layer(torch.ones(2, 64).int())
    with pytest.raises(TypeMismatchError, match="x is on meta and the weight on cpu"):
        op._linear(*arguments(layer, torch.randn(2, 64, device="meta")))
    with pytest.raises(InputError, match="no kernel for 0 rows"):
        layer.prepare([2, 0])
    with pytest.raises(InputError, match=r"a bias of shape \[3\]\n  try: \[16\]"):
        tilewright.Linear(layer.weight, torch.zeros(3))
    with pytest.raises(InputError, match=r"an argument of type list \(bias\)\n  try: a tensor \[16\], or None"):
        tilewright.Linear(layer.weight, [0.0] * 16)
    with pytest.raises(InputError, match=r"an argument of type Tensor \(weight\)\n  try: tilewright.pack\(weight\)"):
        tilewright.Linear(torch.zeros(16, 64))
    with pytest.raises(InputError, match=r"an argument of type Conv2d \(module\)\n  try: a torch.nn.Linear"):
        tilewright.Linear.from_float(torch.nn.Conv2d(3, 3, 1))
    with pytest.raises(InputError, match=r"a linear layer cannot be replaced in itself\n  try: tilewright.Linear.from_float"):
        tilewright.quantize_(torch.nn.Linear(8, 8))
    broken = torch.nn.Sequential(torch.nn.Linear(8, 8))
    broken[0].weight.data[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"the weight holds infinity or NaN, or spans more than f32 \(0\)"):
        tilewright.quantize_(broken)


def test_a_captured_graph_needs_kernels_that_are_ready(monkeypatch):
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 16), group_size=32)
    ready = op.kernels_for(layer.weight, torch.float32, torch.float32, quantize_activations=False)
    layer.prepare(2)
    monkeypatch.setattr(ready, "_gpu", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert layer(torch.randn(2, 64)).shape == (2, 16)
    with pytest.raises(InputError, match=r"no kernel is ready for 3 rows\n  try: run the module once with so many rows before"):
        layer(torch.randn(3, 64))


def test_kernels_of_a_weight_that_is_gone():
    layer = tilewright.Linear.from_float(torch.nn.Linear(64, 16), group_size=32)
    kept = op.kernels_for(layer.weight, torch.float32, torch.float32, quantize_activations=False)
    del layer
    gc.collect()
    with pytest.raises(InputError, match="the weight of these kernels is gone"):
        kept.make([1])


@pytest.mark.parametrize("scheme", ["w4g32", "w4g32z", "w8", "a8w4g32"])
def test_a_compiled_model_has_products_and_folds_what_follows(scheme):
    """Operations that follow are folded into the products, and none is left to torch."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8, bias=False))
    tilewright.quantize_(model, scheme)
    x = torch.randn(2, 3, 64)
    program = tilewright.compile(model, example_inputs=(x,), budget_s=0)
    assert not any(n.op.name == "call" for n in program.source.nodes())
    assert len(program.steps) == (4 if scheme.startswith("a8") else 2)
    torch.testing.assert_close(program(x), model(x).detach(), rtol=1e-4, atol=1e-4 if scheme[0] == "w" else 3e-2)
    if scheme == "w4g32":
        assert {s.decision.kernel.candidate for s in program.steps} == {"llvm_w4"}


def test_a_weight_with_an_order_stays_an_operation():
    weight = dataclasses.replace(tilewright.pack(torch.randn(8, 64)), order=torch.randperm(64))
    layer, x = tilewright.Linear(weight), torch.randn(2, 64)
    program = tilewright.compile(torch.nn.Sequential(layer), example_inputs=(x,), budget_s=0)
    assert any(n.op.name == "call" for n in program.source.nodes())
    torch.testing.assert_close(program(x), layer(x))


def test_a_bias_that_does_not_fit_is_refused_before_any_kernel_reads_it():
    made = tilewright.Linear.from_float(torch.nn.Linear(64, 32))
    x = torch.randn(2, 64)
    for wrong in (torch.randn(0), torch.randn(1), torch.randn(31), torch.randn(32, 1)):
        made.bias = torch.nn.Parameter(wrong, requires_grad=False)
        with pytest.raises(TypeMismatchError, match="a bias of shape") as caught:
            made(x)
        assert caught.value.hint == "[32], one a row of the weight"
    made.bias = torch.nn.Parameter(torch.empty(32, device="meta"), requires_grad=False)
    with pytest.raises(TypeMismatchError, match="the bias is on meta and the weight on cpu"):
        made(x)
    made.bias = None
    with pytest.raises(TypeMismatchError, match="x is on cpu and the weight on meta"):
        made.to("meta")(x)


def test_a_state_dict_of_8_bit_activations_is_not_taken_for_another():
    module = torch.nn.Linear(64, 32)
    coded = tilewright.Linear.from_float(module, quantize_activations=True)
    plain = tilewright.Linear.from_float(module)
    with pytest.raises((InputError, RuntimeError), match="activations in 8 bits"):
        plain.load_state_dict(coded.state_dict())
    with pytest.raises((InputError, RuntimeError), match="activations in 8 bits"):
        coded.load_state_dict(plain.state_dict())


def test_a_model_is_prepared_layer_by_layer_and_compiled_for_at_once(monkeypatch):
    model = torch.nn.Sequential(*[torch.nn.Linear(96, 96) for _ in range(3)], torch.nn.Linear(96, 48))
    tilewright.quantize_(model, "w4g32")
    asked = []
    monkeypatch.setattr(ahead, "compile_ahead", lambda p, target, *, first, chosen, **_: asked.append((p, first, chosen)))
    monkeypatch.setattr("tilewright.linear.replace.detect", lambda device: dataclasses.replace(detect(device), kind="cuda"))
    tilewright.prepare(model, [1, 2, 1])
    assert all(set(layer.candidates()) == {1, 2} for layer in model)
    for (problem, _), begun in kernels._compiled.items():
        begun.wait(problem)
    ((problems, first, chosen),) = asked
    assert first and not chosen and sorted((p.M, p.N) for p in problems) == [(1, 48), (1, 96), (2, 48), (2, 96)]
    tilewright.prepare(model, 2)
    assert asked[1:] == []
    with pytest.raises(InputError, match="no kernel for 0 rows"):
        tilewright.prepare(model, [1, 0])
    with pytest.raises(InputError, match="an argument of type list \\(model\\)"):
        tilewright.prepare([], 1)


def test_kernels_are_checked_while_others_are_compiled(monkeypatch):
    """The first problem's kernel is waited for, and the second one's is still being compiled when the wait is over."""
    target = dataclasses.replace(detect("cpu"), kind="cuda")
    first, second = "first", "second"
    order, go_on = [], threading.Event()

    def compile_ahead(problems, target, *, done, **_):
        order.append(("begun", *problems))
        done(problems[0])
        go_on.wait(60)
        order.append("over")

    monkeypatch.setattr(ahead, "compile_ahead", compile_ahead)
    monkeypatch.setattr(kernels, "_compiled", {})
    kernels.compile_first([first, second, first], [], target)
    kernels.compiled([first, "nobody asked for this one"], target)
    order.append("first")
    go_on.set()
    kernels.compiled([second], target)
    assert order == [("begun", "first", "second"), "first", "over"]
    kernels.compile_first([first], [(second, "a candidate", 0)], target)
    assert len(order) == 3


def test_a_weight_is_unpacked_and_hashed_once_for_all_rows(monkeypatch):
    layer = tilewright.Linear.from_float(torch.nn.Linear(256, 96), group_size=32)
    hashed, unpacked, bits, codes = [], [], packed.bits_of, QuantizedWeight.codes
    monkeypatch.setattr(packed, "bits_of", lambda t: hashed.append(tuple(t.shape)) or bits(t))
    monkeypatch.setattr(QuantizedWeight, "codes", property(lambda w: unpacked.append(w.shape) or codes.fget(w)))
    layer.prepare([1, 2, 3, 4])
    assert unpacked == [(96, 256)] and sorted(hashed) == [(96, 8), (96, 256)]


def test_what_is_not_written_is_hashed_once_and_in_its_block_alone():
    one, other = torch.arange(64.0), torch.arange(64.0)
    with packed.unwritten([one, one.view(8, 8).t()]):
        before = packed._bits(one)
        one[0] = 1.0
        assert packed._bits(one) == before == packed._bits(other)
        assert packed._bits(one[:32]) != before
        other[0] = 1.0
        assert packed._bits(other) != before
    assert packed._bits(one) != before
