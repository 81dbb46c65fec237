"""Writes to state at positions that are data, run by the PTX machine."""

import pytest
import torch
from ptx import H200, How, emulating

from tilewright.candidates.triton.index_copy import index_copy, kernel, takes
from tilewright.candidates.triton.runtime.module import needs
from tilewright.dtype import BF16, F8E4M3FN, F32, S8, S32, S64, U64
from tilewright.ir.types import TensorType


def random_of(dtype, shape):
    return torch.randint(-100, 100, shape).to(dtype.to_torch())


@pytest.mark.parametrize(
    ("dtype", "shape", "axis", "at"),
    [
        (BF16, (2, 3, 17, 64), 2, [5]),
        (F32, (1, 2, 9, 7), 2, [8, 0, -2]),
        (F8E4M3FN, (5, 300), 0, [3, -5]),
        (S8, (3, 4), 1, [1]),
        (S64, (4,), 0, [2, 1]),
    ],
)
@pytest.mark.parametrize("arrays", [1, 2, 3])
def test_it_writes_where_torch_does(dtype, shape, axis, at, arrays):
    new = (*shape[:axis], len(at), *shape[axis + 1 :])
    x, y = ([random_of(dtype, s) for _ in range(arrays)] for s in (shape, new))
    positions = torch.tensor(at, dtype=torch.int32 if arrays == 2 else torch.int64)
    of = TensorType(S32 if arrays == 2 else S64, positions.shape)
    wanted = [t.view(torch.uint8).clone() if t.element_size() == 1 else t.clone() for t in x]
    for t, v in zip(wanted, y, strict=True):
        t[(slice(None),) * axis + (positions.long(),)] = v.view(t.dtype)
    with emulating(How()):
        write = index_copy(TensorType(dtype, shape), axis, of, arrays, H200)
        assert write is not None
        write(positions, x, y)
    for t, v in zip(x, wanted, strict=True):
        assert torch.equal(t.view(v.dtype), v)


def test_a_position_out_of_range_ends_it():
    array = torch.zeros(4, 8)
    with emulating(How()):
        for wraps, outside in ((True, (4, -5)), (False, (4, -1))):
            write = index_copy(TensorType(F32, (4, 8)), 0, TensorType(S64, (1,)), 1, H200, wraps=wraps)
            for at in outside:
                with pytest.raises(Exception, match="trap"):
                    write(torch.tensor([at]), [array], [torch.ones(1, 8)])
    assert not array.any()


def test_what_it_does_not_take_is_left_to_torch():
    assert index_copy(TensorType(F32, (4, 0)), 0, TensorType(S64, (1,)), 1, H200) is None
    assert index_copy(TensorType(F32, (4, 8)), 0, TensorType(S8, (1,)), 1, H200) is None
    assert index_copy(TensorType(F32, (4, 8)), 0, TensorType(U64, (1,)), 1, H200) is None
    with emulating(How()):
        assert index_copy(TensorType(F32, ((1 << 20) - 1, 1 << 11)), 0, TensorType(S64, (1,)), 1, H200) is not None
    assert index_copy(TensorType(S8, ((1 << 31) - 1, 1)), 0, TensorType(S64, (1,)), 1, H200) is None
    assert index_copy(TensorType(S8, (4, 1 << 20)), 0, TensorType(S64, (1 << 11,)), 1, H200) is None
    assert takes([torch.zeros(4, 8)]) and not takes([torch.zeros(4, 8).T])


def test_the_cache_of_a_decoding_step_is_written_in_wide_words():
    built, grid = kernel(TensorType(BF16, (16, 8, 1024, 128)), 2, TensorType(S64, (1,)), 2, H200)
    ptx = built.kernel.asm["ptx"]
    assert grid == 16 and needs(built.kernel).spills == 0
    assert "griddepcontrol.wait" in ptx and "st.global.v4" in ptx and "ld.global.v4" in ptx


def test_one_kernel_writes_any_number_of_positions():
    """Prompts of many lengths do not compile anew; a decoding step's one position has a kernel of its own."""
    array = TensorType(BF16, (2, 3, 64, 8))
    several = [kernel(array, 2, TensorType(S64, (n,)), 2, H200) for n in (2, 7, 61)]
    assert len({built.text for built, _ in several}) == 1 and [grid for _, grid in several] == [1, 1, 3]
    assert kernel(array, 2, TensorType(S64, (1,)), 2, H200)[0].text != several[0][0].text
    for count in (2, 61):
        x, y, at = torch.zeros(2, 3, 64, 8), torch.randn(2, 3, count, 8), torch.randperm(64)[:count]
        x, y = x.bfloat16(), y.bfloat16()
        with emulating(How()):
            write = index_copy(array, 2, TensorType(S64, (count,)), 1, H200)
            assert write is not None
            write(at, [x], [y])
        assert torch.equal(x, torch.zeros_like(x).index_copy(2, at, y))
