"""Tilewright inside other packages, each imported when its module here is."""
