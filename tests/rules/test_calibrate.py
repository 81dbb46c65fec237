"""Quantising a float model: which scales it gets, what it loses, what stays in float; and that what is written folds."""

import math

import pytest
import torch
from rule_checks import arithmetic, assert_close, gemms, graph_of, kinds, results

from tilewright import threads
from tilewright.compiler import optimise
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, S4, S8, S32
from tilewright.errors import InputError
from tilewright.hardware import load
from tilewright.ir.build import const, input_, map_, reshape, swap_last, transpose
from tilewright.ir.evaluate import evaluate, evaluate_nodes
from tilewright.ir.graph import Node
from tilewright.ir.literal import Literal, bits_of
from tilewright.ir.ops import Attention, Const, Dequantize, Gather, Quantize, gemm
from tilewright.ir.types import TensorType
from tilewright.rules import calibrate as calibrate_module
from tilewright.rules.calibrate import SMALLEST_SCALE, calibrate, left_in_float, quantizable, quantize, scheme
from tilewright.schedule.problem import problem_of

M, K, H, N = 16, 32, 48, 8
G = torch.Generator().manual_seed(0)
W1, W2 = torch.randn(K, H, generator=G), torch.randn(H, N, generator=G)
X = input_("x", F32, (M, K))
MODEL = graph_of(gemm(map_("gelu", map_("add", gemm(X, const(W1)), const(torch.ones(H)))), const(W2)))
BATCHES = [{"x": torch.randn(M, K, generator=G)} for _ in range(3)]
SEEN = calibrate(MODEL, BATCHES)


@pytest.mark.parametrize("rows", ["tensor", "row"])
@pytest.mark.parametrize("name", ["int8", "fp8", "w4", "w8"])
def test_a_quantised_model_folds_and_stays_near(name, rows):
    to = scheme(name, group=16, rows=rows)
    coded, layers = quantize(MODEL, to, SEEN)
    after = optimise(coded)
    assert [n.src[1].dtype for n in gemms(after)] == [to.weight] * 2
    assert arithmetic(after) == arithmetic(MODEL)
    if to.activation is None:
        assert kinds(after) == ["gemm", "gemm"] and all(n.op.acc_dtype is F32 for n in gemms(after))
    else:  # the input is quantised by itself; the hidden layer leaves the first product as codes, if its scale is known
        assert kinds(after) == (["quantize", "gemm", "gemm"] if rows == "tensor" else ["quantize", "gemm", "quantize", "gemm"])
        assert {n.op.acc_dtype for n in gemms(after)} == {S32 if name == "int8" else F32}
    assert_close(coded, after, 2e-2)
    (wanted,), (got,) = results(MODEL, BATCHES[0]), results(after, BATCHES[0])
    error = float((got - wanted).norm() / wanted.norm())
    assert 0 < error < {"int8": 0.03, "w8": 0.02, "fp8": 0.1, "w4": 0.25}[name]
    assert all(0 < layer.error < 0.25 and layer.skip_reason is None for layer in layers)


def test_scales_are_the_largest_magnitude_over_the_largest_code():
    coded, layers = quantize(MODEL, scheme("int8"), SEEN)
    first = next(n for n in coded.nodes() if isinstance(n.op, Quantize))
    largest = max(float(b["x"].abs().max()) for b in BATCHES)
    assert layers[0].largest == pytest.approx(largest) and layers[0].scale == pytest.approx(largest / 127)
    assert evaluate_nodes([first.src[1]], {})[0].item() == pytest.approx(largest / 127)
    weight = next(n for n in coded.nodes() if isinstance(n.op, Dequantize) and n.constant and n.shape == (K, H))
    codes, scale = (evaluate_nodes([s], {})[0] for s in weight.src)
    assert torch.allclose(scale, W1.abs().amax(0, keepdim=True) / 127) and int(codes.abs().max()) == 127
    assert ((codes * scale - W1).abs() <= scale / 2 * 1.001).all()


