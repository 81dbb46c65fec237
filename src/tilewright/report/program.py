"""Facts of compiled programs that several reports need."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Generator, Mapping
from datetime import UTC, datetime

import torch

from tilewright.hardware.detect import cores_of
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node
from tilewright.ir.types import TensorType
from tilewright.report.schema import Made
from tilewright.runtime.executable import Executable
from tilewright.schedule.key import code_version
from tilewright.threads import count
from tilewright.versions import installed


@contextlib.contextmanager
def restored(program: Executable) -> Generator[Mapping[str, torch.Tensor]]:
    """A context that gives copies of a program's state, which afterwards is as it was before."""
    before = {name: t.clone() for name, t in program.state.items()}
    try:
        yield before
    finally:
        with torch.no_grad():
            for name, t in program.state.items():
                t.copy_(before[name])


def target_name(target: Target) -> str:
    """The machine in one line: what it calls itself, the chip it was taken for, and how many cores or SMs."""
    return f"{target.name} ({target.chip.name}, {cores_of(target)})"


def tensor_types(node: Node) -> tuple[TensorType, ...]:
    """The types of a node's results."""
    return (node.type,) if isinstance(node.type, TensorType) else node.type.items


def made_here() -> Made:
    """Say how a report is made that is made here and now; no command is known of it."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Made(
        code_version(), installed(), f"{platform.system()} {platform.release()} {platform.machine()}", when, "", count()
    )
