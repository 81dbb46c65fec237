"""Machines: chips as data files, detection of this one, and its measured ceilings."""
