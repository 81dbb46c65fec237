"""Names that would steer a terminal, in what every verb prints and in every error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_programs import FAST, install_ceilings, install_fake_library, invoke
from onnx import TensorProto, helper

from tilewright.dtype import F32
from tilewright.errors import InputError, visible
from tilewright.ir.build import input_, map_
from tilewright.ir.graph import Graph
from tilewright.ir.ops import gemm
from tilewright.ir.text import print_graph
from tilewright.schedule import cache

HOSTILE = "a\x1b[31mb\x1b]0;pwn\x07c\u202ed\x9b1me\x7ff\u2066g\rh\x08i\u2028j\u200bk\U000e0041l"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    install_ceilings(monkeypatch)


@pytest.fixture
def program(tmp_path: Path) -> str:
    a, b = input_(HOSTILE, F32, (4, 8)), input_(HOSTILE + "2", F32, (8, 4))
    y = map_("tanh", gemm(a, b))
    graph = Graph(HOSTILE, (a, b), (y,), (HOSTILE,), {y: HOSTILE, y.src[0]: HOSTILE}, (f"a note on {HOSTILE}",))
    path = tmp_path / "p.tw"
    path.write_text(print_graph(graph), "utf-8")
    return str(path)


def test_what_has_no_shape_is_written_out() -> None:
    assert visible(HOSTILE).startswith(r"a\x1b[31mb\x1b]0;pwn\x07c\u202ed\x9b1me\x7ff\u2066g\rh\x08i\u2028j\u200bk\U000e0041l")
    assert visible("Größe µs × 中文\n\tx — …") == "Größe µs × 中文\n\tx — …"
    assert STEERS.search(HOSTILE) and not STEERS.search(visible(HOSTILE))
    assert not STEERS.search(str(InputError(HOSTILE, where=HOSTILE, hint=HOSTILE)))


@pytest.mark.parametrize("flag", [(), ("--json",)])
@pytest.mark.parametrize("verb", ["read", "run", "verify", "perf", "explain", "tune"])
def test_no_verb_prints_a_control(verb: str, flag: tuple[str, ...], program: str) -> None:
    options = () if verb == "read" else (*FAST, "--no-cache") if verb != "perf" else (*FAST, "--no-cache", "-n", "1")
    result = invoke(verb, program, *options, *flag)
    assert result.exit_code == 0, result.output
    assert not STEERS.search(result.stdout.replace("\r\n", "\n")), repr(result.stdout)
    assert not STEERS.search(result.stderr), repr(result.stderr)
    if flag:
        json.loads(result.stdout)
        assert verb in ("perf", "explain", "tune") or json.dumps(HOSTILE)[1:-1] in json.dumps(json.loads(result.stdout))


@pytest.mark.parametrize("verb", ["read", "run", "verify", "perf", "explain", "tune"])
def test_no_error_prints_a_control(verb: str, program: str, tmp_path: Path) -> None:
    options = () if verb == "read" else FAST
    x = helper.make_tensor_value_info(HOSTILE, TensorProto.FLOAT, [4, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a\x1b[2J"])
    node = helper.make_node(HOSTILE, [HOSTILE], ["y"], name=HOSTILE, domain=HOSTILE)
    model = helper.make_model(helper.make_graph([node], HOSTILE, [x], [y]), opset_imports=[helper.make_opsetid("", 21)])
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    given = ("--input-dim", f"@{HOSTILE}", "1")
    for arguments in ((tmp_path / "m.onnx",), (f"{HOSTILE}.onnx",), (program, *given), (program, f"--{HOSTILE}")):
        result = invoke(verb, *arguments, *options)
        assert result.exit_code == 2, result.output
        assert result.stderr and not STEERS.search(result.stderr), repr(result.stderr)
        assert not STEERS.search(invoke("--traceback", verb, *arguments, *options).stderr)


def test_lines_of_the_cache_are_visible(caplog: pytest.LogCaptureFixture) -> None:
    cache.say(HOSTILE)
    assert "pwn" in (said := caplog.messages[0]) and not STEERS.search(said)
