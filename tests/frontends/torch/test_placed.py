"""Plans for torch modules on a mesh, DTensor parameters, and programs that are one rank's already."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from two_ranks import two_ranks

from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.ir.evaluate import evaluate_mesh
from tilewright.ir.graph import Graph, Node, label_of, substitute
from tilewright.ir.ops import Collective, Const, Input, Own, Transpose
from tilewright.rules.shard import localise


class MLP(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=bias), nn.Linear(32, 16, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 32, bias=False) for _ in range(3))
        self.o = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).reshape(b, s, 8, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = torch.softmax(q @ k.transpose(-1, -2), -1)
        return self.o((p @ v).transpose(1, 2).reshape(b, s, 32))


def local(module: nn.Module, x: torch.Tensor, mesh: str = "tp=4", **options: object) -> Graph:
    return localise(load(module.eval(), LoadOptions(example_inputs=(x,), mesh=mesh, **options)))  # type: ignore[arg-type]


def agrees(module: nn.Module, x: torch.Tensor, mesh: str = "tp=4", **options: object) -> Graph:
    """The program of one rank, once all ranks together gave what the module gives."""
    graph = local(module, x, mesh, **options)
    assert graph.mesh is not None
    parts = graph.placements[0].split(x, graph.mesh)
    found = evaluate_mesh(graph, [{label_of(graph.inputs[0]): p} for p in parts], graph.mesh)
    joined = graph.placements[1].joined([f[0] for f in found], graph.mesh)  # type: ignore[misc]
    torch.testing.assert_close(joined, module(x), rtol=1e-4, atol=1e-5)
    return graph


def exchanged(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.nodes() if isinstance(n.op, Collective) and not isinstance(n.op, Own)]


def owned(graph: Graph) -> dict[str, int]:
    """Names of weights of which ranks have parts, with the axis."""
    return {
        n.src[0].op.data.label: n.op.axis for n in graph.nodes() if isinstance(n.op, Own) and isinstance(n.src[0].op, Const)
    }


MEGATRON = {
    "words": {"up": "colwise", "down": "rowwise"},
    "wildcards": {"*": "replicate", "u*": "colwise", "down": "rowwise_rep"},
    "styles": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "weights": {"up.weight": "[tp, ]", "up.bias": ("tp",), "down.weight": [Shard(1)], "down.bias": [Replicate()]},
    "words of weights": {"up.weight": "colwise", "up.bias": "colwise", "down.weight": "rowwise", "down.bias": "rowwise"},
}


@pytest.mark.parametrize("case", MEGATRON)
def test_plans_of_a_network_give_one_sum_over_ranks(case: str) -> None:
    torch.manual_seed(0)
    module, x = MLP(), torch.randn(8, 16)
    graph = agrees(module, x, plan=MEGATRON[case])
    assert exchanged(graph) == ["all_reduce"]
    assert owned(graph) == {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    other = local(module, x, plan=MEGATRON["words"])
    assert [(n.op.name, n.type) for n in graph.nodes()] == [(n.op.name, n.type) for n in other.nodes()]
    if case == "weights":  # torch has one placement for each axis of the mesh
        return
    two = agrees(module, x, "dp=2,tp=2", plan={**MEGATRON[case], "x": "[dp, ]"})
    assert exchanged(two) == ["all_reduce"] and [*map(str, two.placements)] == ["[dp, ]", "[dp, ]"]


def test_parts_of_a_sequence_are_gathered_and_scattered() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(16), MLP()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(self.norm(x))

    torch.manual_seed(0)
    module, x = Block(), torch.randn(2, 8, 16)
    styles = {"norm": SequenceParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=Shard(1))}
    words = {"norm": "sequence_parallel", "mlp.up": "colwise", "mlp.down": RowwiseParallel(output_layouts=Shard(1))}
    whole = {
        "mlp": PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            output_layouts=(Shard(1),),
            desired_output_layouts=(Shard(1),),
        )
    }
    apart = {
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.down": PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Shard(1),)),
    }
    for plan in (styles, words, {**whole, "mlp.up.*": "colwise", "mlp.down.weight": "rowwise"}, apart):
        graph = agrees(module, x, plan={**plan, "x": "[, tp, ]"})
        assert [*map(str, graph.placements)] == ["[, tp, ]"] * 2
        if plan is not apart:
            assert exchanged(graph) == ["all_gather", "reduce_scatter"]
    with pytest.raises(UnsupportedError, match="parts of a sequence on a mesh of several axes"):
        local(module, x, "dp=2,tp=2", plan=styles)


def test_embeddings_and_what_is_gathered_behind() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    torch.manual_seed(0)
    module, x = Model(), torch.randint(0, 64, (2, 5))
    for plan, gathers in (
        ({"embed": "embedding_rowwise", "head": "colwise_gather_output"}, 1),
        ({"embed": "embedding_colwise", "head": "colwise_rep"}, 2),
        ({"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}, 1),
        ({"embed": ColwiseParallel(output_layouts=Replicate()), "head": "colwise"}, 1),
    ):
        graph = agrees(module, x, plan=plan)
        assert exchanged(graph) == ["all_gather"] * gathers, plan
    notes = load(module, LoadOptions(example_inputs=(x,), mesh="tp=4", plan={"embed": "embedding_rowwise"})).notes  # type: ignore[arg-type]
    assert any("embed.weight is to be split by its rows" in note for note in notes)


def test_a_model_of_transformers_by_its_own_plan() -> None:
    """Two sums over ranks for each layer, and one gather for the logits, as Megatron has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, vocab_size=64
    )
    config.use_cache = False

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM(config)
            self.tp_plan = {f"model.{name}": style for name, style in self.model.tp_plan.items()}

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids, use_cache=False).logits

    module, ids = Logits().eval(), torch.randint(0, 64, (2, 6))
    for mesh in ("tp=2", "tp=4"):
        graph = agrees(module, ids, mesh, plan="auto")
        counts = Counter(exchanged(graph))
        assert counts["all_reduce"] == 4
        assert counts["all_gather"] == 1
        assert counts["reduce_scatter"] == counts["all_to_all"] == 0


