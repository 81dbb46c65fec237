"""Weights that kernels hold packed can be let go of."""

import gc
import weakref

import pytest
import torch

import tilewright
from tilewright.candidates.llvm.runtime.engine import available
from tilewright.errors import InputError

pytestmark = pytest.mark.skipif(available() is not None, reason="no generated kernels")


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(96, 128), torch.nn.Linear(128, 64)

    def forward(self, x):
        return self.second(torch.nn.functional.gelu(self.first(x)))


def test_packed_weights_are_let_go_of_and_the_program_runs_on():
    torch.manual_seed(0)
    model, x = Two().eval(), torch.randn(40, 96)
    program = tilewright.compile(model, example_inputs=(x,))
    before = program(x)
    torch.testing.assert_close(before, model(x).detach(), rtol=1e-4, atol=1e-4)
    weight = weakref.ref(model.first.weight.untyped_storage())
    kept = [s.decision.kernel.candidate for s in program.steps if s.decision is not None]
    dropped = program.drop_weights()
    if set(kept) == {"llvm"}:  # a library may have been the faster one: it holds what it holds
        assert dropped == 4 * (96 * 128 + 128 * 64)  # not the biases, which epilogues read
        del model
        gc.collect()
        assert weight() is None
    assert torch.equal(program(x), before)
    assert program.drop_weights() == 0
    with pytest.raises(InputError, match="the value of this constant was dropped"):
        tilewright.compile(program.source)(x)


def test_weights_from_a_file_are_read_again(tmp_path):
    from onnx import TensorProto, helper, numpy_helper, save

    weight = torch.randn(96, 64).numpy()
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 96])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 64])],
        [numpy_helper.from_array(weight, "w")],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "one.onnx")
    program = tilewright.compile(tmp_path / "one.onnx")
    x = torch.randn(8, 96)
    before = program(x)
    program.drop_weights()
    assert torch.equal(program(x), before)
    assert torch.equal(tilewright.compile(program.source)(x), before)
