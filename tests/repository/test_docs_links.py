"""Links between the pages lead somewhere, and the page of the rules names every rule, in its stage."""

import re
from pathlib import Path

import pytest
from paths import ROOT

from tilewright.compiler import CANONICAL, EXCESS_PRECISION, STAGES
from tilewright.ir.pattern import Pass, Rule, discover

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links to them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_lead_somewhere(page):
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_there_are_links():
    assert {"rules.md", "glossary.md"} <= {Path(link).name for page in PAGES for link in LINK.findall(page.read_text())}


def test_the_layout_names_every_folder_and_every_file_beside_them():
    package, layout = ROOT / "src" / "tilewright", (ROOT / "docs" / "layout.md").read_text()
    wanted = [f"{p.name}/" if p.is_dir() else p.name for p in package.iterdir() if not p.name.startswith("__")]
    assert [name for name in wanted if f"`{name}`" not in layout] == []
    for name in re.findall(r"`([a-z_/]+(?:/|\.py|\.typed))`", layout):
        assert any((folder / name).exists() for folder in (package, ROOT, *package.glob("*/"))), name


def test_constants_that_the_recipes_name_are_in_the_source():
    named = set(re.findall(r"`([A-Z][A-Z_]{2,})`", (ROOT / "CONTRIBUTING.md").read_text()))
    text = "".join(p.read_text() for folder in ("src", "tests") for p in (ROOT / folder).rglob("*.py") if p != Path(__file__))
    assert len(named) > 10 and {n for n in named if not re.search(rf"^{n}\b", text, re.MULTILINE)} == set()


def test_the_page_of_the_rules_has_each_rule_in_its_stage():
    stages: dict[str, list[str]] = {}
    for level, title in re.findall(r"^(##+) (.+)$", BLOCK.sub("", (ROOT / "docs" / "rules.md").read_text()), re.MULTILINE):
        if level == "##":
            stages[title] = []
        else:
            stages[list(stages)[-1]].append(title.strip("`"))
    wanted = {stage: set() for stage in (CANONICAL, *STAGES, EXCESS_PRECISION)}
    for kind in (Rule, Pass):
        for r in discover("tilewright.rules", kind):
            wanted[r.stage].add(r.name)
    assert list(stages)[: len(wanted)] == list(wanted)
    for stage, names in wanted.items():
        assert set(stages[stage]) == names, f"docs/rules.md, under '## {stage}': differs in {set(stages[stage]) ^ names}"
    assert {stage for stage, names in stages.items() if names} == set(wanted)
    assert all(len(set(names)) == len(names) for names in stages.values())


def test_every_rule_says_what_it_does_and_whether_it_is_exact():
    for kind in (Rule, Pass):
        for r in discover("tilewright.rules", kind):
            assert "->" in r.doc, f"{r.name} has no `before -> after`"
            assert "Exact:" in r.doc, f"{r.name} does not say whether it is exact"
