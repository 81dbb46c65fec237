"""Options that verbs share, spelt as migraphx-driver spells them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import click

from tilewright.cli.errors import traceback_option
from tilewright.cli.ranks import as_rank, rank, start
from tilewright.cli.untrusted import GIB, SECONDS, is_supervised, limit_this_process, supervise
from tilewright.errors import InputError
from tilewright.files import require_writable

F = TypeVar("F", bound=Callable[..., Any])
Shapes = list[tuple[str, tuple[int, ...]]]
INPUT_DIM = "--input-dim"
W4_GROUP = 64


ARGUMENTS = "tilewright.arguments"  # in a context's meta: those of the verb, as they were given


class Command(click.Command):
    """A verb. `--input-dim @NAME D D …` takes every name and number that follows it; `--w4` takes none."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, gather_dims(bare_w4(args, ctx)))

    def invoke(self, ctx: click.Context) -> Any:
        threads = ctx.params.pop("threads", None)
        untrusted, seconds, gib = (ctx.params.pop(name, None) for name in ("untrusted", "time_limit", "memory_limit"))
        if untrusted:
            if not is_supervised():
                limits = SECONDS if seconds is None else seconds, GIB if gib is None else gib
                ctx.exit(supervise(str(ctx.info_name), ctx.meta[ARGUMENTS], *limits))
            limit_this_process()
        elif seconds is not None or gib is not None:
            raise click.UsageError("--time-limit and --memory-limit belong to --untrusted", ctx)
        if threads is not None:
            from tilewright.threads import adopt, valid_count

            valid_count(threads)
            adopt(threads)
        mesh = ctx.params.get("mesh")
        if mesh is None:
            return super().invoke(ctx)
        if rank() is None:
            ctx.exit(start(str(ctx.info_name), ctx.meta[ARGUMENTS], mesh))
        with as_rank():
            return super().invoke(ctx)


def bare_w4(args: Sequence[str], ctx: click.Context) -> list[str]:
    """The arguments with `--w4` alone given its default group: only `--w4=GROUP` has a value.

    Raises:
        UsageError: a number stands behind `--w4`, and no file is called so.
    """
    end = args.index("--") if "--" in args else len(args)
    for option, after in pairwise(args[:end]):
        if option == "--w4" and after.isdigit() and not Path(after).exists():
            raise click.UsageError(f"the group of --w4 stands behind an equals sign: --w4={after}", ctx)
    return [f"--w4={W4_GROUP}" if arg == "--w4" and i < end else arg for i, arg in enumerate(args)]


def gather_dims(args: Sequence[str]) -> list[str]:
    """The arguments with everything that belongs to one `--input-dim` joined into its value."""
    found: list[str] = []
    at = 0
    while at < len(args):
        arg = args[at]
        at += 1
        if arg == "--":
            return [*found, arg, *args[at:]]
        name, given, first = arg.partition("=")
        if name != INPUT_DIM:
            found.append(arg)
            continue
        values = [first] if given else []
        while at < len(args) and (args[at].startswith("@") or (values and re.fullmatch(r"-?\d+", args[at]))):
            values.append(args[at])
            at += 1
        found += [INPUT_DIM, " ".join(values)]
    return found


