"""Functions for a race on "f32[64,48] @ f32[48,32] + bias, relu": right ones, and one for each way to be wrong."""

import ctypes
import os
import time

import torch

PROBLEM = "f32[64,48] @ f32[48,32] + bias, relu"
KEPT = []


def sound(a, b, bias):
    return torch.relu(torch.addmm(bias, a, b))


def in_columns(a, b, bias):
    return sound(a, b, bias).t().contiguous().t()


def jittering(a, b, bias):
    return sound(a, b, bias) * (1 + 1e-6 * torch.rand(1))


def slow(a, b, bias):
    time.sleep(0.02)
    return sound(a, b, bias)


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
