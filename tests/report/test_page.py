"""The page that `perf --html` writes: escaped, self-contained, complete, and without errors in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from cli_programs import FAST, block, install_ceilings, install_fake_library, invoke, write

from tilewright.ir.graph import Graph
from tilewright.report.html.roofline import SHAPES, Point, roofline

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    install_ceilings(monkeypatch)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a program in which every name tries to be markup."""
    with pytest.MonkeyPatch.context() as patch:
        install_fake_library(patch)
        install_ceilings(patch)
        folder = tmp_path_factory.mktemp("page")
        graph = block()
        origins = {node: f"{name}{HOSTILE}" for node, name in graph.origins.items()}
        hostile = Graph(graph.name, graph.inputs, graph.outputs, graph.output_names, origins, (HOSTILE,))
        result = invoke("perf", write(folder, hostile), "--html", folder / "page.html", "-n", 1, *FAST)
        assert result.exit_code == 0, result.output
        return (folder / "page.html").read_text("utf-8")


class Elements(HTMLParser):
    """Every start tag, and every tag that is still open at the end."""

    VOID = ("meta", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing(written: str) -> None:
    page = Elements(written)
    assert page.open == []
    for tag, attributes in page.found:
        assert "src" not in attributes and tag != "img"
        link = attributes.get("href") or ""
        assert link.startswith(("#step-", "data:,")) or not link
    (policy,) = (a["content"] or "" for t, a in page.found if t == "meta" and "content" in a and "http-equiv" in a)
    assert policy.startswith("default-src 'none'") and "'sha256-" in policy
    assert sum(tag == "script" for tag, _ in page.found) == 1


def test_what_comes_from_the_program_is_text(written: str) -> None:
    assert HOSTILE not in written
    assert "net/Relu&lt;/script&gt;" in written and "&lt;img src=x onerror=alert(1)&gt;" in written


def test_every_step_that_computes_is_a_point_in_both_pictures_and_every_step_a_row(written: str) -> None:
    page = Elements(written)
    ids = [a["id"] or "" for t, a in page.found if t == "tr" and "id" in a]
    assert ids == [f"step-{i}" for i in range(len(ids))] and len(ids) >= 5
    shown = [a["data-step"] for t, a in page.found if a.get("class") == "point"]
    kinds = re.findall(r'id="step-(\d+)"><td[^>]*>\d+</td><td>(\w+)</td>', written)
    computing = [i for i, kind in kinds if kind not in ("view", "call", "move")]
    assert sorted(shown) == sorted(computing * 2)
    assert {kind for i, kind in kinds} >= {"gemm", "norm", "call", "quantize"}


def test_the_page_tells_what_the_reports_tell(written: str) -> None:
    for said in (
        "Roofline",
        "Choices",
        "Machine",
        "Inputs",
        "Fell back",
        "Unfused",
        "Who is who",
        "float_exact is for integer",
    ):
        assert said in written
    assert "f32[2,5,8] @ f32[8,6] + bias:f32, relu" in written


def test_points_stand_where_their_numbers_say() -> None:
    points = [Point(1.0, 10.0, "gemm", "a", 0), Point(100.0, 10.0, "norm", "b", 1), Point(1.0, 100.0, "softmax", "c", 2)]
    picture = roofline(points, {"f32": 200.0}, 10.0, 1000, 500)
    (x0, y0), (x1, y1), (x2, y2) = (
        tuple(map(float, p)) for p in re.findall(r'data-step="\d" transform="translate\((\S+) (\S+)\)"', picture)
    )
    assert x0 == x2 < x1 and y0 == y1 > y2
    decades = [float(x) for x in re.findall(r'<path class="grid" d="M(\S+) \S+V', picture)]
    assert x1 - x0 == pytest.approx(2 * (decades[1] - decades[0]), abs=0.3)
    roof = re.search(r'<path class="roof" d="M(\S+) (\S+)H\S+"><title>f32', picture)
    assert roof is not None
    ridge = x0 + (x1 - x0) / 2 * 1.30103  # 200 Gop/s over 10 GB/s: 20 operations a byte
    assert float(roof[1]) == pytest.approx(ridge, abs=0.3)


def test_kinds_differ_in_shape() -> None:
    assert len(set(SHAPES.values())) == len(SHAPES)


def test_no_points_and_no_ceilings_are_no_error() -> None:
    assert "<svg" in roofline([], {}, 0.0, 1000, 500)
    assert roofline([Point(1.0, 1.0, "move", "a", 0)], {}, 0.0, 400, 400).count('class="point"') == 1


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    result = invoke("perf", write(tmp_path, block()), "--html", tmp_path / "no" / "page.html", "-n", 1, *FAST)
    assert result.exit_code == 2 and "cannot be written" in result.output
    assert not (tmp_path / "no").exists()


@pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)}")
def test_a_browser_opens_it_without_errors(written: str, tmp_path: Path) -> None:
    """Its script runs (titles become buttons), points are there, and the console stays silent."""
    assert BROWSER is not None
    (tmp_path / "page.html").write_text(written)
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--log-level=0",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        (tmp_path / "page.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    assert done.stdout.count('class="point"') == written.count('class="point"') > 0
    assert done.stdout.count('<button type="button">') == 10  # the titles of the table of steps


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_the_browser_test_would_see_an_error(tmp_path: Path) -> None:
    assert BROWSER is not None
    (tmp_path / "page.html").write_text("<script>undefined_function()</script>")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--log-level=0", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [BROWSER, *flags, profile, "--virtual-time-budget=500", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert any("CONSOLE" in line and "undefined_function" in line for line in done.stderr.splitlines())
