"""Files and programs at the edge of what can be, each with an error that says so."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import tilewright
from tilewright.dtype import F32, S64
from tilewright.errors import InputError, TilewrightError, TypeMismatchError, UnsupportedError
from tilewright.ir.build import broadcast, const, input_, map_, reshape
from tilewright.ir.graph import Graph, Node
from tilewright.ir.literal_file import read_literals
from tilewright.ir.ops import Gather
from tilewright.ir.safetensors import TensorFile
from tilewright.report.measure.inputs import read_npz
from tilewright.runtime.weight_formats import from_compressed_tensors, from_gptq


def header(*entries: tuple[str, list[int], list[int]]) -> bytes:
    text = "{" + ",".join(f'"{n}":{{"dtype":"U8","shape":{s},"data_offsets":{o}}}' for n, s, o in entries) + "}"
    return struct.pack("<Q", len(text)) + text.encode()


LAID = {
    "an overlap": (header(("a", [4], [0, 4]), ("b", [4], [2, 6])), 6, "'b' begins at byte 2, where others lie at 4"),
    "the same bytes": (header(("a", [4], [0, 4]), ("b", [4], [0, 4])), 4, "'b' begins at byte 0"),
    "a hole": (header(("a", [4], [0, 4]), ("b", [2], [6, 8])), 8, "'b' begins at byte 6, where others end at 4"),
    "a hole in front": (header(("a", [4], [1, 5])), 5, "'a' begins at byte 1"),
    "bytes behind": (header(("a", [4], [0, 4])), 9, "5 bytes behind its last tensor"),
    "a name twice": (header(("a", [2], [0, 2]), ("a", [2], [2, 4])), 4, "'a' stands in its header twice"),
}


@pytest.mark.parametrize("name", LAID)
def test_a_safetensors_file_lies_end_to_end(name: str, tmp_path: Path) -> None:
    content, size, said = LAID[name]
    (tmp_path / "x.safetensors").write_bytes(content + bytes(size))
    with pytest.raises(InputError, match=said):
        TensorFile(tmp_path / "x.safetensors")


def test_tensors_in_any_order_and_empty_ones_are_read(tmp_path: Path) -> None:
    content = header(("b", [2], [4, 6]), ("none", [0], [4, 4]), ("a", [4], [0, 4]), ("last", [0, 3], [6, 6]))
    (tmp_path / "x.safetensors").write_bytes(content + bytes([1, 2, 3, 4, 5, 6]))
    file = TensorFile(tmp_path / "x.safetensors")
    assert file.tensor("b").tolist() == [5, 6] and file.tensor("a").tolist() == [1, 2, 3, 4]
    assert file.tensor("none").shape == (0,) and file.tensor("last").shape == (0, 3)


def test_an_index_that_names_nothing_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {}}))
    for path in (index, tmp_path):
        with pytest.raises(InputError, match="weight_map names no file"):
            tilewright.read_checkpoint(path)


def test_weights_of_nothing_are_refused() -> None:
    words = torch.zeros((0, 16), dtype=torch.int32)
    with pytest.raises(TypeMismatchError, match="hold no weight"):
        from_gptq(words, torch.zeros((1, 2), dtype=torch.int32), torch.ones(1, 16))
    with pytest.raises(TypeMismatchError, match="hold no weight"):
        from_compressed_tensors(torch.zeros((0, 4), dtype=torch.int32), torch.ones(1))


@pytest.mark.parametrize("index", [[0, 9], [0, -5]])
@pytest.mark.parametrize("constant", [True, False])
def test_an_index_out_of_range_is_said(index: list[int], constant: bool) -> None:
    x, i = input_("x", F32, (4, 8)), const(torch.tensor(index), S64) if constant else input_("i", S64, (2,))
    graph = Graph("g", (x,) if constant else (x, i), (Node(Gather(0), x, i),), ("y",))
    with pytest.raises(TilewrightError, match="out of range"):
        program = tilewright.compile(graph, budget_s=0)
        program(torch.ones(4, 8), *(() if constant else (torch.tensor(index),)))


def test_more_axes_than_kernels_walk_are_refused() -> None:
    x = input_("x", F32, (4,))
    deep = map_("tanh", reshape(x, (4, *[1] * 64)))
    with pytest.raises(UnsupportedError, match="has 65 axes"):
        tilewright.compile(Graph("g", (x,), (deep,), ("y",)), budget_s=0)
    fine = map_("tanh", reshape(x, (4, *[1] * 63)))
    assert tilewright.compile(Graph("g", (x,), (fine,), ("y",)), budget_s=0)(torch.ones(4)).numel() == 4


def test_a_result_that_no_memory_holds_is_refused() -> None:
    x = input_("x", F32, (1,))
    program = tilewright.compile(Graph("g", (x,), (broadcast(x, (1 << 48,)),), ("y",)), budget_s=0)
    with pytest.raises(UnsupportedError, match=r"no memory for a result of 1,048,576\.0 GiB"):
        program(torch.ones(1))


def bomb(path: Path, name: str, shape: tuple[int, ...]) -> None:
    """An archive whose one array says it has that shape; its data, nothing but zeros, ends early."""
    import io
    import zipfile

    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(f"{name}.npy", "w") as file:
        file.write(head.getvalue() + bytes(1 << 16))


def test_shapes_in_an_archive_are_looked_at_before_it_is_unpacked(tmp_path: Path) -> None:
    x = input_("x", F32, (4, 8))
    graph = Graph("g", (x,), (map_("tanh", x),), ("y",))
    for shape, said in (((1 << 40,), "at most are wanted"), ((4, 1 << 20), "at most are wanted")):
        bomb(tmp_path / "x.npz", "x", shape)
        with pytest.raises(InputError, match=said):
            read_npz(tmp_path / "x.npz", graph)
    bomb(tmp_path / "y.npz", "other", (1 << 45,))
    with pytest.raises(InputError, match="GiB in all, and the machine has"):
        read_npz(tmp_path / "y.npz", graph)
    bomb(tmp_path / "constants.npz", "f64 w", (1 << 45,))
    with pytest.raises(InputError, match="GiB in all, and the machine has"):
        read_literals(tmp_path / "constants.npz")
    np.savez(tmp_path / "good.npz", x=np.ones((4, 8), np.float32))
    assert read_npz(tmp_path / "good.npz", graph)["x"].shape == (4, 8)  # type: ignore[attr-defined]
