"""The account of every product, as prose."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tilewright.report.explain.choices import off_by
from tilewright.report.schema import Choice, Counts, Explain, Finding, Product, RejectedChoice, StepGroup, Traffic
from tilewright.report.text.advice_text import print_advice
from tilewright.report.text.groups_table import counts_words, print_groups, print_reasons
from tilewright.report.text.quantized_table import print_quantized
from tilewright.report.text.tables import findings, hanging, heading, line, noise_line, section
from tilewright.report.words import above_words, count, listing, travel_words, us
from tilewright.schedule.candidate import Candidate, discover, labelled
from tilewright.schedule.search import WAITS

NOTHING_FELL_BACK = "Nothing fell back: no step was left to the slow reference or to the source's own library."
NOTHING_UNFUSED = "Nothing is unfused: no step only converts or moves what another step made."
RIVALS = 2  # that an account names
ACCOUNTS = 12  # of products, those that take most time
COULD_NOT = ("refused", "unbuilt", "unchecked", "failed", "wrong", "lost")
# A tensor in words: its type, which a title has, before where it comes from.
_TYPED = re.compile(r"\w+\[[\d,]*\] \((?:constant |input )?([^()]*(?:\([^()]*\)[^()]*)*)\)")
_DEQUANTISED = re.compile(r"dequantize\(<[a-z_]+ ([^<>\s]+)[^<>]*>[^()]*\)")
_SLICED = re.compile(r"slice\(<[a-z_]+ (?:[^<>\s]*\.)?([^<>\s.]+\.[^<>\s.]+)[^<>]*>, \[(\d+)\], \[(\d+)\], \[1\]\)")
_COLUMNS = re.compile(r"slice\(acc, \[([\d, ]+)\], \[([\d, ]+)\], \[[1, ]+\]\)")
_PARTS = re.compile(r"\.(?![^{]*\})")  # between the parts of a path of modules, of which one may be several in braces
_ONE_SCALE = re.compile(r" with one scale(?=$|,| )")


def print_explain(out: Console, report: Explain, *, everything: bool) -> None:
    """Print a line for each distinct step, the account of each product with its nearest rivals, and what to change.

    `everything` gives each account whole: all candidates, all rules, how results are written.
    """
    noise_line(out, report.noise, report.limits_noise)
    line(out, f"{report.program} on {report.target}", style="bold")
    for said in counts_words(report.counts) if report.counts is not None else ():
        line(out, said)
    for note in report.notes:
        line(out, f"Note: {note}.")
    print_quantized(out, report.quantized)
    out.print()
    print_groups(out, report.groups, report.layers, spread=False, everything=everything, limits_noise=report.limits_noise)
    out.print()
    accounts = [(i + 1, g, report.products[g.product]) for i, g in enumerate(report.groups) if g.product is not None]
    dearest = sorted(accounts, key=lambda a: -(a[1].total_us or 0.0))[:ACCOUNTS]
    for number, group, product in accounts if everything else [a for a in accounts if a in dearest]:
        if everything:
            _product(out, number, group, product, report.limits_noise)
        else:
            _short_product(out, number, group, product)
    hidden = 0 if everything else len(accounts) - len(dearest)
    more = f"{count(hidden, 'more distinct product')}, and all" if hidden else "All"
    if accounts and not everything:
        line(out, f"{more} candidates, rules and settings: -v. The notation of problems: docs/cli.md.", style="dim")
    print_traffic(out, report.traffic)
    _outside(out, report)
    if everything:
        _who(out, report)
    known = [g.total_us for g in report.groups if g.total_us is not None]
    print_advice(out, report.advice, sum(known), report.noise)


def fallback_title(found: Sequence[Finding], counts: Counts | None) -> str:
    """The heading above what fell back; another, where there are notes and refused kernels alone."""
    return "Worth knowing" if found and counts is not None and not counts.fallback else "Fell back"


def _outside(out: Console, report: Explain) -> None:
    """Print what no generated kernel does, what fell back and what is unfused; the counts above say where nothing did."""
    print_reasons(out, report.groups, report.fallback)
    if report.fallback:
        findings(out, fallback_title(report.fallback, report.counts), report.fallback, NOTHING_FELL_BACK)
    if report.unfused:
        findings(out, "Unfused: work that belongs inside another step", report.unfused, NOTHING_UNFUSED)
    if report.unfused or report.fallback:
        line(
            out,
            "The times above are the least that this machine's rates allow for such a step; `tilewright perf` measures it.",
            style="dim",
        )


def _who(out: Console, report: Explain) -> None:
    """Print who the candidates are that the accounts name."""
    known = who_is_who(report)
    if known:
        heading(out, "Who is who")
        for name, what in known:
            out.print(hanging(f"   {name:<15}", what))
        settings = "Settings (mr, nr, kc, …) and the notation of the titles: docs/glossary.md, docs/cli.md."
        line(out, settings, indent=3, style="dim")


def print_traffic(out: Console, traffic: Sequence[Traffic]) -> None:
    """Print what travels between ranks."""
    if not traffic:
        return
    heading(out, "Between ranks")
    for t in traffic:
        line(out, travel_words(t), indent=3)


def _short_product(out: Console, number: int, group: StepGroup, p: Product) -> None:
    """A few lines: what is folded into a product, what is not and why, who does it, who comes nearest, who cannot."""
    times = f" x {len(p.names)}" if len(p.names) > 1 else ""
    out.print(Text(f"{number:>2}. {group.name}{times}", style="bold"))
    for title, lines in short_sections(p, group.untimed):
        section(out, f"  {title}", lines)


def short_sections(p: Product, untimed: str = "") -> list[tuple[str, list[str]]]:
    """The account of a product in few lines: titles, each with its lines. `untimed` says why it was not timed."""
    found = [("Reads", [_reads(p)]), ("Folded", _folded(p))]
    found.append(("Not folded", [*map(_beside, p.beside), *p.left][: RIVALS + 1]))
    found.append(("Done by", [_brief_headline(p, untimed)]))
    tied, slower, more = nearest(p)
    rest = f"; {more} more" if more else ""
    found.append(("As fast", [f"{', '.join(tied)}{'' if slower else rest}"] if tied else []))
    found.append(("Slower", [f"{', '.join(slower)}{rest}"] if slower else []))
    found.append(("Could not", refusals([r for r in p.rejected if r.kind in COULD_NOT], p.chosen)))
    return [(title, lines) for title, lines in found if lines]


def nearest(p: Product) -> tuple[list[str], list[str], int]:
    """The other candidates that came nearest to the chosen one, each by its best point, with its time: those that were as fast,
    those that were slower; and how many points more were timed. Where no other was timed, other points of the chosen one stand
    for them."""
    timed = sorted((r for r in p.rejected if r.time_us is not None), key=lambda r: r.time_us or 0.0)
    best: dict[str, RejectedChoice] = {}
    for r in timed:
        if r.candidate != p.chosen.candidate:
            best.setdefault(r.candidate, r)
    shown = list(best.values())[:RIVALS] or timed[:RIVALS]
    tied, slower = list[str](), list[str]()
    for r in shown:
        name = r.candidate if r.candidate != p.chosen.candidate else _beside_chosen(r, p.chosen)
        ratio = f" ({(r.time_us or 0.0) / p.chosen.time_us:.2f} times)" if p.chosen.time_us else ""
        words = tied if r.kind == "tie" else slower
        waits = ", but its threads wait for each other" if r.why == WAITS else ""
        words.append(f"{name} {us(r.time_us or 0.0)} µs{ratio}{waits}")
    return tied, slower, len(timed) - len(shown)


def _brief_headline(p: Product, untimed: str) -> str:
    """Say who does a product, how fast or why that was not timed, and the part of the limit that is reached."""
    if p.chosen.time_us is None:
        checked = f", checked {p.chosen.checked}" if p.chosen.checked else ""
        why = f", {untimed}" if untimed and not checked else ""
        said = [f"{p.chosen.candidate}: nothing was timed{why}{_expected(p.chosen.predicted_us, None)}{checked}"]
    else:
        when = ", read back" if p.chosen.recalled else ""
        said = [f"{p.chosen.candidate}: {us(p.chosen.time_us)} µs{_expected(p.chosen.predicted_us, None)}{when}"]
    if p.limit_us:
        reached = f", {p.limit_us / p.chosen.time_us:.0%} of it reached" if p.chosen.time_us else ""
        said.append(f"the limit is {us(p.limit_us)} µs ({'memory' if p.memory_bound else 'arithmetic'}){reached}")
    return "; ".join(said)


def _reads(p: Product) -> str:
    """The operands in a line, those of one type that are read alike together."""
    alike: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for operand in p.operands:
        name, _, text = operand.partition(": ")
        kind, _, rest = _brief(text).partition(" (")
        names, _, read = rest.partition(")")
        made = ", ".join(map(last_names, names.split(", ")))
        alike.setdefault((kind, read), []).append((name, made))
    found: list[str] = []
    for (kind, read), group in alike.items():
        made = ", ".join(dict.fromkeys(m for _, m in group if m))
        found.append(f"{', '.join(n for n, _ in group)}: {kind}{f' ({made})' if made else ''}{read}")
    return "; ".join(found)


def _brief(text: str) -> str:
    """Words on a value without the kind of what makes it, where they name that, and without what is said of most."""
    text = re.sub(r"\((?:constant|input|[a-z_]+) ([^()\s]+)(?: \w+)?\)", r"(\1)", text)
    return _ONE_SCALE.sub("", _COLUMNS.sub(_columns, text)).replace("(constant ", "(").replace(", constant ", ", ")


def _columns(cut: re.Match[str]) -> str:
    """A range of the sums' columns, of a slice of all their axes."""
    return f"columns {cut[1].split(', ')[-1]}:{cut[2].split(', ')[-1]}"


