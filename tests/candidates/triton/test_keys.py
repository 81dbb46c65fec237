"""The names under which Triton keeps machine code on the disk: the same in every process, whatever it compiled before."""

import threading
import time

import pytest

pytest.importorskip("triton")

from tilewright.candidates.triton.runtime import module

TEXT = f"""{module.IMPORTS}
FACTOR = tl.constexpr(3)


@triton.jit
def inner(x):
    return x * FACTOR


@triton.jit
def outer(x):
    return inner(x) + 1


@triton.jit
def kernel(p):
    tl.store(p, outer(tl.load(p)))
"""


@pytest.mark.parametrize("settle", [module.keyed, lambda kernel: None])
def test_a_kernels_key_does_not_depend_on_what_was_compiled_before(settle):
    """One process compiled nothing, the other a function that the kernel calls by way of another; Triton alone tells them
    apart."""
    fresh, later = (module.module(TEXT + "\n" * (i + 2 * (settle is module.keyed))) for i in range(2))
    assert later.inner.cache_key
    settle(fresh.kernel)
    settle(later.kernel)
    assert (fresh.kernel.cache_key == later.kernel.cache_key) == (settle is module.keyed)


def test_a_constant_that_a_callee_reads_is_part_of_the_key():
    one, other = (module.module(TEXT.replace("constexpr(3)", f"constexpr({n})")) for n in (4, 5))
    for made in (one, other):
        module.keyed(made.kernel)
    assert one.kernel.cache_key != other.kernel.cache_key


def test_who_compiles_waits_until_triton_is_warm(monkeypatch):
    monkeypatch.setattr(module, "_warming", [])
    done = []
    monkeypatch.setattr(module, "_warm", lambda: (time.sleep(0.1), done.append(threading.current_thread())))
    module.warm()
    module.warm()
    made = module.compiled(module.module(TEXT + "\n" * 9).kernel, {"p": "*fp32"}, module.Arch("cuda", 90, 32))
    assert "cubin" in made.asm and done == module._warming


def test_warming_leaves_nothing_of_the_key_to_work_out():
    from triton.runtime.cache import triton_key

    triton_key.cache_clear()
    module._warm()
    assert triton_key.cache_info().currsize == 1
    module._warm()
    assert triton_key.cache_info().misses == 1


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_what_machine_code_needs_is_what_the_toolkit_says(capability):
    """Sums are spilled where there are few registers."""
    text = f"""{module.IMPORTS}

@triton.jit
def kernel(a, b, o):
    i, j = tl.arange(0, 32), tl.arange(0, 128)
    x = tl.load(a + i[:, None] * 32 + i[None, :])
    y = tl.load(b + i[:, None] * 128 + j[None, :])
    tl.store(o + i[:, None] * 128 + j[None, :], tl.dot(x, y))
"""
    kinds, arch = {"a": "*fp16", "b": "*fp16", "o": "*fp32"}, module.Arch("cuda", capability, 32)
    spilled = []
    for registers in (None, 64):
        kernel = module.compiled(module.module(text).kernel, kinds, arch, num_warps=1, maxnreg=registers)
        said = module._tool("cuobjdump", kernel.asm["cubin"], "--dump-resource-usage")
        needs = module.needs(kernel)
        assert f"REG:{needs.registers} " in said and f"STACK:{needs.spills} " in said, said
        spilled.append(needs.spills)
    assert spilled[0] < spilled[1]
