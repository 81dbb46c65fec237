"""The backend of `torch.compile`: AOTAutograd makes graphs of ATen, forward and backward, and `Compiled` runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tilewright.dynamo.compiled import Compiled
from tilewright.dynamo.options import Options
from tilewright.frontends.torch.aot import decompositions, whole

NAME = "tilewright"


def tilewright(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured: the backend that `torch.compile(model, backend="tilewright")` names.

    Args:
        module: the graph, of calls of torch.
        example_inputs: tensors without data and numbers, as the graph takes them.
        mode: of `torch.compile`: "default" and "reduce-overhead" are one; "max-autotune" waits a minute for measured kernels.
        options: of `torch.compile`: the fields of `Options` by name.

    Returns:
        Callable: the graph's function, with a derivative where one is wanted.

    Raises:
        InputError: there is no such mode or option.
    """
    from torch._dynamo.backends.common import aot_autograd

    chosen, broken = Options.of(mode, options), _broken(module)
    derived = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)

    def forward(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return Compiled(graph, (), chosen, "forward", broken).boxed()

    def backward(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return Compiled(graph, (), chosen, "backward", broken).boxed()

    def inference(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return Compiled(graph, _static() if chosen.pack else (), chosen, "inference", broken).boxed()

    compile = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        decompositions=_table(derived=derived),
        keep_inference_input_mutations=True,
    )
    with contextlib.nullcontext() if derived else _held_whole():
        return compile(module, example_inputs)


def _broken(module: fx.GraphModule) -> str:
    """The place where Dynamo broke a model's graph off behind this one, and why; "" where it did not."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    at = f"{Path(reason.user_stack[-1].filename).name}:{reason.user_stack[-1].lineno}" if reason.user_stack else "its end"
    line = (reason.user_stack[-1].line or "").strip() if reason.user_stack else ""
    said = next((x.strip() for x in reason.reason.splitlines() if x.strip()), "no reason given")
    return f"{at}{f' ({line})' if line else ''}: {said}"


def register() -> None:
    """Make the name known to torch in a process whose package is not installed; nothing if it is known."""
    from torch._dynamo import list_backends, register_backend

    if NAME not in list_backends(exclude_tags=()):
        register_backend(tilewright, name=NAME)


def _static() -> Collection[int]:
    """Places of the parameters and buffers among the inputs of the graph that is compiled now."""
    context = torch._guards.TracingContext.try_get()  # pyright: ignore
    meta = None if context is None else context.fw_metadata
    return () if meta is None else frozenset(meta.static_input_indices)


@cache
def _table(*, derived: bool) -> dict[Any, Callable[..., Any]]:
    return decompositions(derived=derived)


def _held_whole() -> contextlib.AbstractContextManager[None]:
    """A block in which torch traces composite operators that kernels do as a whole without taking them apart."""
    from torch.export.exported_program import _override_composite_implicit_decomp  # pyright: ignore

    return _override_composite_implicit_decomp(whole())