def _folded(p: Product) -> list[str]:
    """The work within an attention, and behind the product; results that are alike together."""
    within: dict[str, list[str]] = {}
    for name, steps in p.inside.items():
        within.setdefault(_steps(steps), []).append(name)
    inside = [f"{' and '.join(names)}: {said}" for said, names in within.items()]
    alike: dict[str, tuple[str, list[int]]] = {}
    for i, store in enumerate(p.stores, start=1):
        laid = f" -> {store.writes.partition(', ')[0]}" if ", written where" in store.writes else ""
        said = _steps(store.steps) + laid
        alike.setdefault(re.sub(r"[\w*{}-]+\.(?=\w+)", "", said), (said, []))[1].append(i)
    several = len(p.stores) > 1
    lines = [(f"result {listed(at)}: " if several else "") + (said.strip() or "nothing") for said, at in alike.values()]
    if inside and not several:
        lines = [f"result: {line}" for line in lines]
    return inside if lines in (["nothing"], ["result: nothing"]) else [*inside, *lines]


def _steps(steps: Sequence[str]) -> str:
    """Steps in a line, without the types of what they read, and without those that are taken for granted."""
    brief = [
        _brief(
            _TYPED.sub(
                lambda m: last_names(m[1]),
                _DEQUANTISED.sub(lambda m: f"{last_names(m[1])} dequantised", _SLICED.sub(r"\1[\2:\3]", s)),
            )
        )
        for s in steps
    ]
    return ", ".join(s for s in brief if not s.startswith("take columns ") and s != "convert to f32")


