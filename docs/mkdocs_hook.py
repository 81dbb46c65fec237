"""A hook of mkdocs: pages that lie beside docs/ become pages of the site, and links that leave docs/ lead to them.

The README is the site's first page, so that it is written once. A link to any other file of the repository, which the site does
not hold, becomes the file's name. Blocks lose what stands after their language, which is for the tests (`no-run`, `slow`).
Notebooks become pages, with the outputs that they hold.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
MARKS = re.compile(r"\A(```\w+)[^\n]*")
BLOCK = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The site's files, with those of the repository's own pages and of notebooks among them."""
    for name, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(Path(config.config_file_path).parent / name)))
    for notebook in [f for f in files if f.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        page = _page(Path(notebook.abs_src_path or "").read_text("utf-8"))
        files.append(File.generated(config, notebook.src_uri.removesuffix(".ipynb") + ".md", content=page))
    return files


def _page(notebook: str) -> str:
    """A notebook's cells as the text of a page."""
    parts: list[str] = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [f"```text\n{''.join(o['text'])}```" for o in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """A page's text with each link to a file of the repository led to the site's page, or left as the file's name."""
    place = {v: k for k, v in OUTSIDE.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = posixpath.dirname(page.file.src_uri) or "."

    def mended(m: re.Match[str]) -> str:
        picture, text, path, anchor = m[1], m[2], m[3], m[4] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), path))
        inside = OUTSIDE.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if inside is None:
            return text
        inside = re.sub(r"\.ipynb$", ".md", inside)
        return f"{picture}[{text}]({posixpath.relpath(inside, here)}{anchor})"

    parts = BLOCK.split(markdown)
    return "".join(MARKS.sub(r"\1", part) if i % 2 else LINK.sub(mended, part) for i, part in enumerate(parts))
