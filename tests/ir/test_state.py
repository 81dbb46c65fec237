"""Buffers that a module writes to: inputs that the program keeps, written in place by the kernel that makes what is written."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import tilewright
from tilewright.dtype import F32, S64, U8
from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.frontends.torch.export import exported
from tilewright.frontends.torch.reader import Reader
from tilewright.ir.build import const, input_, map_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Input, Write
from tilewright.ir.text import parse, print_graph
from tilewright.ir.types import TensorType
from tilewright.ir.verify import verify
from tilewright.lowering.ranges import Destination
from tilewright.report.measure.inputs import make_feeds
from tilewright.report.measure.perf import measure
from tilewright.report.measure.verify import compare_step, verify_program
from tilewright.report.measure.work import work_of
from tilewright.runtime.partition import partition
from tilewright.runtime.steps import bind_outputs
from tilewright.schedule.candidate import Kernel, Schedule
from tilewright.schedule.key import text_of


class Decoder(nn.Module):
    """One new token a call; it takes the last place of a cache [keys and values, batch, heads, tokens, depth]."""

    def __init__(self, heads: int = 2, depth: int = 8) -> None:
        super().__init__()
        self.heads, self.depth = heads, depth
        self.qkv = nn.Linear(32, 3 * heads * depth)
        self.register_buffer("cache", torch.randn(2, 3, heads, 5, depth))
        self.register_buffer("seen", torch.zeros(3, 32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(x).view(3, 3, self.heads, self.depth).unbind(1)
        self.cache[:, :, :, -1] = torch.stack((torch.cat((-k[..., 4:], k[..., :4]), -1), v * 2))
        self.seen[1:] = x[1:]
        keys, values = self.cache
        return functional.scaled_dot_product_attention(q[:, :, None], keys, values), keys


def test_a_program_writes_to_the_buffers_of_its_module():
    torch.manual_seed(0)
    module, x = Decoder().eval(), torch.randn(3, 32)
    program = tilewright.compile(module, example_inputs=(x,), budget_s=0)
    assert list(program.input_types) == ["x"] and set(program.state) == {"cache", "seen"}
    assert program.state["cache"].data_ptr() == module.cache.data_ptr()
    for _ in range(2):
        y = torch.randn(3, 32)
        before = module.cache.clone()
        with torch.no_grad():
            wanted = [t.clone() for t in module(y)]
        after = [module.cache.clone(), module.seen.clone()]
        module.cache.copy_(before)
        module.seen.zero_()
        got = program(y)
        for a, b in zip((*got, module.cache, module.seen[1:]), (*wanted, after[0], after[1][1:]), strict=True):
            torch.testing.assert_close(a, b)
        got[1].zero_()  # a result is the caller's own
        torch.testing.assert_close(module.cache, after[0])
    program.drop_weights()
    torch.testing.assert_close(program(y)[0], wanted[0])


def steps_of(module: nn.Module, *args: torch.Tensor):
    return [p for p in partition(load(module.eval(), LoadOptions({}, None, args))) if not p.once]


def test_a_write_is_done_by_the_fusion_that_makes_what_is_written():
    program = tilewright.compile(Decoder().eval(), example_inputs=(torch.randn(3, 32),), budget_s=0)
    by_write = {n.src[0].op.label: s for s in program.steps for n in s.part.outputs if isinstance(n.op, Write)}
    cache = by_write["cache"]
    assert cache.part.kind == "elementwise" and by_write["seen"].part.kind == "write"
    assert Destination((2, 3, 2, 5, 8), 3, 4) in cache.decision.problem.destinations
    assert work_of(cache).bytes == 2 * 192 + 384 + 8  # k and v, what is written and where; not the whole cache
    rows = []
    program.run([torch.randn(3, 32)], lambda s, values: rows.append(compare_step(s, values)))
    assert len(rows) == len(program.steps) and all(row.ok for row in rows)


def test_where_a_result_goes_is_part_of_its_problem():
    first, second = Decoder(), Decoder()
    second.cache = torch.randn(2, 3, 2, 6, 8)
    texts = []
    for module in (first, second):
        problems = [p.posed[0] for p in steps_of(module, torch.randn(3, 32)) if p.kind == "elementwise"]
        texts.append([text_of(p) for p in problems if any(p.destinations)])
    assert len(texts[0]) == 1 and texts[0] != texts[1]


class Reads(nn.Module):
    def __init__(self, forward) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 3))
        self.change = forward

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.change(self.cache, *args)


def old_value(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    total = cache.sum()
    cache[1] = x[0]
    return total


def of_itself(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache[1] = cache[0] + x[0]
    return x


def of_another_type(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache.copy_(x.double())
    return x


def every_element(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache.mul_(0.5)
    return x


def counts(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    before = cache.clone()
    cache.add_(1)
    return before, x * cache


def turned(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache.copy_(cache.flip(0) + x)
    return cache.flip(1)


@pytest.mark.parametrize("change", [old_value, of_itself, of_another_type, every_element, counts, turned])
def test_a_buffer_whose_old_value_is_read_elsewhere_is_copied_as_the_call_ends(change):
    module = Reads(change)
    same = copy.deepcopy(module)
    program = tilewright.compile(module, example_inputs=(torch.ones(4, 3),), budget_s=0, cache=False)
    for _ in range(3):
        x = torch.randn(4, 3)
        results = program(x)
        for got, wanted in zip(tree_leaves(results), tree_leaves(same(x)), strict=True):
            torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(module.cache, same.cache)


class Exchanges(nn.Module):
    """Two buffers that take each other's place, and a counter of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.ones(3))
        self.register_buffer("b", torch.zeros(3))
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(held)
        self.n.add_(1)
        return x + self.a * self.n, held


