"""ONNX's LSTM, GRU and RNN, against onnxruntime: torch's layers, and a loop behind one product for all steps."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from onnx.helper import make_graph, make_node
from onnx_models import FLOAT, model, one, ours, read, tame, theirs, value

import tilewright
from tilewright.errors import InputError, UnsupportedError

T, B, N, H = 5, 3, 4, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
LENGTHS = np.array([5, 2, 0], np.int32)


def made(op, *, bias=True, before=False, lengths=None, peepholes=False, opset=14, **attributes):
    """A model of one layer, and its inputs. Its weights are constants."""
    d = 2 if attributes.get("direction") == "bidirectional" else 1
    n, turned = GATES[op] * H, attributes.get("layout") == 1
    x, state = tame(*((B, T, N) if turned else (T, B, N))), (B, d, H) if turned else (d, B, H)
    feeds, constants = {"x": x}, {"w": tame(d, n, N) / 2, "r": tame(d, n, H) / 2}
    order = ["x", "w", "r", "", "", ""]
    if bias:
        constants["b"], order[3] = tame(d, 2 * n), "b"
    if lengths is not None:
        feeds["n"], order[4] = lengths, "n"
    if before:
        feeds["h"], order[5] = tame(*state), "h"
    if op == "LSTM":
        order += ["", ""]
        if before:
            feeds["c"], order[6] = tame(*state), "c"
        if peepholes:
            constants["p"], order[7] = tame(d, 3 * H), "p"
    out = [FLOAT] * (3 if op == "LSTM" else 2)
    return one(op, feeds, constants, out=out, order=order, opset=opset, hidden_size=H, **attributes), feeds


def compare(m, feeds, target):
    graph = read(m)
    assert {n.op.target for n in graph.nodes() if n.op.name == "call"} == {target}
    results = ours(graph, feeds)
    for got, wanted in zip(results, theirs(m, feeds), strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    return graph


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("bias", [False, True])
def test_torchs_layers(op, direction, bias):
    usual = {"linear_before_reset": 1} if op == "GRU" else {}
    m, feeds = made(op, bias=bias, before=bias, direction=direction, **usual)
    compare(m, feeds, "tilewright.recurrent_layer.default")


def test_an_rnn_of_relus():
    m, feeds = made("RNN", activations=["Relu", "Relu"], direction="bidirectional")
    compare(m, feeds, "tilewright.recurrent_layer.default")


LOOPED = [
    ("GRU", {}),
    ("LSTM", {"lengths": LENGTHS, "before": True}),
    ("LSTM", {"peepholes": True}),
    ("LSTM", {"clip": 0.3}),
    ("LSTM", {"input_forget": 1}),
    ("LSTM", {"activations": ["HardSigmoid", "Softsign", "Softplus"], "peepholes": True}),
    ("LSTM", {"activations": ["Sigmoid", "LeakyRelu", "Elu"], "activation_alpha": [0.3, 0.7], "before": True}),
    ("GRU", {"lengths": LENGTHS, "linear_before_reset": 1, "before": True}),
    ("GRU", {"activations": ["HardSigmoid", "Softplus"], "activation_alpha": [0.25], "activation_beta": [0.4]}),
    ("GRU", {"clip": 0.2, "bias": False}),
    ("RNN", {"lengths": LENGTHS, "before": True}),
    ("RNN", {"activations": ["Affine"], "activation_alpha": [0.5], "activation_beta": [0.1]}),
    ("RNN", {"activations": ["ThresholdedRelu"], "activation_alpha": [0.2], "clip": 0.9}),
    ("RNN", {"activations": ["ScaledTanh"], "activation_alpha": [0.2], "activation_beta": [1.5]}),
]


@pytest.mark.parametrize(("op", "more"), LOOPED)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_the_loop(op, more, direction):
    """Lengths, clipping and other activations, of which onnx's own evaluator knows nothing."""
    more = {"direction": direction, **more}
    names = more.get("activations", [])
    if more["direction"] == "bidirectional" and len(names) == {"LSTM": 3, "GRU": 2, "RNN": 1}[op]:
        more = {k: v * 2 if isinstance(v, list) else v for k, v in more.items()}
    m, feeds = made(op, **more)
    graph = compare(m, feeds, "tilewright.recurrence.default")
    products = [n for n in graph.nodes() if n.op.name == "gemm"]  # of all steps at once
    assert [p.tensor.elements for p in products] == [T * B * GATES[op] * H] * (2 if more["direction"] == "bidirectional" else 1)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_the_batch_may_come_first(op, lengths):
    """onnxruntime has no layout of 1: its results for 0 are turned."""
    m, feeds = made(op, lengths=lengths, direction="bidirectional", before=True)
    turned = [n for n in ("x", "h", "c") if n in feeds]
    first = {n: np.ascontiguousarray(v.swapaxes(0, 1)) if n in turned else v for n, v in feeds.items()}
    m.graph.node[0].attribute.append(onnx.helper.make_attribute("layout", 1))
    for info in m.graph.input:
        info.CopyFrom(value(info.name, first[info.name]))
    results = ours(m, first)
    del m.graph.node[0].attribute[-1]
    for info in m.graph.input:
        info.CopyFrom(value(info.name, feeds[info.name]))
    y, *last = theirs(m, feeds)
    wanted = [y.transpose(2, 0, 1, 3), *(z.swapaxes(0, 1) for z in last)]
    for got, meant in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, meant, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", GATES)
