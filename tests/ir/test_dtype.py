"""Element types against ml_dtypes, NumPy and torch, which we did not write."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from values import ALL, FLOATS, INTEGERS, every_value, from_numpy, to_numpy

from tilewright.dtype import (
    BF16,
    BY_NAME,
    F4E2M1FN,
    F8E4M3FN,
    F8E5M2,
    F16,
    F32,
    F64,
    OPAQUE,
    PRED,
    S4,
    S8,
    S16,
    S32,
    S64,
    U4,
    U8,
    U16,
    U32,
    U64,
    dtype,
    from_torch,
)
from tilewright.dtype import (
    from_numpy as dtype_of_numpy,
)
from tilewright.errors import InputError


@pytest.mark.parametrize("d", FLOATS, ids=str)
def test_ranges_of_floats_are_those_of_ml_dtypes(d):
    info = ml_dtypes.finfo(d.to_numpy())
    assert (d.min, d.max, d.epsilon, d.bits) == (float(info.min), float(info.max), float(info.eps), info.bits)
    with np.errstate(all="ignore"):
        infinite = bool(np.isinf(np.array(np.inf).astype(d.to_numpy()).astype(np.float64)))
    assert (d.lowest, d.highest) == ((-np.inf, np.inf) if infinite else (d.min, d.max))


@pytest.mark.parametrize("d", INTEGERS, ids=str)
def test_ranges_of_integers_are_those_of_ml_dtypes(d):
    info = ml_dtypes.iinfo(d.to_numpy())
    assert (d.min, d.max, d.bits) == (int(info.min), int(info.max), info.bits)
    assert (d.lowest, d.highest, d.epsilon) == (d.min, d.max, 0)
    assert d.is_signed == (d.min < 0)


@pytest.mark.parametrize("d", [d for d in ALL if d.bits <= 16], ids=str)
def test_every_value_survives_torch_and_back(d):
    values = every_value(d)
    carried = from_numpy(values, d)
    assert carried.dtype == d.to_torch()
    assert to_numpy(carried, d).tobytes() == values.tobytes()


@pytest.mark.parametrize("d", [d for d in ALL if d.bits > 4], ids=str)
def test_types_are_found_from_torch_and_numpy(d):
    assert from_torch(d.to_torch()) is d
    assert dtype_of_numpy(d.to_numpy()) is d
    assert dtype(str(d.to_torch())) is d
    assert dtype(d.to_torch()) is d


def test_4_bit_types_are_found_from_numpy_but_never_from_a_torch_byte():
    assert dtype_of_numpy(np.dtype(ml_dtypes.int4)) is S4
    assert dtype_of_numpy(np.dtype(ml_dtypes.uint4)) is U4
    assert from_torch(S4.to_torch()) is S8
    assert from_torch(U4.to_torch()) is U8
    assert dtype_of_numpy(np.dtype(ml_dtypes.float4_e2m1fn)) is F4E2M1FN
    assert from_torch(F4E2M1FN.to_torch()) is F8E4M3FN


def test_spellings_of_mlir_hlo_torch_and_numpy():
    mlir = {"i1": PRED, "i4": S4, "ui4": U4, "i8": S8, "ui8": U8, "i16": S16, "ui16": U16, "i32": S32, "ui32": U32}
    mlir |= {"i64": S64, "ui64": U64, "f8E4M3FN": F8E4M3FN, "f8E5M2": F8E5M2, "bf16": BF16, "f16": F16, "f32": F32}
    others = {"torch.float8_e5m2": F8E5M2, "bool": PRED, "half": F16, "double": F64, "float": F32, "bfloat16": BF16}
    for name, wanted in (mlir | others | {d.name: d for d in ALL}).items():
        assert dtype(name) is wanted
        assert dtype(dtype(name)) is wanted
    assert dtype("opaque") is OPAQUE


@pytest.mark.parametrize("name", ["f31", "", "s128", "complex64", "torch.", 5, None, np.dtype("datetime64[s]")])
def test_unknown_types_are_input_errors(name):
    with pytest.raises(InputError, match=r"unknown dtype .*\n  try: one of pred s4 u4 .* f64$"):
        dtype(name)


def test_a_copy_is_the_same_type():
    for d in BY_NAME.values():
        assert pickle.loads(pickle.dumps(d)) is d
        assert copy.deepcopy(d) is d
        assert repr(d) == str(d) == d.name


def test_accumulators():
    wanted = {S4: S32, U4: S32, S8: S32, U8: S32, S16: S32, U16: S32, S32: S32, U32: U32, S64: S64, U64: U64}
    wanted |= dict.fromkeys(FLOATS, F32) | {F64: F64}
    for d, acc in wanted.items():
        assert d.accumulator is acc


def test_bytes_are_counted_densely():
    assert [S4.size_bytes(n) for n in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert [F16.size_bytes(3), PRED.size_bytes(3), U64.size_bytes(3)] == [6, 3, 24]
    for d in ALL:
        if d.bits >= 8:
            assert d.size_bytes(5) == torch.empty(5, dtype=d.to_torch()).nbytes


@pytest.mark.parametrize("d", ALL, ids=str)
def test_a_type_holds_its_ends_and_nothing_beyond(d):
    assert d.holds(d.min) and d.holds(d.max) and d.holds(1)
    assert not d.holds(2 * d.max + 1) or d.max == float("inf") or 2 * d.max + 1 == float("inf")
    assert d.holds(float("nan")) == (d.is_float and d is not F4E2M1FN)
    assert d.holds(float("inf")) == (d.highest == float("inf"))
    assert d.holds(0.5) == d.is_float