def listed(at: Sequence[int]) -> str:
    """`1`, `1 and 2`, `1 to 3`."""
    if len(at) > 2 and at[-1] - at[0] == len(at) - 1:
        return f"{at[0]} to {at[-1]}"
    return " and ".join(map(str, at))


def last_names(path: str) -> str:
    """The last two names of a path of modules, the last alone behind a layer's number; the name of an operation without its
    kind, before and behind it."""
    words = path.split()
    parts = _PARTS.split(words[1] if len(words) > 1 else path)[-2:]
    return parts[-1] if re.fullmatch(r"[\d*-]+", parts[0]) else ".".join(parts)


def _product(out: Console, number: int, group: StepGroup, p: Product, limits_noise: str) -> None:
    times = f"{len(p.names)} of them, alike but for constants and names: " if len(p.names) > 1 else ""
    heading(out, f"{number}. {group.name}: {p.problem}")
    line(out, f"{times}{places(p.names)}", indent=3, style="dim")
    for title, lines in product_sections(p, limits_noise):
        section(out, title, lines)


def places(names: Sequence[str]) -> str:
    """Some of the names by which the source calls products: fewer where one was joined from several and has all of theirs."""
    found = list(dict.fromkeys(names))
    return listing(found, 1 if ", " in found[0] else 4)


