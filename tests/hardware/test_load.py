"""The load of the machine, read off planted counters, and off this system's own."""

import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from tilewright import threads
from tilewright.hardware import load as load_module
from tilewright.hardware.load import Load, Meter, Threads, gpu_noise, load_now, spin_s

STAT = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 {} 0 10 500 7 0 0 {} 0 0
cpu1 {} 0 0 500 7 0 0 0 0 0
cpu7 999 0 0 0 0 0 0 0 0 0
intr 3
"""


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """A machine of two cores, of which a file says what it does, and a clock."""
    clock = [100.0]
    monkeypatch.setattr(load_module, "PROC", tmp_path)
    monkeypatch.setattr(load_module, "affine", lambda: {0, 1})
    monkeypatch.setattr(load_module.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(load_module, "spin_s", lambda: load_module._fastest_spin_s)
    monkeypatch.setattr(load_module, "_fastest_spin_s", 1e-5)
    monkeypatch.setattr(load_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(load_module.time, "process_time", lambda: clock[0] / 2)  # half of a core
    (tmp_path / "self" / "task" / "1").mkdir(parents=True)

    def say(now, runnable, one, two, stolen=0, waited_ns=0):
        clock[0] = now
        (tmp_path / "loadavg").write_text(f"9.87 9.87 9.87 {runnable}/300 4242\n")
        (tmp_path / "stat").write_text(STAT.format(one, stolen, two))
        (tmp_path / "self" / "task" / "1" / "schedstat").write_text(f"5 {waited_ns} 7\n")

    return say


def test_a_quiet_machine(planted):
    planted(100.0, 1, 0, 0)
    meter = Meter("cpu", 2)
    planted(102.0, 2, 50, 60, waited_ns=20_000_000)
    load = meter.load()
    assert load.noise == "" and load.others == pytest.approx(0.04) and load.waiting == pytest.approx(0.02 / 1.02)
    assert (load.cores, load.threads, load.of_cores, load.runnable) == (2, 2, 4, 1.5)


def test_a_busy_machine(planted):
    """Both cores were busy all the time, and this process had half of one: the others had one and a half."""
    planted(100.0, 12, 0, 0)
    meter = Meter("cpu", 2)
    planted(102.0, 16, 160, 200, stolen=40, waited_ns=3_000_000_000)
    load = meter.load()
    assert load.others == pytest.approx(1.49) and load.stolen == pytest.approx(0.095) and load.waiting == 0.75
    assert load.noise == (
        "14 runnable tasks on 4 cores, other processes had 1.5 of 2 cores, this one waited for a core 75% of the time, "
        "the hypervisor took 10% of the cores' time"
    )
    assert Meter("cpu", 1).load().noise.startswith("16 runnable tasks on 4 cores"), "no time passed: what is runnable shows"


def test_a_short_look_does_not_believe_single_ticks(planted):
    planted(100.0, 1, 0, 0)
    meter = Meter("cpu", 1)
    planted(100.03, 1, 2, 1)
    assert meter.load().noise == ""


def test_torch_has_as_many_threads_as_cores_are_free(planted, monkeypatch):
    """Two of four cores are ours. What others keep runnable is looked at three times, as threads of torch may spin on."""
    monkeypatch.setattr(load_module.time, "sleep", lambda seconds: None)
    torch.set_num_threads(2)
    for runnable, free in ((1, 2), (3, 2), (4, 1), (30, 1), (0, 2)):
        monkeypatch.setattr(load_module, "_free", (-1.0, 1))
        monkeypatch.setattr(load_module.time, "monotonic", lambda: 5.0)
        planted(100.0, runnable, 0, 0)
        with load_module.uncrowded():
            assert (torch.get_num_threads(), threads.count()) == (free, 2)
        planted(100.0, 30 if free == 2 else 1, 0, 0)
        assert load_module.free_cores() == free  # which holds for a moment
        monkeypatch.setattr(load_module.time, "monotonic", lambda: 6.5)
        assert load_module.free_cores() == 3 - free
        assert torch.get_num_threads() == 2
    monkeypatch.setattr(load_module, "_free", (-1.0, 1))
    looks = iter([7, 5, 1])
    monkeypatch.setattr(load_module, "runnable", lambda: next(looks))
    assert load_module.free_cores() == 2


def test_a_core_that_slows_down_shows(planted, monkeypatch):
    planted(100.0, 1, 0, 0)
    spins = iter([1e-5, 2e-5, 2e-5, 2e-5])
    monkeypatch.setattr(load_module, "spin_s", lambda: next(spins))
    meter = Meter("cpu", 1)
    for now in (101.0, 102.0):
        planted(now, 1, 0, 0)
        meter.look()
    planted(103.0, 1, 0, 0)
    assert meter.load().noise == "the cores ran at 50% of their speed"


def test_a_system_that_says_nothing_is_quiet(monkeypatch, tmp_path):
    monkeypatch.setattr(load_module, "PROC", tmp_path / "nowhere")
    monkeypatch.setattr(load_module, "_fastest_spin_s", 0.0)  # as a coarse clock has it
    monkeypatch.setattr(load_module, "spin_s", lambda: 0.0)
    load = Meter("cpu", 10_000).load()
    assert (load.runnable, load.waiting, load.stolen, load.slowed) == (0.0, 0.0, 0.0, 1.0)
    sample = Threads().timed(lambda: time.sleep(0.01))
    assert sample.wall_s == sample.own_s >= 0.01 and sample.waited_s == 0.0


def test_this_systems_own_counters():
    """They hold whatever else runs: a sleep is no waiting for a core, and threads that come later are found."""
    own = Threads()
    sample = own.timed(lambda: time.sleep(0.02))
    assert sample.wall_s >= 0.02 and 0 <= sample.own_s <= sample.wall_s
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    before = len(own.busy_s())
    own.refresh()
    full = before >= load_module.MOST_THREADS or not Path("/proc/self/task").exists()
    assert full or other.native_id in own.busy_s()
    over.set()
    other.join()
    assert own.waited_s() >= 0.0 and spin_s() > 0.0 and load_now("cpu", 1, 0.01).cores >= 1


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux says it")
def test_waiting_for_a_core_is_seen_and_taken_off():
    """Two processes that compute, and this one, on one core."""
    mine = os.sched_getaffinity(0)
    others = []
    try:
        os.sched_setaffinity(0, {min(mine)})
        others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(2)]
        time.sleep(0.3)  # they start
        meter = Meter("cpu", 1)

        def work():
            ends = time.thread_time() + 0.1
            while time.thread_time() < ends:
                pass

        sample = Threads().timed(work)
        load = meter.load()
    finally:
        for process in others:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, mine)
    assert sample.wall_s > 0.12 and sample.waited_s > 0.02 and sample.own_s < sample.wall_s - 0.02
    assert load.waiting > 0.05 and "waited for a core" in load.noise


def test_other_processes_on_a_gpu(monkeypatch):
    class Sample(types.SimpleNamespace):
        pass

    used, reasons, asked = [Sample(pid=os.getpid(), smUtil=90)], [0], []
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda i: asked.append(i) or i,
        nvmlDeviceGetProcessUtilization=lambda handle, since: used,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: reasons[0],
        nvmlClocksThrottleReasonHwSlowdown=8,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert gpu_noise("cuda:1") == "" and asked == [5]
    reasons[0] = 12
    assert gpu_noise("cuda") == "the GPU's clock is braked by heat or power" and asked == [5, 3]
    used.append(Sample(pid=os.getppid(), smUtil=40))
    assert gpu_noise("cuda") == "the GPU's clock is braked by heat or power"
    used.append(Sample(pid=1 << 30, smUtil=40))
    assert Meter("cuda", 8).load() == Load(gpu="another process used 40 % of the GPU")
    used.append(Sample(pid=(1 << 30) + 1, smUtil=70))
    assert gpu_noise("cuda") == "2 other processes used 100 % of the GPU"
    del used[0]
    assert gpu_noise("cuda").endswith("heat or power"), "numbers of another name space"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_noise("cuda") == ""