def test_known_lengths_of_all_steps_are_none(op):
    m, feeds = made(op, lengths=np.full(B, T, np.int32), **({"linear_before_reset": 1} if op == "GRU" else {}))
    m.graph.initializer.append(onnx.numpy_helper.from_array(feeds.pop("n"), "n"))
    del m.graph.input[1]
    compare(m, feeds, "tilewright.recurrent_layer.default")


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_any_number_of_steps_and_sequences(lengths):
    m, _ = made("LSTM", lengths=lengths, direction="bidirectional")
    for info, (kind, shape) in zip(m.graph.input, ((FLOAT, ["t", "b", N]), (TensorProto.INT32, ["b"])), strict=False):
        info.CopyFrom(value(info.name, kind, shape))
    program = tilewright.compile(m, budget_s=0, cache=False, dims=True)
    for t, b in ((5, 3), (2, 1), (9, 4)):
        given = {"x": tame(t, b, N)} | ({} if lengths is None else {"n": np.arange(b, dtype=np.int32) % (t + 1)})
        for got, wanted in zip(program(**{n: torch.from_numpy(v) for n, v in given.items()}), theirs(m, given), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["f16", "f64"])
def test_other_floats(kind):
    """onnxruntime has none of f16: as f32 does, rounded."""
    m, feeds = made("GRU")
    wanted = theirs(m, feeds)
    dtype = np.float16 if kind == "f16" else np.float64
    constants = {t.name: onnx.numpy_helper.to_array(t).astype(dtype) for t in m.graph.initializer}
    out = [TensorProto.FLOAT16 if kind == "f16" else TensorProto.DOUBLE] * 2
    m = one("GRU", {"x": feeds["x"].astype(dtype)}, constants, out=out, order=["x", "w", "r", "b"], hidden_size=H)
    for got, meant in zip(ours(m, {"x": feeds["x"].astype(dtype)}), wanted, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, meant, rtol=5e-3 if kind == "f16" else 1e-5, atol=5e-3 if kind == "f16" else 1e-5)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UnsupportedError, match=r"activation affine without activation_alpha"):
        read(made("RNN", activations=["Affine"])[0])
    with pytest.raises(UnsupportedError, match=r"activations sigmoid, cube"):
        read(made("GRU", activations=["Sigmoid", "Cube"])[0])
    m, _ = made("LSTM")
    m.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(tame(1, 4 * H, N + 1), "w"))
    with pytest.raises(InputError, match=r"LSTM of f32\[5,3,4\] with f32\[1,24,5\] where f32\[1,24,4\] is wanted"):
        read(m)


def test_what_onnxs_evaluator_leaves_out_is_refused_where_it_runs():
    """It runs the whole of a Loop."""
    inner, _ = made("RNN", clip=0.5)
    body = make_graph(
        [*inner.graph.node, make_node("Identity", ["going"], ["on"]), make_node("Identity", ["out1"], ["last"])],
        "body",
        [value("i", TensorProto.INT64, []), value("going", TensorProto.BOOL, []), value("state", FLOAT, [1, B, H])],
        [value("on", TensorProto.BOOL, []), value("last", FLOAT, [1, B, H])],
        inner.graph.initializer,
    )
    loop = make_node("Loop", ["m", "", "state"], ["y"], body=body)
    inputs = [value("x", FLOAT, [T, B, N]), value("m", TensorProto.INT64, []), value("state", FLOAT, [1, B, H])]
    with pytest.raises(UnsupportedError, match="onnx's reference evaluator leaves out clip of RNN"):
        read(model([loop], inputs, {"y": FLOAT}, opset=14))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "lstm"},
        {"functions": ["relu"]},
        {"parameters": [0.0]},
        {"weight": torch.zeros(12, 5)},
        {"c": torch.zeros(2, 4)},
        {"lengths": torch.zeros(2)},
        {"gates": torch.zeros(3, 2, 12, dtype=torch.float64)},
    ],
)
def test_operands_of_the_loop_are_looked_at(change):
    operands = {"gates": torch.zeros(3, 2, 12), "weight": torch.zeros(12, 4), "bias": torch.zeros(12), "h": torch.zeros(2, 4)}
    absent = dict.fromkeys(("c", "peepholes", "lengths"))
    more = {"functions": ["sigmoid", "tanh"], "parameters": [0.0] * 4, "clip": 0.0, "variant": False, "backwards": False}
    given = {**operands, **absent, "kind": "GRU", **more}
    assert torch.ops.tilewright.recurrence(**given)[0].shape == (3, 2, 4)
    for device in ("cpu", "meta"):
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in {**given, **change}.items()}
        with pytest.raises(InputError, match=r"operands of a recurrence '\w+' that do not fit: \w+"):
            torch.ops.tilewright.recurrence(**moved)


@pytest.mark.parametrize("at", range(6))
def test_operands_of_torchs_layers_are_looked_at(at):
    """Some of those that do not fit end the process in torch."""
    operands = [torch.zeros(s) for s in ((3, 2, 5), (1, 2, 4), (12, 5), (12, 4), (12,), (12,))]
    x, h, *weights = operands
    assert torch.ops.tilewright.recurrent_layer(x, [h], weights, "gru")[0].shape == (3, 2, 4)
    operands[at] = operands[at].flatten()[1:]
    x, h, *weights = operands
    with pytest.raises(InputError, match="operands of a layer 'gru' that do not fit"):
        torch.ops.tilewright.recurrent_layer(x, [h], weights, "gru")


@pytest.mark.parametrize("lengths", [[9, 1, 0], [-1, 2, 3]], ids=str)
def test_lengths_that_no_sequence_has_are_refused(lengths):
    m, feeds = made("LSTM", lengths=np.array(lengths, np.int32))
    with pytest.raises(InputError, match=r"lengths of \[.*\] for \d+ steps"):
        ours(m, feeds)
