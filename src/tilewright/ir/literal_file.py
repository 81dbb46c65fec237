"""Constants too large for a program's text, in an .npz beside it whose keys are a type and a name, as "f32 wte.weight"."""

from __future__ import annotations

import zipfile
import zlib
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


def read_literals(path: Path) -> dict[str, Literal]:
    """The constants of a file by name.

    Raises:
        InputError: it is no such file.
    """
    found: dict[str, Literal] = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
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
    """Whether NumPy has the type that carries this one."""
    return hasattr(np, dtype.storage)


def _viewed(t: torch.Tensor, storage: str) -> torch.Tensor:
    import torch

    return t.view(getattr(torch, storage))
