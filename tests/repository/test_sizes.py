"""Sizes in whole parts."""

import pytest

from tilewright.sizes import next_power_of_2, round_up


@pytest.mark.parametrize(("size", "to", "up"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128), (-5, 4, -4), (7, 1, 7)])
def test_round_up(size, to, up):
    assert round_up(size, to) == up


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (2**40 + 1, 2**41)])
def test_next_power_of_2(n, power):
    assert next_power_of_2(n) == power
