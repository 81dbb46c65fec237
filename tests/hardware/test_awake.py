"""A GPU is woken by the driver's own calls, in a thread, and what fails there is nobody's error."""

import ctypes

import pytest

from tilewright.cli.verbs import cli
from tilewright.hardware import awake


class Driver:
    """Stands for libcuda: notes what it is asked for; `fails` gives a status other than 0."""

    def __init__(self, fails=""):
        self.fails, self.asked = fails, []

    def __getattr__(self, name):
        def call(*given):
            self.asked.append(
                (name, *(g.value if hasattr(g, "value") else g for g in given if isinstance(g, (int, ctypes.c_int))))
            )
            if name == "cuDeviceGet":
                given[0]._obj.value = 40 + given[1]
            return int(name == self.fails)

        return call


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:3", 3)])
def test_the_primary_context_of_the_named_device_is_made(monkeypatch, device, index):
    driver, opened = Driver(), []
    monkeypatch.setattr(awake.ctypes, "CDLL", lambda name: opened.append(name) or driver)
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    awake.wake(device).join()
    assert opened == ["libcuda.so.1"] and awake.os.environ["CUDA_MODULE_LOADING"] == "LAZY"
    assert driver.asked == [("cuInit", 0), ("cuDeviceGet", index), ("cuDevicePrimaryCtxRetain", 40 + index)]


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet"])
def test_nothing_is_asked_of_a_driver_that_failed(monkeypatch, fails):
    driver = Driver(fails)
    monkeypatch.setattr(awake.ctypes, "CDLL", lambda name: driver)
    awake.wake("cuda").join()
    assert driver.asked[-1][0] == fails


def test_a_machine_without_a_driver_has_nothing_to_wake(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(awake.ctypes, "CDLL", missing)
    awake.wake("cuda:1").join()
    assert awake.wake("cpu") is None and awake.wake("tpu") is None


def test_a_verb_wakes_the_device_it_is_given(tmp_path, monkeypatch):
    from click.testing import CliRunner

    file, woken = tmp_path / "a.hlo", []
    file.write_text("HloModule m\nENTRY e { p = f32[2]{0} parameter(0) ROOT n = f32[2]{0} negate(p) }\n")
    monkeypatch.setattr(awake, "wake", woken.append)
    assert CliRunner().invoke(cli, ["perf", str(file), "--budget", "0", "--device", "cpu"]).exit_code == 0
    assert woken == ["cpu"]
