"""`torch.compile(model, backend="tilewright")`: docs/torch-compile.md.

`tilewright` is the backend, which torch finds by an entry point of the installed package. From a source tree that is not
installed, `register()` makes its name known.
"""

from tilewright.dynamo.backend import register, tilewright
from tilewright.dynamo.compiled import Compiled, graphs

__all__ = ["Compiled", "graphs", "register", "tilewright"]
