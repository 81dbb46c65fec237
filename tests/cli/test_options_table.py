"""The table of options in docs/cli.md says which verbs take each."""

import re
from pathlib import Path

import click
import pytest

from tilewright.cli.verbs import cli

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def commands():
    found = {}
    for name, command in cli.commands.items():
        found |= (
            {f"{name} {n}": c for n, c in command.commands.items()} if isinstance(command, click.Group) else {name: command}
        )
    return found


def test_what_is_no_number_is_quoted_with_the_numbers_that_are():
    """Each option that takes one is given a word, a NaN, and one that is too small."""
    seen = set()
    for command in commands().values():
        for option in command.params:
            if not isinstance(option.type, click.types.IntParamType | click.types.FloatParamType):
                continue
            seen.add(option.opts[0])
            whole = isinstance(option.type, click.types.IntParamType)
            for given in ("fast", "nan", "-1", "1.5" if whole else "1,5"):
                with pytest.raises(click.BadParameter) as said:
                    option.type.convert(given, option, None)
                due = f"'{given}' is no {'whole ' if whole else ''}number (of [a-zA-Z]+ )?from [01]"
                assert re.match(due, said.value.message), (option.opts, said.value.message)
                assert ("of seconds" in said.value.message) == (option.metavar == "SECONDS")
    assert {"--budget", "--threads", "--iterations", "--batch", "--seed", "--rtol", "--time-limit", "--memory-limit"} <= seen


def taking(said, verbs):
    """The verbs that a cell of the table names; `cache` stands for all of its own."""
    named = re.findall(r"`([^`]+)`", said)
    named = [v for part in named for v in ([part] if part in verbs or " " not in part else part.split())]
    meant = {v for v in verbs for n in named if v == n or v.startswith(f"{n} ")}
    if said.startswith("all with FILE"):
        return {v for v, c in verbs.items() if any(p.name == "file" for p in c.params)}
    return set(verbs) - meant if said.startswith("all") else meant


def test_the_table_of_options_says_which_verbs_take_them():
    verbs = commands()
    told = {}
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("| `-"):
            options, said, _ = re.split(r"(?<!\\) \| ", line.removeprefix("| "), maxsplit=2)
            for option in re.findall(r"--[a-z0-9][a-z0-9-]*", options):
                told.setdefault(option, set()).update(taking(said, verbs))
    own = {}
    for verb, command in verbs.items():
        for option in (o for p in command.params if isinstance(p, click.Option) and not p.hidden for o in p.opts):
            if option.startswith("--") and option != "--help":
                own.setdefault(option, set()).add(verb)
    assert {o: sorted(v) for o, v in told.items()} == {o: sorted(v) for o, v in own.items()}
