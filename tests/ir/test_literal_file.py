"""Constants beside a program's text: every type comes back bit by bit, stages of a dump share them, bad files are told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rule_checks import feeds_of, same_bits, staged

from tilewright.dtype import BY_NAME, F32, OPAQUE, S4, S8
from tilewright.errors import InputError
from tilewright.frontends import load
from tilewright.ir.build import const, convert, input_, map_, swap_last
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.literal import Literal
from tilewright.ir.literal_file import FILE, arrays_of, read_literals
from tilewright.ir.ops import Const, Dequantize, gemm
from tilewright.ir.ops.rounding import to_float
from tilewright.ir.text import print_graph
from tilewright.ir.types import TensorType
from tilewright.report.html.picture import Dump
from tilewright.report.measure.inputs import write_npz


def random(dtype, shape) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    if dtype.is_integer:
        low, high = max(dtype.min, -(1 << 62)), min(dtype.max, 1 << 62)
        return torch.randint(low, high + 1, shape, generator=g).to(dtype.to_torch())
    return to_float(torch.randn(shape, generator=g) * 8, dtype)


@pytest.mark.parametrize("name", [n for n, d in BY_NAME.items() if d is not OPAQUE])
@pytest.mark.parametrize("shape", [(), (3, 7), (0, 4)])
def test_every_type_comes_back_bit_by_bit(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    dtype = BY_NAME[name]
    value = random(dtype, shape)
    turned = random(dtype, (7, 3)).T  # not dense
    given = {
        "layer.0/weight": Literal(TensorType(dtype, shape), value, "w"),
        "turned w": Literal(TensorType(dtype, (3, 7)), turned),
    }
    write_npz(tmp_path / FILE, dict(arrays_of(v, k) for k, v in given.items()))
    found = read_literals(tmp_path / FILE)
    assert found.keys() == given.keys()
    for key, literal in given.items():
        assert found[key].type == literal.type and found[key].tensor().dtype == literal.tensor().dtype
        assert same_bits(found[key].tensor().reshape(-1), literal.tensor().reshape(-1))


def test_every_stage_of_a_dump_reads_back_and_computes_the_same(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    x = input_("x", F32, (5, 8))
    first, second = (Node(Const(Literal(TensorType(F32, (8, 12)), torch.randn(8, 12, generator=g), "w"))) for _ in range(2))
    codes = const(torch.randint(-8, 8, (6, 24), generator=g).to(torch.int8), S4)
    up = map_("add", gemm(x, first), const(torch.randn(12, generator=g)))
    narrow = Node(Dequantize(F32), codes, const(torch.rand(6, 1, generator=g)))
    both = Node(Dequantize(F32), const(torch.arange(-100, 92).to(torch.int8).reshape(8, 24)), const(0.01))
    y = map_("add", gemm(x, both), gemm(map_("tanh", gemm(x, second)), swap_last(const(torch.randn(24, 12, generator=g)))))
    graph = Graph("g", (x,), (y, up, convert(gemm(y, swap_last(narrow)), S8)), ("y", "up", "z"))
    stages = {"source": graph, "all": staged(graph)}
    dump = Dump(tmp_path / "dump")
    for stage, each in stages.items():
        dump(stage, each)
    wanted = evaluate(graph, feeds_of(graph))
    for path, each in zip(sorted((tmp_path / "dump").glob("*.tw")), stages.values(), strict=True):
        assert '@"w.1"' in path.read_text()
        again = load(path)
        assert print_graph(again) == print_graph(each)
        for got, exact in zip(evaluate(again, feeds_of(graph)), evaluate(each, feeds_of(graph)), strict=True):
            assert torch.equal(got, exact)
    assert torch.allclose(evaluate(again, feeds_of(graph))[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert sum(len(a.read_bytes()) for a in (tmp_path / "dump").glob("*.npz")) < 6000  # once for all stages


def test_a_file_without_large_constants_has_none_beside_it(tmp_path: Path) -> None:
    x = input_("x", F32, (4,))
    Dump(tmp_path)("source", Graph("g", (x,), (map_("add", x, const(1.0)),), ("y",)))
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 no archive", {"w": np.zeros(3)}, {"q7 w": np.zeros(3)}, {"s4 w": "text"}]
)
def test_a_bad_file_is_told(tmp_path: Path, content) -> None:
    x = input_("x", F32, (64,))
    (tmp_path / "p.tw").write_text(print_graph(Graph("g", (x,), (map_("add", x, const(torch.arange(64.0))),), ("y",))))
    if isinstance(content, bytes):
        (tmp_path / FILE).write_bytes(content)
    else:
        np.savez(tmp_path / FILE, **content)
    with pytest.raises(InputError, match=r"(?s)holds no constants of a program: .*--dump writes it"):
        load(tmp_path / "p.tw")


@pytest.mark.parametrize(
    ("constants", "said"),
    [
        ({"f32 other": np.zeros(64, np.float32)}, "no data given for constant 'constant'"),
        ({"f32 constant": np.zeros(63, np.float32)}, "63"),
    ],
)
def test_a_constant_that_is_missing_or_of_another_shape_is_told(tmp_path: Path, constants, said: str) -> None:
    x = input_("x", F32, (64,))
    (tmp_path / "p.tw").write_text(print_graph(Graph("g", (x,), (map_("add", x, const(torch.arange(64.0))),), ("y",))))
    np.savez(tmp_path / FILE, **constants)
    with pytest.raises(InputError, match=said):
        load(tmp_path / "p.tw")