def product_sections(p: Product, limits_noise: str, *, while_choosing: bool = False) -> list[tuple[str, list[str]]]:
    """The account of a product: titles, each with its lines. `limits_noise` says why limits are not reliable, "" if they are;
    with `while_choosing` it is said that times are of the choice, as beside those of a run."""
    found = [("Reads", p.operands), ("Accumulates", [p.accumulates])]
    found += [(name.capitalize(), steps) for name, steps in p.inside.items()]
    which = [f", result {i} of {len(p.stores)}" if len(p.stores) > 1 else "" for i in range(1, len(p.stores) + 1)]
    for said, store in zip(which, p.stores, strict=True):
        found.append((f"Then{said}", store.steps or ["nothing: the accumulator is the result"]))
        found.append(("Writes", [store.writes]))
    found.append(("Folded by", ["; ".join(p.rules) or "no rule: it stands as it was read"]))
    found.append(("Not folded", [_beside(f) for f in p.beside]))
    found.append(("Rules that left it", p.left))
    timed = while_choosing and p.chosen.time_us is not None
    when = ["times while kernels were chosen:"] if timed else []
    found.append(("Done by", [*when, headline(p, limits_noise), *_settings(p.chosen)]))
    found += lost_sections(p.rejected, p.chosen)
    return [(title, lines) for title, lines in found if lines]


def lost_sections(rejected: Sequence[RejectedChoice], chosen: Choice | None = None) -> list[tuple[str, list[str]]]:
    """The candidates that lost, in lists with a title each: as fast, slower, those that could not do the problem,
    and those that were not tried. Candidates for problems of other types are in none."""
    tied = [r for r in rejected if r.kind == "tie"]
    slower = [r for r in rejected if r.kind == "slower" or (r.time_us is not None and r not in tied)]
    unable = [r for r in rejected if r.time_us is None and r.kind in COULD_NOT]
    rest = [r for r in rejected if r.time_us is None and r.kind in ("untried", "starved")]
    titled = (("Was as fast", tied), ("Was slower", slower), ("Could not", unable), ("Was not tried", rest))
    return [(title, refusals(found, chosen)) for title, found in titled if found]


def headline(p: Product, limits_noise: str) -> str:
    """The headline of a product: who does it, how fast, and how that stands beside the prediction and the machine's limit;
    `limits_noise` says why this is not reliable, "" if it is."""
    tied = any(r.time_us and p.chosen.time_us and r.time_us < p.chosen.time_us for r in p.rejected)
    said = [f"{p.chosen.candidate}: {how(p.chosen, p.measured, tied=tied)}"]
    if p.limit_us:
        bound = "memory" if p.memory_bound else "arithmetic"
        reached = p.limit_us / p.chosen.time_us if p.chosen.time_us else 0.0
        part = f", {reached:.0%} of it reached" if reached else ""
        if reached > 1:
            part += f": {above_words([p.memory_bound], limits_noise)}"
        said.append(f"the limit of this machine's {bound} is {us(p.limit_us)} µs{part}")
    return "; ".join(said)


def _settings(chosen: Choice) -> list[str]:
    return [] if chosen.schedule == "default" else [f"settings: {chosen.schedule}"]


def _beside(f: Finding) -> str:
    cost = "" if f.cost_us is None else f" (at least {us(f.cost_us)} µs)"
    return f"{f.where}{cost}: {f.why}"