class _Dims(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - generic only in click 8.5 and later
    """`@NAME D D …`, once or several times over."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Shapes:
        shapes: Shapes = []
        for word in str(value).split():
            if word.startswith("@"):
                shapes.append((word[1:], ()))
            elif shapes and word.isdigit():
                name, shape = shapes[-1]
                shapes[-1] = (name, (*shape, int(word)))
            else:
                self.fail(f"{word!r} is no extent; write @NAME and then its extents", param, ctx)
        for name, shape in shapes:
            if not name or not shape:
                self.fail(f"@{name} needs its extents", param, ctx)
        if not shapes:
            self.fail("write @NAME and then its extents", param, ctx)
        return shapes


UNITS = {"SECONDS": " of seconds", "GIB": " of GiB"}


class _NotNegative(click.FloatRange):
    """A number of 0 or more. NaN is none: whatever is compared with it passes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        if not found >= 0:
            unit = UNITS.get(str(getattr(param, "metavar", "")), "")
            self.fail(f"{str(value)!r} is no number{unit} from 0 on", param, ctx)
        return found


class Whole(click.IntRange):
    """A whole number from `min` on, up to `max` if there is one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            least = int(self.min or 0)
            which = f"from {least} on" if self.max is None else f"from {least} to {int(self.max)}"
            self.fail(f"{str(value)!r} is no whole number {which}", param, ctx)


class _Written(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - generic only in click 8.5 and later
    """A file that can be written: seen before the work whose result it is to hold. Its name has one of some suffixes, of which
    the first is named in errors, or none."""

    name = "path"

    def __init__(self, *suffixes: str) -> None:
        self._suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if self._suffixes and path.suffix and path.suffix.lower() not in self._suffixes:
            option, (suffix, *_) = "" if param is None else f"{param.opts[0]} ", self._suffixes
            base = path.with_suffix("")  # of model.json.gz, say
            meant = base if base.suffix.lower() in self._suffixes else path.with_suffix(suffix)
            hint = f"{option}{shlex.quote(str(meant))}"
            raise InputError(f"what is written is {suffix}, not {path.suffix}", where=str(path), hint=hint)
        require_writable(path)
        return path


NOT_NEGATIVE = _NotNegative(min=0)
WRITTEN = _Written()
WRITTEN_ARRAYS, WRITTEN_PAGE, WRITTEN_JSON = _Written(".npz"), _Written(".html", ".htm"), _Written(".json")


def _merged(ctx: click.Context, param: click.Parameter, value: tuple[Shapes, ...]) -> dict[str, tuple[int, ...]]:
    merged: dict[str, tuple[int, ...]] = {}
    for name, shape in (pair for shapes in value for pair in shapes):
        if name in merged:
            raise click.BadParameter(f"@{name} is given twice", ctx, param)
        merged[name] = shape
    return merged


def all_of(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """The decorators as one, the first outermost."""

    def decorate(f: F) -> F:
        for d in reversed(decorators):
            f = d(f)
        return f

    return decorate


_PATH = click.Path(path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on standard output.")
device_option = click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1.")
budget_option = click.option(
    "--budget",
    type=NOT_NEGATIVE,
    metavar="SECONDS",
    help="Seconds from the command to its answer; 0 measures none.",
)
threads_option = click.option(
    "--threads",
    type=Whole(min=1),
    metavar="N",
    help="Threads on a CPU; as many as torch takes if not given, but no more than the machine has for this process.",
)
cache_option = click.option("--no-cache", "cache", flag_value=False, default=True, help="Measure anew, and keep nothing of it.")
iterations_option = click.option(
    "--iterations",
    "-n",
    type=Whole(min=1),
    metavar="N",
    help="Timed runs; as many as a few seconds allow if not given.",
)
everything_option = click.option(
    "--all", "-v", "everything", is_flag=True, help="Leave nothing out: every step and view, every candidate, problems whole."
)

simulated_options = all_of(
    click.option("--mesh", "ranks", metavar="AXIS=N,…", help="With --simulate: the mesh, such as tp=512 or dp=2,tp=4."),
    click.option("--simulate", is_flag=True, help="Run all ranks of a mesh in this process; compare what they give together."),
)


class _Fixed(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - generic only in click 8.5 and later
    """`NAME=VALUE`, the value true, false or a number."""

    name = "value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, bool | float]:
        name, _, text = str(value).rpartition("=")
        words = {"true": True, "false": False}
        try:
            number = words[text.lower()] if text.lower() in words else int(text) if text.lstrip("+-").isdigit() else float(text)
        except ValueError:
            number = None
        if not name or number is None:
            self.fail(f"{value!r} is no NAME=VALUE with true, false or a number", param, ctx)
        return name, number


class _Bounds(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - generic only in click 8.5 and later
    """`NAME=LOW:HIGH` or `NAME=LOW:HIGH:STEP`."""

    name = "bounds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, tuple[int, ...]]:
        name, _, text = str(value).rpartition("=")
        numbers = text.split(":")
        if not name or len(numbers) not in (2, 3) or not all(n.isdecimal() for n in numbers):
            self.fail(f"{value!r} is no NAME=LOW:HIGH or NAME=LOW:HIGH:STEP with whole numbers", param, ctx)
        return name, tuple(map(int, numbers))


file_options = all_of(
    click.argument("file", type=_PATH),
    click.option("--batch", type=Whole(min=1), metavar="N", help="Value of a symbolic first axis."),
    click.option(
        INPUT_DIM,
        "input_dims",
        type=_Dims(),
        metavar="@NAME D D…",
        multiple=True,
        callback=_merged,
        help="Shape of an input that the program leaves open; several may follow each other.",
    ),
    click.option(
        "--dim",
        "dims",
        type=_Bounds(),
        metavar="NAME=LOW:HIGH",
        multiple=True,
        callback=lambda ctx, param, pairs: dict(pairs),
        help="Leave an extent open that the program does, within bounds; repeatable.",
    ),
    click.option(
        "--untrusted",
        is_flag=True,
        help="Read and run it in a process of its own, with limits on time and memory.",
    ),
    click.option(
        "--time-limit",
        type=_NotNegative(min=0),
        metavar="SECONDS",
        help=f"With --untrusted: by the clock, for all of it; {SECONDS:.0f} if not given.",
    ),
    click.option(
        "--memory-limit",
        type=_NotNegative(min=0),
        metavar="GIB",
        help=f"With --untrusted: address space; {GIB:.0f} if not given.",
    ),
    click.option(
        "--allow-calls",
        is_flag=True,
        help="Let a .tw file call any operator of torch: only if you trust it.",
    ),
    click.option(
        "--fix",
        "fixed",
        type=_Fixed(),
        metavar="NAME=VALUE",
        multiple=True,
        callback=lambda ctx, param, pairs: dict(pairs),
        help="Value of an input of one element of an ONNX model, true, false or a number; repeatable.",
    ),
    click.option(
        "--follow-links",
        is_flag=True,
        help="Read an ONNX model's data through symbolic links that leave its folder.",
    ),
)
fill_options = all_of(
    click.option("--fill0", multiple=True, metavar="NAME", help="Fill an input with 0 instead of random data; repeatable."),
    click.option("--fill1", multiple=True, metavar="NAME", help="Fill an input with 1 instead of random data; repeatable."),
    click.option("--seed", type=Whole(0, (1 << 63) - 1), metavar="N", default=0, show_default=True, help="Of the random data."),
)
inputs_option = click.option(
    "--inputs",
    type=_PATH,
    metavar="F.npz",
    help="Take inputs, and sizes that are left open, from an .npz file, by name.",
)
common_options = all_of(json_option, traceback_option)
