"""Runners of saved GPU kernels: machine code, packed weights and launches from a file, without Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from msgspec.structs import replace

from tilewright.candidates.triton.hopper.gemm.plan import Matrix
from tilewright.candidates.triton.runtime.cubin import starter
from tilewright.candidates.triton.runtime.launch import Start, arrays_of, caller, parted
from tilewright.errors import InputError
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Runner
from tilewright.schedule.problem import AnyProblem, FusionProblem
from tilewright.schedule.recipe import Launched


def launched(
    recipe: Launched,
    problem: AnyProblem,
    weights: Mapping[int, torch.Tensor],
    target: Target,
    memory: Callable[[str], torch.Tensor],
    expression: Callable[[str], Node],
    places: Mapping[int, torch.Tensor] | None = None,
) -> Runner:
    """A runner from its recipe.

    Args:
        recipe: the launch as data.
        problem: what it does.
        weights: sources that do not change, by number.
        target: the device.
        memory: gives the arrays that the recipe names.
        expression: reads the text of one.
        places: memory for some results of a fusion, see `Kernel.place`.

    Raises:
        InputError: the recipe does not fit the problem.
        UnsupportedError: the driver does not take it.
    """
    arrays = arrays_of(problem) if isinstance(problem, FusionProblem) else [*problem.outputs]
    count = len(problem.types)
    own = {number: memory(name).to(target.device) for number, name in recipe.held}
    copied = {o.number: o for o in recipe.operands}
    known = {"source": {*range(count), *own, *copied}, "result": {*range(len(arrays))}}
    known["source"] -= {i for i, w in enumerate(problem.weights) if w and i not in weights}  # in packed weights
    fits = all(p.number in known.get(p.of, {p.number}) for p in recipe.pointers)
    written = {p.number for p in recipe.pointers if p.of == "result"}
    behind = len({*own, *copied}) == len(recipe.held) + len(recipe.operands) and all(n >= count for n in (*own, *copied))
    maps = recipe.code.maps
    shaped = all(len(m.box) == len(m.shape) == len(m.strides) for m in maps) and len(maps) <= len(recipe.pointers)
    if not fits or not behind or not shaped or written != known["result"] or [k.type for k in recipe.results] != arrays:
        raise InputError("a saved launch does not fit its step", hint="save the program again")
    operands: dict[int, Matrix] = {}
    for number, o in copied.items():
        root = expression(o.root)
        if not isinstance(root.type, TensorType) or root.tensor.elements > o.extents[0] * o.extents[1] * o.extents[2]:
            raise InputError("a saved operand does not fit its step", hint="save the program again")
        operands[number] = Matrix(root, o.extents, o.strides, 0, None, False, o.columns_last, o.permuted)
    binary = memory(recipe.code.binary)
    with torch.cuda.device(target.index):
        launch = starter(recipe.code, binary.numpy().tobytes(), len(recipe.pointers), target.index)
    start = Start(launch, lambda parts: replace(recipe.code, binary=parts.bytes(binary)))
    run = partial(caller, start, recipe.pointers, count, arrays, {**weights, **own}, target)
    if places is not None or not isinstance(problem, FusionProblem):
        return run(places=places, operands=operands)
    return parted(problem, run(operands=operands))
