"""Memory that the GPUs of one host reach of each other, by torch's symmetric memory, whose interface may still change: no other
file knows it.

NVLink multicast is never used: it can put the GPUs of a host out of service for all who share it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tilewright.errors import UnsupportedError
from tilewright.runtime.peers import Peers, first_line

WITHOUT_MULTICAST = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Environment in which torch, NCCL and NVSHMEM leave multicast alone."""


def forbid_multicast() -> None:
    """Switch NVLink multicast off for this process, before anything communicates."""
    os.environ.update(WITHOUT_MULTICAST)


def reached(group: dist.ProcessGroup, order: Sequence[int], size: int, device: str, peers: Peers) -> list[torch.Tensor]:
    """Bytes of each rank of a group, zeros, as this one reaches them. All ranks ask together.

    Args:
        group: torch's group.
        order: torch's place of each rank, in the order of the result.
        size: bytes of a rank.
        device: this rank's GPU.
        peers: agreement with all ranks of the mesh, all of which ask.

    Raises:
        UnsupportedError: a rank has no such memory, and then all of them say so.
    """
    made, why = None, ""
    try:
        if torch.device(device).type != "cuda":
            raise UnsupportedError("memory is shared between GPUs alone")
        from torch.distributed import _symmetric_memory as symmetric

        forbid_multicast()
        made = symmetric.empty(size, dtype=torch.uint8, device=torch.device(device)).zero_()
        torch.cuda.synchronize(device)
    except Exception as error:
        why = first_line(error)
    _agreed(peers, why, "shared memory")
    assert made is not None
    found: list[torch.Tensor] = []
    try:
        from torch.distributed import _symmetric_memory as symmetric

        handle = symmetric.rendezvous(made, group.group_name)
        if handle.multicast_ptr:
            raise UnsupportedError("torch shares memory with multicast on, though its environment forbids it")
        found = [made if i == handle.rank else handle.get_buffer(i, (size,), torch.uint8) for i in order]
    except Exception as error:
        why = first_line(error)
    _agreed(peers, why, "shared memory reached")
    return found


def _agreed(peers: Peers, why: str, what: str) -> None:
    """See that no rank has a reason against.

    Raises:
        UnsupportedError: one has.
    """
    said = peers.gathered(why, str, what)
    if any(said):
        rank = next(r for r, w in enumerate(said) if w)
        raise UnsupportedError(f"rank {rank} shares no memory with others: {said[rank]}", hint="values travel by NCCL or gloo")
