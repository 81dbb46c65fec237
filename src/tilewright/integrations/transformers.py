"""Models of transformers: `TilewrightConfig` for `from_pretrained`; `accelerate_` and `savable_` for models that were
quantised otherwise; `decode` for `generate`.

Importing this module registers the method "tilewright" with transformers, which then reads the folders that it wrote.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from tilewright.errors import InputError

if TYPE_CHECKING:
    from tilewright.integrations._decoding import decode
    from tilewright.integrations._transformers import TilewrightConfig, TilewrightQuantizer, accelerate_, savable_

__all__ = ["TilewrightConfig", "TilewrightQuantizer", "accelerate_", "decode", "savable_"]


def _registered() -> ModuleType:
    """Import the classes that transformers knows from then on.

    Raises:
        InputError: it is not installed, or lacks what they are made of.
    """
    try:
        return import_module("tilewright.integrations._transformers")
    except ImportError as error:
        hint = "pip install 'transformers>=5.16'"
        raise InputError(f"no transformers that quantised models work with: {error}", hint=hint) from error


_module = _registered()


def __getattr__(name: str) -> object:
    """Give the public names."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("tilewright.integrations._decoding") if name == "decode" else _module, name)
