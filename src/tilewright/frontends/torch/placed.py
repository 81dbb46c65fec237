"""Plans for modules on a mesh: how parameters lie, and how values lie where they enter and leave modules.

A plan names modules and parameters, "*" standing for one part of a name: `{"layers.*.wq": "colwise"}`. It says what it wants in
the words of Transformers' `tp_plan`, or with styles of `torch.distributed.tensor.parallel`; of parameters and inputs also as
placements (`frontends/_plan.py`). Parameters that are DTensors lie as they say themselves. The module is exported over whole
tensors: hooks put `tilewright::place` where the plan says something of a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends._plan import as_placement, from_torch
from tilewright.frontends.torch.registry import Site, operators
from tilewright.ir.graph import Node
from tilewright.ir.mesh import Mesh, Placement
from tilewright.ir.ops import Place


@dataclass(frozen=True)
class _Style:
    """Words of a style on a layer, along one mesh axis: axes of tensors that it splits, None for whole, ... for nothing said.

    Attributes:
        weight: of the weight, by the kind of layer: a linear layer's, an embedding's.
        bias: of the bias.
        given: of the first input.
        left: of the result.
    """

    weight: tuple[int | None, int | None] = (None, None)
    bias: int | None = None
    given: Any = ...
    left: Any = ...


_COLUMNS = _Style((0, 1), 0, None, -1)
_ROWS = _Style((1, 0), None, -1, None)
_STYLES = {
    "colwise": _COLUMNS,
    "colwise_rep": _Style((0, 1), 0, None, None),
    "colwise_gather_output": _Style((0, 1), 0, None, None),
    "local_colwise": _Style((0, 1), 0),
    "rowwise": _ROWS,
    "rowwise_rep": _ROWS,
    "rowwise_split_input": _ROWS,
    "local_rowwise": _Style((1, 0), None),
    "embedding_rowwise": _Style((None, 0), None, None, None),
    "embedding_colwise": _Style((None, 1), None, None, None),
    "sequence_parallel": _Style(given=1, left=1),
    "gather": _Style(left=None),
    "all_reduce": _Style(left=None),
    "replicate": _Style(),
    "replicated_with_grad_allreduce": _Style(),
    "mla_kv_a_proj": _Style(),
    "local": _Style(),
    "local_params": _Style(),
}
# Of transformers, for weights with several matrices in one, and for experts: what they are of stays whole.
_UNREAD = frozenset(
    {
        *("packed_colwise", "packed_rowwise", "local_packed_colwise", "local_packed_rowwise", "grouped_gemm"),
        *("moe_tp_experts", "moe_identity_expert", "ep_router", "ep_dispatch_experts"),
    }
)
_HOW = '"colwise", "rowwise", or a style of torch.distributed.tensor.parallel'


@dataclass
class Plan:
    """A plan, read for one module.

    Attributes:
        mesh: the ranks.
        parameters: placements of parameters and buffers, by name.
        inputs: what is said of names that are neither modules nor parameters.
        notes: sentences on what is not read.
    """

    mesh: Mesh
    parameters: dict[str, Placement] = field(default_factory=dict[str, Placement])
    inputs: dict[str, object] = field(default_factory=dict[str, object])
    notes: list[str] = field(default_factory=list[str])
    _modules: list[tuple[nn.Module, str, _Style | Any]] = field(default_factory=list[tuple[nn.Module, str, Any]])

    @property
    def axis(self) -> str:
        """The mesh axis of styles: the only one, or the one called tp.

        Raises:
            InputError: there is none.
        """
        names = [name for name, _ in self.mesh.axes]
        if len(names) == 1:
            return names[0]
        if "tp" not in names:
            raise InputError(f"the mesh {self.mesh} has no axis for styles", where="plan", hint='an axis called "tp"')
        return "tp"

    def along(self, split: int | None, rank: int) -> Placement:
        """The placement that splits one axis, or none, of a tensor."""
        where = None if split is None else split % rank
        return Placement(tuple((self.axis,) if i == where else () for i in range(rank)))

    def __bool__(self) -> bool:
        return bool(self.parameters or self._modules)

    @contextmanager
    def placing(self) -> Generator[None]:
        """A context in which modules place the values that the plan speaks of."""
        with ExitStack() as stack:
            for module, name, style in self._modules:
                for handle in _hooked(self, module, name, style):
                    stack.callback(handle.remove)
            yield


def read_plan(module: nn.Module, mesh: Mesh, given: Mapping[str, object] | str | None) -> Plan:
    """A plan, read for a module's parts.

    Args:
        module: the module.
        mesh: the ranks.
        given: the plan; "auto" takes the module's own `tp_plan`, as models of transformers have it.

    Raises:
        InputError: the module has no plan of its own, or what the plan says is none of the words that are read.
        UnsupportedError: a style says how values lie that a mesh of several axes splits otherwise.
    """
    plan = Plan(mesh)
    if given == "auto":
        own = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
        if not own:
            raise InputError("the module has no plan of its own", where="plan", hint='{"layers.*.wq": "colwise"}')
        given = cast("Mapping[str, object]", own)
    assert not isinstance(given, str)
    modules, held = dict(module.named_modules()), {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in held.items():
        sizes = getattr(getattr(tensor, "device_mesh", None), "mesh_dim_names", None)
        if hasattr(tensor, "placements"):
            axes = sizes or ([plan.axis] if getattr(tensor, "device_mesh").ndim == 1 else None)  # noqa: B009
            if axes is None:
                raise InputError("a device mesh whose axes have no names", where=name, hint='mesh_dim_names=("dp", "tp")')
            inner = Mesh(tuple((str(a), mesh.ranks_of([str(a)])) for a in axes))
            plan.parameters[name] = from_torch(getattr(tensor, "placements"), tensor.dim(), inner, name)  # noqa: B009
    for key, said in (given or {}).items():
        pattern = re.compile(re.escape(key).replace(r"\*", r"[^.]+"))
        parts = [(n, m) for n, m in modules.items() if pattern.fullmatch(n)]
        tensors = [(n, t) for n, t in held.items() if pattern.fullmatch(n)]
        for name, part in parts:
            _of_module(plan, name, part, said)
        for name, tensor in tensors:
            if isinstance(said, str) and (said in _STYLES or said in _UNREAD):
                _of_parameter(plan, name, modules[name.rpartition(".")[0]], tensor, said)
            else:
                plan.parameters[name] = as_placement(said, tensor.dim(), mesh, f"plan of {name!r}")
        if not parts and not tensors:
            plan.inputs[key] = said
    return plan


def _unread(plan: Plan, name: str, style: str) -> None:
    plan.notes.append(f"the style {style!r} of {name} is not read: what it is of stays whole on every rank")


def _style(said: object, name: str) -> _Style | Any:
    """A style in the words of `_Style`; torch's own for a module's inputs and outputs as it is."""
    if isinstance(said, str):
        if said not in _STYLES:
            raise InputError(f"no style: {said!r}", where=f"plan of {name!r}", hint=_HOW)
        return _STYLES[said]
    kind = type(said).__name__
    if kind in ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput"):
        return said
    if kind == "SequenceParallel":
        (shard,) = cast("Any", said).sequence_sharding
        return _Style(given=int(shard.dim), left=int(shard.dim))
    if kind in ("ColwiseParallel", "RowwiseParallel"):
        (left,) = cast("Any", said).output_layouts
        base = _COLUMNS if kind == "ColwiseParallel" else _ROWS
        return _Style(base.weight, base.bias, base.given, None if left.is_replicate() else int(left.dim))
    raise InputError(f"no style: an argument of type {kind}", where=f"plan of {name!r}", hint=_HOW)


def _of_module(plan: Plan, name: str, module: nn.Module, said: object) -> None:
    if isinstance(said, str) and said in _UNREAD:
        _unread(plan, name, said)
        return
    style = _style(said, name)
    plan._modules.append((module, name, style))  # pyright: ignore[reportPrivateUsage]
    if isinstance(style, _Style):
        for label, tensor in module.named_parameters(recurse=False):
            _lies(plan, f"{name}.{label}" if name else label, module, tensor, style)


def _of_parameter(plan: Plan, name: str, owner: nn.Module, tensor: torch.Tensor, said: str) -> None:
    if said in _UNREAD:
        _unread(plan, name, said)
    else:
        _lies(plan, name, owner, tensor, _STYLES[said])


def _lies(plan: Plan, name: str, owner: nn.Module, tensor: torch.Tensor, style: _Style) -> None:
    """Place a parameter of a module of a style."""
    table = isinstance(owner, nn.Embedding)
    axis = style.weight[table] if tensor.dim() > 1 else style.bias
    if table and axis == 0:  # a lookup reads all rows of what it looks up in
        plan.notes.append(f"{name} is to be split by its rows, in which is looked up: it stays whole on every rank")
        return
    if axis is not None:
        axis = axis if tensor.dim() <= 2 else axis - 2  # stacked matrices
    plan.parameters[name] = plan.along(axis, tensor.dim())


def _hooked(plan: Plan, module: nn.Module, name: str, style: _Style | Any) -> list[Any]:
    """Hooks of a module that place its inputs and results."""
    several = len(plan.mesh.axes) > 1
    if not isinstance(style, _Style):
        before = getattr(style, "prepare_module_input", style)
        after = getattr(style, "prepare_module_output", style)
        given = [_axis_of(p, name) for p in getattr(before, "desired_input_layouts", None) or ()]
        named = {k: _axis_of(p, name) for k, p in getattr(before, "desired_input_kwarg_layouts", {}).items()}
        left = [_axis_of(p, name) for p in getattr(after, "desired_output_layouts", None) or ()]
    else:
        given, named, left = [style.given], dict[str, Any](), [style.left]
        if isinstance(module, nn.Embedding) and style.given is not ...:
            given = [None]  # ids
        if several and style.given == style.left and isinstance(style.given, int):
            raise UnsupportedError(
                "a style for parts of a sequence on a mesh of several axes", where=name, hint="placements of inputs: plan={…}"
            )
    if several:  # what the other axes split is not the style's to say; weights are placed, and propagation does the rest
        return []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        placed = [plan_value(plan, a, given[i] if i < len(given) else ...) for i, a in enumerate(args)]
        return tuple(placed), {k: plan_value(plan, v, named.get(k, ...)) for k, v in kwargs.items()}

    def leave(_: nn.Module, args: Any, result: Any) -> Any:
        if isinstance(result, tuple):
            parts = cast("tuple[Any, ...]", result)
            return tuple(plan_value(plan, r, left[i] if i < len(left) else ...) for i, r in enumerate(parts))
        return plan_value(plan, result, left[0] if left else ...)

    pre: Callable[..., Any] = enter
    return [module.register_forward_pre_hook(pre, with_kwargs=True), module.register_forward_hook(leave)]


def _axis_of(placement: Any, name: str) -> Any:
    """The axis that torch's placement splits; None where it splits none, ... where none is given."""
    if placement is None:
        return ...
    if placement.is_replicate():
        return None
    if type(placement).__name__ != "Shard":
        raise UnsupportedError(f"the placement {placement} of a value is not read", where=name, hint="Shard or Replicate")
    return int(placement.dim)


