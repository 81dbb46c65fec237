"""Reading of PyTorch programs: what is referred to, what things are called, what is bound, what is refused and how."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from against_torch import Of, agree, compare, read
from torch import nn
from torch.export import Dim, export

import tilewright
from tilewright.errors import InputError
from tilewright.frontends import LoadOptions, load
from tilewright.frontends import torch as frontend
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph
from tilewright.ir.ops import Const, Convert, Gemm, Input
from tilewright.ir.verify import verify


def shown(error: pytest.ExceptionInfo[Exception]) -> str:
    """The message, which a user sees in two lines at most."""
    text = str(error.value)
    assert len(text.splitlines()) <= 2
    return text


def weights(graph: Graph) -> dict[str, torch.Tensor]:
    return {n.op.data.label: n.op.data.tensor() for n in graph.nodes() if isinstance(n.op, Const) and n.op.data.label}


def labels(graph: Graph) -> list[str]:
    return [n.op.label for n in graph.inputs if isinstance(n.op, Input)]


class Tied(nn.Module):
    """An embedding whose table is the head's weight too, and a weight that is stored transposed. None is small enough to be
    taken by value."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(130, 72)
        self.body = nn.Sequential(nn.Linear(72, 72), nn.GELU())
        self.turned = nn.Parameter(torch.randn(72, 17).t())
        self.head = nn.Linear(72, 130, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("shift", torch.randn(72, 5), persistent=False)
        self.plain = torch.randn(5, 100)

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        x = self.body(self.table(ids))
        return {"logits": self.head(x), "more": (F.linear(x, self.turned), x @ self.shift @ self.plain)}


class TestReading:
    def test_weights_are_references_and_tied_ones_are_one(self) -> None:
        module = Tied().eval()
        graph = agree(module, torch.randint(0, 130, (2, 6)), ulps=4, depth=8)
        found = weights(graph)
        shared = ({"table.weight", "head.weight"} & set(found)).pop()
        assert set(found) == {shared, "body.0.weight", "body.0.bias", "turned", "shift", "plain"}
        for label, value in found.items():
            source = attrgetter(label)(module)
            assert value.data_ptr() == source.data_ptr() and value.stride() == source.stride()
        assert not found["turned"].is_contiguous()

    def test_inputs_outputs_and_nodes_are_called_as_the_source_calls_them(self) -> None:
        graph = read(Tied().eval(), torch.randint(0, 130, (2, 6)))
        assert graph.name == "Tied"
        assert labels(graph) == ["ids"]
        assert graph.output_names == ("logits", "more.0", "more.1")
        names = [graph.origin(n) for n in graph.nodes() if isinstance(n.op, Gemm)]
        assert names[:2] == ["body.0 linear", "head linear"]
        assert names[2:] == ["linear_2", "matmul", "matmul_1"]

    def test_one_result_is_called_output_and_several_by_their_place(self) -> None:
        assert read(torch.neg, torch.ones(2)).output_names == ("output",)
        assert read(lambda a: (a + 1, [a + 2]), torch.ones(2)).output_names == ("output_0", "output_1.0")

    def test_keyword_inputs_take_their_names_and_constants_are_said(self) -> None:
        class Flagged(nn.Module):
            def forward(self, x: torch.Tensor, *, scale: float = 1.0, mask: torch.Tensor | None = None) -> object:
                return (x * scale if mask is None else x.masked_fill(mask, scale)), None, 3

        inputs = {"x": np.ones((2, 3), np.float32), "scale": 2.5, "mask": torch.tensor([True, False, True])}
        graph = load_with(Flagged(), inputs)
        assert labels(graph) == ["x", "mask"]
        assert graph.notes == (
            "input 'scale' is fixed to 2.5, the value it was traced with",
            "output 'output_2' is 3, no tensor, and is left out",
        )
        given = evaluate(graph, {"x": torch.zeros(2, 3), "mask": torch.tensor([True, False, False])})
        assert given[0].tolist() == [[2.5, 0, 0]] * 2

    @pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
    def test_positions_are_those_of_forward_however_the_examples_were_named(self, order: tuple[str, str]) -> None:
        class Apart(nn.Module):
            def forward(self, x: torch.Tensor, /, y: torch.Tensor, *, z: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
                return x @ x.mT - y @ y.mT + z + more["w"]

        given = {n: torch.randn(3, 3) for n in ("w", "z", *order)}
        graph = load_with(Apart(), given)
        assert labels(graph) == ["x", "y", "z", "w"]
        x, y, z, w = (given[n] for n in "xyzw")
        wanted = Apart()(x, y, z=z, w=w)
        torch.testing.assert_close(evaluate(graph, [x, y, z, w])[0], wanted)
        torch.testing.assert_close(evaluate(graph, given)[0], wanted)

    def test_positions_after_an_argument_that_was_left_out_are_refused(self) -> None:
        class Optional(nn.Module):
            def forward(
                self, ids: torch.Tensor, mask: torch.Tensor | None = None, *, kinds: torch.Tensor | None = None
            ) -> torch.Tensor:
                return ids + (0 if mask is None else 10 * mask) + (0 if kinds is None else 100 * kinds)

        class Passed(nn.Module):
            def forward(self, *args: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
                return Optional()(*args, **more)

        x = torch.ones(2, 2)
        for examples in ({"ids": x, "kinds": x}, {"kinds": x, "mask": None, "ids": x}):
            program = tilewright.compile(Optional(), example_inputs=examples, budget_s=0, cache=False)
            with pytest.raises(InputError, match=r"argument 2 is 'mask', which is no input(.|\n)*by name: kinds=…"):
                program(x, x)
            torch.testing.assert_close(program(x, kinds=2 * x), 201 * x)
        program = tilewright.compile(Optional(), example_inputs={"kinds": x, "mask": x, "ids": x}, budget_s=0, cache=False)
        torch.testing.assert_close(program(x, 2 * x, 3 * x), 321 * x)
        exported = export(Optional(), (x,), {"kinds": x.clone()})
        for module, given in ((exported, None), (Passed(), {"ids": x, "kinds": x})):
            program = tilewright.compile(module, example_inputs=given, budget_s=0, cache=False)
            with pytest.raises(InputError, match=r"what argument \d is cannot be told: the program takes it by name"):
                program(x, x)
            torch.testing.assert_close(program(ids=x, kinds=2 * x), 201 * x)

    def test_one_tensor_alone_is_an_input(self) -> None:
        assert labels(load_with(Of(torch.neg), torch.ones(3))) == ["args_0"]

    def test_an_input_nothing_reads_is_still_an_input(self) -> None:
        assert labels(read(lambda a, b: a + 1, torch.ones(2), torch.ones(3))) == ["args_0", "args_1"]

    def test_an_input_may_be_an_output(self) -> None:
        agree(lambda a: (a, a.view(4)), torch.randn(2, 2))

    def test_only_the_front_end_of_torch_takes_a_module(self) -> None:
        graph = load(nn.Linear(3, 2), LoadOptions(example_inputs=(torch.ones(1, 3),)))
        assert graph.name == "Linear"
        assert not frontend.accepts("HloModule m") and not frontend.accepts(Path("model.onnx"))

    def test_a_region_without_gradients_and_one_with_autocast_are_read_through(self) -> None:
        linear = nn.Linear(8, 8)

        def program(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = x.sin()
            with torch.autocast("cpu", enabled=False):
                y = y * 2
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return linear(y)

        graph = agree(program, torch.randn(3, 8), ulps=2, depth=2)
        assert any(isinstance(n.op, Convert) for n in graph.nodes())

    def test_a_tensor_subclass_is_read_as_what_it_is_made_of(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        module = nn.Linear(8, 4, bias=False)
        half = module.weight.detach().clone()
        module.weight = nn.Parameter(TwoTensor(half, half.clone()))
        graph = read(module, torch.randn(3, 8))
        x = torch.randn(3, 8)
        assert torch.allclose(evaluate(graph, [x])[0], x @ half.t(), atol=1e-5)


def load_with(program: object, inputs: object, **options: Any) -> Graph:
    return verify(frontend.load(program, LoadOptions(example_inputs=inputs, **options)))  # type: ignore[arg-type]


class Attends(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT) * mask[:, None] + x.shape[1]


def dynamic() -> torch.export.ExportedProgram:
    batch, length = Dim("batch", min=1, max=64), Dim("length", min=2, max=64)
    shapes = {"x": {0: batch, 1: length}, "mask": {0: batch, 1: length}}
    return export(Attends(), (torch.randn(2, 5, 4), torch.ones(2, 5)), dynamic_shapes=shapes, strict=False)


class TestExportedPrograms:
    @pytest.mark.parametrize("strict", [False, True])
    def test_an_exported_program_needs_no_example_inputs(self, strict: bool) -> None:
        module = Tied().eval()
        ids = torch.randint(0, 130, (2, 6))
        graph = load_with(export(module, (ids,), strict=strict), None)
        assert graph.name == "Tied"
        assert "body.0 linear" in graph.origins.values()
        assert weights(graph)["body.0.weight"].data_ptr() == module.body[0].weight.data_ptr()
        compare(graph, module, [ids], ulps=4, depth=8)

    @pytest.mark.parametrize(
        ("inputs", "options"),
        [
            (None, {"input_dims": {"x": (3, 7, 4)}}),
            (None, {"input_dims": {"mask": (3, 7)}}),
            (None, {"batch": 3, "input_dims": {"x": (3, 7, 4)}}),
            ((torch.zeros(3, 7, 4), torch.zeros(3, 7)), {}),
            ({"mask": np.zeros((3, 7), np.float32), "x": torch.zeros(3, 7, 4)}, {}),
        ],
    )
    def test_symbolic_extents_are_bound(self, inputs: object, options: Mapping[str, Any]) -> None:
        graph = load_with(dynamic(), inputs, **options)
        assert [n.shape for n in graph.inputs] == [(3, 7, 4), (3, 7)]
        compare(graph, Attends(), [torch.randn(3, 7, 4), torch.randn(3, 7)], ulps=2, depth=4)

    def test_batch_binds_what_nothing_else_does(self) -> None:
        rows = Dim("rows", min=1, max=64)
        program = export(nn.Linear(3, 2), (torch.ones(4, 3),), dynamic_shapes={"input": {0: rows}}, strict=False)
        assert load_with(program, None, batch=9).outputs[0].shape == (9, 2)

    def test_what_is_asked_of_fixed_shapes_is_refused(self) -> None:
        """Every front end does so: no option changes in silence what a program fixes."""
        text = "HloModule m\nENTRY e { x = f32[2,3] parameter(0)\n ROOT y = f32[2,3] negate(x) }"
        graph = read(torch.neg, torch.ones(2, 3))
        fixed: list[tuple[object, object]] = [(nn.Linear(3, 2), (torch.ones(2, 3),)), (text, None), (graph, None)]
        for program, inputs in fixed:
            with pytest.raises(InputError, match=r"a batch of 5 is for a first axis left open(.|\n)*inputs are f32\[2,3\]"):
                load(program, LoadOptions(batch=5, example_inputs=inputs))  # type: ignore[arg-type]
            assert load(program, LoadOptions(batch=2, example_inputs=inputs)).inputs[0].shape == (2, 3)  # type: ignore[arg-type]
        for dims, message in (({"args_0": (5, 3)}, r"'args_0' cannot be \[5, 3\]"), ({"z": (1,)}, "no input is called 'z'")):
            with pytest.raises(InputError, match=message):
                load(graph, LoadOptions(input_dims=dims))

    def test_dims_that_bind_one_symbol_twice_must_agree(self) -> None:
        with pytest.raises(
            InputError, match=r"do not agree: an extent that is 3 elsewhere is 1 here \(input 'mask', axis 0\)"
        ) as error:
            load_with(dynamic(), None, input_dims={"x": (3, 7, 4), "mask": (1, 7)})
        assert "has one symbol" in shown(error)

    def test_an_extent_beyond_what_the_program_allows_is_refused(self) -> None:
        with pytest.raises(InputError, match=r"torch\.export fails: .*64") as error:
            load_with(dynamic(), None, input_dims={"x": (3, 99, 4)})
        shown(error)

    def test_an_example_of_every_input_is_wanted(self) -> None:
        with pytest.raises(InputError, match=r"no example of input 'mask'(.|\n)*inputs are x, mask") as error:
            load_with(dynamic(), {"x": torch.zeros(3, 7, 4)})
        shown(error)

    def test_unbound_extents_are_named(self) -> None:
        with pytest.raises(InputError, match=r"extents of an input are symbolic: \[.*, .*, 4\] \(x\)") as error:
            load_with(dynamic(), None, batch=3)
        assert "input_dims={'x': (…)}" in shown(error)

    def test_dims_must_be_those_of_the_program(self) -> None:
        program = export(Attends(), (torch.randn(2, 5, 4), torch.ones(2, 5)), strict=False)
        assert load_with(program, None, input_dims={"x": (2, 5, 4)})
        with pytest.raises(InputError, match=r"traced with \[2, 5, 4\], not \[3, 5, 4\] \(input 'x'\)") as error:
            load_with(program, None, input_dims={"x": (3, 5, 4)})
        shown(error)
        with pytest.raises(InputError, match=r"no input 'y' to give dims to(.|\n)*inputs are x, mask"):
            load_with(program, None, input_dims={"y": (3,)})
