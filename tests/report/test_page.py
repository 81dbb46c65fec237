"""The page that `perf --html` writes: escaped, self-contained, complete, for keys and screen readers, without errors."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from browser import browser, opened
from cli_programs import FAST, block, install_ceilings, install_fake_library, invoke, write
from hypothesis import given
from hypothesis import strategies as st

import tilewright
from tilewright.dtype import F32, F64
from tilewright.ir.build import input_, map_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import LayerNorm, gemm
from tilewright.report.html.roofline import LABEL_GAP, SMALL, WIDE, Point, power, roofline, spread
from tilewright.report.html.template import KINDS, fill, text_of

HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)>\x1b[31m\u202e'
MOST_STOPS = 25  # of the Tab key before the table of steps


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    install_ceilings(monkeypatch)


def page_of(folder: Path, graph: Graph, *more: object) -> str:
    with pytest.MonkeyPatch.context() as patch:
        install_fake_library(patch)
        install_ceilings(patch)
        result = invoke("perf", write(folder, graph), "--html", folder / "page.html", "-n", 1, *FAST, *more)
    assert result.exit_code == 0, result.output
    return (folder / "page.html").read_text("utf-8")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a program in which every name tries to be markup."""
    graph = block()
    origins = {node: f"{name}{HOSTILE}" for node, name in graph.origins.items()}
    hostile = Graph(graph.name, graph.inputs, graph.outputs, graph.output_names, origins, (HOSTILE,))
    return page_of(tmp_path_factory.mktemp("page"), hostile)


def test_an_account_says_of_each_time_which_run_it_is_of(written: str) -> None:
    """The line above an account has the time of its row; what it says of the choice is said to be of that."""
    text = re.sub(r"<[^>]*>", " ", written)
    accounts = re.findall(r"<summary>.*?</summary>.*?</dl>", written[written.index('id="accounts"') :], re.DOTALL)
    timed = [a for a in accounts if "fastest that agrees" in a or "as fast as any" in a]
    assert accounts and all("times while kernels were chosen:" in a for a in timed)
    beside = r"(The rest of a call is [\d.,]+ µs|A call has no rest beside them): "
    rest = re.search(rf"The steps, each timed by itself, take [\d.,]+ µs. {beside}", text)
    assert rest is not None


def layered(layers: int) -> Graph:
    """Layers of norm, product, tanh, each with a residual around it, and a side input that all of them read."""
    x = start = input_("x", F32, (4, 8))
    side, w = input_("side", F32, (4, 8)), input_("w", F32, (8, 8))
    for _ in range(layers):
        x = map_("add", x, map_("tanh", map_("add", gemm(Node(LayerNorm(1, 1e-5), x), w), side)))
    return Graph("layered", (start, side, w), (x,), ("y",))


