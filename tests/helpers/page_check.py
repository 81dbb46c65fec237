"""Opens a report's page in a browser and looks: `make page-check`.

BERT's page if none is named, at 1280 and 390 pixels, light and dark. Everything that is wrong is said in a sentence; pictures
of the page go into a folder, to be looked at. A browser of the Chromium family and axe-core
(https://github.com/dequelabs/axe-core) are needed: axe-core is found in `node_modules`, named by `--axe`, or taken from the
registry by `npm pack`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from browser import NAMES, Tab, browser, opened

ROOT = Path(__file__).parent.parent.parent
AXE = "axe-core@4.14.1"
MOST_BYTES = 300_000
MOST_STOPS, MOST_AFTER_SKIPPING = 40, 6  # of the Tab key before the table of steps
WINDOWS = ((1280, 900), (390, 844))
SCHEMES = ("light", "dark")

# Visible texts in drawings that overlap by more than a pixel both ways.
OVERLAPS = """
(() => {
  const texts = [...document.querySelectorAll("svg.roofline text, svg.graph text")].filter((t) => t.getClientRects().length);
  const found = [];
  for (let i = 0; i < texts.length; i++) for (let j = 0; j < i; j++) {
    if (texts[i].ownerSVGElement !== texts[j].ownerSVGElement) continue;
    const [a, b] = [texts[i].getBoundingClientRect(), texts[j].getBoundingClientRect()];
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > 1 && down > 1) found.push(texts[j].textContent + " / " + texts[i].textContent);
  }
  return found;
})()
"""
# Texts that leave the box they stand in.
LEAVING = """
[...document.querySelectorAll("svg.graph a")].flatMap((a) => {
  const box = a.querySelector(".box").getBoundingClientRect();
  const texts = [...a.querySelectorAll("text")];
  return texts.filter((t) => t.getBoundingClientRect().right > box.right + 1).map((t) => t.textContent);
})
"""
DEAD = """[...document.querySelectorAll('a[href^="#"]')].map((a) => a.getAttribute("href").slice(1))
  .filter((id) => !document.getElementById(id))"""
VIOLATIONS = """axe.run({preload: false}).then((found) => found.violations.map((v) =>
  ({impact: v.impact, id: v.id, help: v.help, nodes: v.nodes.slice(0, 3).map((n) => n.html.slice(0, 160))})))"""
AT_STEPS = 'document.activeElement.closest("#table") !== null'


def looks(tab: Tab, width: int, page: Path, axe: str) -> Iterator[str]:
    """Say what is wrong with the page as it stands."""
    for said in tab.said:
        yield f"the console says: {said}"
    for address in tab.asked:
        if address not in (page.as_uri(), "about:blank") and not address.startswith("data:"):
            yield f"it asks for {address}"
    wide = tab.run("document.documentElement.scrollWidth")
    if wide > width:
        yield f"it is {wide} pixels wide, and scrolls sideways"
    for pair in tab.run(OVERLAPS):
        yield f"labels overlap: {pair}"
    for text in tab.run(LEAVING):
        yield f"a label leaves its box: {text}"
    for name in tab.run(DEAD):
        yield f"a link leads nowhere: #{name}"
    right = tab.run('document.querySelector("#table tbody tr").cells[2].getBoundingClientRect().right')
    if right > width:
        yield f"the times end at {right:.0f} pixels, out of sight"
    tab.run(axe)
    yield from violations(tab)


def violations(tab: Tab) -> Iterator[str]:
    """Say what axe-core, which is there already, finds."""
    for v in tab.run(VIOLATIONS):
        yield f"axe-core, {v['impact']}: {v['id']}: {v['help']}: {' '.join(v['nodes'])}"


def works(tab: Tab) -> Iterator[str]:
    """Say what does not work: keys, search, sorting, the head that stays, links both ways."""
    stops = 0
    while stops <= MOST_STOPS and not tab.run(AT_STEPS):
        tab.press("Tab")
        stops += 1
    if stops > MOST_STOPS:
        yield f"the table of steps is more than {MOST_STOPS} stops of the Tab key away"
    tab.run("document.querySelectorAll('a.skip')[1].focus(); 0")
    if tab.run("document.activeElement.getBoundingClientRect().top") < 0:
        yield "the link that skips to the table is not seen"
    tab.press("Enter", "\r")
    tab.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")  # its target takes the focus
    for _ in range(MOST_AFTER_SKIPPING):
        if not tab.run(AT_STEPS):
            tab.press("Tab")
    if not tab.run(AT_STEPS):
        yield f"the table is more than {MOST_AFTER_SKIPPING} stops behind the link that skips to it"
        return
    tab.run("document.querySelectorAll('#table th button')[0].focus(); 0")
    tab.press("Tab")
    tab.press("Tab")  # from the first title, #, to the third, the time
    tab.press("Enter", "\r")
    column = "[...document.querySelectorAll('#table tbody tr')].map((r) => Number(r.cells[2].dataset.v))"
    times = tab.run(column)
    if tab.run("document.querySelectorAll('#table th')[2].getAttribute('aria-sort')") != "descending":
        yield "Enter on a title does not sort"
    if times != sorted(times, reverse=True):
        yield f"sorted rows are in no order: {times}"
    tab.run("const s = document.querySelector('#search'); s.value = 'no such thing'; s.dispatchEvent(new Event('input')); 0")
    if not str(tab.run("document.querySelector('output').textContent")).startswith("0 of "):
        yield "a search for what is not there shows rows"
    tab.run("s.value = ''; s.dispatchEvent(new Event('input')); 0")
    region = "document.querySelector('#table').parentElement"
    tab.run(f"{region}.style.maxHeight = '200px'; {region}.scrollTop = 1e6; 0")
    if (
        abs(tab.run(f"document.querySelector('#table th').getBoundingClientRect().top - {region}.getBoundingClientRect().top"))
        > 2
    ):
        yield "the table's head does not stay"
    for drawing in ("graph", "roofline"):
        links = f"[...document.querySelectorAll('svg.{drawing} a')].filter((a) => a.getClientRects().length)"
        if tab.run(f"{links}.filter((a) => a.tabIndex === 0).length") > 1:
            yield f"the {drawing} is several stops of the Tab key"
        if tab.run(f"{links}.length") < 2:
            continue
        tab.run(f"{links}[0].focus(); 0")
        tab.press("ArrowDown")
        if not tab.run(f"document.activeElement === {links}[1]"):
            yield f"arrow keys do not go through the {drawing}"
    tab.run("document.querySelector('svg.graph a')?.dispatchEvent(new MouseEvent('click', {bubbles: true})); 0")
    tab.run("new Promise((done) => setTimeout(done, 100))")
    if tab.run("document.querySelector('svg.graph') !== null && !document.querySelector(location.hash).open"):
        yield "a click on a box does not open its account"
    for said in tab.said:
        yield f"the console says: {said}"


def bert(folder: Path) -> Path:
    """The page of BERT-base, int8, as `perf` writes it."""
    sys.path.insert(0, str(ROOT / "examples"))
    from models import write_model

    model, page = write_model("bert", "int8", folder, batch=1, sequence=128), folder / "bert.html"
    command = [sys.executable, "-m", "tilewright", "perf", str(model), "--budget", "0", "-n", "3", "--html", str(page)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return page


def axe_core(named: Path | None, folder: Path) -> str | None:
    """The text of axe-core; None if it is nowhere."""
    here = [named] if named else [ROOT / "node_modules" / "axe-core" / "axe.min.js"]
    found = next((f for f in here if f.is_file()), None)
    if found is None and named is None and shutil.which("npm"):
        done = subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True)
        packed = folder / (done.stdout.split() or ["none"])[-1]
        if done.returncode == 0 and packed.is_file():
            with tarfile.open(packed) as archive:
                archive.extract("package/axe.min.js", folder, filter="data")
            found = folder / "package" / "axe.min.js"
    return None if found is None else found.read_text("utf-8")


def site(tab: Tab, folder: Path, axe: str) -> Iterator[tuple[str, str]]:
    """Say what is serious on the pages of the site of the docs: the page, and a sentence on it."""
    for page in sorted(p for p in folder.rglob("*.html") if p.name != "404.html"):  # which a server alone shows
        for width, height in WINDOWS:
            for scheme in SCHEMES:
                tab.open(page.as_uri(), width, height, scheme)
                tab.run("new Promise((done) => setTimeout(done, 300))")  # until its own scripts have run
                name = f"{page.relative_to(folder)}, {width} px, {scheme}"
                wide = tab.run("document.documentElement.scrollWidth")
                if wide > width:
                    yield name, f"it is {wide} pixels wide, and scrolls sideways"
                for said in tab.said:
                    yield name, f"the console says: {said}"
                tab.run(axe)
                for sentence in violations(tab):
                    if sentence.startswith(("axe-core, serious", "axe-core, critical")):
                        yield name, sentence


def main(say: Callable[[str], None]) -> int:
    """Check a page; how many sentences there were to say of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path, nargs="?", help="what `perf --html` wrote, or the site's folder; else BERT's page")
    parser.add_argument("--axe", type=Path, help="axe.min.js")
    parser.add_argument("--pictures", type=Path, default=ROOT / "build" / "page", help="a folder for them")
    asked = parser.parse_args()
    asked.pictures.mkdir(parents=True, exist_ok=True)
    command, axe = browser(), axe_core(asked.axe, asked.pictures)
    if command is None:
        say(f"There is no browser to open the page in: install one of {', '.join(NAMES)}.")
    if axe is None:
        say("There is no axe-core to check the page with: `npm install axe-core`, or --axe axe.min.js.")
    if command is None or axe is None:
        return 2
    wrong: dict[str, list[str]] = {}
    if asked.page is not None and asked.page.is_dir():
        with opened(command) as tab:
            for where, sentence in site(tab, asked.page.resolve(), axe):
                wrong.setdefault(sentence, []).append(where)
        for sentence, places in wrong.items():
            say(f"{'; '.join(places[:3])}{' and more' if len(places) > 3 else ''}: {sentence}")
        say(f"{asked.page}: {len(wrong) or 'nothing'} to mend")
        return len(wrong)
    page = (asked.page or bert(asked.pictures)).resolve()
    if page.stat().st_size > MOST_BYTES:
        wrong[f"it has {page.stat().st_size:,} bytes, more than {MOST_BYTES:,}"] = ["the file"]
    with opened(command) as tab:
        for width, height in WINDOWS:
            for scheme in SCHEMES:
                where = f"{width} px, {scheme}"
                tab.open(page.as_uri(), width, height, scheme)
                tab.picture(asked.pictures / f"{width}-{scheme}.png", whole=True)
                for look in (partial(looks, tab, width, page, axe), partial(works, tab)):
                    for sentence in look():
                        wrong.setdefault(sentence, []).append(where)
                tab.run("document.querySelectorAll('details').forEach((d) => (d.open = true)); 0")
                tab.picture(asked.pictures / f"{width}-{scheme}-open.png", whole=True)
                for v in tab.run(VIOLATIONS):
                    wrong.setdefault(f"axe-core, {v['impact']}, all open: {v['id']}: {v['help']}: {v['nodes']}", []).append(
                        where
                    )
    for sentence, places in wrong.items():
        say(f"{'; '.join(dict.fromkeys(places))}: {sentence}")
    say(f"{page.name}: {page.stat().st_size:,} bytes; {len(wrong) or 'nothing'} to mend; pictures in {asked.pictures}")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(min(main(print), 1))
