"""Explanations: what was chosen and folded, why, and what could not be."""
