"""`--mesh … --simulate`: all ranks of a mesh in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from tilewright.cli.compile import SAVED, Compiling
from tilewright.cli.given import Given, progress
from tilewright.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from tilewright.ir.graph import Graph
    from tilewright.report.measure.compare import Tolerances
    from tilewright.report.measure.inputs import Feed
    from tilewright.report.schema import Verify


def simulated(
    given: Given, how: Compiling, ranks: str | None, simulate: bool, tolerances: Tolerances, more: Mapping[str, bool]
) -> Verify:
    """The report on a program of a file (`of_graph`).

    Args:
        given: the program and its data.
        how: no kernel is chosen: options that say how are refused.
        ranks, simulate: the mesh, and whether it is to be simulated.
        tolerances: of the user's.
        more: further options that do not go with it, and whether they are given.

    Raises:
        InputError: an option would do nothing, or there is no mesh.
    """
    idle = {
        **more,
        "--int8, --fp8 or --w4": how.scheme is not None,
        "--fp16 or --bf16": how.half is not None,
        "--excess-precision": how.excess_precision,
        "--dump": how.dump is not None,
        "--device": how.device != "cpu",
    }
    if given.file.suffix.lower() == SAVED:
        raise InputError("a saved program is one process's", where=str(given.file), hint="its source, with --mesh")
    from tilewright.report.measure.simulate import whole_inputs

    graph, whole = given.load(mesh=ranks), None
    if graph.local:
        with suppress(UnsupportedError):  # a program that was partitioned before has no other form
            whole = given.load()
    if whole is not None and (whole.local or [n.type for n in whole.inputs] != [n.type for n in whole_inputs(graph).inputs]):
        whole = None
    return of_graph(graph, str(given.file), ranks, simulate, idle, given.feeds, tolerances, whole)


def of_graph(
    graph: Graph,
    name: str,
    ranks: str | None,
    simulate: bool,
    idle: Mapping[str, bool],
    feeds: Callable[[Graph], list[Feed]],
    tolerances: Tolerances | None = None,
    whole: Graph | None = None,
) -> Verify:
    """The report on a program that all ranks of a mesh run in this process, by the oracle's own functions after the rules.

    Args:
        graph: over whole tensors, or of one rank.
        name: of the program, for the report.
        ranks: the mesh; None takes the program's own.
        simulate: it is to be simulated, as it must be.
        idle: options that would do nothing, and whether they are given.
        feeds: values for whole inputs.
        tolerances: of the user's.
        whole: the program over whole tensors, where `graph` is one rank's.

    Raises:
        InputError: an option would do nothing, or there is no mesh.
    """
    from tilewright.compiler import optimise
    from tilewright.ir.mesh import Mesh
    from tilewright.report.measure.simulate import verify_on_mesh, whole_inputs, whole_program

    if not simulate:
        raise InputError("this verb runs the ranks of a mesh in one process", where="--mesh", hint="add --simulate")
    for option, said in idle.items():
        if said:
            raise InputError(f"{option} is not for ranks that are simulated", where="--simulate", hint="leave it out")
    graph = whole_program(graph, None if ranks is None else Mesh.parse(ranks))
    given = feeds(whole_inputs(graph))
    with progress("simulating all ranks"):
        return verify_on_mesh(graph, name, given, optimise, tolerances, whole)
