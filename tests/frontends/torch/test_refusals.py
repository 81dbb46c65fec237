"""Refusals of PyTorch programs: two lines that say what, where and what to try."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from against_torch import Of, read
from torch import nn
from torch.export import export, save
from torch.nn.attention.flex_attention import flex_attention

from tilewright.errors import InputError, TilewrightError, UnsupportedError
from tilewright.frontends import LoadOptions, load
from tilewright.frontends import torch as frontend


class Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _with_buffer(value: torch.Tensor, f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> nn.Module:
    module = Of(lambda x: f(x, module.held))
    module.register_buffer("held", value)
    return module


class Cache:
    """A result torch knows nothing of."""


X = torch.randn(4, 3)
REFUSED: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...], type[TilewrightError], str, str]] = {
    "a branch on what has no shape": (
        lambda x: x + 1 if torch.unique(x).numel() > 2 else x,
        *((X,), UnsupportedError, r"branches or takes a shape on the data: .*u0", r"torch\.where instead of `if`"),
    ),
    "control flow": (
        lambda x: torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,)),
        *((X,), UnsupportedError, r"control flow \(cond\) has no place in a graph \(cond\)", r"torch\.where over both"),
    ),
    "attention with a function of scores": (
        lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j)),
        *(
            (torch.randn(1, 2, 16, 16),),
            UnsupportedError,
            r"\(flex_attention\) has no place in a graph",
            r'implementation="sdpa"',
        ),
    ),
    "as many elements as there are different ones": (
        torch.unique,
        *((X,), UnsupportedError, r"a shape depends on the data: \[u0\]", r"torch\.where"),
    ),
    "a nested tensor": (
        lambda x: x + 1,
        *(
            (torch.nested.nested_tensor([X, X[:2]]),),
            UnsupportedError,
            "nested tensor, which no graph holds",
            "to_padded_tensor",
        ),
    ),
    "an input that changes": (
        lambda x: x.add_(1),
        *((X,), UnsupportedError, r"changes its input 'args_0'", r"pass a cache in"),
    ),
    "dropout in training": (
        nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)),
        *((X,), UnsupportedError, r"native_dropout\.default draws random numbers \(1 ", r"model\.eval\(\)"),
    ),
    "random numbers": (
        lambda x: x + torch.rand(4, 3),
        *((X,), UnsupportedError, r"aten\.rand\.default draws random numbers", r"model\.eval\(\)"),
    ),
    "shapes that do not fit": (
        nn.Linear(5, 2),
        *((X,), InputError, r"torch\.export fails: RuntimeError: .*\(Linear\)", r"check that module\(\*example_inputs\) runs"),
    ),
    "too many inputs": (
        nn.Linear(3, 2),
        *((X, X), InputError, r"torch\.export fails: TypeError: too many positional arguments", r"check that module"),
    ),
    "a result of no known type": (
        lambda x: (x, Cache()),
        *((X,), InputError, r"torch\.export fails: .*Cache", r"register_dataclass\(its class\)"),
    ),
    "weights without data": (
        Meta(),
        *((X,), InputError, r"a weight has no data \(meta device\) \(weight\)", "load the weights"),
    ),
    "a complex input": (
        lambda x: x.abs(),
        *(
            (X.to(torch.complex64),),
            UnsupportedError,
            r"an input is of type torch\.complex64, which no graph holds \(args_0\)",
            "make it complex inside the module",
        ),
    ),
    "a complex output": (
        torch.fft.rfft,
        *((X,), UnsupportedError, r"an output is of a type no graph holds \(complex\?\) \(output\)", "torch.view_as_real"),
    ),
    "a sparse weight": (
        _with_buffer(torch.eye(3).to_sparse(), lambda x, w: torch.mm(w, x.t())),
        *((X,), UnsupportedError, r"a weight is torch\.sparse_coo torch\.float32, which no graph holds \(held\)", "to_dense"),
    ),
    "strides before a slice": (
        lambda x: torch.as_strided(x[1:], (2,), (1,), 0),
        *((X,), UnsupportedError, r"reads memory by strides", "reshape or index"),
    ),
    "strides of what is not contiguous": (
        lambda x: torch.as_strided(x[:, ::2], (2, 2), (1, 2)),
        *((X,), UnsupportedError, r"reads memory by strides", "reshape or index"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_two_lines(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    program, args, kind, what, hint = REFUSED[name]
    with pytest.raises(kind, match=what) as error:
        read(program, *args)
    assert len(str(error.value).splitlines()) <= 2
    assert error.type is kind
    if hint:
        assert error.value.hint is not None and re.search(hint, error.value.hint)
    # torch's own logs and tracebacks do not reach the terminal
    assert capfd.readouterr().err == ""


def test_a_module_without_inputs_says_what_it_wants() -> None:
    with pytest.raises(InputError, match=r"needs example inputs to be traced with \(Linear\)\n  try: example_inputs="):
        frontend.load(nn.Linear(3, 2), LoadOptions())


class Payload:
    """Unpickling this touches a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.path, "w"))


@pytest.mark.parametrize("suffix", [".pt2", ".pt", ".pth"])
def test_a_saved_file_is_never_opened(suffix: str, tmp_path: Path) -> None:
    path, touched = tmp_path / f"model{suffix}", tmp_path / "touched"
    path.write_bytes(pickle.dumps(Payload(str(touched))))
    with pytest.raises(UnsupportedError, match=r"unpickling(.|\n)*torch\.export\.load\(path\)"):
        load(path)
    assert not touched.exists()


def test_what_the_refusal_of_a_file_advises_works(tmp_path: Path) -> None:
    path = tmp_path / "linear.pt2"
    save(export(nn.Linear(3, 2), (X,), strict=False), path)
    with pytest.raises(UnsupportedError, match="could run any code"):
        load(path)
    graph = load(torch.export.load(path))
    assert [n.shape for n in graph.outputs] == [(4, 2)]
