import gc

import pytest
import torch
from torch._dynamo.utils import counters

from tilewright import dynamo
from tilewright.schedule import tuning_database

dynamo.register()


@pytest.fixture(scope="module")
def decisions(tmp_path_factory):
    return tmp_path_factory.mktemp("decisions")


@pytest.fixture(autouse=True)
def decided_once(monkeypatch, decisions, no_memory_of_other_tests):
    """What the tests of a file chose, its later ones take over: kernels are chosen for each shape."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(decisions))
    monkeypatch.setattr("tilewright.compiler.user_cache", tuning_database.user_cache)


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()
    counters.clear()
    gc.collect()  # `graphs()` are those of one test
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