@pytest.mark.parametrize("group", [1, 16, 20, 32, 64, 10**30])
def test_groups_of_k_share_a_scale_and_the_last_may_be_short(group):
    coded, _ = quantize(MODEL, scheme("w4", group=group), SEEN)
    weight = next(n for n in coded.nodes() if isinstance(n.op, Dequantize) and n.shape == (K, H))
    assert weight.op.block == (min(group, K), 1) and weight.src[1].shape == (-(-K // group), H) and weight.src[0].dtype is S4
    (got,) = evaluate_nodes([weight], {})
    for start in range(0, K, group):
        part = W1[start : start + group]
        assert ((got[start : start + group] - part).abs() <= part.abs().amax(0) / 7 / 2 * 1.001).all()
    assert problem_of(gemms(optimise(coded))[0]).rhs.stored.dtype is S4


def attention_model(dtype=F16):
    """Queries, keys and values from one input; what attends to what is passed on to a product."""
    batch, heads, tokens, depth = 2, 2, 24, 16
    width = heads * depth
    x = input_("x", dtype, (batch, tokens, width))
    generator = torch.Generator().manual_seed(1)

    def weight():
        return const((torch.randn(width, width, generator=generator) / 4).to(dtype.to_torch()), dtype)

    parts = [transpose(reshape(gemm(x, weight(), out_dtype=dtype), (batch, tokens, heads, depth)), (0, 2, 1, 3)) for _ in "qkv"]
    mixed = transpose(Node(Attention(depth**-0.5, "upper"), *parts), (0, 2, 1, 3))
    graph = graph_of(gemm(reshape(mixed, (batch, tokens, width)), weight(), out_dtype=dtype))
    return graph, [{"x": torch.randn(x.shape, generator=generator).to(dtype.to_torch())} for _ in range(2)]


def test_fp8_attention_reads_codes_that_the_products_before_it_write():
    graph, batches = attention_model()
    seen = calibrate(graph, batches)
    coded, layers = quantize(graph, scheme("fp8", attention=True), seen)
    after = optimise(coded)
    assert kinds(after) == ["quantize", "gemm", "attention", "gemm"] and len(layers) == 4
    (attention,) = (n for n in after.nodes() if isinstance(n.op, Attention))
    assert [s.dtype for s in attention.src] == [F8E4M3FN] * 3 and attention.dtype is F8E4M3FN
    scales = [evaluate_nodes([o.src[1]], {})[0].item() for o in attention.op.operands]
    (q,) = results(graph.with_outputs([next(n for n in graph.nodes() if isinstance(n.op, Attention)).src[0]], {}), batches[0])
    assert scales[0] >= float(q.abs().max()) / 448 * 0.999 and all(0 < s < 1 for s in scales)
    assert_close(coded, after, 6e-2)  # some codes lie on an edge
    (wanted,), (got,) = (results(g, batches[0]) for g in (graph, after))
    assert 0 < float((got - wanted).double().norm() / wanted.double().norm()) < 0.1


def test_attention_stays_in_float_where_that_is_asked_for_or_it_loses_too_much():
    graph, batches = attention_model()
    seen = calibrate(graph, batches)
    inner = scheme("fp8", attention=True)
    schemes = [scheme("fp8"), scheme("int8", attention=True), scheme("fp8", rows="row", attention=True)]
    for to, rtol in (*((s, None) for s in schemes), (inner, 1e-3)):
        after = optimise(quantize(graph, to, seen, rtol=rtol)[0])
        (attention,) = (n for n in after.nodes() if isinstance(n.op, Attention))
        assert [s.dtype for s in attention.src[:3]] == [F16] * 3
    graph, batches = attention_model()
    batches[0]["x"][0, 0, 0] = float("inf")
    coded, layers = quantize(graph, inner, calibrate(graph, batches))
    assert coded.outputs == graph.outputs and all(layer.skip_reason for layer in layers)


def test_layers_that_lose_too_much_stay_in_float():
    """A row of the weight is a thousand times the others': int8 per column cannot hold both."""
    bad = W2.clone()
    bad[0] *= 1e4
    graph = graph_of(gemm(map_("relu", gemm(X, const(W1))), const(bad)))
    seen = calibrate(graph, BATCHES)
    _, layers = quantize(graph, scheme("fp8"), seen)
    limit = sum(layer.error for layer in layers) / 2
    coded, layers = quantize(graph, scheme("fp8"), seen, rtol=limit)
    kept = [layer for layer in layers if layer.skip_reason]
    assert len(kept) == 1 and f"exceeds {limit:g}" in kept[0].skip_reason
    assert sum(n.constant for n in coded.nodes() if isinstance(n.op, Dequantize)) == 1


def test_activations_that_are_not_finite_stay_in_float():
    seen = calibrate(MODEL, [{"x": torch.full((M, K), float("inf"))}])
    coded, layers = quantize(MODEL, scheme("int8"), seen)
    assert coded.outputs == MODEL.outputs
    assert {layer.skip_reason for layer in layers} == {"its activations are not finite"}


def test_columns_and_activations_of_zeros_get_a_scale_that_divides():
    graph = graph_of(gemm(X, const(torch.zeros(K, N))))
    coded, layers = quantize(graph, scheme("int8"), calibrate(graph, [{"x": torch.zeros(M, K)}]))
    assert layers[0].weight_scales == (SMALLEST_SCALE, SMALLEST_SCALE) and layers[0].scale == SMALLEST_SCALE
    assert not results(optimise(coded), BATCHES[0])[0].any()


def test_only_float_products_with_a_constant_matrix_are_quantised():
    half = input_("h", F16, (M, K))
    assert quantizable(gemm(X, const(W1))) and quantizable(gemm(half, const(W1.half())))
    for node in (
        gemm(X, input_("w", F32, (K, N))),
        gemm(const(W1.T), const(W1)),
        gemm(X, swap_last(X)),
        gemm(input_("c", S8, (M, K)), const(torch.ones(K, N, dtype=torch.int8))),
        X,
    ):
        assert not quantizable(node)


def test_a_16_bit_model_keeps_its_type():
    half = input_("h", F16, (M, K))
    graph = graph_of(gemm(half, const(W1.half()), out_dtype=F16))
    coded, _ = quantize(graph, scheme("fp8"), calibrate(graph, [{"h": torch.randn(M, K).half()}]))
    after = optimise(coded)
    assert after.outputs[0].dtype is F16 and {s.dtype for s in gemms(after)[0].src[:2]} == {F8E4M3FN}


def test_one_left_operand_of_several_products_is_quantised_once():
    graph = graph_of(*(gemm(X, const(torch.randn(K, N))) for _ in range(3)))
    coded, _ = quantize(graph, scheme("int8"), calibrate(graph, BATCHES))
    assert sum(isinstance(n.op, Quantize) for n in coded.nodes()) == 1
    after = optimise(coded)
    assert kinds(after) == ["quantize", "gemm"]


def test_rows_are_scaled_by_what_they_hold():
    """A row a thousand times another's keeps its relative precision only if rows are scaled by themselves."""
    x = torch.ones(M, K) * 1e-3
    x[0] = 1
    graph = graph_of(gemm(X, const(W1)))
    seen = calibrate(graph, [{"x": x}])
    errors = []
    for rows in ("tensor", "row"):
        (wanted,), (got,) = (
            results(g, {"x": x}) for g in (graph, optimise(quantize(graph, scheme("int8", rows=rows), seen)[0]))
        )
        errors.append(float((got - wanted)[1:].norm() / wanted[1:].norm()))
    assert errors[1] < 0.02 < errors[0]


def test_what_cannot_be_is_said():
    with pytest.raises(InputError, match="no quantisation called 'int3'"):
        scheme("int3")
    with pytest.raises(InputError, match="a group of 0 elements"):
        scheme("w4", group=0)
    with pytest.raises(InputError, match=r"an argument of type str \(group\)"):
        scheme("w4", group="64")
    with pytest.raises(InputError, match="no activations per rwo\n  try: 'tensor' or 'row'"):
        scheme("int8", rows="rwo")
    with pytest.raises(InputError, match="no calibration data"):
        calibrate(MODEL, [])
    with pytest.raises(InputError, match="no value for input 'x'"):
        calibrate(MODEL, [{"y": torch.zeros(2)}])
    with pytest.raises(InputError, match=r"an argument of type Tensor \(batches\)\n  try: tensors by the names of the inputs"):
        calibrate(MODEL, [torch.zeros(2)])
    assert "s4 weights per group of 16" in str(scheme("w4", group=16))


def test_calibration_runs_on_a_device_and_on_the_cpu_where_that_cannot(monkeypatch):
    asked = []

    def refusing(graph, batch, *, visit, device="cpu"):
        asked.append(device)
        if device == "cuda":
            raise torch.OutOfMemoryError("no room")
        return evaluate(graph, batch, visit=visit, device=device)

    monkeypatch.setattr("tilewright.rules.calibrate.evaluate", refusing)
    for device in ("cpu:0", "cuda"):
        for node, seen in calibrate(MODEL, BATCHES, device).seen.items():
            assert seen.largest == SEEN.seen[node].largest and torch.equal(seen.rows, SEEN.seen[node].rows)
    assert asked == ["cpu:0"] * len(BATCHES) + ["cuda", "cpu"] * len(BATCHES)


def test_torch_has_the_free_cores_alone(monkeypatch):
    """Each operation of the model would wait for threads whose cores other processes have."""
    monkeypatch.setattr(load, "free_cores", lambda: 1)
    before, counts = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        for name in ("evaluate", "evaluate_nodes"):
            run = getattr(calibrate_module, name)
            how = lambda *given, run=run, **k: counts.append((torch.get_num_threads(), threads.count())) or run(*given, **k)  # noqa: E731
            monkeypatch.setattr(calibrate_module, name, how)
        quantize(MODEL, scheme("int8"), calibrate(MODEL, BATCHES))
        assert set(counts) == {(1, 2)} and len(counts) > len(BATCHES) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_past_its_time_a_loss_is_computed_from_few_rows():
    many = calibrate(graph_of(gemm(input_("x", F32, (100, K)), const(W1))), [{"x": torch.randn(100, K, generator=G)}])
    (node,) = many.seen
    model = graph_of(node)
    (whole,), (late,) = (quantize(model, scheme("int8"), many, until=until)[1] for until in (math.inf, -math.inf))
    exact = many.seen[node].rows[::6][:16]
    assert late.error != whole.error == pytest.approx(late.error, rel=0.3) and late.scale == whole.scale
    many.seen[node].rows = exact
    assert quantize(model, scheme("int8"), many)[1][0].error == late.error
    assert math.isfinite(quantize(MODEL, scheme("int8"), SEEN, until=-math.inf)[1][0].error)


@pytest.mark.parametrize("name", ["w4", "w8"])
def test_small_weights_of_16_bits_keep_their_codes(name):
    x = input_("x", F16, (4, 64))
    batch = [{"x": torch.randn(4, 64, generator=G).half()}]
    errors = []
    for size in (1.0, 2.0**-16):
        weight = (torch.randn(64, 8, generator=torch.Generator().manual_seed(1)) * size).half()
        model = graph_of(gemm(x, const(weight)))
        (layer,) = quantize(model, scheme(name, group=16), calibrate(model, batch))[1]
        errors.append(layer.error)
    assert errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("name", ["int8", "fp8", "w4", "w8"])
def test_the_largest_weights_of_a_type_are_decoded_to_finite_ones(name, dtype):
    most = torch.finfo(dtype.to_torch()).max
    weight = torch.tensor([[1.0, -1.0, 0.3, 0.999], [0.5, 0.1, -1.0, 0.0]]).double().mul(most).to(dtype.to_torch())
    model = graph_of(gemm(input_("x", dtype, (3, 2)), const(weight)))
    batch = {"x": torch.full((3, 2), 2.0**-10, dtype=weight.dtype)}
    quantised, layers = quantize(model, scheme(name, group=2), calibrate(model, [batch]))
    assert layers[0].skip_reason is None
    (back,) = [n for n in quantised.nodes() if isinstance(n.op, Dequantize) and n.constant]
    found = evaluate_nodes((back,), {})[0]
    assert torch.isfinite(found).all() and (found.double() - weight.double()).abs().max() <= 0.08 * most


def test_what_stays_in_float_is_named_with_its_share():
    table, ids = torch.randn(50, K), input_("ids", S32, (M,))
    embedded = Node(Gather(0), Node(Const(Literal(TensorType(F32, (50, K)), table, "embed.weight"))), ids)
    graph = graph_of(gemm(embedded, const(W1)))
    coded, _ = quantize(graph, scheme("int8"), calibrate(graph, [{"ids": torch.arange(M, dtype=torch.int32)}]))
    assert left_in_float(coded) == {"embed.weight": 50 * K * 4}
    share = 50 * K * 4 / (50 * K * 4 + K * H)
    (note,) = coded.notes
    assert note == f"quantising left {share:.0%} of the bytes of all matrices in float: embed.weight: 0.0 MB, {share:.0%}"
    plain, _ = quantize(MODEL, scheme("int8"), SEEN)
    assert left_in_float(plain) == {} and plain.notes == ()


@pytest.mark.parametrize(
    ("name", "rows", "stays"),
    [("int8", "tensor", True), ("fp8", "tensor", True), ("int8", "row", False), ("w8", "tensor", False)],
)
def test_data_that_are_0_tell_no_scale_and_that_is_said(name, rows, stays, monkeypatch, caplog):
    monkeypatch.setattr("tilewright.errors._said", set())
    x, z = input_("x", F32, (3, 8)), input_("z", F32, (3, 8))
    model = graph_of(gemm(x, const(torch.randn(8, 4))), gemm(z, const(torch.randn(8, 4))))
    batches = [{"x": torch.zeros(3, 8), "z": torch.randn(3, 8)}, {"x": torch.zeros(3, 8), "z": torch.zeros(3, 8)}]
    silent, heard = quantize(model, scheme(name, rows=rows), calibrate(model, batches))[1]
    assert heard.skip_reason is None and (silent.skip_reason is not None) is stays
    if stays:
        assert silent.skip_reason == "its activations are 0 in all calibration data, which tells no scale"
        (said,) = caplog.messages
        assert said.startswith("calibration data are 0 at ") and said.endswith(
            "stays in float: give batches as the model meets them"
        )
    else:
        assert not caplog.messages


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["int8", "fp8", "w8", "w4"])
def test_weights_become_the_same_codes_and_scales_on_every_device(name):
    here, there = (quantize(MODEL, scheme(name), SEEN, device=device) for device in ("cpu", "cuda"))
    ours, theirs = ([n.op.data.tensor() for n in g.nodes() if isinstance(n.op, Const)] for g, _ in (here, there))
    assert len(ours) == len(theirs) > 2 and all(t.device.type == "cpu" for t in theirs)
    assert all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(here[1], there[1], strict=True):
        assert b.error == pytest.approx(a.error, rel=1e-6) and b.weight_scales == a.weight_scales
