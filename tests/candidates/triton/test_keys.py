"""The names under which Triton keeps machine code on the disk: the same in every process, whatever it compiled before."""

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
    """In one process nothing was, in the other a function that the kernel calls by way of another; Triton alone tells them
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
