"""`--mesh` on the command line: ranks that it starts or that torchrun did, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import warm
from local_programs import case
from paths import EXAMPLES, ROOT

from tilewright.ir.mesh import Mesh
from tilewright.ir.notation import parse
from tilewright.ir.text import print_graph

EXAMPLE = EXAMPLES / "tensor_parallel.tw"
CONNECTED = 5  # sockets of a rank that has met the others
ENDS_S = 12.0  # for a job to end once a rank is gone: ranks have 7 s to say what they miss
FAST = ("--budget", "0", "--iterations", "3")

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


COMMAND = "import sys; sys.argv[0] = 'tilewright'; from tilewright.cli.verbs import main; main()"


def started(*words: object, **environment: str) -> warm.Program:
    """A command of its own, whose children can be told by its session."""
    return warm.start(["-c", COMMAND, *map(str, words)], surroundings(**environment))


def surroundings(**environment: str) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        **environment,
    }


def alive(session: int) -> dict[int, str]:
    """The processes of a session that run, with their ranks."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, _, _, of, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            said = dict(e.split("=", 1) for e in (folder / "environ").read_text(errors="replace").split("\0") if "=" in e)
        except (OSError, ValueError):
            continue
        if int(of) == session and state != "Z":
            found[int(folder.name)] = said.get("RANK", "")
    return found