def how(chosen: Choice, measured: bool, *, tied: bool = False) -> str:
    """The words on why a candidate was chosen; `tied` if another was faster by less than what counts."""
    expected = _expected(chosen.predicted_us, None if chosen.provisional else chosen.time_us)
    if chosen.checked:
        return f"code that serves several shapes, checked {chosen.checked}; nothing was timed here{expected}"
    if not measured or chosen.time_us is None:
        return f"the first to be tried that agrees with the reference; nothing was timed{expected}"
    when = ", measured earlier and read back" if chosen.recalled else ""
    best = "as fast as any that agrees" if tied else "the fastest that agrees"
    if chosen.provisional:
        return f"{us(chosen.time_us)} µs on a busy machine{expected}, where none was seen to be faster{when}"
    return f"{us(chosen.time_us)} µs{expected}, {best} with the reference{when}"


def refusals(rejected: Sequence[RejectedChoice], chosen: Choice | None = None) -> list[str]:
    """The candidates that lost, timed ones first, each with why; those that cannot do the problem at all last.

    Of another point of the chosen candidate only the settings are named that differ.
    """
    best_us = None if chosen is None else chosen.time_us
    noisy = chosen is not None and bool(chosen.provisional)
    ordered = sorted(rejected, key=lambda r: (r.time_us is None, r.time_us or 0.0))
    alike: dict[str, list[str]] = {}
    for r in ordered:
        alike.setdefault(_lost(r, best_us, noisy=noisy), []).append(_beside_chosen(r, chosen))
    return [f"{', '.join(dict.fromkeys(names))}: {why.removeprefix('not tried: ')}" for why, names in alike.items()]


def _beside_chosen(r: RejectedChoice, chosen: Choice | None) -> str:
    """A candidate and its settings, as far as they are not those chosen."""
    if chosen is not None and r.differs:
        return f"{r.candidate} with {r.differs}"
    return labelled(r.candidate, r.schedule)


def _lost(r: RejectedChoice, best_us: float | None, *, noisy: bool) -> str:
    """The words why one lost; in noise the cost model is not held to its time."""
    expected = _expected(r.predicted_us, None if noisy else r.time_us)
    if r.time_us is None or not best_us:
        return f"{r.why}{expected}"
    if r.time_us <= best_us:
        if r.why == WAITS:
            return f"{us(r.time_us)} µs{expected}, {WAITS}"
        tie = "not told apart on a busy machine" if noisy else "a tie"
        return f"{us(r.time_us)} µs{expected}, {tie}: the earlier one is kept"
    return f"{us(r.time_us)} µs{expected}, {r.time_us / best_us:.2f} times as long"


def _expected(predicted_us: float | None, took_us: float | None) -> str:
    """The cost model's expectation, and the factor by which it was wrong if that is more than twofold."""
    if not predicted_us:
        return ""
    off = off_by(predicted_us, took_us)
    wrong = "" if off is None else f": wrong by a factor of {off:.1f}"
    return f" ({us(predicted_us)} predicted{wrong})"


def who_is_who(report: Explain) -> list[tuple[str, str]]:
    """The candidates that the account names, each with what it is in its own words."""
    named: set[str] = set()
    for p in report.products:
        others = (labelled(r.candidate, r.schedule) for r in p.rejected if r.kind != "inapplicable")
        for said in (p.chosen.candidate, p.chosen.schedule, *others):
            named.update(re.findall(r"\w+", said))
    return [(c.name, _described(c)) for c in discover() if c.name in named]


def _described(candidate: Candidate) -> str:
    """The first paragraph that its module, or of a plug-in its plan, says of it; and a plug-in's package."""
    about = sys.modules.get(candidate.plan.__module__)
    doc = ((about and about.__doc__) or candidate.plan.__doc__ or "").strip()
    said = [" ".join(doc.partition("\n\n")[0].split()).rstrip(".")] if doc else []
    return ", ".join([*said, *([f"of the package {candidate.package}"] if candidate.package else [])])
