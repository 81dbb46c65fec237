"""Calls of torch, onnx and StableHLO's interpreter in a file, and what it must be trusted for."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from against_torch import Of, read
from cli_programs import FAST, invoke
from hostile_calls import case
from onnx import TensorProto, helper

from tilewright.compiler import compile
from tilewright.dtype import F32, OPAQUE, S64
from tilewright.errors import InputError, TilewrightError, UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.frontends.torch.allowed import ALLOWED
from tilewright.frontends.torch.call import find_operator, schema_of
from tilewright.ir.build import input_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Call
from tilewright.ir.text import print_graph
from tilewright.ir.types import TensorType

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
ONE = '{"args":[{"tensor":0}],"kwargs":{}}'


def calling(library: str, target: str, payload: str, *types: TensorType) -> str:
    x = input_("x", F32, (3, 8))
    made = Node(Call(library, target, payload, types or (TensorType(F32, (3, 8)),)), x)
    outputs = (made,) if len(types) < 2 else ()
    return print_graph(Graph("hostile", (x,), outputs, ("y",) * len(outputs)))


REFUSED = {
    "old memory by strides": ("aten._reshape_alias.default", '{"args":[{"tensor":0},[100000],[1]],"kwargs":{}}', (100000,)),
    "old memory by another name": ("inductor._reinterpret_tensor.default", '{"args":[{"tensor":0},[9],[1],-9]}', (9,)),
    "old memory made new": ("aten.empty.memory_format", '{"args":[[9]],"kwargs":{}}', (9,)),
    "freeing the caller's": ("inductor.resize_storage_bytes_.default", '{"args":[{"tensor":0},0],"kwargs":{}}', (3, 8)),
    "the interpreter's own": ("prim.PythonOp.default", ONE, (3, 8)),
    "the lowest integer by -1": ("aten.div.Tensor_mode", '{"args":[{"tensor":0},{"tensor":0}],"kwargs":{}}', (3, 8)),
    "numbers alone": ("aten.remainder.int", '{"args":[1,0],"kwargs":{}}', ()),
    "a file": ("aten.from_file.default", '{"args":["/etc/passwd"],"kwargs":{"size":1}}', (1,)),
    "other processes": ("_c10d_functional.all_reduce.default", '{"args":[{"tensor":0},"sum","x"],"kwargs":{}}', (3, 8)),
    "a library that is not there": ("torchvision.nms.default", ONE, (3, 8)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_operators_are_refused_by_name_and_allowed_by_a_flag(name: str) -> None:
    target, payload, shape = REFUSED[name]
    text = calling("torch", target, payload, TensorType(F32, shape))
    with pytest.raises(InputError, match="not among what a file may call") as refused:
        load(text)
    assert repr(target) in refused.value.what and "--allow-calls" in str(refused.value)
    assert load(text, LoadOptions(allow_calls=True)).outputs
    with pytest.raises(InputError, match="not among what a file may call"):
        compile(text, budget_s=0)


BEYOND = {
    "strides past the end": ("aten.as_strided.default", '{"args":[{"tensor":0},[100000],[1]],"kwargs":{}}', (100000,)),
    "an offset past the end": ("aten.as_strided.default", '{"args":[{"tensor":0},[4],[1],22],"kwargs":{}}', (4,)),
    "strides below the start": ("aten.as_strided.default", '{"args":[{"tensor":0},[4],[-1]],"kwargs":{}}', (4,)),
    "a slice of nothing": ("aten.select.int", '{"args":[{"tensor":0},0,7],"kwargs":{}}', (8,)),
    "16 TiB": ("aten.full.default", '{"args":[[4398046511104],1.0],"kwargs":{}}', (1 << 42,)),
    "more than a number holds": ("aten.add.Scalar", '{"args":[{"tensor":0},' + "9" * 40 + '],"kwargs":{}}', (3, 8)),
    "a sparse result": ("aten.zeros.default", '{"args":[[3,8]],"kwargs":{"layout":{"torch":"sparse_coo"}}}', (3, 8)),
    "a quantised type": ("aten.zeros.default", '{"args":[[3,8]],"kwargs":{"dtype":{"torch":"qint8"}}}', (3, 8)),
    "pinned memory": ("aten.zeros.default", '{"args":[[3,8]],"kwargs":{"pin_memory":true}}', (3, 8)),
    "another type than declared": ("aten.relu.default", ONE, (8, 3)),
    "a deep payload": ("aten.relu.default", '{"args":' + "[" * 5000 + "]" * 5000 + ',"kwargs":{}}', (3, 8)),
    "half a complex number": ("aten.full.default", '{"args":[[3,8],{"complex":[1]}],"kwargs":{}}', (3, 8)),
    "words as a complex number": ("aten.full.default", '{"args":[[3,8],{"complex":["a",[]]}],"kwargs":{}}', (3, 8)),
    "deep complex numbers": ("aten.relu.default", '{"args":[' + '{"complex":[' * 400 + "]}" * 400 + '],"kwargs":{}}', (3, 8)),
    "a number as a type": ("aten.zeros.default", '{"args":[[3,8]],"kwargs":{"dtype":64}}', (3, 8)),
    "a number as a layout": ("aten.zeros.default", '{"args":[[3,8]],"kwargs":{"layout":9}}', (3, 8)),
    "no payload": ("aten.relu.default", "nonsense", (3, 8)),
}


@pytest.mark.parametrize("name", BEYOND)
def test_arguments_are_looked_at_before_anything_runs(name: str) -> None:
    target, payload, shape = BEYOND[name]
    with pytest.raises(TilewrightError, match=r"cannot be evaluated|a call |is declared|malformed"):
        load(calling("torch", target, payload, TensorType(F32, shape)))


@pytest.mark.parametrize("device", ["mps", "meta", "nowhere", "cpu:99999999999"])
def test_a_call_without_operands_names_no_other_device(device: str) -> None:
    payload = f'{{"args":[[3,8]],"kwargs":{{"device":{{"device":"{device}"}}}}}}'
    made = Node(Call("torch", "aten.zeros.default", payload, (TensorType(F32, (3, 8)),)))
    with pytest.raises(InputError, match=r"a call on device|malformed"):
        load(print_graph(Graph("hostile", (), (made,), ("y",))))


def test_a_call_on_an_opaque_value_is_seen_through() -> None:
    x = input_("x", F32, (3, 8))
    transform = '{"args":[{"tensor":0},[1],0,true],"kwargs":{}}'
    bins = Node(Call("torch", "aten._fft_r2c.default", transform, (TensorType(OPAQUE, ()),)), x)
    real = Node(Call("torch", "aten.view_as_real.default", ONE, (TensorType(F32, (3, 5, 2)),)), bins)
    graph = load(print_graph(Graph("fft", (x,), (real,), ("y",))))
    assert torch.equal(evaluate(graph, [X])[0], torch.view_as_real(torch.fft.rfft(X)))
    wrong = Node(Call("torch", "aten.view_as_real.default", ONE, (TensorType(F32, (3, 8, 2)),)), bins)
    with pytest.raises(TilewrightError, match=r"f32\[3,5,2\] where f32\[3,8,2\] is declared"):
        load(print_graph(Graph("fft", (x,), (wrong,), ("y",))))


def test_what_has_a_shape_only_at_run_time_needs_the_flag() -> None:
    x = input_("x", F32, (3, 8))
    made = Node(
        Call("onnx", "Identity", onnx_payload(helper.make_node("Identity", ["x"], ["y"])), (TensorType(OPAQUE, ()),)), x
    )
    text = print_graph(
        Graph("g", (x,), (Node(Call("torch", "aten.relu.default", ONE, (TensorType(F32, (3, 8)),)), made),), ("y",))
    )
    with pytest.raises(InputError, match="has a shape only once the program runs"):
        load(text)
    assert load(text, LoadOptions(allow_calls=True))


@pytest.mark.parametrize(
    "f",
    [
        lambda a: torch.topk(a, 3).values,
        lambda a: torch.cdist(a, a, p=1.0),
        lambda a: torch.sort(a, 1, descending=True).indices,
        lambda a: a.cumsum(1, dtype=torch.float64),
        lambda a: torch.nn.functional.avg_pool2d(a[None], 3),
        lambda a: torch.fft.irfft(torch.fft.rfft(a) * 2),
        lambda a: torch.histc(a, bins=4, min=-1.0, max=1.0),
        lambda a: torch.as_strided(a, (2, 3), (3, 2)),
        lambda a: a.view(torch.int32),
        lambda a: torch.linalg.vector_norm(a, 3, 1),
        lambda a: torch.slice_scatter(a, a[:, :4], 1, 0, 8, 2),
        lambda a: a.scatter(0, torch.zeros(1, 8, dtype=torch.int64), 5.0),
    ],
)
def test_what_the_torch_front_end_leaves_to_torch_may_stand_in_a_file(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    graph = read(Of(f), X)
    assert any(isinstance(n.op, Call) for n in graph.nodes())
    (given,) = evaluate(load(print_graph(graph)), [X])
    torch.testing.assert_close(given, f(X))


def test_no_allowed_operator_writes_draws_or_shows_old_memory() -> None:
    known = 0
    for target in ALLOWED:
        try:
            operator = find_operator(target, "")
        except UnsupportedError:  # an older torch knows fewer
            continue
        known += 1
        assert not schema_of(operator).is_mutable, target
        assert torch.Tag.nondeterministic_seeded not in operator.tags, target
        assert not any(word in target for word in ("empty", "resize", "_reshape_alias", "from_file", "set_", "storage")), target
        assert all(str(a.type) not in ("Storage", "Stream", "Generator") for a in schema_of(operator).arguments), target
    assert known > 250


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_a_norm_over_batches_has_weights_for_all_channels(place: int) -> None:
    """Torch reads past those that are too few."""
    args = [{"tensor": 0}, *({"tensor": 0} if i == place else None for i in range(1, 5)), True, 0.1, 1e-5]
    payload = json.dumps({"args": args, "kwargs": {}})
    with pytest.raises(InputError, match="a call whose weights are not one for each channel"):
        load(calling("torch", "aten.native_batch_norm.default", payload))


@pytest.mark.parametrize("target", ["aten.as_strided.default", "aten.gather.default", "aten.index_put.default"])
def test_random_arguments_are_refused_or_evaluated(target: str) -> None:
    ran = 0
    for seed in range(20):
        try:
            case(target, seed)()
            ran += 1
        except (TilewrightError, RuntimeError, IndexError):
            continue
    assert ran


def onnx_payload(node: onnx.NodeProto, elem: int = TensorProto.FLOAT) -> str:
    x = helper.make_tensor_value_info("x", elem, [3, 8])
    graph = helper.make_graph([node], "g", [x], [helper.make_value_info("y", onnx.TypeProto())])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    return base64.b64encode(model.SerializeToString()).decode()


def external(location: str) -> TensorProto:
    t = TensorProto(name="secret", data_type=TensorProto.UINT8, dims=[16], data_location=TensorProto.EXTERNAL)
    t.external_data.add(key="location", value=location)
    return t


def test_a_payload_of_onnx_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.txt").write_bytes(b"0123456789abcdef")
    monkeypatch.chdir(tmp_path)
    constant = helper.make_node("Constant", [], ["y"], value=external("secret.txt"))
    inner = helper.make_graph([constant], "inner", [], [helper.make_value_info("y", onnx.TypeProto())])
    branch = helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
    for node in (constant, branch):
        text = calling("onnx", node.op_type, onnx_payload(node), TensorType(S64, (16,)))
        for options in (LoadOptions(), LoadOptions(allow_calls=True)):
            with pytest.raises(InputError, match="data outside itself"):
                evaluate(load(text, options), [X])


@pytest.mark.parametrize("payload", ["", "nonsense", "AAAA", "####"])
def test_a_payload_of_onnx_that_is_none_is_refused(payload: str) -> None:
    with pytest.raises(TilewrightError, match=r"no ONNX model|holds no graph|cannot run it|operands for a payload"):
        load(calling("onnx", "Relu", payload))


def test_a_payload_of_stablehlo_is_looked_at() -> None:
    t = "tensor<3x8xf32>"
    body = f"%0 = stablehlo.custom_call @f(%a) : ({t}) -> {t} return %0 : {t}"
    module = f"func.func @main(%a: {t}) -> {t} {{ {body} }}"
    with pytest.raises(TilewrightError, match="cannot be interpreted"):
        load(calling("stablehlo", "stablehlo.custom_call", module))
    with pytest.raises(TilewrightError):
        load(calling("stablehlo", "stablehlo.sort", "nonsense"))


@pytest.mark.parametrize("library", ["os", "hlo", "_torch_call", "a.b", ""])
def test_a_library_that_evaluates_nothing_is_refused(library: str) -> None:
    with pytest.raises(InputError, match="does not say what a file may call"):
        load(calling(library, "x", ONE))


@pytest.mark.parametrize("verb", ["read", "run", "verify", "perf", "explain"])
def test_the_command_line_refuses_and_allows(verb: str, tmp_path: Path) -> None:
    program = tmp_path / "p.tw"
    program.write_text(calling("torch", "aten.relu6.default", ONE))
    assert "aten.relu6.default" not in ALLOWED
    options = () if verb == "read" else FAST
    refused = invoke(verb, str(program), *options)
    assert refused.exit_code == 2 and "'aten.relu6.default'" in refused.stderr and "--allow-calls" in refused.stderr
    if verb in ("read", "run"):
        assert invoke(verb, str(program), *options, "--allow-calls").exit_code == 0


@pytest.mark.parametrize(
    "rest",
    ["[-2],0,true", "[0,0],0,true", "[2],0,true", "[],0,true", "[1],1000,true", "[1],-1,true", '[{"float":"nan"}],0,true'],
)
def test_a_transform_over_axes_that_are_not_there_is_refused(rest: str) -> None:
    payload = f'{{"args":[{{"tensor":0}},{rest}],"kwargs":{{}}}}'
    x = input_("x", F32, (3, 8))
    bins = Node(Call("torch", "aten._fft_r2c.default", payload, (TensorType(OPAQUE, ()),)), x)
    real = Node(Call("torch", "aten.view_as_real.default", ONE, (TensorType(F32, (3, 5, 2)),)), bins)
    with pytest.raises(InputError, match="no Fourier transform has"):
        load(print_graph(Graph("fft", (x,), (real,), ("y",))))
