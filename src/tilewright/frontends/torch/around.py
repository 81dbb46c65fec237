"""Surroundings of a trace of a module in torch: questions asked of tensors and ways taken are noticed, and nothing is left
afterwards."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from tilewright.frontends.torch.registry import DependsOnDataError

_TORCH = str(Path(torch.__file__).parent)


@contextlib.contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Generator[None]:
    """A context in which these attributes of `owner` have other values."""
    held = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in held.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def numbers_refused(where: str) -> Generator[None]:
    """A context that ends a trace in which Python takes a number out of a tensor, whatever becomes of the number: the symbol
    that stands for it is no `float` or `int`, and as one `v == v` is true where it is NaN. torch's own checks may ask.

    Raises:
        DependsOnDataError: Python takes one.
    """
    names = ("create_unbacked_symfloat", "create_unbacked_symint", "create_unbacked_symbool")
    met = list[str]()

    def refusing(name: str) -> Callable[..., Any]:
        own: Callable[..., Any] = getattr(ShapeEnv, name)

        def create(shapes: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
            if _is_a_number_for_python():
                met.append(name)
                raise DependsOnDataError("Python takes a number out of a tensor", where=where)
            return own(shapes, *args, **kwargs)

        return create

    try:
        with replaced(ShapeEnv, {name: refusing(name) for name in names}):
            yield
    except Exception as error:
        if not met:
            raise
        what, hint = "Python takes a number out of a tensor", "calculate with tensors, without .item() and .tolist()"
        raise DependsOnDataError(what, where=where, hint=hint) from error


def _is_a_number_for_python() -> bool:
    """Tell whether a symbol is made for what `.item()` gives the program's own code, and not for what torch checks at each
    call."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    if frame.f_code.co_name != "local_scalar_dense":
        return False
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_name.startswith("_check"):
            return False
        frame = frame.f_back
    return True


class NothingMade(TorchFunctionMode):
    """`torch.tensor([])`, with which a cache of transformers begins, as an operator's result: torch loses such constants as it
    decomposes."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and len(args) == 1 and args[0] == []:
            return torch.empty(0, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_ASKED = torch.compiler.is_compiling, torch.compiler.is_exporting
_OWN = {f.__name__: FunctionType(f.__code__, f.__globals__, f.__name__) for f in _ASKED}
_listening: list[list[str]] = []


def answered(name: str) -> bool:
    """The answer of torch's own function `name`, once it is noted who asked."""
    asker = sys._getframe(2).f_code  # pyright: ignore[reportPrivateUsage] - a frame that is held holds tensors
    if _listening and not asker.co_filename.startswith(_TORCH):
        _listening[-1].append(f"{asker.co_filename} in {asker.co_name}")
    return _OWN[name]()


def _noted_is_compiling() -> bool:  # both run among the names of torch.compiler
    from tilewright.frontends.torch import around

    return around.answered("is_compiling")


def _noted_is_exporting() -> bool:
    from tilewright.frontends.torch import around

    return around.answered("is_exporting")


@contextlib.contextmanager
def asking(found: list[str]) -> Generator[None]:
    """A context that adds places outside torch that ask whether they are being traced to `found`.

    torch's functions stay the objects they are and have other code meanwhile: Dynamo knows them by identity, in tables that it
    fills once (`tracing_state_functions` in torch/_dynamo/variables/torch.py), maybe here; others have imported them by name.
    """
    for f, noted in zip(_ASKED, (_noted_is_compiling, _noted_is_exporting), strict=True):
        f.__code__ = noted.__code__
    _listening.append(found)
    try:
        yield
    finally:
        _listening.pop()
        if not _listening:
            for f in _ASKED:
                f.__code__ = _OWN[f.__name__].__code__


@contextlib.contextmanager
def casts_that_change_nothing() -> Generator[None]:
    """`self.router.to(self.dtype)` in `forward` leaves a module as it is; torch cannot exchange weights that it traces."""
    own = torch.nn.Module.to

    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore
        held = [*module.parameters(), *module.buffers()]
        same = all(
            (dtype is None or not t.is_floating_point() or t.dtype is dtype) and device in (None, t.device) for t in held
        )
        return module if same and layout is None else own(module, *args, **kwargs)

    with replaced(torch.nn.Module, {"to": to}):
        yield


@contextlib.contextmanager
def hooks_kept() -> Generator[None]:
    """Hooks on buffers of all modules are afterwards those from before: a trace that fails leaves torch 2.11's own behind."""
    hooks = cast("dict[int, object]", torch.nn.modules.module._global_buffer_registration_hooks)  # pyright: ignore[reportPrivateUsage]
    before = {**hooks}
    try:
        yield
    finally:
        for key in [k for k in hooks if k not in before]:
            del hooks[key]


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """torch logs tracebacks and prints programs before it raises; the error alone reaches the user."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
