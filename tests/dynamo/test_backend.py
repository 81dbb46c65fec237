"""`torch.compile(backend="tilewright")` against torch's own results: shapes, mutations, parameters that change, gradients."""

import copy

import pytest
import torch
from in_threads import in_threads
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.nn import functional

from tilewright.dynamo.compiled import graphs
from tilewright.errors import InputError

NOW = {"budget_s": 0, "met": 1}  # programs for every shape, with the first kernels


def compiled(f, dynamic=None, fullgraph=True, **options):
    return torch.compile(f, backend="tilewright", dynamic=dynamic, fullgraph=fullgraph, options={**NOW, **options})


def latest():
    return graphs()[-1]


class Attending(torch.nn.Module):
    """A layer of attention between a norm and a gated product."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up, self.gate = (torch.nn.Linear(width, 48) for _ in range(2))
        self.down = torch.nn.Linear(48, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


def test_twenty_shapes_take_at_most_three_compiles():
    """They have more than one row and token; torch itself makes a graph for each extent of 1."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 16)).eval()
    f = compiled(model, dynamic=True)
    draw = torch.Generator().manual_seed(1)
    shapes = [tuple(torch.randint(2, 12, (2,), generator=draw).tolist()) for _ in range(18)] + [(1, 7), (1, 3)]
    with torch.no_grad():
        for batch, length in shapes:
            x = torch.randn(batch, length, 32)
            torch.testing.assert_close(f(x), model(x), rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 3
    made = graphs()
    assert len(made) <= 3 and all(g.why is None for g in made)
    assert sum(len(g.programs) for g in made) == len(set(shapes))
    assert sum(g.compiled for g in made) <= 3 and all(g.concrete is None for g in made)


def test_attention_of_any_length_is_read_once():
    model = Attending().eval()
    f = compiled(model, dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 3), (4, 9), (3, 17), (7, 2)):
            x = torch.randn(batch, length, 32)
            torch.testing.assert_close(f(x), model(x), rtol=1e-4, atol=1e-5)
    assert latest().compiled == 1 and latest().concrete is None and len(latest().programs) == 4


@torch.fx.experimental._config.patch(use_duck_shape=False)
def test_caches_that_grow_are_read_once():
    """The lengths of keys and of values are symbols of their own; those that were equal at first are one dim."""

    def attend(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, scale=0.5)

    def f(q, caches, new):
        grown = [torch.cat((old, new), 2) for old in caches]
        return attend(q, *grown[:2]) + attend(q, *grown[2:]), grown

    g = compiled(f, dynamic=True)
    q, new = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 1, 8)
    for first, second, readings in ((5, 5, 1), (6, 6, 1), (9, 9, 1), (6, 4, 2), (7, 9, 2), (9, 9, 2), (10, 10, 2)):
        lengths = (first, first, second, second)
        caches = [torch.randn(2, 4, n, 8) for n in lengths]
        with torch.no_grad():
            torch.testing.assert_close(g(q, caches, new), f(q, caches, new))
        assert latest().concrete is None and latest().compiled == readings
    assert len(graphs()) == 1 and len(latest().programs) == 6


def test_a_graph_that_holds_for_some_extents_alone_is_read_once():
    """Torch takes the halves to be of one length, which the usual example, a prime, has not."""

    def f(x, w):
        half = x.shape[0] // 2
        return (x[:half] + x[half:]) @ w

    g, w = compiled(f, dynamic=True), torch.randn(5, 4)
    with torch.no_grad():
        for rows in (8, 12, 6, 30):
            x = torch.randn(rows, 5)
            torch.testing.assert_close(g(x, w), f(x, w))
    assert latest().concrete is None and latest().compiled == 1 and len(latest().programs) == 4


def test_a_size_that_is_computed_with():
    def f(x, w):
        y = (x @ w) * x.shape[0] + torch.arange(x.shape[0]).unsqueeze(1) / x.shape[0] ** 0.5
        return y, y.t(), torch.zeros(x.shape[0], 2), x.shape[0] + 1

    g, w = compiled(f, dynamic=True), torch.randn(5, 4)
    with torch.no_grad():
        for rows in (3, 8, 5):
            x = torch.randn(rows, 5)
            wanted, got = f(x, w), g(x, w)
            torch.testing.assert_close(got, wanted)
            assert [t.stride() for t in got[:3]] == [t.stride() for t in wanted[:3]]
    assert latest().programs