def test_what_is_not_read_is_noted() -> None:
    module, x = MLP(), torch.randn(8, 16)
    graph = load(
        module.eval(),
        LoadOptions(example_inputs=(x,), mesh="tp=4", plan={"up": "packed_colwise", "down.weight": "moe_tp_experts"}),
    )  # type: ignore[arg-type]
    assert "the style 'packed_colwise' of up is not read: what it is of stays whole on every rank" in graph.notes
    assert "the style 'moe_tp_experts' of down.weight is not read: what it is of stays whole on every rank" in graph.notes


@pytest.mark.parametrize(
    ("plan", "mesh", "kind", "pattern"),
    [
        ({"up": "column"}, "tp=4", InputError, "no style: 'column'.*plan of 'up'"),
        ({"up": 3}, "tp=4", InputError, "no style: an argument of type int"),
        ({"upp": "colwise"}, "tp=4", InputError, "the plan names 'upp', which is no part of the program"),
        ({"up.weight": "[tp]"}, "tp=4", InputError, r"the placement \[tp\] is of 1 axes, the tensor has 2"),
        ({"up": "colwise"}, "a=2,b=2", InputError, "the mesh a=2,b=2 has no axis for styles"),
        ({"up": "colwise"}, "tp=5", UnsupportedError, "5 ranks do not divide an extent of 32"),
        ("auto", "tp=4", InputError, "the module has no plan of its own"),
    ],
)
def test_plans_that_are_none_are_refused(plan: object, mesh: str, kind: type[Exception], pattern: str) -> None:
    with pytest.raises(kind, match=f"(?s){pattern}"):
        local(MLP(), torch.randn(8, 16), mesh, plan=plan)


def as_inputs(graph: Graph, names: dict[str, str]) -> list[Node]:
    """The results, with ranks' parts of weights as inputs of these names."""
    found: dict[Node, Node] = {}
    for node in graph.nodes():
        if isinstance(node.op, Own) and isinstance(node.src[0].op, Const):
            found[node] = Node(Input(names[node.src[0].op.data.label], node.tensor))
    return substitute(graph.outputs, found)


