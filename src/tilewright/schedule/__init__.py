"""Choosing a kernel for a problem: candidates, cost model, verification, measurement, tuning database."""
