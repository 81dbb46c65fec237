"""Fit the polynomials of `lowering/scalar/approximations.py` anew and say how far off the committed ones are.

Each is the polynomial of least largest error on its interval, times a weight, among those with coefficients of f32 or f16.
It is found without rounding by linear programming on Chebyshev points; then the lowest coefficient is rounded, the others are
fitted again, and so on. Targets are computed by mpmath to 40 digits. Needs mpmath (comes with torch) and SciPy (with JAX).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click
import mpmath as mp
import numpy as np
from scipy.optimize import linprog

from tilewright.lowering.scalar import approximations as committed

mp.mp.dps = 40
POINTS = 600
Real = Callable[[mp.mpf], mp.mpf]


def upper(x: mp.mpf) -> mp.mpf:
    """Phi(-x), Phi the normal distribution."""
    return mp.erfc(x / mp.sqrt(2)) / 2


def scaled_upper(x: mp.mpf) -> mp.mpf:
    """Phi(-x) without what it falls by."""
    return upper(x) * mp.exp(x * x / 2)


def log2_upper(x: mp.mpf) -> mp.mpf:
    """log2 of Phi(-x), which gelu(-x) is -x times."""
    return mp.log(upper(x), 2)


def log2_upper_tanh(x: mp.mpf) -> mp.mpf:
    """log2 of what the gelu by tanh multiplies -x by."""
    return -mp.log(1 + mp.exp(2 * mp.sqrt(2 / mp.pi) * (x + mp.mpf("0.044715") * x**3)), 2)


@dataclass(frozen=True)
class Fit:
    """One polynomial.

    Attributes:
        coefficients: the committed ones, lowest first.
        target: the function of x that the polynomial in `variable` of x is to be.
        low, high: of x.
        weight: what a difference is multiplied by: 1 / target gives relative errors.
        variable: what the polynomial is in.
        exact: how many of the lowest coefficients are given, not fitted.
        kind: the type whose numbers coefficients are.
    """

    coefficients: Sequence[float]
    target: Real
    low: float
    high: float
    weight: Real
    variable: Real = lambda x: x
    exact: int = 0
    kind: type[np.floating] = np.float32


def relative_log2(x: mp.mpf) -> mp.mpf:
    """The relative error of 2^p for an error of p, which is what multiplies."""
    return mp.log(2)


FITS = {
    "ERFC": Fit(committed.ERFC, lambda x: -mp.erf(x) / x, 1e-6, 0.7075, lambda x: x / mp.erfc(x), lambda x: x * x),
    "TAIL": Fit(
        committed.TAIL, lambda x: x * scaled_upper(x), 0.99, 14.4, lambda x: 1 / (x * scaled_upper(x)),
        lambda x: (x - committed.TAIL_FROM) / (x + committed.TAIL_TO), exact=1,
    ),
    "EXP2": Fit(committed.EXP2, lambda x: mp.power(2, x), -0.5, 0.5, lambda x: mp.power(2, -x)),
    "UPPER": Fit(
        committed.UPPER, scaled_upper, 0.0, 14.4, lambda x: mp.mpf(1), lambda x: x / (x + committed.UPPER_TO), exact=1
    ),
    "LOG2_UPPER": Fit(committed.LOG2_UPPER, log2_upper, 0.0, committed.LOG2_UPPER_TO, relative_log2),
    "LOG2_UPPER_16": Fit(committed.LOG2_UPPER_16, log2_upper, 0.0, committed.LOG2_UPPER_16_TO, relative_log2),
    "LOG2_UPPER_8": Fit(committed.LOG2_UPPER_8, log2_upper, 0.0, 5.0, relative_log2, kind=np.float16),
    "LOG2_UPPER_TANH_8": Fit(
        committed.LOG2_UPPER_TANH_8, log2_upper_tanh, 0.0, committed.LOG2_UPPER_TANH_8_TO, relative_log2, kind=np.float16
    ),
}  # fmt: skip


def points(fit: Fit) -> list[mp.mpf]:
    """Chebyshev points of a fit's interval, its ends among them."""
    angles = np.cos(np.pi * np.arange(POINTS) / (POINTS - 1))
    return [mp.mpf(float(x)) for x in (fit.low + fit.high) / 2 + (fit.high - fit.low) / 2 * angles]


def error(fit: Fit, coefficients: Sequence[float]) -> float:
    """The largest weighted error of a polynomial."""
    at = [mp.mpf(float(c)) for c in reversed(coefficients)]
    return float(max(abs((mp.polyval(at, fit.variable(x)) - fit.target(x)) * fit.weight(x)) for x in points(fit)))


def fitted(fit: Fit) -> list[float]:
    """Coefficients of the type, each rounded after those below it."""
    xs = points(fit)
    u = np.array([float(fit.variable(x)) for x in xs])
    reach = np.abs(u).max()
    weight = np.array([float(fit.weight(x)) for x in xs])
    basis = np.vander(u / reach, len(fit.coefficients), increasing=True) * weight[:, None]
    done = [float(c) for c in fit.coefficients[: fit.exact]]
    for i in range(len(done), len(fit.coefficients)):
        known = [mp.mpf(c) for c in reversed(done)] or [mp.mpf(0)]
        left = np.array([float((fit.target(x) - mp.polyval(known, fit.variable(x))) * fit.weight(x)) for x in xs])
        done.append(float(fit.kind(_minimax(basis[:, i:], left)[0] / reach**i)))
    return done


def _minimax(basis: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The combination of columns whose largest difference from `wanted` is least."""
    start = np.linalg.lstsq(basis, wanted, rcond=None)[0]
    rest = wanted - basis @ start
    size = np.abs(rest).max()
    n, columns = basis.shape
    one = np.ones((n, 1))
    both = np.vstack([np.hstack([basis, -one]), np.hstack([-basis, -one])])
    made = linprog(
        [*[0.0] * columns, 1.0], both, np.concatenate([rest, -rest]) / size, bounds=[(None, None)] * columns + [(0, None)]
    )
    return start + made.x[:columns] * size if made.success else start


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(FITS)))
def main(names: Sequence[str]) -> None:
    """Fit NAMES, all of them unless told otherwise."""
    for name in names or FITS:
        fit = FITS[name]
        again = fitted(fit)
        was, now = error(fit, fit.coefficients), error(fit, again)
        click.echo(f"{name}: committed {was:.3g} (2^{np.log2(was):.2f}), fitted again {now:.3g} (2^{np.log2(now):.2f})")
        click.echo("    " + ", ".join(repr(c) for c in again))


if __name__ == "__main__":
    main()
