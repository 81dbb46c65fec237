"""Telling what was done and why."""
