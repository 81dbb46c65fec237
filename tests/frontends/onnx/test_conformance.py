"""onnx's own node tests of the operators this compiler is about; `make conformance` runs all of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx_models import one
from onnx_node_suite import NAMED, Outcome, outcomes

from tilewright.errors import InputError
from tilewright.frontends import onnx as frontend


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    return outcomes(lambda op: op in NAMED)


def test_every_case_of_the_named_operators_passes(found):
    assert [o for o in found if o.status == "fail"] == []
    assert set(NAMED) == {o.op for o in found}
    assert len(found) > 250


def test_the_named_operators_are_read_natively(found):
    """A call is left for element types that Tilewright lacks, and for scales and axes known only at run time."""
    called = Counter(o.op for o in found if o.status == "call")
    assert set(called) <= {"QuantizeLinear", "DequantizeLinear"}
    names = {o.name for o in found if o.status == "call"}
    assert all("int2" in n or "float6" in n for n in names), names


def test_the_backend_is_onnxs_own_interface():
    backend = frontend.backend()
    assert issubclass(backend, onnx.backend.base.Backend)
    assert backend.supports_device("CPU")
    assert not backend.supports_device("CUDA")
    x = np.ones((2, 3), np.float32)
    m = one("Relu", {"x": x})
    assert backend.run_model(m, [x])[0].tobytes() == x.tobytes()
    with pytest.raises(InputError, match="1 input wanted, 2 given"):
        backend.prepare(m).run([x, x])
    m.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    prepared = backend.prepare(m)
    for rows in (1, 4):
        assert prepared.run([np.ones((rows, 3), np.float32)])[0].shape == (rows, 3)
    assert len(prepared.graphs) == 2
