"""Tilewright: a matrix-multiplication compiler for XLA HLO, ONNX and PyTorch programs."""

__version__ = "0.1.0"
