"""Folders of the checkout, for tests that read its files or start programs of their own."""

import os
import sys
from pathlib import Path

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
EXAMPLES = ROOT / "examples"
SEARCHED = [str(ROOT), str(HELPERS)]  # what a child needs on its path to import a test or a helper


def python_path() -> str:
    """The variable PYTHONPATH of a child that imports tests and helpers."""
    return os.pathsep.join([*SEARCHED, *sys.path])
