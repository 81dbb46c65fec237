"""Chains: steps in one call of machine code give what they give one by one, bit for bit, or fail as they do."""

import copy
import gc
import pickle
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_threads import in_threads
from random_graphs import INPUTS, feeds, graphs, split_by_sign

from tilewright.candidates.llvm.runtime import calls, scratch, watch
from tilewright.candidates.llvm.runtime.calls import CACHE_LINE
from tilewright.compiler import compile
from tilewright.dtype import BY_NAME, F32, S64
from tilewright.errors import InputError, TypeMismatchError
from tilewright.ir.build import broadcast, const, convert, input_, map_, reduce_, reshape
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Gather, gemm
from tilewright.ir.types import TensorType
from tilewright.runtime import chain
from tilewright.threads import limited

X, Y, _ = INPUTS


def program(*outputs, inputs=(X, Y), **options):
    return compile(
        Graph("g", tuple(inputs), tuple(outputs), tuple(f"r{i}" for i in range(len(outputs)))), budget_s=0, **options
    )


def one_by_one(executable, values):
    return executable.run(values, lambda step, inputs: None)


def chains(executable, values):
    """The names of what runs in a call: chains, and steps by themselves."""
    executable.run(values)
    return [b.name for b in executable._placed[1][executable.threads or 0][1]]


def same(got, wanted):
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def layers(count, x, width=64):
    """Products, from each of which the largest of a row is taken away."""
    torch.manual_seed(count)
    for _ in range(count):
        y = map_("tanh", gemm(x, const(torch.randn(width, width))))
        x = map_("subtract", y, broadcast(reduce_("maximum", y, [1], keepdims=True), y.shape))
    return x


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 100))
def test_chains_give_the_bits_of_steps_one_by_one(graph, seed):
    executable = compile(graph, budget_s=0)
    values = feeds(seed)
    for _ in range(2):
        same(executable.run(values), one_by_one(executable, values))


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
def test_layers_are_one_call(rows):
    x = input_("x", F32, (rows, 64))
    executable = program(layers(4, x), inputs=(x,))
    values = [torch.randn(rows, 64)]
    assert len(executable.steps) > 4 and len(chains(executable, values)) == 1
    for v in (values[0], torch.randn(64, rows).t(), torch.full((rows, 64), torch.nan), torch.randn(rows, 128)[:, ::2]):
        same(executable.run([v]), one_by_one(executable, [v]))
    for count in (1, 3, None):
        executable.threads = count
        same(executable.run(values), one_by_one(executable, values))
    with limited(2):
        same(executable.run(values), one_by_one(executable, values))


def test_other_steps_stand_between_chains():
    x = input_("x", F32, (8, 64))
    above, below = split_by_sign(layers(2, x))
    a, b = layers(2, above), gemm(below, const(torch.randn(64, 32)))
    executable = program(a, gemm(a, const(torch.eye(64))), b, above, inputs=(x,))
    values = [torch.randn(8, 64)]
    found = chains(executable, values)
    assert 3 <= len(found) < len(executable.steps) and " to " in found[0]
    same(executable.run(values), one_by_one(executable, values))


def test_threads_share_a_program():
    x = input_("x", F32, (33, 64))
    executable = program(layers(3, x), inputs=(x,))
    inputs = [[torch.randn(33, 64)] for _ in range(6)]
    wanted = [one_by_one(executable, i) for i in inputs]

    def work(i):
        for _ in range(60):
            same(executable.run(inputs[i]), wanted[i])

    in_threads(6, work)


def picking(table, behind):
    """A table of so many rows that is picked from by an input, and by positions that a product gives."""
    x, at = input_("x", F32, (4, 64)), input_("at", S64, (4,))
    rows = reshape(Node(Gather(0, 0), const(torch.randn(table, 64)), at), (4, 64))
    first = layers(2, map_("add", gemm(x, const(torch.randn(64, 64))), rows))
    if not behind:
        return x, at, first
    picked = convert(map_("floor", reduce_("maximum", x, [1])), S64)
    return x, at, map_("add", first, Node(Gather(0, 0), const(torch.randn(table, 64)), picked))


