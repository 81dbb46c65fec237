"""Queries that share keys, in every spelling that programs have: one attention over the keys as they lie, repeated nowhere."""

import pytest
import torch
from onnx import TensorProto, helper
from rule_checks import assert_no_growth
from torch.nn import functional

import tilewright
from tilewright.compiler import optimise
from tilewright.frontends import LoadOptions
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Attention

B, H, K, T, D = 2, 8, 2, 64, 16


def onnx_model(nodes, shapes, numbers=(), opset=20):
    infos = [helper.make_tensor_value_info(n, t, s) for n, (t, s) in shapes.items()]
    (query, *_), (_, like) = infos, shapes["q"]
    out = helper.make_tensor_value_info("y", shapes["q"][0], like)
    graph = helper.make_graph(nodes, "g", infos, [out], [helper.make_tensor(n, t, [len(v)], v) for n, t, v in numbers])
    assert query.name == "q"
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=11)


def attention(opset, queries):
    f16 = TensorProto.FLOAT16
    shapes = {"q": (f16, [B, H, queries, D]), **{n: (f16, [B, K, T, D]) for n in "kv"}}
    return onnx_model([helper.make_node("Attention", ["q", "k", "v"], ["y"])], shapes, opset=opset)


def group_query_attention(queries):
    """GroupQueryAttention on a first prompt: the cache is what it gives."""
    f16 = TensorProto.FLOAT16
    shapes = {"q": (f16, [B, queries, H * D]), **{n: (f16, [B, queries, K * D]) for n in "kv"}}
    shapes["lengths"] = (TensorProto.INT32, [B])
    given = ["q", "k", "v", "", "", "lengths", "total"]
    node = helper.make_node("GroupQueryAttention", given, ["y"], domain="com.microsoft", num_heads=H, kv_num_heads=K)
    return onnx_model([node], shapes, [("total", TensorProto.INT32, [queries])])


def repeat_kv(queries):
    """Heads repeated as in exports of transformers' models."""
    f32, made = TensorProto.FLOAT, []
    for x in "kv":
        made += [
            helper.make_node("Unsqueeze", [x, "axis"], [f"{x} by group"]),
            helper.make_node("Expand", [f"{x} by group", "group"], [f"{x} spread"]),
            helper.make_node("Reshape", [f"{x} spread", "heads"], [f"{x} repeated"]),
        ]
    made += [
        helper.make_node("Transpose", ["k repeated"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Mul", ["s", "scale"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["w"], axis=-1),
        helper.make_node("MatMul", ["w", "v repeated"], ["y"]),
    ]
    shapes = {"q": (f32, [B, H, queries, D]), **{n: (f32, [B, K, T, D]) for n in "kv"}}
    i64 = TensorProto.INT64
    numbers = [("axis", i64, [2]), ("group", i64, [B, K, H // K, T, D]), ("heads", i64, [B, H, T, D]), ("scale", f32, [0.25])]
    return onnx_model(made, shapes, numbers)


def xla(queries):
    """A broadcast and a reshape of keys that lie by tokens, and a softmax written out."""
    q, kv, s = f"bf16[{B},{H},{queries},{D}]", f"bf16[{B},{T},{K},{D}]", f"[{B},{H},{queries},{T}]"
    batched = "lhs_batch_dims={0,1}, rhs_batch_dims={0,2}"
    wide, rows = f"bf16[{B},{T},{K},{H // K},{D}]", f"f32[{B},{H},{queries}]"
    return f"""
HloModule m
max {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] maximum(a, b)
}}
sum {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b)
}}
ENTRY main {{
  q = {q} parameter(0)
  k = {kv} parameter(1)
  v = {kv} parameter(2)
  kb = {wide} broadcast(k), dimensions={{0,1,2,4}}
  kr = bf16[{B},{T},{H},{D}] reshape(kb)
  vb = {wide} broadcast(v), dimensions={{0,1,2,4}}
  vr = bf16[{B},{T},{H},{D}] reshape(vb)
  p = bf16{s} dot(q, kr), {batched}, lhs_contracting_dims={{3}}, rhs_contracting_dims={{3}}
  f = f32{s} convert(p)
  c = f32[] constant(0.25)
  cb = f32{s} broadcast(c), dimensions={{}}
  x = f32{s} multiply(f, cb)
  low = f32[] constant(-inf)
  m = {rows} reduce(x, low), dimensions={{3}}, to_apply=max
  mb = f32{s} broadcast(m), dimensions={{0,1,2}}
  d = f32{s} subtract(x, mb)
  e = f32{s} exponential(d)
  zero = f32[] constant(0)
  t = {rows} reduce(e, zero), dimensions={{3}}, to_apply=sum
  tb = f32{s} broadcast(t), dimensions={{0,1,2}}
  w = f32{s} divide(e, tb)
  wb = bf16{s} convert(w)
  ROOT y = {q} dot(wb, vr), {batched}, lhs_contracting_dims={{3}}, rhs_contracting_dims={{1}}
}}
"""


class Torch(torch.nn.Module):
    def __init__(self, repeat):
        super().__init__()
        self.repeat = repeat

    def forward(self, q, k, v):
        if self.repeat:
            k, v = (t[:, :, None].expand(B, K, H // K, T, D).reshape(B, H, T, D) for t in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=not self.repeat)


def from_torch(queries, *, repeat):
    q, k, v = (torch.randn(B, n, t, D) for n, t in ((H, queries), (K, T), (K, T)))
    return tilewright.load(Torch(repeat), LoadOptions(example_inputs=(q, k, v)))


def one_attention(graph: Graph) -> Node:
    after = optimise(graph)
    assert_no_growth(graph, after)
    (node,) = (n for n in after.nodes() if n.src)
    assert isinstance(node.op, Attention)
    return node


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(
    "program",
    [
        lambda s: tilewright.load(attention(23, s)),
        lambda s: tilewright.load(attention(24, s)),
        lambda s: tilewright.load(group_query_attention(s)),
        lambda s: tilewright.load(repeat_kv(s)),
        lambda s: tilewright.load(xla(s)),
        lambda s: from_torch(s, repeat=False),
        lambda s: from_torch(s, repeat=True),
    ],
    ids=["Attention-23", "Attention-24", "GroupQueryAttention", "repeat_kv", "xla", "enable_gqa", "expand"],
)
def test_keys_are_read_as_they_lie(program, queries):
    graph = program(queries)
    given = sum(n.tensor.elements for n in graph.inputs if n.dtype.is_float)
    node = one_attention(graph)
    assert all(s.op.name == "input" for s in node.src)
    assert sum(s.tensor.elements for s in node.src) == given