def test_a_plan_and_shardings_of_hlo_give_one_local_graph() -> None:
    """An MLP and an attention block, by torch's words and by JAX with placements of its inputs."""
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    own = local(MLP(bias=False), x, plan=MEGATRON["words"])
    text = """HloModule m
ENTRY main {
  x = f32[8,16] parameter(0)
  u = f32[32,16] parameter(1), sharding={devices=[4,1]<=[4]}
  d = f32[16,32] parameter(2), sharding={devices=[1,4]<=[4]}
  h = f32[8,32] dot(x, u), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  t = f32[8,32] tanh(h)
  ROOT y = f32[8,16] dot(t, d), lhs_contracting_dims={1}, rhs_contracting_dims={1}, sharding={replicated}
}
"""
    other = load(text, LoadOptions(mesh="tp=4"))  # type: ignore[arg-type]
    assert as_inputs(own, {"up.weight": "u", "down.weight": "d"}) == [*other.outputs]
    assert own.mesh == other.mesh and own.placements[0] == other.placements[0] and own.placements[1] == other.placements[-1]

    def attention(x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, o: jax.Array) -> jax.Array:
        b, s, _ = x.shape
        q, k, v = ((x @ w.T).reshape(b, s, 8, 4).transpose(0, 2, 1, 3) for w in (q, k, v))
        p = jax.nn.softmax(q @ k.swapaxes(-1, -2), -1)
        return (p @ v).transpose(0, 2, 1, 3).reshape(b, s, 32) @ o.T

    shapes = [(2, 6, 16), (32, 16), (32, 16), (32, 16), (16, 32)]
    lowered = jax.jit(attention).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).as_text()
    text = load(
        lowered, LoadOptions(mesh="tp=4", plan={f"arg{i}": p for i, p in enumerate(("[, , ]", *["[tp, ]"] * 3, "[, tp]"))})
    )  # type: ignore[arg-type]
    x = torch.randn(2, 6, 16)
    own = agrees(Attention(), x, plan={"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"})
    assert exchanged(own) == exchanged(text) == ["all_reduce"]

    def products(graph: Graph) -> list[tuple[object, ...]]:
        return sorted((n.shape, n.src[0].shape, n.src[1].shape) for n in graph.nodes() if n.op.name == "gemm")

    flat = Counter(int(np.prod(s[0])) for s in products(own))
    assert flat == Counter(int(np.prod(s[0])) for s in products(text))
    assert [*map(str, own.placements)] == [str(text.placements[0]), str(text.placements[-1])]
    assert any(isinstance(n.op, Transpose) for n in own.nodes())


def test_parameters_that_are_dtensors_and_collectives_of_torch() -> None:
    said = two_ranks("""
        sys.path.insert(0, f"{ROOT}/tests/frontends/torch")
        from test_placed import MLP, exchanged, owned
        from tilewright.frontends import load, LoadOptions
        from tilewright.rules.shard import localise
        from tilewright.ir.evaluate import evaluate_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        import torch.distributed._functional_collectives as funcol
        module, x = MLP().eval(), torch.randn(8, 16)
        wanted = module(x)
        parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        graph = load(module, LoadOptions(example_inputs=(x,), mesh=mesh))
        notes = graph.notes
        graph = localise(graph)
        assert module.up.weight.placements[0].is_shard() and len(module.up._forward_pre_hooks) == 1
        found = evaluate_mesh(graph, [{"x": x}] * 2, graph.mesh)
        torch.testing.assert_close(found[1][0], wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(module(x), wanted, rtol=1e-4, atol=1e-5)
        assert exchanged(graph) == ["all_reduce"] and len(owned(graph)) == 3, exchanged(graph)
        assert any("hooks of parallelize_module on up, down are left out" in n for n in notes), notes

        class Rank(nn.Module):
            def forward(self, x, w):
                part = funcol.all_gather_tensor(x, 0, mesh) @ w
                whole = funcol.all_reduce(part, "sum", mesh)
                return whole, funcol.reduce_scatter_tensor(part, "avg", 0, mesh), funcol.all_reduce(part, "max", mesh)
        x, w = torch.randn(4, 6), torch.randn(6, 5)
        plan = {"x": "[tp, ]", "w": "[tp, ]"}
        graph = load(Rank(), LoadOptions(example_inputs=(x, w), mesh="tp=2", plan=plan))
        print([n.op.name for n in graph.nodes() if hasattr(n.op, "over")], *map(str, graph.placements), sep="; ")
        xs, ws = [torch.randn(4, 6) for _ in range(2)], [torch.randn(6, 5) for _ in range(2)]
        found = evaluate_mesh(graph, [{"x": a, "w": b} for a, b in zip(xs, ws)], graph.mesh)
        parts = [torch.cat(xs) @ w for w in ws]
        torch.testing.assert_close(found[0][0], parts[0] + parts[1])
        torch.testing.assert_close(found[1][1], ((parts[0] + parts[1]) / 2)[4:])
        torch.testing.assert_close(found[1][2], torch.maximum(*parts))
        try:
            load(Rank(), LoadOptions(example_inputs=(x, w)))
        except Exception as error:
            print(error)
    """)
    assert "all_gather" in said and "reduce_scatter" in said and "; [tp, ]; [tp, ]; [, ]; [tp, ]; [, ]" in said
    assert "needs several ranks, and a program runs on one" in said and 'mesh="tp=4"' in said
