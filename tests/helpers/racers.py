"""Functions for a race on "f32[64,48] @ f32[48,32] + bias, relu": right ones, and one for each way to be wrong."""

import ctypes
import os
import threading
import time

import torch

PROBLEM = "f32[64,48] @ f32[48,32] + bias, relu"
KEPT = []
STOP = threading.Event()  # ends what `at_work_behind` leaves


def sound(a, b, bias):
    return torch.relu(torch.addmm(bias, a, b))


def in_columns(a, b, bias):
    return sound(a, b, bias).t().contiguous().t()


def jittering(a, b, bias, calls=[0]):  # noqa: B006 - what it remembers
    calls[0] += 1
    return sound(a, b, bias) * (1 + 1e-6 * (calls[0] % 2))


def slow(a, b, bias):
    time.sleep(0.02)
    return sound(a, b, bias)


def remembering_until_written(a, b, bias, held={}):  # noqa: B006 - what it remembers
    """Hand out what it remembers of these inputs, unless they were written since; else it works for 2 ms more."""
    at = tuple((id(t), t._version) for t in (a, b, bias))
    if at not in held:
        time.sleep(0.002)
        held[at] = (sound(a, b, bias), a, b, bias)
    return held[at][0].clone()


def without_bias(a, b, bias):
    return torch.relu(a @ b)


def one_element_off(a, b, bias):
    c = sound(a, b, bias)
    c[3, 5] += 1
    return c


def in_bf16(a, b, bias):
    return torch.relu(a.bfloat16() @ b.bfloat16() + bias.bfloat16()).float()


def not_a_number(a, b, bias):
    c = sound(a, b, bias)
    c[0, 0] = float("nan")
    return c


def random(a, b, bias):
    return sound(a, b, bias) + torch.rand(64, 32)


def one_row_unwritten(a, b, bias):
    c = torch.empty(64, 32)
    c[:-1] = sound(a, b, bias)[:-1]
    return c


def writes_an_input(a, b, bias):
    c = sound(a, b, bias)
    a.zero_()
    return c


def a_view_of_an_input(a, b, bias):
    return a[:, :32]


def in_f64(a, b, bias):
    return sound(a, b, bias).double()


def of_three_axes(a, b, bias):
    return sound(a, b, bias)[None]


def two_results(a, b, bias):
    return sound(a, b, bias), a.clone()


def raising(a, b, bias):
    raise KeyError("no such thing")


def nothing(a, b, bias):
    return None


def no_tensors(a, b, bias):
    return [sound(a, b, bias), 3]


def sparse(a, b, bias):
    return sound(a, b, bias).to_sparse()


def the_same_memory_again(a, b, bias):
    if not KEPT:
        KEPT.append(torch.empty(64, 32))
    return KEPT[0].copy_(sound(a, b, bias))


def remembering_by_address(a, b, bias, held={}):  # noqa: B006 - what it remembers
    at = a.data_ptr(), b.data_ptr(), bias.data_ptr()
    if at not in held:
        held[at] = sound(a, b, bias)
    return held[at]


def remembering_by_tensor(a, b, bias, held={}):  # noqa: B006
    at = id(a), id(b), id(bias)
    if at not in held:
        held[at] = (sound(a, b, bias), a, b, bias)
    return held[at][0].clone()


def remembering_late(a, b, bias, held={}, calls=[0]):  # noqa: B006
    calls[0] += 1
    return sound(a, b, bias) if calls[0] < 9 else remembering_by_address(a, b, bias, held)


def remembering_by_an_element(a, b, bias, held={}):  # noqa: B006
    at = a.data_ptr(), float(a[0, 0]), float(b[3, 4]), float(bias[7])
    if at not in held:
        held[at] = sound(a, b, bias)
    return held[at].clone()


def remembering_by_a_row(a, b, bias, held={}):  # noqa: B006
    at = float(a[5].sum()), float(b[5].sum()), float(bias[:3].sum())
    if at not in held:
        held[at] = sound(a, b, bias)
    return held[at].clone()


