"""Words of ranks about their calls: lines in memory that they share, and digests of what they are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tilewright.runtime.calls import RING, WORDS, Board, Line, digest_of, new_file, shared


def test_a_line_is_read_by_its_number_alone():
    path = new_file(2)
    first, second = Board(shared(path), 0), Board(shared(path), 1)
    Path(path).unlink()
    assert first.read(1, 1) is None
    for number in range(1, 3 * RING):
        line = Line(number, number % 2, (1 << 32) - number)
        second.write(line)
        assert first.read(1, number) == line
        assert first.read(1, number + 1) is None and first.read(0, number) is None
    assert first.read(1, 3 * RING - RING) == Line(2 * RING, 0, (1 << 32) - 2 * RING)
    assert first.read(1, RING) is None  # written over


def test_memory_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        shared(str(tmp_path / "gone"))
    assert Path(new_file(3)).stat().st_size == 3 * RING * WORDS * 8


@pytest.mark.parametrize("shape", [(0,), (), (1,), (7, 3), (100, 67), (513, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_a_digest_is_of_the_bits(shape, dtype):
    torch.manual_seed(0)
    x = (100 * torch.rand(shape) - 50).to(dtype)
    assert digest_of([x]) == digest_of([x.clone()]) < 1 << 63
    wide = torch.zeros((*x.shape, 2), dtype=torch.uint8).to(dtype)
    wide[..., 1] = x
    assert digest_of([wide[..., 1]]) == digest_of([x])  # strided, and beside a word's boundary
    held = torch.zeros(x.numel() + 1, dtype=torch.uint8).to(dtype)
    held[1:] = x.reshape(-1)
    assert digest_of([held[1:]]) == digest_of([x])
    for i in {0, x.numel() // 2, x.numel() - 1} if x.numel() else set[int]():
        other = x.clone()
        bits = other.reshape(-1)[i : i + 1].view(torch.uint8)
        bits[0] ^= 1
        assert digest_of([other]) != digest_of([x])


def test_a_digest_sees_rows_that_change_places():
    x = torch.randn(512, 1024)
    assert digest_of([x]) != digest_of([x.flip(0)])
    assert digest_of([x, x.flip(0)]) != digest_of([x.flip(0), x])
    nan = torch.full((4096, 4), float("nan"))
    assert digest_of([nan]) == digest_of([nan.clone()])