def plan_value(plan: Plan, value: Any, axis: Any) -> Any:
    """A value that a hook places; itself where nothing is said of it."""
    if axis is ... or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    lies = plan.along(axis, value.dim())
    return torch.ops.tilewright.place(value, ";".join(",".join(names) for names in lies.splits))


_Placing = torch.library.Library("tilewright", "FRAGMENT")
_Placing.define("place(Tensor x, str splits) -> Tensor")
_Placing.impl("place", lambda x, splits: x.clone(), "CompositeExplicitAutograd")
_Placing.impl("place", lambda x, splits: torch.empty_like(x), "Meta")


@operators("tilewright", "place.default")
def place(site: Site, x: Node, splits: str) -> Node:
    """x, with how it is to lie: for each axis names of mesh axes."""
    return Node(Place(tuple(tuple(n for n in names.split(",") if n) for names in splits.split(";"))), x)


@contextmanager
def whole(module: nn.Module) -> Generator[None]:
    """A context in which parameters that are DTensors are the whole tensors, which all ranks of their meshes gather."""
    changed: list[tuple[Any, str, Any]] = []
    try:
        owners: list[Any] = [*module.modules()]
        for owner in owners:
            held = cast("dict[str, Any]", owner._parameters)
            for name, tensor in list(held.items()):
                if hasattr(tensor, "full_tensor"):
                    changed.append((owner, name, tensor))
                    held[name] = nn.Parameter(tensor.full_tensor().detach(), requires_grad=tensor.requires_grad)
        yield
    finally:
        for owner, name, tensor in changed:
            owner._parameters[name] = tensor


@contextmanager
def without_styles(module: nn.Module) -> Generator[list[str]]:
    """A context in which hooks are off that torch's `parallelize_module` put on modules, which take and give DTensors; yields
    the names of the modules that have them."""
    names: list[str] = []
    kept: list[tuple[Any, Any]] = []
    try:
        parts: list[tuple[str, Any]] = [*module.named_modules()]
        for name, part in parts:
            for hooks in (part._forward_pre_hooks, part._forward_hooks):
                own = {
                    k: h for k, h in hooks.items() if str(getattr(h, "__module__", "")).startswith("torch.distributed.tensor")
                }
                if own:
                    kept.append((hooks, dict(hooks)))
                    names.append(name)
                    for k in own:
                        del hooks[k]
        yield list(dict.fromkeys(names))
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


def said_twice(names: Sequence[str]) -> str:
    """The sentence on styles that a module was given before."""
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    return f"hooks of parallelize_module on {shown} are left out: how values lie follows from the parameters, and from plan="
