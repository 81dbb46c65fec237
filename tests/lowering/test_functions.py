"""Elementwise functions by name: every one has a form or is refused by name, and tables list functions that there are."""

import pytest

from tilewright.candidates.llvm.expressions import vector
from tilewright.candidates.llvm.gemm import kernel as llvm_kernel
from tilewright.candidates.triton.expressions import emit
from tilewright.dtype import F32, PRED, S32, U32
from tilewright.ir import expression
from tilewright.ir.build import map_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Param
from tilewright.ir.ops.functions import FUNCTIONS
from tilewright.ir.types import TensorType
from tilewright.lowering.scalar import costs, functions
from tilewright.schedule import sample
from tilewright.schedule.candidate import Unsupported

TABLES = {
    "costs.APPROXIMATED": costs.APPROXIMATED,
    "costs.POLYNOMIAL": costs.POLYNOMIAL.of,
    "costs.ROW": costs.ROW.of,
    "costs.SPECIAL_UNIT": costs.SPECIAL_UNIT.of,
    "expression.QUICK": expression.QUICK,
    "expression.REDUCED_PRECISION_SAFE": expression.REDUCED_PRECISION_SAFE,
    "expression.REDUCED_PRECISION_SAFE_TO_8_BITS": expression.REDUCED_PRECISION_SAFE_TO_8_BITS,
    "functions.PICKED": functions.PICKED,
    "llvm.gemm.kernel.FUSED_FUNCTIONS": llvm_kernel.FUSED_FUNCTIONS,
    "sample.ADDITIVE": sample.ADDITIVE,
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_lists_functions_that_there_are(table):
    assert set(TABLES[table]) <= set(FUNCTIONS)


@pytest.mark.parametrize("fn", sorted(FUNCTIONS))
def test_every_function_has_a_form(fn):
    for dtype in (F32, S32, U32, PRED):
        if dtype.kind in FUNCTIONS[fn].kinds:
            assert functions.has_form(fn, dtype), dtype


@pytest.mark.parametrize("target", [vector, emit])
@pytest.mark.parametrize("dtype", [F32, S32])
def test_a_function_without_a_form_is_refused_by_name(monkeypatch, target, dtype):
    monkeypatch.setitem(FUNCTIONS, "softsign", FUNCTIONS["abs"])
    with pytest.raises(Unsupported, match=r"^softsign has no (vector|Triton) form$"):
        target.check([map_("softsign", Node(Param(0, TensorType(dtype, (4, 8)))))])