@pytest.mark.parametrize("behind", [False, True])
def test_an_index_out_of_range_is_the_step_s_own_error(behind):
    x, at, y = picking(10, behind)
    executable = program(y, inputs=(x, at))
    good, bad = torch.tensor([0, 9, 3, 3]), torch.tensor([0, 10, 3, 3])
    values = torch.rand(4, 64)
    before = one_by_one(executable, [values, good])
    same(executable.run([values, good]), before)
    with pytest.raises(TypeMismatchError) as alone:
        one_by_one(executable, [values, bad])
    for _ in range(3):
        with pytest.raises(TypeMismatchError) as together:
            executable.run([values, bad])
        assert str(together.value) == str(alone.value)
    if behind:
        with pytest.raises(TypeMismatchError):
            executable.run([values + 20, good])
    same(executable.run([values, good]), before)


def test_what_is_no_tensor_is_refused_as_by_a_step():
    x = input_("x", F32, (4, 64))
    executable = program(layers(2, x), inputs=(x,))
    for wrong in (3, None, "x"):
        with pytest.raises(TypeError):
            executable.run([wrong])


def test_a_call_that_fails_gives_its_memory_back(monkeypatch):
    x, at, y = picking(10, behind=False)
    wide = gemm(y, const(torch.randn(64, 1 << 15)))  # too much for the stack
    executable = program(layers(1, gemm(wide, const(torch.randn(1 << 15, 64)))), inputs=(x, at))
    values = torch.rand(4, 64)
    executable.run([values, torch.zeros(4, dtype=torch.int64)])
    monkeypatch.setattr(scratch, "_free", free := {})
    for _ in range(3):
        with pytest.raises(TypeMismatchError):
            executable.run([values, torch.full((4,), 99)])
    assert sum(map(len, free.values())) <= 1


def test_steps_that_somebody_wrapped_run_by_themselves():
    x = input_("x", F32, (8, 64))
    executable = program(layers(3, x), inputs=(x,))
    values = [torch.randn(8, 64)]
    wanted, seen = executable.run(values), []
    plain = executable.steps
    step = plain[2]
    executable.swap((*plain[:2], replace(step, run=lambda v: seen.append(len(v)) or step.run(v)), *plain[3:]))
    same(executable.run(values), wanted)
    assert len(seen) == 1 and len(chains(executable, values)) == 3
    executable.swap(plain)
    assert len(chains(executable, values)) == 1


def test_a_copy_has_the_steps_before_a_swap_or_those_behind_it():
    x = input_("x", F32, (8, 64))
    executable = program(layers(2, x), inputs=(x,))
    copies, launch = [], executable._launch
    copying = threading.Thread(target=lambda: copies.append(copy.copy(executable)))

    def launching():
        copying.start()
        copying.join(0.1)
        launch()

    executable._launch = launching
    executable.swap(tuple(replace(step, name="other") for step in executable.steps))
    copying.join()
    assert copies[0]._kernels[0] is copies[0].steps


def test_copies_and_saved_programs_run_in_chains_of_their_own():
    x = input_("x", F32, (8, 64))
    bias = const(torch.randn(8, 64))
    executable = program(map_("add", layers(2, x), bias), inputs=(x,))
    values = [torch.randn(8, 64)]
    wanted = executable.run(values)
    for made in (copy.copy(executable), copy.deepcopy(executable), pickle.loads(pickle.dumps(executable))):
        same(made.run(values), wanted)
        assert len(chains(made, values)) == 1
    executable.drop_weights()
    same(executable.run(values), wanted)