def test_a_cache_of_any_batch():
    """Its extents are open; a call writes to what it is given."""
    eager = Counting().eval()
    other = copy.deepcopy(eager)
    del eager.total, other.total
    eager.total, other.total = torch.zeros(1), torch.zeros(1)
    f = compiled(other, dynamic=True)
    with torch.no_grad():
        for batch in (2, 3, 5):
            x, at, cache = torch.randn(batch, 3, 8), torch.arange(3), torch.randn(batch, 16, 8)
            mine = cache.clone()
            torch.testing.assert_close(f(x, mine, at), eager(x, cache, at))
            torch.testing.assert_close(mine, cache)
    assert latest().programs and latest().concrete is None


def test_products_are_ours():
    model = Attending().eval()
    f = compiled(model)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        torch.testing.assert_close(f(x), model(x), rtol=1e-4, atol=1e-5)
    (program,) = latest().programs
    kinds = [s.part.kind for s in program.steps]
    assert "attention" in kinds and kinds.count("gemm") in (4, 5) and "call" not in kinds


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_a_mode_is_taken(mode, monkeypatch):
    monkeypatch.setattr("tilewright.dynamo.options.PATIENT_S", 0.0)
    model, x = torch.nn.Linear(8, 8), torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="tilewright", mode=mode)(x), model(x))


def test_wrong_options_are_named():
    model, x = torch.nn.Linear(8, 8), torch.randn(3, 8)
    wrong = [
        ({"options": {"budget": 1}}, "no option 'budget'"),
        ({"options": {"met": 0}}, "met of 0"),
        ({"options": {"budget_s": "1"}}, "an argument of type str"),
        ({"mode": "fast"}, "no mode 'fast'"),
    ]
    for given, message in wrong:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message) as caught:
            torch.compile(model, backend="tilewright", **given)(x)
        assert isinstance(caught.value.__cause__ or caught.value.inner_exception, InputError)


class Counting(torch.nn.Module):
    """Writes to a cache that it is given, at positions that are data, and to buffers of its own."""

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(2, 16, 8))

    def forward(self, x, cache, at):
        self.seen.add_(x.shape[1])
        self.total.add_(1)
        cache.index_copy_(1, at, self.proj(x))
        return cache.sum(1) @ self.proj.weight, x.view(-1), cache[:, 0], cache


def test_writes_reach_caches_and_buffers():
    eager = Counting().eval()
    other = copy.deepcopy(eager)
    f = compiled(other, dynamic=True)
    with torch.no_grad():
        for length in (3, 4, 4, 5):
            x, at = torch.randn(2, length, 8), torch.arange(length) + 2
            cache = torch.randn(2, 16, 8)
            mine = cache.clone()
            for _ in range(2):  # the second time as it was bound the first
                wanted, got = eager(x, cache, at), f(x, mine, at)
                torch.testing.assert_close(got, wanted)
                torch.testing.assert_close(mine, cache)
                assert other.seen == eager.seen and torch.equal(other.total, eager.total)
            assert got[1].data_ptr() == x.data_ptr()
            assert got[2].data_ptr() == mine.data_ptr() and got[3].data_ptr() == mine.data_ptr()
    assert latest().why is None and latest().programs
    assert any(s.part.kind == "write" for s in latest().programs[0].steps)


def test_a_cache_is_not_kept_alive():
    import gc
    import weakref

    f = compiled(Counting().eval())
    x, at, cache = torch.randn(2, 3, 8), torch.arange(3), torch.randn(2, 16, 8)
    with torch.no_grad():
        f(x, cache, at)
        f(x, cache, at)
    gone = weakref.ref(cache.untyped_storage())
    del cache
    gc.collect()
    assert gone() is None


def test_a_cache_of_other_strides_is_written_where_it_lies():
    eager = Counting().eval()
    f = compiled(copy.deepcopy(eager), dynamic=True)
    x, at = torch.randn(2, 3, 8), torch.arange(3)
    with torch.no_grad():
        for cache in (torch.randn(2, 16, 8), torch.randn(16, 2, 8).transpose(0, 1), torch.randn(2, 16, 16)[..., ::2]):
            mine = torch.empty_strided(cache.shape, cache.stride()).copy_(cache)
            eager(x, cache, at), f(x, mine, at)
            torch.testing.assert_close(mine, cache)


def test_inputs_of_other_strides():
    model = Attending().eval()
    f = compiled(model, fullgraph=False)
    with torch.no_grad():
        for x in (torch.randn(2, 6, 32), torch.randn(6, 2, 32).transpose(0, 1), torch.randn(2, 6, 64)[..., ::2]):
            torch.testing.assert_close(f(x), model(x), rtol=1e-4, atol=1e-5)


