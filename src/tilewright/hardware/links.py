"""Links between the ranks of a mesh: what operations between them take, as they were measured, or as a chip's data file has it.

The model is Hockney's: a latency, and bytes at a rate (R. Hockney, The communication challenge for MPP, 1994).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from tilewright import threads
from tilewright.files import NotJSONError, cache_folder, decoded, read_own, write_own
from tilewright.hardware.link import Link
from tilewright.hardware.target import Target

VERSION = 1  # of how links are measured
KEPT = 32  # meshes whose links are remembered on a machine, the latest
# Where nothing was measured. On GPUs: NCCL's operations of 8 KB to 1 MB in a CUDA graph, and the part of NVLink's rate that
# copies of 256 MB reach, both on 4 H200s. On CPUs: gloo between two processes of a host.
LATENCY_US = {"cpu": 200.0, "cuda": 20.0}
REACHED = 0.8
GBPS = {"cpu": 1.0, "cuda": 50.0}  # where no data file says either


class _Record(msgspec.Struct, frozen=True):
    """Links of meshes on one machine, by mesh and circumstances; the latest last."""

    meshes: dict[str, list[Link]]


@dataclass(frozen=True)
class Links:
    """The costs of operations between the ranks of a mesh.

    Attributes:
        kind: the device that ranks compute on.
        measured: links that were measured; none where the others stand for them.
        latency_us, gbps: what an operation takes that was not measured.
    """

    kind: str
    measured: tuple[Link, ...]
    latency_us: float
    gbps: float

    def time_us(self, operation: str, over: Sequence[str], sent_bytes: int) -> float:
        """The time of an operation between the ranks along some axes, of which each receives so many bytes at least.

        One that is not measured (`all_to_all`) takes what an all-gather takes; a maximum what a sum takes.
        """
        axes = ",".join(over)
        alike = [x for x in self.measured if x.over == axes]
        found = next((x for x in alike if x.operation == operation), None)
        found = found or next((x for x in alike if x.operation == "all_gather"), None)
        if found is None:
            return self.latency_us + sent_bytes / self.gbps / 1e3
        return found.latency_us + (sent_bytes / found.gbps / 1e3 if found.gbps else 0.0)


def links_for(target: Target, measured: Sequence[Link] = ()) -> Links:
    """The links between ranks that compute on this machine's device: those measured, and the chip's own for the rest."""
    own = next(iter(target.chip.links), None)
    gbps = GBPS[target.kind] if own is None else REACHED * own.gbps
    return Links(target.kind, tuple(measured), LATENCY_US[target.kind], gbps)


def key_of(target: Target, mesh: str, between: str) -> str:
    """The name of a mesh's links among those that are kept.

    Args:
        target: a rank's device.
        mesh: its axes, `tp=2`.
        between: by what values travel, and between how many hosts.
    """
    own = f"{target.name}|{target.cores}|{threads.count()}|torch {torch.__version__}"
    return f"{VERSION}|{mesh}|{between}|{own}"


def kept_links(key: str, kind: str) -> list[Link]:
    """The links of a mesh that were measured before on this machine; none if they were not."""
    return _read(kind).get(key, [])


def keep_links(key: str, kind: str, found: Sequence[Link]) -> None:
    """Remember the links of a mesh. A folder that cannot be written costs the memory of it."""
    meshes = {k: v for k, v in _read(kind).items() if k != key} | {key: list(found)}
    latest = dict(list(meshes.items())[-KEPT:])
    with contextlib.suppress(OSError):
        write_own(cache_folder() / f"links-{kind}.json", msgspec.json.encode(_Record(latest)))


def _read(kind: str) -> dict[str, list[Link]]:
    try:
        return decoded(read_own(cache_folder() / f"links-{kind}.json"), _Record).meshes
    except (OSError, NotJSONError):
        return {}
