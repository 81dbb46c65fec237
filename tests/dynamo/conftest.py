import weakref

import pytest
import torch
from torch._dynamo.utils import counters

from tilewright import dynamo
from tilewright.schedule import cache as schedule_cache

dynamo.register()


@pytest.fixture(scope="module")
def decisions(tmp_path_factory):
    return tmp_path_factory.mktemp("decisions")


@pytest.fixture(autouse=True)
def decided_once(monkeypatch, decisions, no_memory_of_other_tests):
    """Let a file's later tests take over what its earlier ones chose: kernels are chosen for each shape."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(decisions))
    monkeypatch.setattr("tilewright.compiler.user_cache", schedule_cache.user_cache)


@pytest.fixture(autouse=True)
def compiled_anew(monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr("tilewright.dynamo.compiled._all", weakref.WeakSet())  # torch 2.15 keeps some graphs of earlier tests
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
