"""Reading a functional ATen program into a graph: one pass over its operators."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from tilewright.dtype import OPAQUE
from tilewright.errors import TypeMismatchError, UnsupportedError
from tilewright.frontends.torch.call import call, schema_of, tensors_in
from tilewright.frontends.torch.export import changes
from tilewright.frontends.torch.registry import TRANSLATIONS, DependsOnDataError, Site
from tilewright.frontends.torch.symbols import extent_of
from tilewright.frontends.torch.taken import COMPARED
from tilewright.frontends.torch.types import converted, dtype_of, type_of
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, input_, items, transpose
from tilewright.ir.dims import asking
from tilewright.ir.graph import Graph, Node
from tilewright.ir.literal import Literal
from tilewright.ir.mesh import Placement
from tilewright.ir.ops import Const, Convert, Input, Place
from tilewright.ir.state import in_place, share
from tilewright.ir.types import TensorType


class Reader:
    """Builds the graph of one program; used once."""

    def __init__(
        self,
        program: ExportedProgram,
        name: str,
        *,
        in_place: bool = True,
        random: bool = False,
        placed: Mapping[str, Placement] | None = None,
    ) -> None:
        """`in_place`: positions of a buffer that are data are replaced where it lies; else by torch, in a copy. `random`: the
        program may draw random numbers. `placed`: how weights are to lie on a mesh, by name."""
        self._placed = placed or {}
        self._program = program
        self._draws = itertools.count() if random else None
        self._in_place = in_place
        self._name = name
        self._env: dict[fx.Node, object] = {}
        self._inputs: list[Node] = []
        self._origins: dict[Node, str] = {}
        self._notes: list[str] = []
        self._literals: dict[object, Literal] = {}
        self._kept: dict[str, tuple[Node, torch.Tensor]] = {}  # buffers that change, by name
        self._checked = _checked(program, name)

    def read(self) -> Graph:
        """The graph, with its notes.

        Raises:
            UnsupportedError: control flow, shapes that depend on data, random numbers, types no graph can hold; a buffer that
                changes otherwise than by replacing some positions.
        """
        specs = {getattr(s.arg, "name", ""): s for s in self._program.graph_signature.input_specs}
        wanted = _live(self._program)
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                self._env[node] = self._placeholder(node, specs[node.name])
            elif node.op == "call_function" and node in wanted:
                self._env[node] = self._operator(node)
        self._check_apart()
        outputs, names = self._outputs()
        self._note_conversions(outputs)
        kept = [held for _, held in self._kept.values()]
        inputs = (*self._inputs, *(made for made, _ in self._kept.values()))
        made = Graph(self._name, inputs, tuple(outputs), tuple(names), self._origins, tuple(self._notes), tuple(kept))
        written, failed = in_place(made)
        if not failed:
            return written
        if self._in_place:  # what it held before is read elsewhere, too
            return Reader(self._program, self._name, in_place=False, random=self._draws is not None, placed=self._placed).read()
        raise changes("buffer", failed[0], self._name)

    def _placeholder(self, node: fx.Node, spec: InputSpec) -> object:
        if spec.kind is InputKind.TOKEN:
            return None
        if spec.kind is not InputKind.USER_INPUT:
            return self._weight(node, spec)
        if isinstance(spec.arg, ConstantArgument):
            if spec.arg.value is not None:
                self._notes.append(f"input {node.name!r} is fixed to {spec.arg.value!r}, the value it was traced with")
            return spec.arg.value
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            hint = "a tensor, or an attribute of the module"
            raise UnsupportedError(f"an input is a {type(value).__name__}, not a tensor", where=node.name, hint=hint)
        found = type_of(value, node.name)
        if found.dtype is OPAQUE:
            hint = "make it complex inside the module (torch.view_as_complex)" if value.is_complex() else "another type"
            raise UnsupportedError(f"an input is of type {value.dtype}, which no graph holds", where=node.name, hint=hint)
        made = input_(node.name, found.dtype, found.shape)
        self._inputs.append(made)
        return made

    def _weight(self, node: fx.Node, spec: InputSpec) -> object:
        label = spec.target or node.name
        held: object = self._program.state_dict.get(label)
        if held is None:
            held = self._program.constants.get(label)
        if not isinstance(held, torch.Tensor):
            raise UnsupportedError(f"a weight is a {type(held).__name__}, not a tensor", where=label)
        if label in self._program.graph_signature.buffers_to_mutate.values():
            traced = node.meta.get("val")
            found = type_of(traced if isinstance(traced, torch.Tensor) else held, label)
            made = Node(Input(self._name_of_kept(label), found, mutable=True))
            self._kept[label] = made, held.detach()
            return made
        made = self._constant(held, label)
        lies = self._placed.get(label)
        return made if lies is None else Node(Place(lies.splits, lies.partial), made)

    def _name_of_kept(self, label: str) -> str:
        """The name of a buffer as an input: its own, unless an argument has that."""
        specs = self._program.graph_signature.input_specs
        taken = {getattr(s.arg, "name", "") for s in specs if s.kind is InputKind.USER_INPUT}
        return label if label not in taken else f"self.{label}"

    def _check_apart(self) -> None:
        """See that what a buffer's writes change is nothing else's memory: a graph knows values, not memory."""
        held = {**self._program.constants, **self._program.state_dict}
        for label, (_, mine) in self._kept.items():
            for other, t in held.items():
                if other != label and isinstance(t, torch.Tensor) and not mine.is_meta and share(mine, t):
                    what = f"the program changes its buffer {label!r}, whose memory is that of {other!r}, too"
                    raise UnsupportedError(what, where=self._name, hint="a buffer of its own for each")

    def _constant(self, held: torch.Tensor, label: str) -> Node:
        """A reference to somebody's tensor; tied weights are one."""
        t = held.detach()
        if t.layout is not torch.strided or t.is_quantized:
            hint = "weight.dequantize()" if t.is_quantized else "weight.to_dense()"
            raise UnsupportedError(f"a weight is {t.layout} {t.dtype}, which no graph holds", where=label, hint=hint)
        if t.is_complex():
            # The graph has no complex type: a call makes the complex view of the same memory.
            pairs = self._constant(torch.view_as_real(t.resolve_conj()), label)
            return call("aten.view_as_complex.default", [pairs], {}, [TensorType(OPAQUE, ())], label)
        d = dtype_of(t.dtype)
        if d is OPAQUE:
            raise UnsupportedError(f"a weight is of type {t.dtype}, which no graph holds", where=label)
        key = (t.untyped_storage().data_ptr(), t.storage_offset(), tuple(t.shape), t.stride(), d, t.device)
        found = self._literals.setdefault(key, Literal(TensorType(d, tuple(t.shape)), t, label))
        return Node(Const(found))

    def _operator(self, node: fx.Node) -> object:
        where = _place(node)
        asking(f"{node.target} ({where})")
        if node.target is operator.getitem:
            whole = cast("Sequence[object]", self._env[cast(fx.Node, node.args[0])])
            return whole[cast(int, node.args[1])]
        value = node.meta.get("val")
        if isinstance(value, (bool, int, float)) and not isinstance(node.target, HigherOrderOperator):
            return value
        if isinstance(value, torch.SymInt):
            found = extent_of(value)
            if found is not None:
                return found
        if isinstance(node.target, HigherOrderOperator):
            attends = node.target.name().startswith("flex_attention")
            raise UnsupportedError(
                f"{'a function of scores' if attends else 'control flow'} ({node.target.name()}) has no place in a graph",
                where=where,
                hint='attn_implementation="sdpa", or scaled_dot_product_attention with a mask'
                if attends
                else "torch.where over both branches",
            )
        if not isinstance(node.target, OpOverload) or not any(True for _ in tensors_in(value)):
            raise DependsOnDataError(
                f"{node.target} makes a number that depends on the data", where=where, hint="avoid .item()"
            )
        return self._apply(node, node.target, where)

    def _apply(self, node: fx.Node, target: OpOverload, where: str) -> object:
        positional, named = _arranged(target, node.args, node.kwargs)
        args = [self._resolved(a) for a in positional]
        kwargs = {name: self._resolved(a) for name, a in named.items()}
        if node in self._checked:
            kwargs["check_errors"] = True
        value = node.meta["val"]
        types = tuple(type_of(t, where) for t in tensors_in(value))
        site = Site(str(target), where, types, _used(node, value), self._in_place, _readers(node, value))
        try:
            results = self._translate(site, args, kwargs)
        except Unmodelled as unmodelled:
            results = self._call(node, site, args, kwargs, unmodelled.reason)
        self._remember(results, where)
        return _shaped_like(value, results)

    def _resolved(self, argument: object) -> object:
        """An argument with the program's nodes replaced by what they were read as."""
        if isinstance(argument, fx.Node):
            return self._env[argument]
        if isinstance(argument, (list, tuple)):
            return [self._resolved(a) for a in cast("Sequence[object]", argument)]
        return argument

    def _translate(self, site: Site, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Node | None]:
        translation = TRANSLATIONS.get(site.target)
        opaque = any(t.dtype is OPAQUE for t in site.outs) or any(_is_opaque(a) for a in _nodes_in((args, kwargs)))
        if translation is None or opaque:
            raise Unmodelled("it takes or gives a type that no graph holds" if translation is not None else "")
        made = translation(site, *args, **kwargs)
        results: list[Node | None] = [made] if isinstance(made, Node) else list(made)
        for i, (result, wanted) in enumerate(zip(results, site.outs, strict=True)):
            if result is not None and result.type != wanted:
                raise TypeMismatchError(f"{site.target} reads as {result.type}, torch says {wanted}", where=site.where)
            if result is None and i in site.used:
                raise Unmodelled("a result that is read has no node")
        return results

    def _call(
        self, node: fx.Node, site: Site, args: Sequence[object], kwargs: Mapping[str, object], reason: str
    ) -> list[Node | None]:
        if site.target.startswith("aten.as_strided"):
            return [self._strided(node, site, args)]
        outs = site.outs
        if site.target.startswith("aten._embedding_bag"):  # of what only its backward pass reads, shapes differ by kernel
            outs = tuple(t if i in site.used else TensorType(OPAQUE, ()) for i, t in enumerate(outs))
        draw = None if self._draws is None else next(self._draws)
        made = call(site.target, args, kwargs, outs, site.where, draw)
        if site.target != COMPARED:  # of which there are notes
            self._notes.append(
                f"{site.where}: {site.target} is not modelled and is left to torch{f': {reason}' if reason else ''}"
            )
        return [*items(made)]

    def _strided(self, node: fx.Node, site: Site, args: Sequence[object]) -> Node:
        """`as_strided`, or `as_strided_scatter`, which has a second operand and gives the first one's shape."""
        source = cast("torch.Tensor", cast(fx.Node, node.args[0]).meta["val"])
        x, *written, sizes, strides = args[: 4 if "scatter" in site.target else 3]
        offset = args[len(written) + 3] if len(args) > len(written) + 3 else None
        order, first = _within_memory(site, source, *cast("tuple[list[int], list[int], int | None]", (sizes, strides, offset)))
        laid = transpose(cast(Node, x), order)
        outs = (laid.tensor,) if written else site.outs
        made = call(site.target, [laid, *written, sizes, strides, first], {}, outs, site.where)
        self._notes.append(f"{site.where}: {site.target} is not modelled and is left to torch")
        return transpose(made, [order.index(a) for a in range(len(order))]) if written else made

    def _remember(self, results: Sequence[Node | None], where: str) -> None:
        """Give every node this operator made the operator's place, unless it has one."""
        stack = [r for r in results if r is not None]
        while stack:
            made = stack.pop()
            if made not in self._origins and not isinstance(made.op, Const) and made not in self._inputs:
                self._origins[made] = where
                stack.extend(made.src)

    def _outputs(self) -> tuple[list[Node], list[str]]:
        signature = self._program.graph_signature
        (last,) = (n for n in self._program.graph.nodes if n.op == "output")
        tokens = {s.arg.name for s in signature.output_specs if s.kind is OutputKind.TOKEN}
        returned = cast("Sequence[object]", last.args[0])
        every = [None if str(value) in tokens else self._resolved(value) for value in returned]
        specs = [s for s in signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
        values = [v for s, v in zip(signature.output_specs, every, strict=True) if s.kind is OutputKind.USER_OUTPUT]
        names = _output_names(self._program, len(specs))
        nodes: list[Node] = []
        labels: list[str] = []
        for value, spec, name in zip(values, specs, names, strict=True):
            if isinstance(spec.arg, TensorArgument) and isinstance(value, Node):
                if value.dtype is OPAQUE:
                    hint = "return torch.view_as_real of it"
                    raise UnsupportedError("an output is of a type no graph holds (complex?)", where=name, hint=hint)
                nodes.append(value)
                labels.append(name)
            elif value is not None:
                self._notes.append(f"output {name!r} is {value!r}, no tensor, and is left out")
        changed = {
            s.target: v for s, v in zip(signature.output_specs, every, strict=True) if s.kind is OutputKind.BUFFER_MUTATION
        }
        for label in self._kept:
            made, _ = self._kept[label]
            nodes.append(broadcast(converted(cast("Node", changed[label]), made.dtype), made.shape))  # as copy_ does it
            labels.append(label)
        return nodes, labels

    def _note_conversions(self, outputs: Sequence[Node]) -> None:
        graph = Graph(self._name, (), tuple(outputs), ())
        for node in graph.nodes():
            if isinstance(node.op, Convert) and node.op.dtype.is_integer and node.src[0].dtype.is_float:
                self._notes.append("a float that no integer of 32 (or 64) bits holds saturates where torch leaves it undefined")
                return


def _live(program: ExportedProgram) -> set[fx.Node]:
    """The operators an output depends on; assertions about shapes are none, nor is what only follows effects."""
    wanted: set[fx.Node] = set()
    (last,) = (n for n in program.graph.nodes if n.op == "output")
    tokens = {s.arg.name for s in program.graph_signature.output_specs if s.kind is OutputKind.TOKEN}
    stack = [n for n in last.all_input_nodes if n.name not in tokens]
    while stack:
        node = stack.pop()
        if node not in wanted:
            wanted.add(node)
            stack.extend(node.all_input_nodes)
    return wanted


def _checked(program: ExportedProgram, name: str) -> set[fx.Node]:
    """The factorisations whose success the program checks, which their kernels can do (`check_errors`).

    Raises:
        UnsupportedError: it has another effect, as printing is.
    """
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op != "call_function" or not str(node.target).startswith("with_effects"):
            continue
        effect, *given = cast("Sequence[object]", node.args)[1:]
        whole = _of_result(given[0]) if given and str(effect) == "aten._linalg_check_errors.default" else None
        if whole is None or not isinstance(whole.target, OpOverload) or "check_errors" not in _names(whole.target):
            raise UnsupportedError(f"an effect ({effect}) has no place in a graph", where=name, hint="leave it out")
        found.add(whole)
    return found


def _of_result(item: object) -> fx.Node | None:
    """The operator that one of several results is of."""
    return cast(fx.Node, item.args[0]) if isinstance(item, fx.Node) and item.target is operator.getitem else None


def _names(target: OpOverload) -> set[str]:
    return {a.name for a in schema_of(target).arguments}


def _place(node: fx.Node) -> str:
    """The module an operator stands in and what the operator is: "encoder.layer.0.attention.query linear"."""
    stack = cast("Mapping[str, tuple[str, object]]", node.meta.get("nn_module_stack") or {})
    path = next(reversed([p for p, _ in stack.values()]), "").removeprefix("L['self']").lstrip(".")
    if not path or not isinstance(node.target, OpOverload):
        return node.name
    return f"{path} {node.target.overloadpacket.__name__}"


def _used(node: fx.Node, value: object) -> frozenset[int]:
    """The indices of an operator's tensor results that anything reads; of one result, that one."""
    if isinstance(value, torch.Tensor):
        return frozenset({0})
    picked = {cast(int, user.args[1]) for user in node.users if user.target is operator.getitem and user.args[0] is node}
    places = [i for i, v in enumerate(cast("Sequence[object]", value)) if isinstance(v, torch.Tensor)]
    return frozenset(n for n, place in enumerate(places) if place in picked)


def _readers(node: fx.Node, value: object) -> frozenset[str]:
    """The operators that read an operator's first result."""
    users = list(node.users)
    if not isinstance(value, torch.Tensor):
        users = [reader for item in users if item.args[1:] == (0,) for reader in item.users]
    return frozenset(str(user.target) for user in users)


def _arranged(
    target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[object], dict[str, object]]:
    """Arguments with every positional one of the schema in its place, whether it was passed by name or not."""
    named = dict(kwargs)
    places = [a for a in schema_of(target).arguments if not a.kwarg_only]
    given = max((i + 1 for i, a in enumerate(places) if i < len(args) or a.name in named), default=0)
    positional = [args[i] if i < len(args) else named.pop(a.name, a.default_value) for i, a in enumerate(places[:given])]
    return positional, named


def _within_memory(
    site: Site, source: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int | None
) -> tuple[list[int], int]:
    """The order in which a tensor's axes lie in memory, as those of a call's operands do, and where `as_strided` begins there.

    Raises:
        UnsupportedError: elements of `source` lie apart or it reads beyond them: what is there, no graph says.
    """
    order = sorted(range(source.dim()), key=lambda a: (source.stride(a), source.shape[a]), reverse=True)
    first = 0 if offset is None else offset - int(source.storage_offset())
    last = first + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    inside = 0 in sizes or 0 <= first <= last < source.numel()
    if not source.permute(order).is_contiguous() or not inside:
        raise site.refuse("reads memory by strides that a graph does not keep", "reshape or index instead")
    return order, first


def _nodes_in(value: object) -> list[Node]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Node)]


