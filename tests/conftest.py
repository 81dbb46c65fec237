import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor

import hypothesis
import pytest
import torch

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX is a reference here; it must not look for an accelerator
os.environ.setdefault("TILEWRIGHT_WORKER", "0")  # what tests replace must be seen; test_worker.py has the worker
hypothesis.settings.register_profile("tilewright", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tilewright")
torch.set_num_threads(2)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job; the programs that tests start inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests marked `beside` do nothing but wait for a process. They come last, and their processes run one after the other beside
# the others, which leave a core idle for most of the time.
_beside = ThreadPoolExecutor(1)
_ends: dict[str, Future[object]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("beside") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        for item in session.items:
            for mark in item.iter_markers("beside"):
                _ends[item.nodeid] = _beside.submit(mark.kwargs["by"], **item.callspec.params)


def pytest_sessionfinish() -> None:
    _beside.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def done(request: pytest.FixtureRequest) -> object:
    """What the function `by` of the test's mark `beside` returned, given the test's parameters."""
    return _ends[request.node.nodeid].result()


@pytest.fixture(autouse=True)
def no_memory_of_other_tests(monkeypatch):
    """No test reads what another one, or the user, measured; the tests of that cache give it a folder of their own."""
    monkeypatch.setattr("tilewright.compiler.user_cache", lambda: None)
