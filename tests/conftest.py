import collections
import math
import os
import signal
from pathlib import Path

import hypothesis
import pytest
import torch
from races import StillMeter

from tilewright.files import cache_folder
from tilewright.hardware.load import Load

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX is a reference here; it must not look for an accelerator
os.environ.setdefault("TILEWRIGHT_WORKER", "0")  # what tests replace must be seen; test_worker.py has the worker
hypothesis.settings.register_profile("tilewright", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tilewright")
# `make test` runs one process a core: a second thread in each would wait for the other process at every barrier.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job; the programs that tests start inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest itself deselects by marks
def pytest_collection_modifyitems(items):
    """Leave every n-th case of a test marked `thin(n)` to `make test`, the others to `make conformance`."""
    seen = collections.Counter()
    for item in items:
        mark = item.get_closest_marker("thin")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker(pytest.mark.conformance)
            seen[name] += 1
    # What the commands and programs of the pages take is minutes: no process is to be left alone with them at the end.
    items.sort(key=lambda item: "repository" not in item.nodeid)


@pytest.fixture(autouse=True)
def no_memory_of_other_tests(monkeypatch):
    """No test reads what another one, or the user, measured; the tests of that cache give it a folder of their own."""
    monkeypatch.setattr("tilewright.schedule.shipped.FOLDER", Path(__file__).with_name("nothing_is_shipped"))
    for module in ("compiler", "m_dispatch", "runtime.artefact.read", "runtime.programs"):
        monkeypatch.setattr(f"tilewright.{module}.user_cache", lambda: None)
    monkeypatch.setattr("tilewright.runtime.program_folder.cache_folder", folder_of_the_test)


@pytest.fixture(autouse=True)
def threads_as_they_were():
    """Give torch's threads back after each test that sets them: plans and kept choices depend on them."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


CACHE = os.environ.get("TILEWRIGHT_CACHE")


def folder_of_the_test() -> Path:
    """The cache folder that a test has set; the user's kept programs are neither read, counted nor removed."""
    if os.environ.get("TILEWRIGHT_CACHE") == CACHE:
        raise FileNotFoundError("the test set no TILEWRIGHT_CACHE")
    return cache_folder()


@pytest.fixture(autouse=True)
def never_quiet(monkeypatch):
    """Have nothing that was chosen beside other tests chosen again once those rest; a test of that says when it is quiet."""
    monkeypatch.setattr("tilewright.schedule.tuning_database.TuningDatabase._quiet", lambda self: False)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """Count what is measured beside other tests as reliable; a test of noise plants its own."""
    for module in ("hardware.ceilings", "schedule.measure", "schedule.bench", "report.measure.perf"):
        monkeypatch.setattr(f"tilewright.{module}.Meter", StillMeter(Load()))
    monkeypatch.setattr("tilewright.hardware.ceilings.load_now", lambda device, threads: Load())
    monkeypatch.setattr("tilewright.schedule.race.SPREAD", math.inf)