class Elements(HTMLParser):
    """Every start tag, with those that it stands in, and every tag that is still open at the end."""

    VOID = ("meta", "link", "br", "wbr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, ...]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.inside.append(tuple(self.open))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        """The attributes of every element of these names."""
        return [attributes for tag, attributes in self.found if tag in tags]

    def drawn(self) -> list[dict[str, str | None]]:
        """The attributes of every link in a drawing."""
        return [a for (tag, a), inside in zip(self.found, self.inside, strict=True) if tag == "a" and "svg" in inside]

    def ids(self) -> list[str]:
        return [a["id"] or "" for _, a in self.found if "id" in a]


def test_the_page_is_well_formed_and_loads_nothing(written: str) -> None:
    page = Elements(written)
    assert page.open == []
    for tag, attributes in page.found:
        assert "src" not in attributes and tag != "img" and "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        link = attributes.get("href") or "#"
        assert link.startswith("#") or (tag == "link" and link == "data:,")
    (policy,) = (a["content"] or "" for a in page.all("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", written, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_what_comes_from_the_program_is_text(written: str) -> None:
    assert "<script>alert" not in written and "<img" not in written
    assert "net/Relu&lt;/script&gt;" in written and "&lt;img src=x onerror=alert(1)&gt;" in written
    assert all(c.isprintable() or c == "\n" for c in written)


def test_links_lead_somewhere_and_both_ways(written: str) -> None:
    page = Elements(written)
    ids = page.ids()
    assert [name for name, times in Counter(ids).items() if times > 1] == []
    links = Counter((a.get("href") or "")[1:] for a in page.all("a"))
    assert set(links) <= set(ids)
    rows = [name for name in ids if name.startswith("row-")]
    assert len(rows) >= 5
    for row in rows:
        account = row.replace("row-", "account-")
        assert links[row] >= 1 and links[account] >= 2, "from the account to the row; from the row and the graph to the account"
    boxes = [name for name in ids if name.startswith("box-")]
    assert len(boxes) >= 5 and all(links[box] == 1 for box in boxes)


def test_landmarks_captions_and_heads_are_there_for_screen_readers(written: str) -> None:
    page = Elements(written)
    tags = Counter(tag for tag, _ in page.found)
    assert all(tags[tag] == 1 for tag in ("header", "nav", "main", "footer", "h1"))
    assert {a["lang"] for a in page.all("html")} == {"en"}
    headings = {a.get("id") for a in page.all("h2")}
    assert all(a.get("aria-labelledby") in headings for a in page.all("section"))
    assert tags["table"] == tags["caption"] and tags["table"] >= 5
    assert all(a.get("scope") in ("col", "row") for a in page.all("th"))
    assert [a["href"] for a in page.all("a")][:2] == ["#report", "#steps"], "skip links come first"
    assert {a.get("for") for a in page.all("label")} == {"search"}
    for tag, attributes in page.found:
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true" or attributes.get("aria-label")
    regions = [a["aria-label"] for a in page.all("div") if a.get("role") == "region"]
    assert len(regions) == len(set(regions))


def test_a_drawing_is_one_stop_and_the_table_is_near(written: str) -> None:
    page = Elements(written)
    drawn = [a.get("tabindex") for a in page.drawn()]
    assert Counter(drawn)["0"] == 3 and set(drawn) == {"0", "-1"}, "the graph, and the roofline in two sizes"
    stops = 0
    for tag, attributes in page.found:
        if attributes.get("id") == "table":
            break
        focusable = tag in ("a", "input", "button", "summary") or "tabindex" in attributes
        stops += focusable and attributes.get("tabindex") != "-1"
    assert stops <= MOST_STOPS


def test_every_step_is_in_the_tables_and_what_computes_in_the_pictures(written: str) -> None:
    page = Elements(written)
    ids = page.ids()
    steps = [name for name in ids if re.fullmatch(r"step-\d+", name)]
    assert steps == [f"step-{i}" for i in range(len(steps))] and len(steps) >= 5
    shown = re.findall(r'<tr id="step-\d+"><td class="n" data-v="\d+">(\d+)</td>', written)
    assert shown == [str(i) for i in range(1, len(steps) + 1)], "counted from 1, as the other table is"
    assert all(int(n) == int(i) + 1 for i, n in re.findall(r'<a href="#step-(\d+)">(\d+)</a>: ', written))
    kinds = dict(re.findall(r'<tr id="row-(\d+)".*?<td class="kind">.*?</svg>(\w+)</td>', written, re.DOTALL))
    assert set(kinds.values()) >= {"gemm", "norm", "call", "quantize"} and "view" not in kinds.values()
    computing = [key for key, kind in kinds.items() if kind not in ("call", "move")]
    shown = Counter(a["data-key"] for a in page.drawn())
    for key in kinds:
        assert shown[key] == (3 if key in computing else 1), "a box, and a point in both rooflines"


def test_the_page_tells_what_the_reports_tell(written: str) -> None:
    for said in (
        "What you can change",
        "Time by kind",
        "Graph of steps",
        "Roofline",
        "Accounts",
        "Machine",
        "Inputs",
        "Fell back",
        "Unfused",
        "Who is who",
        "Could not",
        "How this was made",
        "tilewright perf ",
        f"Tilewright {tilewright.__version__} ",
    ):
        assert said in written
    assert "f32[2,5,8] @ f32[8,6] + bias:f32, relu" in written
    assert re.search(r"<dt>when</dt><dd>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00</dd>", written)


def test_advice_saves_what_the_text_says(tmp_path: Path) -> None:
    a, b = input_("a", F64, (64, 64)), input_("b", F64, (64, 64))
    page = tmp_path / "page.html"
    result = invoke("perf", write(tmp_path, Graph("doubles", (a, b), (gemm(a, b),), ("y",))), "--html", page, "-n", 1, *FAST)
    saved = re.findall(r'<span class="saves">(.*?)</span>', page.read_text("utf-8"))
    assert saved, result.output
    assert all(s in " ".join(result.stdout.split()) and " % of all steps" in s for s in saved)


def test_layers_are_one_row_and_one_frame(tmp_path: Path) -> None:
    written = page_of(tmp_path, layered(7))
    assert "× 7 layers" in written
    page = Elements(written)
    assert len([name for name in page.ids() if name.startswith("box-")]) == 2
    assert len([name for name in page.ids() if name.startswith("row-")]) <= 3
    assert len([name for name in page.ids() if name.startswith("step-")]) == 14
    assert "gemm × 7" in written and "norm × 7" in written


def test_an_earlier_report_stands_beside_this_one(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text(invoke("perf", write(tmp_path, layered(7)), "--json", "-n", 1, *FAST).stdout)
    written = page_of(tmp_path, layered(9), "--before", earlier)
    page = Elements(written)
    assert "before" in page.ids() and page.open == []
    assert "14 steps before, 18 after" in written and re.search(
        r"A call took [\d,.]+ µs there, and takes [\d,.]+ here", written
    )
    (table,) = re.findall(r"the largest effect first</caption>(.*?)</table>", written, re.DOTALL)
    assert "other steps" in table and "gemm" in table and "2 x " in table
    assert '<th scope="row">command</th>' in written, "what else differs"
    assert 'id="before"' not in page_of(tmp_path, layered(7))


def test_an_earlier_report_that_is_none_is_refused_before_any_work(tmp_path: Path) -> None:
    program, page = write(tmp_path, block()), tmp_path / "page.html"
    earlier = tmp_path / "earlier.json"
    earlier.write_text(invoke("perf", program, "--json", "-n", 1, *FAST).stdout)
    result = invoke("perf", program, "--before", earlier, *FAST)
    assert result.exit_code == 2 and "--before belongs to --html" in result.output
    result = invoke("perf", program, "--before", tmp_path / "x.json", "--html", page, *FAST)
    assert result.exit_code == 2 and "the report cannot be read" in " ".join(result.output.split())
    account = tmp_path / "explain.json"
    account.write_text(invoke("explain", program, "--json", *FAST).stdout)
    result = invoke("perf", program, "--before", account, "--html", page, *FAST)
    assert result.exit_code == 2 and "it is of explain, and times are compared" in " ".join(result.output.split())
    result = invoke("perf", program, "--before", write(tmp_path, block()), "--html", page, *FAST)
    assert result.exit_code == 2 and "it is no JSON" in " ".join(result.output.split())


def test_kinds_add_up(written: str) -> None:
    (table,) = re.findall(r"longest first</caption>(.*?)</table>", written, re.DOTALL)
    shares = [float(share) for share in re.findall(r'</th><td class="n">[\d,.]+</td><td class="n">([\d.]+)</td>', table)]
    assert len(shares) >= 4 and sum(shares) == pytest.approx(100, abs=0.5) and shares == sorted(shares, reverse=True)
    bars = re.findall(r'<rect class="mark k-\w+" x="([\d.]+)" width="([\d.]+)" height="28">', written)
    for (x, width), (after, _) in pairwise(bars):
        assert float(x) + float(width) == pytest.approx(float(after), abs=0.2)


def test_points_stand_where_their_numbers_say() -> None:
    points = [Point(1.0, 10.0, "gemm", "a", 0), Point(100.0, 10.0, "norm", "b", 1), Point(1.0, 100.0, "softmax", "c", 2)]
    picture = roofline(points, {"f32": 200.0}, 10.0, WIDE)
    one, two, three = picture.points
    assert one.x == three.x < two.x and one.y == two.y > three.y
    decades = [x for x, _ in picture.across]
    assert two.x - one.x == pytest.approx(2 * (decades[1] - decades[0]))
    (roof,) = picture.roofs
    assert roof.x == pytest.approx(one.x + (two.x - one.x) / 2 * 1.30103)  # 200 Gop/s over 10 GB/s: 20 operations a byte


@given(
    st.lists(st.floats(1.0, 1e6), max_size=8),
    st.lists(st.tuples(st.floats(1e-3, 1e5), st.floats(1e-3, 1e6)), max_size=8),
    st.floats(0.1, 1e4),
    st.sampled_from((WIDE, SMALL)),
)
def test_labels_of_roofs_never_touch(rates: list[float], at: list[tuple[float, float]], gbps: float, size) -> None:
    points = [Point(x, y, "gemm", "p", i) for i, (x, y) in enumerate(at)]
    picture = roofline(points, {f"t{i}": rate for i, rate in enumerate(rates)}, gbps, size)
    heights = [roof.label_y for roof in picture.roofs]
    assert all(b - a >= LABEL_GAP - 1e-6 for a, b in pairwise(heights))
    assert all(picture.top - 1e-6 <= y <= picture.bottom + 1e-6 for y in heights)
    assert all(picture.left <= p.x <= picture.right and picture.top <= p.y <= picture.bottom for p in picture.points)
    assert all(picture.left - 1e-6 <= roof.x <= picture.right + 1e-6 for roof in picture.roofs)


def test_places_stay_where_they_are_if_there_is_room() -> None:
    assert spread([10, 50, 90], 14, 0, 100) == [10, 50, 90]
    assert spread([50, 51, 52], 14, 0, 100) == [50, 64, 78]
    assert spread([90, 95, 99], 14, 0, 100) == [72, 86, 100]
    assert spread([], 14, 0, 100) == []


def test_powers_are_short() -> None:
    assert [power(e) for e in (-5, -3, -1, 0, 1, 2, 3, 5, 6, 10, 12)] == (
        ["1e-5", "0.001", "0.1", "1", "10", "100", "1k", "100k", "1M", "10G", "1e12"]
    )


def test_kinds_differ_in_shape_and_have_a_colour() -> None:
    drawn = {kind: fill("roofline.svg", r=roofline([Point(1, 1, kind, "p", 0)], {}, 1.0, WIDE)) for kind in KINDS}
    shapes = {kind: re.search(r"</title>(.*?)</g>", text)[1] for kind, text in drawn.items()}  # type: ignore[index]
    assert len(set(shapes.values())) == len(KINDS)
    style = text_of("kinds.css")
    for kind in (*KINDS, "other"):
        assert style.count(f"--{kind}: #") == 2 and f".k-{kind} {{ --kind: var(--{kind})" in style, "light and dark"


def test_no_points_and_no_ceilings_are_no_error() -> None:
    assert "<svg" in fill("roofline.svg", r=roofline([], {}, 0.0, WIDE))
    assert fill("roofline.svg", r=roofline([Point(1.0, 1.0, "move", "a", 0)], {}, 0.0, SMALL)).count('class="point') == 1


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    result = invoke("perf", write(tmp_path, block()), "--html", tmp_path / "no" / "page.html", "-n", 1, *FAST)
    assert result.exit_code == 2 and "cannot be written" in result.output
    assert not (tmp_path / "no").exists()


@pytest.mark.skipif(browser() is None, reason="no browser of the Chromium family")
def test_a_browser_opens_it_without_errors_and_its_script_works(written: str, tmp_path: Path) -> None:
    """`make page-check` looks further: at BERT's page, in two sizes, light and dark, with axe-core."""
    (tmp_path / "page.html").write_text(written)
    (tmp_path / "wrong.html").write_text("<script>undefined_function()</script>")
    with opened(browser() or "") as tab:
        tab.open((tmp_path / "page.html").as_uri(), 390, 800, "light")
        assert tab.said == [] and len([a for a in tab.asked if a.startswith("file:")]) == 1
        assert tab.run("document.documentElement.scrollWidth") == 390
        wider = "[...document.querySelectorAll('main > section > .scroll[role]')].map((s) => s.scrollWidth > s.clientWidth)"
        signs = "[...document.querySelectorAll('main > section > .scroll > .more')]"
        seen = f"{signs}.map((m) => getComputedStyle(m).visibility === 'visible' && m.clientHeight > 9)"
        assert tab.run(wider) == tab.run(seen) and len(set(tab.run(seen))) == 2, "a sign where a table scrolls, and only there"
        assert tab.run("document.querySelectorAll('#table th button').length") == 11
        times = "[...document.querySelectorAll('#table tbody tr')].map((r) => Number(r.cells[2].dataset.v))"
        tab.run("document.querySelectorAll('#table th button')[2].click()")
        assert tab.run(times) == sorted(tab.run(times), reverse=True)
        tab.run("document.querySelectorAll('#table th button')[2].click()")
        assert tab.run(times) == sorted(tab.run(times))
        tab.run("s = document.querySelector('#search'); s.value = 'GEMM f32'; s.dispatchEvent(new Event('input'))")
        assert tab.run("document.querySelector('output').textContent").startswith("1 of ")
        tab.run("document.querySelector('svg.graph a').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
        tab.run("new Promise((done) => setTimeout(done, 100))")
        assert tab.run("document.querySelector(location.hash).open") is True
        tab.run("document.querySelector('details[open] .ways a').click()")  # to a row that the search hid
        tab.run("new Promise((done) => setTimeout(done, 100))")
        assert tab.run("document.querySelector(location.hash).getBoundingClientRect().height") > 0
        assert tab.said == []
        tab.open((tmp_path / "wrong.html").as_uri(), 390, 800, "light")
        assert any("undefined_function" in said for said in tab.said), "it would see an error"
