"""Kernels for Hopper: TMA, mbarriers, wgmma."""
