"""Explanations: the choices, the folds, their reasons, and the places where folding failed."""