def _is_opaque(node: Node) -> bool:
    return isinstance(node.type, TensorType) and node.dtype is OPAQUE


def _shaped_like(value: object, results: Sequence[Node | None]) -> object:
    """The results where the operator's own result has tensors; what else it has (numbers, None) stays."""
    remaining = iter(results)
    if isinstance(value, torch.Tensor):
        return next(remaining)
    return [next(remaining) if isinstance(v, torch.Tensor) else v for v in cast("Sequence[object]", value)]


def _output_names(program: ExportedProgram, count: int) -> list[str]:
    """Outputs by their place in what the module returns: "logits", "hidden.0", "output" for one alone."""
    spec = program.call_spec.out_spec
    if spec is None or spec.num_leaves != count:
        return [f"output_{i}" for i in range(count)]
    names: list[str] = []
    for parts in _paths(spec):
        if not parts or parts[0].isdigit():
            parts = ["_".join(["output", *parts[:1]]), *parts[1:]]
        names.append(".".join(parts))
    return names


def _paths(spec: pytree.TreeSpec) -> list[list[str]]:
    """The path of each leaf of a result: keys and positions, read off what it is made of, as nothing is made of it here."""
    if spec.is_leaf():
        return [[]]
    children = spec.children()
    known: object = spec.context
    if isinstance(known, list) and known and isinstance(known[0], list):  # a cache's: its keys, and more
        known = cast("list[object]", known)[0]
    known = list(getattr(known, "_fields", ())) if isinstance(known, type) else known  # of a named tuple
    keys = (
        cast("list[object]", known)
        if isinstance(known, list) and len(cast("list[object]", known)) == len(children)
        else range(len(children))
    )
    return [[str(key), *path] for key, child in zip(keys, children, strict=True) for path in _paths(child)]
