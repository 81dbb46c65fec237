"""Budgets of which one problem takes little: enough time by the clock for a program, and short searches."""

from tilewright.schedule import budget, key


def shorten(monkeypatch):
    """One problem takes a thousandth of a budget; that of 100 seconds counts as long."""
    monkeypatch.setattr(budget, "LONGEST_S", 0.0)
    monkeypatch.setattr(budget, "LONGEST", 0.001)
    monkeypatch.setattr(key, "BUDGETS", (("long", 0.05), ("short", 0.0)))
