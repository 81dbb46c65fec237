"""Memory that is used again: never by two at once, and never more than is kept."""

import torch
import warm

from tilewright.candidates.llvm.runtime import scratch as _scratch
from tilewright.candidates.llvm.runtime.scratch import LARGE_BYTES, maker


def test_large_results_share_no_memory_and_come_back_when_let_go(monkeypatch):
    monkeypatch.setattr(_scratch, "_idle", {})
    make = maker((LARGE_BYTES // 4,), torch.float32)
    first, second = make(), make()
    assert first.data_ptr() != second.data_ptr()
    held = first.data_ptr()
    view = first[3:]
    del first
    assert make().data_ptr() != held, "a view of it is still there"
    del view
    assert make().data_ptr() == held


def test_a_larger_block_serves_and_smaller_ones_make_room_for_one(monkeypatch):
    monkeypatch.setattr(_scratch, "_idle", {})
    large = maker((8 * LARGE_BYTES,), torch.uint8)()
    address = large.data_ptr()
    del large
    small = maker((3 * LARGE_BYTES,), torch.uint8)()
    assert small.data_ptr() == address
    del small
    assert list(_scratch._idle) == [8 * LARGE_BYTES]
    larger = maker((9 * LARGE_BYTES,), torch.uint8)()
    assert not _scratch._idle[8 * LARGE_BYTES]
    assert larger.numel() == 9 * LARGE_BYTES


def test_sizes_that_nobody_asks_for_any_more_make_room(monkeypatch):
    monkeypatch.setattr(_scratch, "_idle", {})
    monkeypatch.setattr(_scratch, "KEPT_BYTES", 4 * LARGE_BYTES)
    old = [maker((2 * LARGE_BYTES,), torch.uint8)() for _ in range(2)]
    del old
    make = maker((LARGE_BYTES,), torch.uint8)
    address = make().data_ptr()
    assert make().data_ptr() == address
    assert sum(size * len(blocks) for size, blocks in _scratch._idle.items()) <= 4 * LARGE_BYTES


def test_memory_to_work_in_goes_back_to_the_system_past_what_is_kept(monkeypatch):
    monkeypatch.setattr(_scratch, "_free", {})
    monkeypatch.setattr(_scratch, "KEPT_BYTES", 1 << 25)
    for bits in range(20, 30):
        _scratch.give(_scratch.take(1 << bits))
    assert sum(size * len(blocks) for size, blocks in _scratch._free.items()) <= 1 << 25


FORKED = """
import os, torch
torch.set_num_threads(1)  # torch's do not outlive a fork
from tilewright.candidates.llvm.runtime.scratch import LARGE_BYTES, maker
result = maker((LARGE_BYTES,), torch.uint8)().fill_(64)
child = os.fork()
if not child:
    result.fill_(1)
    os._exit(0)
os.waitpid(child, 0)
assert bool((result == 64).all()), "a child wrote into its parent's result"
"""


def test_a_fork_s_results_are_its_own():
    ran = warm.run(["-c", FORKED])
    assert ran.returncode == 0, ran.stderr
