"""Elementwise operations as arithmetic, once for all targets: algorithms over `Value`s, which a target's `Builder` prints."""
