"""The site of `make docs`: every page has its place, is no hard reading, and the reference has every public name, documented.

That links lead somewhere is `make docs`'s to find, and `test_docs_links.py`'s.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from statistics import mean

import pytest
from paths import ROOT

import tilewright

DOCS = ROOT / "docs"
NAV = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
OUTSIDE = {"index.md", "contributing.md", "changelog.md"}  # mkdocs_hook.py makes them of README, CONTRIBUTING and CHANGELOG
SHOWN = re.findall(r"^::: (\S+)$", "".join(p.read_text("utf-8") for p in sorted((DOCS / "api").glob("*.md"))), re.MULTILINE)


def resolved(name: str) -> object:
    """The module, class or function of that name, imported."""
    module, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), attribute)


def undocumented(name: str, value: object) -> Iterator[str]:
    """The names below one, itself included, that have no docstring, not even from a base class; ours alone."""
    if not inspect.getdoc(value) and not str(getattr(value, "__module__", "")).startswith("onnx."):
        yield name
    if inspect.ismodule(value):
        own = getattr(value, "__all__", None) or [
            n for n, v in vars(value).items() if not n.startswith("_") and getattr(v, "__module__", None) == value.__name__
        ]
        for n in own:
            yield from undocumented(f"{name}.{n}", getattr(value, n))
    elif inspect.isclass(value):
        for n, v in vars(value).items():
            callable_ = isinstance(v, (classmethod, staticmethod, property)) or inspect.isfunction(v)
            if not n.startswith("_") and callable_ and not inspect.getdoc(getattr(value, n)):
                yield f"{name}.{n}"


def test_every_page_has_a_place_on_the_site() -> None:
    sources = [*DOCS.rglob("*.md"), *(p.with_suffix(".md") for p in DOCS.rglob("*.ipynb"))]
    pages = {str(p.relative_to(DOCS)) for p in sources} | OUTSIDE
    places = re.findall(r"([\w/-]+\.md)$", NAV, re.MULTILINE)
    assert set(places) == pages, f"mkdocs.yml, under nav: differs in {sorted(set(places) ^ pages)}"
    assert len(places) == len(set(places))


def sentences(text: str) -> list[str]:
    """The sentences of a page, without its blocks, tables and headings; an item of a list ends one."""
    prose = re.sub(r"^```.*?^```$|^(?:\||#|:::|    )[^\n]*$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^\s*(?:-|\d+\.) ", "\n\n", prose, flags=re.MULTILINE)
    return [s for s in re.split(r"(?<=[.:;?!])\s+|\n\n+", prose) if len(s.split()) > 1]


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_sentences_are_short(page) -> None:
    words = [len(s.split()) for s in sentences(page.read_text("utf-8"))]
    assert mean(words or [0]) <= 20, max(sentences(page.read_text("utf-8")), key=len)


def test_sentences_end_where_they_do() -> None:
    assert sentences("# A page\n\nOne is short. Two\nis, too.\n\n| a | b |\n\n- three items\n- no point\n") == [
        "One is short.",
        "Two\nis, too.",
        "three items",
        "no point\n",
    ]


def test_no_row_stands_outside_its_table() -> None:
    """A row after an empty line begins a table, so the line below it has to say how many columns there are."""
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for row, below in re.findall(r"\n\n(\|[^\n]*)\n([^\n]*)", text):
            assert re.fullmatch(r"\|[-:| ]+\|", below), f"{page.name}: {row}"


def test_the_reference_has_every_public_name_once() -> None:
    wanted = {f"tilewright.{n}" for n in tilewright.__all__} - {"tilewright.__version__"}
    assert len(SHOWN) == len(set(SHOWN))
    assert wanted - set(SHOWN) == set(), "docs/api: a page has to show these"


def test_every_name_of_the_reference_is_documented() -> None:
    assert [n for name in SHOWN for n in undocumented(name, resolved(name))] == []


def test_what_has_no_docstring_is_found() -> None:
    class Bare:
        """A class."""

        def method(self) -> None: ...

    assert list(undocumented("Bare", Bare)) == ["Bare.method"]
