"""A table of which a program picks some rows: neither copied nor read whole while it is compiled."""

import subprocess
import sys
import textwrap

import torch

from tilewright.dtype import F32, S64
from tilewright.ir.build import map_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Param
from tilewright.ir.types import TensorType
from tilewright.schedule.expected import expect
from tilewright.schedule.measure import examine
from tilewright.schedule.problem import TABLE_END_BYTES, FusionProblem
from tilewright.schedule.sample import random_sources
from tilewright.schedule.worker import _Weights

ROWS, COLUMNS = 9000, 512  # 18 MB
END = TABLE_END_BYTES // (4 * COLUMNS)

CHILD = """
    import sys, torch, tilewright

    class Picks(torch.nn.Module):
        def __init__(self, rows):
            super().__init__()
            table = torch.from_file(sys.argv[1], size=rows * 512, dtype=torch.float32).view(rows, 512)
            self.table = torch.nn.Embedding.from_pretrained(table)

        def forward(self, x):
            return torch.nn.functional.layer_norm(self.table(x), (512,))

    def peak_kb():
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

    def compiled(rows, budget_s):
        tilewright.compile(Picks(rows), example_inputs=(torch.tensor([1, 5, 7]),), budget_s=budget_s, cache=False)

    for budget_s in (0, 0.2):
        compiled(20_000, budget_s)
        before = peak_kb()
        compiled(100_000, budget_s)
        print(peak_kb() - before)
"""


def test_a_large_embedding_takes_no_memory(tmp_path):
    """The peak of a compile with 205 MB beside that with 41 MB: here and, with a budget, in what is handed to a worker."""
    table = tmp_path / "table"
    with table.open("wb") as file:
        file.truncate(100_000 * 512 * 4)
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(table)], capture_output=True, text=True, check=True
    )
    grown = [int(line) * 1024 for line in told.stdout.split()]
    assert len(grown) == 2
    assert max(grown) < 0.05 * 100_000 * 512 * 4


def picking(weight: bool = True, twice: bool = False) -> FusionProblem:
    table, index = Node(Param(0, TensorType(F32, (ROWS, COLUMNS)))), Node(Param(1, TensorType(S64, (50,))))
    picked = map_("tanh", Node(Gather(0), table, index))
    roots = (picked, map_("negate", table)) if twice else (picked,)
    return FusionProblem(roots, (table.tensor, index.tensor), (weight, False))


def test_a_table_is_what_is_picked_from_and_nothing_else():
    assert picking().large_tables == {0: END}
    assert not picking(weight=False).large_tables
    assert not picking(twice=True).large_tables
    small = Node(Param(0, TensorType(F32, (9, 4))))
    index = Node(Param(1, TensorType(S64, (5,))))
    assert not FusionProblem((Node(Gather(0), small, index),), (small.tensor, index.tensor), (True, False)).large_tables


def test_rows_at_both_ends_are_picked_and_a_wrong_one_shows():
    problem = picking()
    table = torch.randn(ROWS, COLUMNS)
    sources = random_sources(problem, given={0: table})
    picked = sources[1]
    assert bool(((picked < END) | (picked >= ROWS - END)).all())
    assert bool((picked < END).any()) and bool((picked >= ROWS - END).any())
    expected = expect(problem, sources)

    def judged(kernel):
        return examine(problem, expected, kernel, sources, watched=False)

    def writes(sources):
        sources[0][-1, -1] += 1
        return [torch.tanh(sources[0][sources[1]])]

    assert judged(lambda s: [torch.tanh(s[0][s[1]])]) is None
    assert "is wrong" in str(judged(lambda s: [torch.tanh(s[0][s[1].clamp(max=ROWS // 2)])]))
    assert judged(writes).why == "it writes its sources"


def test_a_worker_is_sent_the_ends():
    table = torch.randn(ROWS, COLUMNS)
    weights = _Weights({0: table}, picking().large_tables)
    assert weights.fd is None
    ((_, dtype, shape, ends),) = weights.places
    assert (dtype, shape) == (torch.float32, (ROWS, COLUMNS))
    assert torch.equal(ends[0], table[:END]) and torch.equal(ends[1], table[-END:])
    weights.close()