def test_results_have_torchs_strides_and_are_the_callers():
    def f(x, w):
        y = x @ w
        return y.transpose(0, 1), y, x.t(), y.expand(2, 3, 4)

    x, w = torch.randn(3, 5), torch.randn(5, 4)
    g = compiled(f)
    with torch.no_grad():
        wanted, got = f(x, w), g(x, w)
        assert [t.stride() for t in got] == [t.stride() for t in wanted]
        torch.testing.assert_close(got, wanted)
        assert got[2].data_ptr() == x.data_ptr()
        got[1].zero_()
        assert not got[0].any() and not got[3].any()  # views of it, as in torch
        torch.testing.assert_close(g(x, w), wanted)


def test_an_inputs_view_is_written_through():
    def f(x, w):
        y = x[1:]
        y.mul_(2)
        return y @ w, x

    x, w = torch.randn(3, 5), torch.randn(5, 4)
    mine = x.clone()
    with torch.no_grad():
        wanted, got = f(x, w), compiled(f)(mine, w)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(mine, x)


@pytest.mark.parametrize("change", ["add_", "data", "state_dict", "swap"])
def test_weights_are_never_stale(change):
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()
    f, x = compiled(model), torch.randn(4, 16)
    with torch.no_grad():
        for turn in range(5):
            torch.testing.assert_close(f(x), model(x), rtol=1e-4, atol=1e-5)
            if change == "add_":
                model[0].weight.add_(1)
            elif change == "data":
                model[0].weight.data = torch.randn(32, 16)
            elif change == "state_dict":
                model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})
            else:
                model[0].weight = torch.nn.Parameter(torch.randn(32, 16))
            if turn == 3 and change == "add_":  # they change often: kernels read them as they are
                programs = latest().programs
                assert len(programs) == 1 and len(programs[0].input_types) == 2


def test_layers_of_one_class_have_programs_of_their_own():
    layers = torch.nn.ModuleList(Attending() for _ in range(3)).eval()
    whole = copy.deepcopy(layers)
    for layer in layers:
        layer.compile(backend="tilewright", options=NOW)
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        for _ in range(2):
            for layer, other in zip(layers, whole, strict=True):
                torch.testing.assert_close(layer(x), other(x))
    assert sum(len(g.programs) for g in graphs()) == 3


def test_gradients_of_three_steps():
    eager = Attending()
    other = copy.deepcopy(eager)
    f = compiled(other, dynamic=True)
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, other)]
    for length in (4, 6, 6):
        x = torch.randn(2, length, 32, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        eager(x).square().mean().backward()
        f(y).square().mean().backward()
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-4, atol=1e-6)
        for p, q in zip(eager.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    made = {g.name: g for g in graphs() if g.programs}
    assert {"forward", "backward"} <= set(made) and all(g.why is None for g in made.values())
    assert all(g.compiled == 1 and g.concrete is None for g in made.values())
    assert any(s.part.kind == "gemm" for s in made["backward"].programs[0].steps)


def test_grad_and_no_grad_have_graphs_of_their_own():
    model = torch.nn.Linear(8, 4)
    f, x = compiled(model), torch.randn(3, 8)
    for _ in range(2):
        assert f(x).requires_grad
        with torch.no_grad():
            assert not f(x).requires_grad
            torch.testing.assert_close(f(x), model(x))
    with torch.inference_mode():
        torch.testing.assert_close(f(x), model(x))


def test_derivatives_forward():
    f = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU()).requires_grad_(False)
    g = torch.compile(f, backend="tilewright", options=NOW)
    x, v = torch.randn(2, 3, 8)
    g(x)
    wanted = torch.func.jvp(f, (x,), (v,))[1]
    with forward_ad.dual_level():
        torch.testing.assert_close(forward_ad.unpack_dual(g(forward_ad.make_dual(x, v))).tangent, wanted)
    torch.testing.assert_close(torch.func.jvp(g, (x,), (v,))[1], wanted)