@pytest.mark.parametrize("make", [Exchanges, lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))])
def test_state_that_new_values_are_made_of_is_what_eager_torch_leaves(make):
    module = make()
    same = copy.deepcopy(module)
    program = tilewright.compile(module, example_inputs=(torch.ones(4, 3),), budget_s=0, cache=False)
    for _ in range(3):
        x = torch.randn(4, 3)
        for got, wanted in zip(tree_leaves(program(x)), tree_leaves(same(x)), strict=True):
            torch.testing.assert_close(got, wanted)
    for got, wanted in zip(module.buffers(), same.buffers(), strict=True):
        torch.testing.assert_close(got, wanted)


def at_positions(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache[at] = x[:2] * 2
    return cache + 1


def copied(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return cache.index_copy_(1, at, x[:, :2]) + 1


@pytest.mark.parametrize("change", [at_positions, copied])
def test_positions_of_a_module_may_be_data(change):
    module, x = Reads(change), torch.randn(4, 3)
    program = tilewright.compile(module, example_inputs=(x, torch.tensor([0, 1])), budget_s=0)
    for at in (torch.tensor([2, 0]), torch.tensor([0, 1])):
        before = module.cache.clone()
        wanted = module(x, at)
        after = module.cache.clone()
        module.cache.copy_(before)
        torch.testing.assert_close(program(x, at), wanted)
        torch.testing.assert_close(module.cache, after)


X, Y = Node(Input("x", TensorType(F32, (4, 3)), mutable=True)), input_("y", F32, (2, 3))
AT = input_("at", S64, (2,))


def stateful(*outputs: Node, inputs: tuple[Node, ...] = (AT, Y, X)) -> Graph:
    return Graph("g", inputs, outputs, tuple(f"o{i}" for i in range(len(outputs))), state=(torch.zeros(4, 3),))


def only_position(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache[:, :3] = x * 2
    return cache.sum()


def all_at_once(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache.copy_(torch.cat((x[2:], x[:2])))
    return cache + 1


def one_result_of_two(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x @ x[:3]
    cache.copy_(y)
    return y * 2


@pytest.mark.parametrize("change", [only_position, all_at_once, one_result_of_two])
def test_all_of_a_buffer_may_be_replaced(change):
    module, x = Reads(change), torch.randn(4, 3)
    program = tilewright.compile(module, example_inputs=(x,), budget_s=0)
    for x in (torch.randn(4, 3), torch.randn(4, 3)):
        wanted = module(x)
        after = module.cache.clone()
        module.cache.zero_()
        torch.testing.assert_close(program(x), wanted)
        torch.testing.assert_close(module.cache, after)


def written_twice(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache[at] = x[:2]
    return cache.index_copy(0, at, x[2:])


def by_bytes(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache[(at % 2).to(torch.uint8).repeat(2)] = x[0]  # a mask, as torch has it
    return x


def read_elsewhere(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    before = cache.sum(0)
    cache[at] = x[:2]
    return before + cache


@pytest.mark.parametrize("change", [written_twice, by_bytes, read_elsewhere])
def test_what_is_no_write_to_some_positions_is_done_in_a_copy(change):
    module = Reads(change)
    same = copy.deepcopy(module)
    program = tilewright.compile(module, example_inputs=(torch.ones(4, 3), torch.tensor([0, 1])), budget_s=0, cache=False)
    for at in ([2, 0], [1, 3]):
        x = torch.randn(4, 3)
        torch.testing.assert_close(program(x, torch.tensor(at)), same(x, torch.tensor(at)))
        torch.testing.assert_close(module.cache, same.cache)


def test_a_position_out_of_range_is_an_error():
    program = tilewright.compile(Reads(at_positions), example_inputs=(torch.ones(4, 3), torch.tensor([0, 1])), budget_s=0)
    with pytest.raises(TypeMismatchError, match=r"write: position out of range: 4 of 4 along axis 0; .*\(index_put\)"):
        program(torch.ones(4, 3), torch.tensor([1, 4]))


class Caches(nn.Module):
    """Two layers that write to a cache each, the second what it makes of the first; then a row of a table is looked up."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object], further: int = 0) -> None:
        super().__init__()
        self.write, self.further, self.linear = write, further, nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(2, 8, 4))
        self.register_buffer("values", torch.zeros(2, 8, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.randn(8, 4))

    def forward(self, x: torch.Tensor, at: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.write(self.keys, at, x)
        y = torch.relu(self.linear(self.keys)) + 1
        self.write(self.values, at + self.further, y[:, : at.shape[0]])
        return self.values.sum(1) + self.table.index_select(0, self.values[0, 0, :1].long() + row)


def copied(cache: torch.Tensor, at: torch.Tensor, x: torch.Tensor) -> object:
    return cache.index_copy_(1, at, x)


def put(cache: torch.Tensor, at: torch.Tensor, x: torch.Tensor) -> None:
    cache[:, at] = x


def written_of(module: nn.Module) -> list[str]:
    return [name for name, t in module.named_buffers() if name != "table" and bool(t.any())]


def running(module: nn.Module, door: str) -> Callable[..., object]:
    """A module by `tilewright.compile`, or by torch.compile."""
    if door == "program":
        given = torch.ones(2, 2, 4), torch.tensor([0, 1]), torch.tensor([0])
        return tilewright.compile(module, example_inputs=given, budget_s=0, cache=False)
    torch._dynamo.reset()
    return torch.compile(module, backend="tilewright", options={"budget_s": 0, "cache": False})


@pytest.mark.parametrize("door", ["program", "torch.compile"])
@pytest.mark.parametrize("write", [copied, put])
def test_a_call_with_a_position_out_of_range_writes_nothing(write, door):
    module = Caches(write, further=2).eval()
    run, x, row = running(module, door), torch.ones(2, 2, 4), torch.tensor([0])
    wrong = [[3, 8], [5, 6], [3, -9], [3, -1] if write is copied else [-9, 0]]  # [5, 6]: past the second layer's end
    with torch.no_grad():
        for at in wrong:
            with pytest.raises(
                Exception, match=r"write: position out of range: \S+ of 8 along axis 1; the call has written nothing"
            ):
                run(x, torch.tensor(at), row)
            assert written_of(module) == []
        run(x, torch.tensor([3, 4]), row)
    assert written_of(module) == ["keys", "values", "calls"]


def test_a_call_that_fails_once_it_wrote_says_what():
    module = Caches(copied).eval()
    program = running(module, "program")
    with pytest.raises(TypeMismatchError, match=r"index out of range: 9 of 8.*; the call had written (.*) by then") as caught:
        program(torch.ones(2, 2, 4), torch.tensor([3, 4]), torch.tensor([9]))
    said = re.search("had written (.*) by then", str(caught.value))
    assert said is not None and sorted(said[1].split(", ")) == sorted(written_of(module)) != []


def test_any_number_of_positions_is_looked_at():
    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(2, 100, 4))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return self.cache.index_copy_(1, at, x).sum(1)

    module, x = Prompt(), torch.randn(2, 80, 4)
    program = tilewright.compile(module, example_inputs=(x, torch.arange(80)), budget_s=0, cache=False)
    for at in (torch.arange(80) + 21, torch.arange(80) - 1):
        with pytest.raises(TypeMismatchError, match=r"position out of range: (100|-1) of 100"):
            program(x, at)
        assert not module.cache.any()
    for at in (torch.arange(80) + 20, torch.randperm(100)[:80]):
        program(x, at)
        torch.testing.assert_close(module.cache[:, at], x)


@pytest.mark.parametrize(("write", "at"), [(copied, [6, 2]), (copied, [3, 4]), (put, [-1, 2]), (put, [-2, -1]), (put, [5])])
def test_positions_in_range_are_written_as_by_torch(write, at):
    module = Caches(write).eval()
    same, x, row = copy.deepcopy(module), torch.randn(2, len(at), 4), torch.tensor([0])
    with torch.no_grad():
        got, wanted = running(module, "torch.compile")(x, torch.tensor(at), row), same(x, torch.tensor(at), row)
    for a, b in zip((got, *module.buffers()), (wanted, *same.buffers()), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("write", [copied, put])
def test_constant_positions_past_the_end_write_nothing(write):
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(2, 8, 4))
            self.register_buffer("at", torch.tensor([7, 8]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            write(self.cache, self.at, x)
            return self.cache + 1

    module = Fixed()
    program = tilewright.compile(module, example_inputs=(torch.ones(2, 2, 4),), budget_s=0, cache=False)
    with pytest.raises(TypeMismatchError, match=r"position out of range: 8 of 8 along axis 1; the call has written nothing"):
        program(torch.ones(2, 2, 4))
    assert not module.cache.any()


def test_a_write_that_does_not_wrap_is_text_and_has_no_place_below_zero():
    at = input_("at", S64, (2,))
    graph = verify(stateful(Node(Write(0, wraps=False), X, at, Y), inputs=(at, Y, X)))
    assert print_graph(parse(print_graph(graph))) == print_graph(graph)
    with pytest.raises(TypeMismatchError, match="index -1 is out of bounds"):
        evaluate(graph, [torch.tensor([0, -1]), torch.ones(2, 3)])
    wrapping = verify(stateful(Node(Write(0), X, at, Y), inputs=(at, Y, X)))
    evaluate(wrapping, [torch.tensor([0, -1]), torch.ones(2, 3)])


def test_positions_of_any_integer_type_are_positions():
    at = input_("at", U8, (2,))
    write = Node(Write(0), X, at, Y)
    program = tilewright.compile(verify(stateful(write, inputs=(at, Y, X))), budget_s=0)
    y = torch.randn(2, 3)
    program(torch.tensor([2, 0], dtype=torch.uint8), y)
    torch.testing.assert_close(program.state["x"], torch.stack((y[1], torch.zeros(3), y[0], torch.zeros(3))))


class Shared(nn.Module):
    """Buffers `a`, which is written to, and `b`, which is read."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("a", a)
        self.register_buffer("b", b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a[1] = x[0]
        return self.b + 1


def test_a_buffer_that_shares_memory_is_refused():
    memory, x = torch.zeros(8, 3), torch.ones(4, 3)
    tilewright.compile(Shared(memory[:4], memory[4:]), example_inputs=(x,), budget_s=0)
    with pytest.raises(InputError, match="shares memory with another tensor"):  # torch's own exporter fails
        load(Shared(memory[:4], memory[2:6]), LoadOptions({}, None, (x,)))
    program = exported(Shared(torch.zeros(4, 3), torch.zeros(4, 3)), LoadOptions({}, None, (x,)))
    program.state_dict.update(a=memory[:4], b=memory[2:6])
    with pytest.raises(UnsupportedError, match=r"buffer 'a', whose memory is that of 'b', too"):
        Reader(program, "Shared").read()


class Doubles(nn.Module):
    """Its buffer is called as its argument is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("x", torch.arange(15.0).view(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x[2:] = x[:-1] * 2
        return self.inner(x)


def test_a_buffer_may_be_called_as_an_input_is():
    program = tilewright.compile(Doubles(), example_inputs=(torch.ones(4, 3),), budget_s=0)
    assert list(program.input_types) == ["x"] and list(program.state) == ["self.x"]


@pytest.mark.parametrize("given", [lambda t: t[:4], lambda t: t[1:], lambda t: t[1:].numpy()])
def test_an_input_in_a_buffers_memory_is_read_as_it_was(given):
    module = Doubles()
    x = given(module.x)
    wanted = module.inner(torch.as_tensor(x).clone())
    program = tilewright.compile(module, example_inputs=(torch.ones(4, 3),), budget_s=0)
    torch.testing.assert_close(torch.as_tensor(program(x)), wanted)


def test_a_program_that_writes_is_not_copied():
    program = tilewright.compile(Doubles(), example_inputs=(torch.ones(4, 3),), budget_s=0)
    with pytest.raises(InputError, match=r"writes to self.x cannot be copied"):
        copy.deepcopy(program)
    other = tilewright.compile(nn.Linear(3, 2), example_inputs=(torch.ones(4, 3),), budget_s=0)
    x = torch.randn(4, 3)
    assert copy.deepcopy(other)(x).equal(other(x))


def test_reports_leave_buffers_as_they_were():
    torch.manual_seed(0)
    module = Decoder().eval()
    module.register_buffer("places", torch.zeros(7, 3))
    module.forward = lambda x, at: (module.places.index_copy_(0, at, x[:, :3]), Decoder.forward(module, x))[1]
    program = tilewright.compile(module, example_inputs=(torch.ones(3, 32), torch.arange(3)), budget_s=0)
    before = {name: t.clone() for name, t in program.state.items()}
    feeds = make_feeds(program.source)
    assert sorted(set(feeds[1].value.tolist())) == sorted(feeds[1].value.tolist()) and feeds[1].value.max() < 7
    report = verify_program(program, "d", feeds)
    assert report.verified and {"cache", "seen", "places"} <= {row.name for row in report.end_to_end}
    assert measure(program, "d", feeds, program.target, iterations=1).report.steps
    assert all(program.state[name].equal(t) for name, t in before.items())


def test_a_module_that_writes_is_quantised():
    torch.manual_seed(0)
    module, x = Decoder().eval(), torch.randn(3, 32)
    before = module.cache.clone()
    scheme = tilewright.Quantization(tilewright.scheme("int8"), [{"x": x}])
    program = tilewright.compile(module, example_inputs=(x,), budget_s=0, quantize=scheme)
    assert module.cache.equal(before) and len(program.layers) == 1
    with torch.no_grad():
        wanted = [t.clone() for t in module(x)]
    module.cache.copy_(before)
    for a, b in zip(program(x), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.1)


def test_positions_may_be_data():
    write = Node(Write(0), X, AT, map_("negate", Y))
    graph = verify(stateful(map_("negate", write), write))
    assert [p.kind for p in partition(graph)] == ["elementwise", "write", "elementwise"]
    program = tilewright.compile(graph, budget_s=0)
    x, y = torch.zeros(4, 3), torch.randn(2, 3)
    for at in ([3, 1], [0, -2]):
        x[torch.tensor(at)] = -y
        torch.testing.assert_close(program(torch.tensor(at), y), -x)
        torch.testing.assert_close(program.state["x"], x)
    (_, wanted) = evaluate(graph, {"at": torch.tensor([0, -2]), "y": y, "x": torch.zeros(4, 3)})
    assert wanted[0].equal(-y[0]) and wanted[2].equal(-y[1]) and not wanted[1].any()


def test_what_a_write_takes():
    with pytest.raises(TypeMismatchError, match=r"write takes a vector of integer positions, not f32\[2,3\]"):
        Node(Write(0), X, Y, Y)
    with pytest.raises(TypeMismatchError, match=r"write of f32\[2,3\] to 3 positions of axis 0 of f32\[4,3\]"):
        Node(Write(0), X, const([0, 1, 2], S64), Y)
    write = Node(Write(0), X, AT, Y)
    with pytest.raises(TypeMismatchError, match="writes to what is read elsewhere"):
        verify(stateful(map_("negate", X), write))
    with pytest.raises(TypeMismatchError, match="or is not kept"):
        verify(stateful(Node(Write(0), map_("negate", X), AT, Y)))


def test_a_text_says_what_is_kept_and_holds_none_of_it():
    graph = stateful(Node(Write(0), X, AT, Y))
    back = parse(print_graph(graph))
    assert back.inputs == graph.inputs and back.outputs == graph.outputs
    with pytest.raises(InputError, match="what the program keeps from call to call is missing"):
        tilewright.compile(back, budget_s=0)
    with pytest.raises(TypeMismatchError, match="inputs that a program keeps come last"):
        verify(stateful(Node(Write(0), X, AT, Y), inputs=(X, AT, Y)))


def test_a_kernel_may_write_a_result_in_its_place_and_others_are_copied():
    part = next(p for p in steps_of(Decoder(), torch.randn(3, 32)) if p.kind == "write")
    problem, new = part.posed[0], torch.randn(2, 32)
    kernel = Kernel(
        "any", Schedule(), lambda weights: lambda sources: [new], lambda weights, places: lambda sources: [places[0]]
    )
    copies = replace(kernel, place=None)
    for memory, made, placed in (
        (torch.zeros(3, 32), kernel, True),
        (torch.zeros(3, 32), copies, False),
        (torch.zeros(32, 3).T, kernel, False),
        (torch.zeros(97)[1:].view(3, 32), kernel, False),  # on no multiple of 16 bytes
    ):
        run = bind_outputs(problem, part, made, {}, {part.outputs[0].src[0]: memory})
        assert run([torch.zeros(3, 32)])[0] is memory
        assert memory[1:].equal(torch.zeros(2, 32) if placed else new) and not memory[0].any()