def slowing_others_down(a, b, bias, calls=[0]):  # noqa: B006
    calls[0] += 1
    if calls[0] == 2:
        addmm = torch.addmm
        torch.addmm = lambda *given: (time.sleep(0.003), addmm(*given))[1]
    return torch.relu(a @ b + bias)


def with_a_slow_clock(a, b, bias, calls=[0]):  # noqa: B006
    """Replace the clock late, while it is timed."""
    calls[0] += 1
    if calls[0] == 12:
        began, real = time.perf_counter(), time.perf_counter
        time.perf_counter = lambda: began + (real() - began) / 100
    return sound(a, b, bias)


def at_work_behind(a, b, bias, threads=[]):  # noqa: B006
    def work():
        while not STOP.is_set():
            pass

    if not threads:
        threads.append(threading.Thread(target=work, daemon=True))
        threads[0].start()
    return sound(a, b, bias)


def wrong_after_many_calls(a, b, bias, calls=[0]):  # noqa: B006 - what it remembers
    calls[0] += 1
    return sound(a, b, bias) + (calls[0] > 8)


def of_two_arguments(a, b):
    return a @ b


def never_back(a, b, bias):
    while True:
        pass


def asleep(a, b, bias):
    time.sleep(1000)


def exiting(a, b, bias):
    os._exit(7)


def crashing(a, b, bias):
    ctypes.string_at(0)


def late_crash(a, b, bias, calls=[0]):  # noqa: B006
    calls[0] += 1
    return os._exit(9) if calls[0] > 40 else sound(a, b, bias)


KEPT_RESULT = r"the result is wrong: .* \(only in memory that held other data in an earlier call: it keeps results\)"
WRONG = {
    without_bias: r"the result is wrong: \d+ of 2048 elements differ",
    one_element_off: r"the result is wrong: 1 of 2048 elements differ, first at \[3, 5\]",
    in_bf16: r"the result is wrong: \d+ of 2048 elements differ",
    not_a_number: r"the result is wrong: 1 of 2048 elements differ, first at \[0, 0\]: nan",
    random: r"the result is wrong: \d+ of 2048 elements differ",
    one_row_unwritten: r"the result is wrong: 32 of 2048 elements differ, first at \[63, 0\]: nan",
    writes_an_input: "it writes its sources",
    a_view_of_an_input: "failed: a result lies in the memory of input a",
    in_f64: r"the result is torch.float64\[64, 32\], f32\[64,32\] wanted",
    of_three_axes: r"the result is torch.float32\[1, 64, 32\], f32\[64,32\] wanted",
    two_results: "gave 2 results, 1 wanted",
    raising: "failed: 'no such thing'",
    nothing: "failed: it gave a NoneType where tensors are due",
    no_tensors: "failed: it gave a int where tensors are due",
    sparse: "failed: a result is torch.sparse_coo, and no dense tensor",
    the_same_memory_again: "a result changed when it ran again: it gives memory that it writes later",
    remembering_by_address: KEPT_RESULT,
    remembering_by_tensor: KEPT_RESULT,
    remembering_late: "the result is wrong after many calls: only in memory that held other data in an earlier call",
    remembering_by_an_element: "the result is wrong after many calls: only in memory that held other data in an earlier call",
    remembering_by_a_row: "the result is wrong after many calls: only in memory that held other data in an earlier call",
    slowing_others_down: r"it replaced torch\.addmm$",
    with_a_slow_clock: r"it replaced time\.perf_counter$",
    wrong_after_many_calls: r"the result is wrong after many calls: [\d,]+ of 2,048 elements differ",
    of_two_arguments: r"failed: of_two_arguments\(\) takes 2 positional arguments but 3 were given",
}
LOST = {
    never_back: r"no answer in \d+ s: killed",
    asleep: r"no answer in \d+ s: killed",
    exiting: "crashed: its process ended with status 7",
    crashing: "crashed: SIGSEGV",
    late_crash: "crashed: its process ended with status 9",
}