def test_autocast():
    model = Attending().eval()
    f, x = compiled(model), torch.randn(2, 5, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, got = model(x), f(x)
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_dropout_draws_anew():
    drop = torch.nn.Dropout(0.5)

    def f(x, w):
        return drop(x @ w), drop(x @ w)

    x, w = torch.rand(64, 16) + 1, torch.rand(16, 32) + 1
    g = compiled(f)
    with torch.no_grad():
        first, second = g(x, w)
        again, _ = g(x, w)
    assert not torch.equal(first, second) and not torch.equal(first, again)
    kept = first != 0
    assert 0.4 < kept.float().mean() < 0.6
    torch.testing.assert_close(first[kept], 2 * (x @ w)[kept])


@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (3, 1)])
def test_extents_of_zero_and_one(shape):
    model = torch.nn.Linear(shape[1], 4).eval()
    f = compiled(model, dynamic=True)
    with torch.no_grad():
        x = torch.randn(shape)
        torch.testing.assert_close(f(x), model(x))


def test_breaks_and_numbers():
    def f(x, w, n):
        y = x @ w
        torch._dynamo.graph_break()
        return (y * n).relu() @ w.t(), y.shape[0] * n

    x, w = torch.randn(3, 5), torch.randn(5, 4)
    g = compiled(f, dynamic=True, fullgraph=False)
    with torch.no_grad():
        for n in (2, 3, 3, 0.5):
            wanted, got = f(x, w, n), g(x, w, n)
            torch.testing.assert_close(got[0], wanted[0])
            assert got[1] == wanted[1]


def test_what_cannot_stay_open_is_compiled_for_each_shape():
    """Torch's own operator, to which an extent is given."""

    def f(x, w):
        y = x @ w
        return torch.nn.functional.interpolate(y[None, None], size=(2 * x.shape[0], 8), mode="bicubic")

    w = torch.randn(5, 4)
    g = compiled(f, dynamic=True)
    with torch.no_grad():
        for rows in (3, 6, 3):
            x = torch.randn(rows, 5)
            torch.testing.assert_close(g(x, w), f(x, w), rtol=1e-4, atol=1e-5)
    assert latest().why is None and latest().concrete is not None and latest().compiled == 2


def test_what_no_graph_holds_runs_in_torch():
    def f(x, w):
        return torch.fft.fft(x @ w), x @ w

    x, w = torch.randn(3, 5), torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(f)(x, w), f(x, w))
    assert "complex" in latest().why and not latest().programs


def test_where_a_graph_breaks_is_advice():
    first, second = (torch.nn.Linear(64, 64).eval() for _ in range(2))

    def f(x):
        x = torch.relu(first(x))
        torch._dynamo.graph_break()
        return second(x)

    x = torch.randn(4, 64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(f, fullgraph=False)(x), f(x))
    before, behind = graphs()[-2:]
    (found,) = before.programs[0].explain().facts.advice
    assert found.kind == "graph-break" and found.where[0].startswith("test_backend.py:") and "graph_break()" in found.where[0]
    assert found.saves_us and "Python between is not counted" in found.basis and "nothing is fused across" in found.why
    assert behind.broken == "" and behind.programs[0].explain().facts.advice == []


def test_torch_runs_extents_until_they_are_met_again():
    model = torch.nn.Linear(8, 4).eval()
    f = compiled(model, dynamic=True, met=2)
    with torch.no_grad():
        for rows, programs in ((3, 1), (4, 1), (5, 1), (4, 2), (4, 2)):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(f(x), model(x))
            assert len(latest().programs) == programs


def test_the_latest_extents_are_kept():
    model = torch.nn.Linear(8, 4).eval()
    f = compiled(model, dynamic=True, most=2)
    with torch.no_grad():
        for rows in (3, 4, 5, 6):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(f(x), model(x))
    assert len(latest().programs) == 2


def test_threads():
    model = Attending().eval()
    f = compiled(model, dynamic=True)
    inputs = [torch.randn(2, length, 32) for length in (3, 4, 5, 6)]
    with torch.no_grad():
        f(inputs[0])
        wanted = [model(x) for x in inputs]
    wrong = []

    def work(i):
        with torch.no_grad():
            for _ in range(5):
                got = f(inputs[i])
                if not torch.allclose(got, wanted[i], rtol=1e-4, atol=1e-5):
                    wrong.append(i)

    in_threads(4, work)
    assert not wrong


def test_better_kernels_take_their_place():
    model = torch.nn.Linear(64, 64).eval()
    f, x = compiled(model, budget_s=2.0), torch.randn(32, 64)
    with torch.no_grad():
        for _ in range(20):
            torch.testing.assert_close(f(x), model(x), rtol=1e-4, atol=1e-5)
        (program,) = latest().programs
        assert program.search is not None and program.wait(30)
        torch.testing.assert_close(f(x), model(x), rtol=1e-4, atol=1e-5)
