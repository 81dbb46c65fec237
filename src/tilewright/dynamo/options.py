"""`mode=` and `options=` of `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from tilewright.errors import InputError, check_type

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
PATIENT_S = 60.0


@dataclass(frozen=True)
class Options:
    """Options of a compile, given by `torch.compile(..., options={name: value})`.

    Attributes:
        budget_s: seconds for measuring the kernels of a program, once it is called often; 0 takes what was measured before, or
            what the cost model names first.
        background: search while the program runs, with first kernels; else its first call waits for the search.
        cuda_graphs: replay a program's steps on a GPU as CUDA graphs.
        pack: parameters may be packed for kernels, and are looked at on each call; else kernels read them as they are.
        met: calls with the same extents after which a program is compiled for them; until then torch runs the graph. The first
            extents are compiled for at once.
        most: programs that are kept for a graph: of other extents, or of other parameters.
        cache: read decisions of the user's cache, and keep them there.
    """

    budget_s: float = 20.0
    background: bool = True
    cuda_graphs: bool = True
    pack: bool = True
    met: int = 2
    most: int = 64
    cache: bool = True

    @staticmethod
    def of(mode: str | None, options: Mapping[str, object] | None) -> Options:
        """The options of a call of `torch.compile`.

        Raises:
            InputError: there is no such mode or option, or a value is of another type.
        """
        if mode not in (None, *MODES):
            raise InputError(f"no mode {mode!r}", where="torch.compile(mode=)", hint=", ".join(MODES))
        made = Options()
        if mode is not None and mode.startswith("max-autotune"):
            made = replace(made, budget_s=PATIENT_S, background=False, cuda_graphs=mode == "max-autotune")
        types = {f.name: (float, int) if f.name == "budget_s" else type(getattr(made, f.name)) for f in fields(Options)}
        for name, value in (options or {}).items():
            where = "torch.compile(options=)"
            if name not in types:
                raise InputError(f"no option {name!r}", where=where, hint=", ".join(types))
            check_type(value, types[name], f"{where}, {name}", f"such as {getattr(made, name)!r}")
            if not isinstance(value, bool) and not value >= (0 if name == "budget_s" else 1):  # pyright: ignore[reportOperatorIssue]
                raise InputError(f"{name} of {value}", where=where, hint="1 or more; a budget may be 0")
        return replace(made, **(options or {}))  # pyright: ignore[reportArgumentType]
