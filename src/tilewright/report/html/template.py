"""Templates of the pages and pictures: HTML, SVG, CSS and JavaScript beside this module, filled in with escaped values."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from tilewright.report.words import percent, us

KINDS = ("gemm", "attention", "norm", "softmax", "elementwise", "quantize", "reduce", "call", "gather")


def fill(template: str, **values: object) -> str:
    """The text of a template with these values in it. Whatever is put into it is escaped, but for what the template marks safe.

    Args:
        template: the name of a file beside this module.
    """
    return _environment().get_template(template).render(values)


def text_of(name: str) -> str:
    """The text of a file beside this module."""
    return files("tilewright.report.html").joinpath(name).read_text("utf-8")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FunctionLoader(text_of),
        autoescape=True,
        finalize=_seen,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "us": us,
        "percent": percent,
        "parted": _parted,
        "at": _coordinate,
        "digest": _digest,
        "kind_class": _kind_class,
    }
    return made


def _seen(value: object) -> object:
    """A value without the characters that no reader could see, and that XML forbids; what is no UTF-8 in a file's name is a
    question mark, as on a terminal. Templates' own text stays as it is."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(c for c in value.encode(errors="replace").decode() if c.isprintable())


def _parted(name: str) -> Markup:
    """A dotted name that may break behind its parts, escaped."""
    return Markup("<wbr>").join(re.split(r"(?<=[.,_])", str(_seen(name))))


def _coordinate(value: float) -> str:
    """A place in a drawing, to a tenth of its unit."""
    return f"{value:.1f}".removesuffix(".0")


def _kind_class(kind: str) -> str:
    """The class of a kind of step in `kinds.css`."""
    return kind if kind in KINDS else "other"


def _digest(text: str) -> str:
    """The hash by which a content security policy (W3C, CSP Level 3, 2.3.1) allows a script or a style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
