"""Costs of elementwise functions: the instructions that a function of one element takes, for cost models of generated kernels.

The tables are not multiples of one another. A target whose special function unit has a reciprocal and a power needs a third of
the instructions for `silu`, but half for `erf`; and where a model must only tell long from short, it has two or three numbers.
`schedule` orders kernels by them, so a changed number is a changed choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.ir.expression import QUICK

APPROXIMATED = frozenset({"exponential", "logistic", "silu", "tanh", "erf", "erfc", "gelu", "gelu_tanh"})  # by polynomials
COMPOSED = APPROXIMATED - {"exponential"}  # of an exponential or a polynomial and more, all of which takes registers at once


@dataclass(frozen=True)
class FunctionCosts:
    """Instructions of functions by name, and of every other function."""

    of: Mapping[str, int]
    otherwise: int = 1

    def __call__(self, fn: str) -> int:
        return self.of.get(fn, self.otherwise)


# A gemm's expressions on vectors of a CPU: counted in the forms of `functions.py`.
POLYNOMIAL = FunctionCosts({
    "divide": 8, "exponential": 12, "logistic": 18, "silu": 19, "tanh": 20, "gelu_tanh": 24, "erf": 25, "gelu": 28, "erfc": 30,
})  # fmt: skip
# A gemm's epilogue on Hopper, which has ex2.approx and rcp.approx (`FastMath`).
SPECIAL_UNIT = FunctionCosts({
    "exponential": 4, "logistic": 8, "silu": 8, "gelu_tanh": 10, "gelu": 12, "tanh": 14, "erf": 16, "erfc": 16,
})  # fmt: skip
# A row of a reduction nest on any target: tells what is worth storing from what is computed again in each pass.
ROW = FunctionCosts(dict.fromkeys(APPROXIMATED, 16) | {"divide": 4, "sqrt": 4, "rsqrt": 4})
# A step of an operand's conversion on the way to the dot of a plain Triton gemm: short or long.
ON_THE_WAY = FunctionCosts(dict.fromkeys(QUICK, 2), otherwise=24)