def test_a_long_chain_is_cut(monkeypatch):
    x = input_("x", F32, (8, 64))
    executable = program(layers(3, x), inputs=(x,))
    values = [torch.randn(8, 64)]
    wanted = executable.run(values)
    monkeypatch.setattr(chain, "MOST_LINKS", 2)
    executable.swap(executable.steps)
    assert len(chains(executable, values)) == len(executable.steps) / 2
    same(executable.run(values), wanted)
    times = [40_000.0] * len(executable.steps)
    assert len(chain.in_chains(executable._program, executable._start, times, 0)) == len(executable.steps) / 2
    monkeypatch.setattr(chain, "MOST_LINKS", 100)
    assert len(chain.in_chains(executable._program, executable._start, times, 0)) == -(-len(executable.steps) // 2)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_values_that_are_needed_at_once_lie_apart(data):
    count = data.draw(st.integers(1, 12))
    links, types = [], {}
    for i in range(count):
        sources = data.draw(st.lists(st.sampled_from(sorted(types)), max_size=3)) if types else []
        results = range(2 * i, 2 * i + data.draw(st.integers(1, 2)))
        kind = TensorType(
            data.draw(st.sampled_from([F32, BY_NAME["s4"], BY_NAME["pred"]])),
            (data.draw(st.sampled_from([0, 1, 7, 64, 5000])),),
        )
        types.update(dict.fromkeys(results, kind))
        links.append(SimpleNamespace(results=results, sources=dict(enumerate(sources))))
    wanted = data.draw(st.sets(st.sampled_from(sorted(types))))
    between = {v: t for v, t in types.items() if v not in wanted}
    offsets, size = calls._laid_out(links, between)
    assert offsets.keys() == between.keys()
    ends = {v: offsets[v] + t.shape[0] * t.dtype.to_torch().itemsize for v, t in between.items()}
    assert all(offset % CACHE_LINE == 0 and ends[v] <= size for v, offset in offsets.items())
    for i, link in enumerate(links):
        later = {v for one in links[i:] for v in one.sources.values()} | set(link.results)
        live = [v for v in between if v in later and v < 2 * i + 2]
        for v in set(live) & set(link.results):
            assert all(u == v or ends[u] <= offsets[v] or ends[v] <= offsets[u] or offsets[u] == ends[u] for u in live)
    assert size <= sum(-(-(ends[v] - offsets[v]) // CACHE_LINE) * CACHE_LINE for v in between)


MOVES = {
    "shared": lambda t: t.share_memory_(),
    "larger": lambda t: t.untyped_storage().resize_(4 * t.nbytes),
    "let go of and back": lambda t: (t.untyped_storage().resize_(0), t.untyped_storage().resize_(t.nbytes)),
    "others in its place": lambda t: t.set_(torch.empty_like(t)),
    "transposed": lambda t: t.t_(),
}


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.layer = torch.nn.Buffer(torch.zeros(64, 64)), torch.nn.Linear(64, 64)

    def forward(self, x):
        self.seen.copy_(torch.tanh(self.layer(x) + self.seen))
        return self.seen * 2


@pytest.fixture(params=["machine code", "Python"])
def asked_by(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(watch, "_asked", lambda: None)


@pytest.mark.usefixtures("asked_by")
@pytest.mark.parametrize("how", MOVES)
def test_constants_are_read_where_they_were_moved_to(how):
    x = input_("x", F32, (64, 64))
    bias = torch.randn(64, 64)
    held = bias.detach()  # over the same storage, whatever becomes of the tensor

    def adding(constant):
        return program(map_("add", layers(2, x), const(constant)), map_("multiply", x, const(constant)), inputs=(x,))

    executable, values = adding(bias), [torch.randn(64, 64)]
    executable.run(values)
    for _ in range(2):
        MOVES[how](bias)
        held.copy_(torch.randn(64, 64))
        found = executable.run(values)
        same(found, adding(held.clone()).run(values))
        same(found, one_by_one(executable, values))


@pytest.mark.usefixtures("asked_by")
@pytest.mark.parametrize("how", MOVES)
def test_state_is_written_where_it_was_moved_to(how):
    module, x = Counts().eval(), torch.randn(64, 64)
    reference, executable = copy.deepcopy(module), compile(module, example_inputs=(x,), budget_s=0)
    held = module.seen.detach()
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(executable(x), reference(x))
            torch.testing.assert_close(held, reference.seen)
            MOVES[how](module.seen)
            reference.seen.copy_(held.copy_(torch.randn(64, 64)))
    inside = held.view(64, 64)  # an input in the memory of state is read as it was before the call
    with torch.no_grad():
        wanted = reference(inside.clone())
        torch.testing.assert_close(executable(inside), wanted)


def test_where_torch_answers_otherwise_python_watches(monkeypatch):
    code, (data, size) = calls.caller(), watch._asked() or (0, 0)
    kept = [torch.randn(8), torch.randn(3, 0), torch.tensor(1.0), torch.randn(8, 8).t()[1:, ::2], torch.ones(4).bool()]
    assert type(watch.watch(kept, code)).__name__ == "builtin_function_or_method"
    for answers in ((size, size), (size, data), (data, data)):
        monkeypatch.setattr(watch, "_asked", lambda answers=answers: answers)
        moved = watch.watch([*kept], code)
        assert not moved()
        kept[0].share_memory_()
        assert moved()
        kept[0] = torch.randn(8)


@pytest.mark.usefixtures("asked_by")
def test_a_result_is_no_constant_that_was_moved():
    x = input_("x", F32, (8, 64))
    kept = torch.randn(8, 64)
    executable = program(layers(2, x), const(kept), inputs=(x,))
    executable(torch.randn(8, 64))
    kept.share_memory_()
    before = kept.clone()
    executable(torch.randn(8, 64))[1].zero_()
    assert torch.equal(kept, before)


@pytest.mark.usefixtures("asked_by")
def test_a_constant_that_was_let_go_of_is_an_error():
    x = input_("x", F32, (8, 64))
    bias = torch.randn(8, 64)
    executable = program(map_("add", layers(2, x), const(bias)), inputs=(x,))
    values = [torch.randn(8, 64)]
    wanted, kept = executable.run(values), bias.clone()
    for size in (0, 17, 2047):
        bias.untyped_storage().resize_(size)
        for _ in range(2):
            with pytest.raises(InputError, match=rf"its memory was let go of: {size:,} of 2,048 bytes are there"):
                executable.run(values)
    bias.untyped_storage().resize_(2048)
    bias.copy_(kept)
    same(executable.run(values), wanted)


def test_kernels_without_a_time_end_chains_too(monkeypatch):
    x = input_("x", F32, (256, 512))
    executable = program(layers(4, x, 512), inputs=(x,), threads=1)
    assert all(step.decision.time_us is None for step in executable.steps)
    times = executable._expected_us(executable.steps)
    assert min(times) > 0 and sum(times) > 1e3  # 0.5 GFLOP, on one thread
    monkeypatch.setattr(chain, "LONGEST_US", sum(times) / 2)
    assert len(chains(executable, [torch.randn(256, 512)])) >= 2


def test_programs_over_other_state_share_their_chains():
    module, x = Counts().eval(), torch.randn(64, 64)
    executable = compile(module, example_inputs=(x,), budget_s=0)
    made = []
    for fill in (0.0, 1.0, 2.0):
        state = torch.full((64, 64), fill)
        reference = copy.deepcopy(module)
        reference.seen.data = state.clone()
        one = executable.with_state([state])
        torch.testing.assert_close(one.run([x])[0], reference(x).detach())
        torch.testing.assert_close(state, reference.seen.detach())
        made.append(one._placed[1][0][1])
    assert made[0] is made[1] is made[2] and any(" to " in b.name or "," in b.name for b in made[0])


def test_a_copy_that_was_called_holds_no_packed_weight():
    x = input_("x", F32, (8, 64))
    weight = torch.randn(64, 64)
    lives = weakref.ref(weight.untyped_storage())
    executable = program(map_("tanh", gemm(x, const(weight))), inputs=(x,))
    other, values = copy.copy(executable), [torch.randn(8, 64)]
    wanted = other.run(values)
    assert executable.drop_weights() == 4 * 64 * 64
    del weight
    gc.collect()
    assert lives() is None
    same(other.run(values), wanted)
