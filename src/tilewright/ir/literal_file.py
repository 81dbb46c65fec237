"""Constants too large for a program's text, in an .npz beside it whose keys are a type and a name, as "f32 wte.weight"."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tilewright.dtype import BY_NAME, DType
from tilewright.errors import InputError
from tilewright.ir.literal import Literal
from tilewright.ir.types import TensorType

if TYPE_CHECKING:
    import torch

FILE = "constants.npz"
# What NumPy and zipfile raise at a file that is no archive of arrays, or a damaged one.
UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def arrays_of(constant: Literal, name: str) -> tuple[str, np.ndarray]:
    """Key and array under which a constant stands in the file: its own memory, if that is on the CPU and dense. 4-bit codes are
    one to a byte; types NumPy lacks are their bits."""
    t, dtype = constant.tensor().detach().cpu().contiguous(), constant.type.dtype
    return f"{dtype} {name}", t.numpy() if _native(dtype) else _viewed(t, _BITS[t.element_size()]).numpy()


def check_sizes(archive: np.lib.npyio.NpzFile, most: Mapping[str, int] | None = None) -> None:
    """See what the arrays of an archive say of themselves before one is unpacked: some bytes can stand for very many.

    Args:
        archive: an opened .npz.
        most: bytes that an array of a name may take; all together may take what the machine has.

    Raises:
        ValueError: they take more, or one is no array.
    """
    total = 0
    for name in archive.files:
        assert archive.zip is not None
        member = f"{name}.npy" if f"{name}.npy" in archive.zip.namelist() else name
        with archive.zip.open(member) as file:
            version = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = header(file)
        size = math.prod(shape) * dtype.itemsize
        total += size
        if size > (most or {}).get(name, size):
            raise ValueError(
                f"{name!r} is {dtype}{list(shape)}, {size:,} bytes, where {(most or {})[name]:,} at most are wanted"
            )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else total
    if total > memory:
        raise ValueError(f"arrays of {total / 2**30:,.0f} GiB in all, and the machine has {memory / 2**30:,.0f} GiB")


def read_literals(path: Path) -> dict[str, Literal]:
    """The constants of a file by name.

    Raises:
        InputError: it is no such file.
    """
    found: dict[str, Literal] = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            check_sizes(archive)
            for key in archive.files:
                word, _, name = key.partition(" ")
                found[name] = _literal(BY_NAME[word], archive[key], name)
    except UNREADABLE as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"holds no constants of a program: {said}", where=str(path), hint="--dump writes it") from error
    return found


def _literal(dtype: DType, array: np.ndarray, name: str) -> Literal:
    import torch

    t = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    return Literal(TensorType(dtype, array.shape), t if _native(dtype) else _viewed(t, dtype.storage), name)


def _native(dtype: DType) -> bool:
    """Tell whether NumPy has the type that carries this one."""
    return hasattr(np, dtype.storage)


def _viewed(t: torch.Tensor, storage: str) -> torch.Tensor:
    import torch

    return t.view(getattr(torch, storage))
