"""Numbers of threads: of the machine, of control groups, and as users say them."""

import threading
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import tilewright
from tilewright import processors, threads
from tilewright.cli.verbs import cli
from tilewright.errors import InputError
from tilewright.frontends import LoadOptions
from tilewright.runtime import executable


@pytest.mark.parametrize(
    ("lines", "files", "wanted"),
    [
        ("0::/\n", {}, None),
        ("0::/box\n", {"cpu.max": "max 100000\n", "box/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/box/inner\n", {"box/cpu.max": "150000 100000\n", "box/inner/cpu.max": "400000 100000\n"}, 1.5),
        ("0::/seen/by/the/host\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"unified/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/../box\n", {"cpu.max": "what\n"}, None),
        ("4:cpu:/a\n0::/\n", {"cpu/a/cpu.cfs_quota_us": "200000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 2.0),
        ("4:cpu,cpuacct:/a\n", {"cpu,cpuacct/cpu.cfs_quota_us": "70000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 0.7),
        ("4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
        ("nonsense", {}, None),
    ],
)
def test_the_least_quota_of_all_control_groups_counts(tmp_path, lines, files, wanted):
    (tmp_path / "own").write_text(lines)
    for name, content in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert processors.quota(tmp_path / "own", tmp_path / "groups") == wanted


@pytest.mark.parametrize(("share", "affine", "wanted"), [(None, 8, 8), (2.5, 8, 2), (0.3, 8, 1), (16.0, 4, 4)])
def test_a_process_may_keep_no_more_processors_busy_than_it_is_granted(monkeypatch, share, affine, wanted):
    monkeypatch.setattr(processors, "quota", lambda: share)
    monkeypatch.setattr(processors, "affine", lambda: set(range(affine)))
    assert processors.usable.__wrapped__() == wanted


def test_torch_s_threads_are_as_many_as_said_for_the_calling_thread_alone(monkeypatch):
    monkeypatch.setattr(threads, "usable", lambda: 6)
    before, seen = torch.get_num_threads(), []
    with threads.limited(before + 2):
        assert threads.count() == torch.get_num_threads() == before + 2
        other = threading.Thread(target=lambda: seen.append((threads.count(), torch.get_num_threads())))
        other.start()
        other.join()
        with threads.limited(None):
            assert threads.count() == before + 2
        with threads.limited(1):
            assert threads.count() == torch.get_num_threads() == 1
        assert threads.count() == before + 2
    assert threads.count() == torch.get_num_threads() == before
    assert seen == [(before, before)]


def test_without_a_word_torch_has_no_more_threads_than_the_machine(monkeypatch):
    torch.set_num_threads(7)
    monkeypatch.setattr(threads, "usable", lambda: 3)
    assert threads.count() == 3
    with threads.limited(None):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 7
    monkeypatch.setattr(threads, "usable", lambda: 9)
    assert threads.count() == 7


def test_torch_is_alone_where_kernels_lose_their_cores(monkeypatch):
    x = torch.randn(16, 8)
    program = tilewright.compile(torch.nn.LogSigmoid(), example_inputs=(x,), budget_s=0)
    seen = []
    run = type(program)._run
    monkeypatch.setattr(
        type(program), "_run", lambda *given: seen.append((threads.count(), torch.get_num_threads())) or run(*given)
    )
    program.threads, program._in_chains = 3, False  # as where steps are no consecutive kernels, which torch has a part in
    for lost, foreign in ((1, True), (0, True), (1, False)):
        monkeypatch.setattr(threads, "_asked", [lambda lost=lost: lost])
        monkeypatch.setattr(threads, "_crowd", threads._Crowd())
        program._foreign = foreign
        program(x)
    assert seen == [(3, 1), (3, 3), (3, 3)]


def test_torch_is_alone_for_longer_the_more_often_it_stood_still(monkeypatch):
    wall, seen = [100.0], []
    clock = SimpleNamespace(monotonic=lambda: wall[0], perf_counter=lambda: wall[0], thread_time=lambda: 0.0)
    monkeypatch.setattr(threads, "_asked", [])
    monkeypatch.setattr(threads, "_crowd", threads._Crowd())
    monkeypatch.setattr(threads, "time", clock)
    before = torch.get_num_threads()

    def call(still_s):
        with threads.with_torch(2):
            seen.append(torch.get_num_threads())
            wall[0] += still_s

    for still_s, then_s in ((0.0, 0.0), (0.02, 0.2), (0.02, 0.1), (0.02, 0.4), (0.0, 0.2), (0.0, 9.0), (0.02, 0.3), (0.0, 0.0)):
        call(still_s)
        wall[0] += then_s
    assert seen == [2, 2, 1, 2, 1, 2, 2, 2]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True, 9999])
def test_what_is_no_number_of_threads_is_told(wrong):
    with pytest.raises(InputError, match="is no number of threads"):
        threads.valid_count(wrong)


@pytest.fixture
def counts(monkeypatch):
    """Numbers of threads that parts of programs were called with."""
    seen, run = [], executable.Executable._run

    def noted(self, *given):
        seen.append((self._in_chains and self.threads) or threads.count())  # a chain is told its own
        return run(self, *given)

    monkeypatch.setattr(executable.Executable, "_run", noted)
    return seen


def test_a_program_runs_on_as_many_threads_as_it_was_compiled_for(counts):
    module, x = torch.nn.Linear(64, 48).eval(), torch.randn(8, 64)
    before = threads.count()
    other = tilewright.compile(module, example_inputs=(x,), budget_s=0)
    program = tilewright.compile(module, example_inputs=(x,), budget_s=0, threads=3)
    assert (program.threads, other.threads) == (3, None)
    for made in (program, other):
        torch.testing.assert_close(made(x), module(x), rtol=1e-4, atol=1e-5)
    tilewright.matmul(x, x.T, budget_s=0, threads=3)
    tilewright.matmul(x, x.T, budget_s=0)
    rows = tilewright.compile_rows(
        lambda m: tilewright.load(module, LoadOptions(example_inputs=(torch.empty(m, 64),))), last=4, budget_s=0.1, threads=3
    )
    torch.testing.assert_close(rows(x[:3]), module(x[:3]), rtol=1e-4, atol=1e-5)
    assert counts == [3, before, 3, before, 3]
    assert threads.count() == torch.get_num_threads() == before


def test_layers_run_on_as_many_threads_as_they_say(counts):
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 32)), torch.randn(4, 64)
    tilewright.quantize_(model, "w8", threads=3)
    model[1].threads = None
    wanted = model(x)
    counts.clear()
    torch.testing.assert_close(model(x), wanted)
    assert counts == [3, threads.count()]
    with pytest.raises(InputError, match="is no number of threads"):
        tilewright.Linear(model[0].weight.plain, threads=0)


def test_the_command_line_says_how_many_threads(counts):
    before = threads.count()
    try:
        done = CliRunner().invoke(cli, ["gemm", "f32[8,16] @ f32[16,8]", "--budget", "0", "--threads", "3"])
        assert done.exit_code == 0, done.output
        assert set(counts) == {3}
    finally:
        threads.adopt(before)
        threads._say(0)
    wrong = CliRunner().invoke(cli, ["gemm", "f32[8,16] @ f32[16,8]", "--threads", "0"])
    assert wrong.exit_code == 2 and "--threads" in wrong.output
    many = CliRunner().invoke(cli, ["gemm", "f32[8,16] @ f32[16,8]", "--threads", "9999"])
    assert many.exit_code == 2 and "threads=9999 is no number of threads\n  try: 1 to 1024" in many.output


@pytest.mark.parametrize("call", [tilewright.compile, tilewright.compile_rows])
def test_compiling_for_no_threads_is_refused(call):
    with pytest.raises(InputError, match="threads=0 is no number of threads"):
        call("f32[8,8] @ f32[8,8]", threads=0)
