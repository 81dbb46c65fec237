"""Committed polynomials are as far off as their comments say; the script that fits them finds none much better or the same."""

import pytest

pytest.importorskip("scipy")
from benchmarks import fit_approximations as fits

ERRORS = {
    "ERFC": 5e-9,
    "TAIL": 6e-9,
    "EXP2": 2**-18,
    "UPPER": 2.5e-8,
    "LOG2_UPPER": 2**-16.1,
    "LOG2_UPPER_16": 2**-15,
    "LOG2_UPPER_8": 2**-8.8,
    "LOG2_UPPER_TANH_8": 2**-7.8,
}


@pytest.fixture(autouse=True)
def few_points(monkeypatch):
    monkeypatch.setattr(fits, "POINTS", 200)


def test_each_own_fit_has_its_error_stated():
    assert set(fits.FITS) == set(ERRORS)


@pytest.mark.parametrize("name", ERRORS)
def test_a_polynomial_is_as_far_off_as_stated(name):
    fit = fits.FITS[name]
    assert 0.5 * ERRORS[name] < fits.error(fit, fit.coefficients) < ERRORS[name]


@pytest.mark.parametrize("name", ["ERFC", "TAIL", "EXP2"])
def test_fitting_again_finds_the_same(name):
    fit = fits.FITS[name]
    again = fits.fitted(fit)
    assert fits.error(fit, again) == pytest.approx(fits.error(fit, fit.coefficients), rel=0.05)
    assert again[:3] == pytest.approx(list(fit.coefficients[:3]), rel=1e-6)