def sockets(pid: int) -> int:
    """The number of sockets that a process has open."""
    try:
        return sum("socket" in str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


def gone(session: int, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while alive(session) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(session)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"TILEWRIGHT_CACHE": str(tmp_path / "cache"), "TILEWRIGHT_WORKER": "0"}


def test_ranks_are_started_and_the_first_reports(environment, tmp_path):
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    written = ("--html", page, "--trace", trace)
    perf = started("perf", EXAMPLE, "--mesh", "tp=2", "--json", *written, *FAST, **environment)
    explain = started("explain", EXAMPLE, "--mesh", "tp=2", "--json", "--budget", "0", **environment)
    out, err = perf.communicate(timeout=120)
    assert perf.returncode == 0, err
    report = json.loads(out)
    (reduction,) = (s for s in report["steps"] if s["candidate"] == "sequential")
    assert reduction["kind"] == "gemm" and "all_reduce(acc" in reduction["problem"]
    assert reduction["sent_bytes"] == 64 * 256 * 4 and 0 < reduction["between_us"] <= reduction["time_us"]
    assert all(s["sent_bytes"] == 0 and s["between_us"] is None for s in report["steps"] if s is not reduction)
    assert any(s.startswith("Between ranks: 1 step, in which a rank sends 64.0 KiB") for s in report["summary"])
    assert "Warning" not in err
    (met,) = report["traffic"]
    assert met["exposed_us"] == reduction["between_us"] and met["link_us"] > 0 and report["steps"][met["number"]] is reduction
    assert met["hidden_us"] == 0
    words = f"{met['exposed_us']:,.1f}"
    assert '<h2 id="ranks">Between ranks</h2>' in page.read_text() and f'<td class="n">{words}</td>' in page.read_text()
    slices = [e["args"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X" and "sent_bytes" in e["args"]]
    assert slices and all(s["exposed_us"] == met["exposed_us"] and "all_reduce" in s["between ranks"][0] for s in slices)
    out, err = explain.communicate(timeout=120)
    assert explain.returncode == 0, err
    (traffic,) = json.loads(out)["traffic"]
    assert (
        traffic["operation"] == "all_reduce of f32[64,256] over tp=2" and traffic["sent_bytes"] == 65536 and not traffic["why"]
    )


@pytest.mark.conformance
def test_a_note_that_all_ranks_have_is_said_once(environment):
    job = started("explain", EXAMPLE, "--mesh", "tp=2", "--budget", "0.01", **environment)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 0 and err.count("before this machine's rates were measured") == 1, err


def test_ranks_of_torchrun_are_taken(environment):
    words = ("perf", EXAMPLE, "--mesh", "tp=2", "--json", *FAST)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "tilewright")
    command = [sys.executable, *launcher, *map(str, words)]
    job = subprocess.run(command, env=surroundings(**environment), capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stderr
    assert json.loads(job.stdout)["verified"] is True


def test_links_are_measured_along_each_axis_and_all_of_them(environment):
    out, err = (command := started("devices", "--mesh", "dp=1,tp=2", "--json", **environment)).communicate(timeout=240)
    assert command.returncode == 0, err
    found = json.loads(out)["links"]
    assert [(x["operation"], x["over"], x["ranks"]) for x in found] == [
        (operation, "tp", 2) for operation in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    assert all(x["latency_us"] > 0 and (x["gbps"] is None or x["gbps"] > 0) for x in found)


def test_what_ranks_save_they_run_and_its_results_are_whole(environment, tmp_path):
    """A file for each rank; what they compute by it, split by columns, is written whole, by the first."""
    file, saved, where = tmp_path / "product.tw", tmp_path / "product.twp", ("--mesh", "tp=2", "--budget", "0")
    file.write_text(print_graph(parse("s8[16,32] @ s8[32,24] -> s8")))
    both = {"a": np.arange(512).reshape(16, 32) % 7, "b": np.arange(768).reshape(32, 24) % 5}
    np.savez(tmp_path / "given.npz", **{name: x.astype(np.int8) for name, x in both.items()})
    given = ("--inputs", tmp_path / "given.npz", "--output", tmp_path / "found.npz")
    for words in (("compile", file, "-o", saved, *where), ("run", saved, *where, *given)):
        out, err = (command := started(*words, **environment)).communicate(timeout=120)
        assert command.returncode == 0, err
    assert sorted(p.name for p in tmp_path.glob("*.twp")) == ["product.0-of-2.twp", "product.1-of-2.twp"]
    assert "s8[16,24]" in out
    wanted = (both["a"] @ both["b"]).astype(np.int8)
    assert (np.load(tmp_path / "found.npz")["result"] == wanted).all()
    _, err = (command := started("run", saved, *where, "--fp16", **environment)).communicate(timeout=120)
    assert command.returncode == 2 and "this program is compiled already" in err
    _, err = (command := started("run", saved, *where, "--batch", "2", **environment)).communicate(timeout=120)
    assert command.returncode == 2 and "the shapes of a saved program are settled" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("perf", EXAMPLE, "--mesh", "tp"), "no mesh: 'tp'"),
        (("perf", EXAMPLE, "--mesh", "tp=4096"), "4096 processes on"),
        (("perf", EXAMPLE, "--mesh", "tp=2", "--against", "torch"), "--against is for a program of one process"),
        (("explain", EXAMPLE, "--mesh", "dp=1"), "no mesh axis 'tp'"),
        (("explain", EXAMPLE), "the program is one of several ranks"),
        (("perf", "nothing.tw", "--mesh", "tp=2"), "no such file: nothing.tw"),
        (("run", "nothing.twp", "--mesh", "tp=1"), "nothing.0-of-1.twp"),
    ],
)
def test_what_cannot_be_run_on_a_mesh_is_said(words, sentence, environment):
    _, err = (command := started(*words, **environment)).communicate(timeout=120)
    assert err.count(sentence) == 1 and err.count("error:") == 1 and command.returncode == 2, err


def test_a_program_that_places_nothing_is_placed_as_for_simulated_ranks(environment, tmp_path):
    file = tmp_path / "product.tw"
    file.write_text(print_graph(parse("s8[16,32] @ s8[32,24] -> s8")))
    out, err = (command := started("explain", file, "--mesh", "tp=2", "--budget", "0", **environment)).communicate(timeout=120)
    assert command.returncode == 0 and "Traceback" not in out + err
    said = "the program places nothing: the weights of 1 product by columns and of 0 by rows over tp are split"
    assert err.count(said) == 1 and "s8[32,12]" in out and "each rank runs all of it" not in err


def test_a_program_is_one_of_any_number_of_ranks(environment):
    """That its file names two of them does not matter: one rank exchanges nothing."""
    command = started("explain", EXAMPLE, "--mesh", "tp=1", "--budget", "0", **environment)
    out, err = command.communicate(timeout=120)
    assert command.returncode == 0, err
    assert "f32[256,768]" in out and "all_reduce" not in out


def test_a_program_that_is_not_split_is_said_to_be_whole_on_each_rank(environment, tmp_path):
    file = tmp_path / "product.tw"
    file.write_text(print_graph(parse("s8[16,32] @ s8[32,23] -> s8")))  # which two ranks do not divide
    out, err = (command := started("explain", file, "--mesh", "tp=2", "--budget", "0", **environment)).communicate(timeout=120)
    assert command.returncode == 0 and "Traceback" not in out + err
    assert err.count("is split over the mesh tp=2: each rank runs all of it") == 1


@linux
@pytest.mark.parametrize("whom", ["1", pytest.param("0", marks=pytest.mark.conformance), "the command"])
def test_a_rank_that_is_killed_ends_the_job(whom, environment, tmp_path):
    file = tmp_path / "program.tw"
    file.write_text(print_graph(case("sequence parallel", Mesh.parse("tp=2")).local))
    job = started("perf", file, "--mesh", "tp=2", "--budget", "0", "-n", "1000000", **environment)
    until = time.monotonic() + 60
    while sum(sockets(pid) >= CONNECTED for pid, r in alive(job.pid).items() if r) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1)
    ranks = alive(job.pid)
    assert sorted(r for r in ranks.values() if r)[:2] == ["0", "1"], "" if ranks else job.communicate()
    target = job.pid if whom == "the command" else next(pid for pid, r in ranks.items() if r == whom)
    os.kill(target, signal.SIGKILL)
    if whom != "the command":
        _, err = job.communicate(timeout=ENDS_S)
        other = "0" if whom == "1" else "1"
        assert job.returncode == 75, err
        assert f"rank {whom} is gone" in err or f"rank {whom}, which keeps what ranks know" in err, err
        assert ("rank 1: error:" in err) == (other == "1")
    assert gone(job.pid, 3.0), alive(job.pid)
    job.wait()
