"""Products with 4-bit weights for CPUs."""
