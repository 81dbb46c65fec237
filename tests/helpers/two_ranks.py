"""Two processes over gloo, which run one program as the ranks of a mesh tp=2."""

from __future__ import annotations

import tempfile
import textwrap

import warm
from paths import ROOT

HEAD = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    rank, store, ROOT = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.path[:0] = [f"{ROOT}/src", f"{ROOT}/tests/helpers"]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
"""


def two_ranks(program: str, timeout_s: float = 300) -> str:
    """Output of rank 0, once both have come to their end."""
    text = textwrap.dedent(HEAD) + textwrap.dedent(program)
    with tempfile.TemporaryDirectory() as folder:
        runs = [warm.start(["-c", text, str(rank), f"{folder}/store", str(ROOT)]) for rank in range(2)]
        try:
            said = [run.communicate(timeout=timeout_s) for run in runs]
        finally:
            for run in runs:
                run.kill()
    assert all(run.returncode == 0 for run in runs), said[0][1] + said[1][1]
    return said[0][0]
