"""One process of several that share a cache: `counted_process.py linear|tuned|program|rows ROWS…` compiles, calls, and prints
as JSON how often it compiled machine code, verified, timed and searched, and what it found. `counted_process.py explain FILE…`
is the command line's verb; programs are kept however small, and what the machine reaches is said, not measured. How often
either is done is counted, too."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections import Counter

import torch

import tilewright
from tilewright.candidates.llvm.runtime import engine
from tilewright.cli import main
from tilewright.frontends import LoadOptions
from tilewright.hardware import ceilings
from tilewright.linear import kernels
from tilewright.runtime import programs
from tilewright.schedule import bench, buckets, budget, search, tuning_database

torch.set_num_threads(1)
done: Counter[str] = Counter()


def counting(module: object, name: str, what: str) -> None:
    inner = getattr(module, name)

    def counted(*given, **named):
        done[what] += 1
        return inner(*given, **named)

    setattr(module, name, counted)


counting(engine, "_parsed", "compiled")
counting(bench, "examine", "verified")
counting(tuning_database, "spot_check", "verified")
counting(bench, "expect", "expected")
counting(bench, "time_interleaved", "timed")
counting(search._Search, "run", "searched")
counting(programs, "keep", "kept")
tuning_database.TuningDatabase._quiet = lambda self: False  # what was measured beside other tests is not measured again
for module in (budget, buckets, tuning_database):
    assert module.search is search.search


def layer() -> tilewright.Linear:
    torch.manual_seed(0)
    return tilewright.Linear.from_float(torch.nn.Linear(128, 96), group_size=32)


def linear(rows: list[int]) -> object:
    made = layer()
    for count in rows:
        x = torch.randn(count, 128)
        torch.testing.assert_close(made(x), x @ made.weight.tensor().t() + made.bias, rtol=1e-4, atol=1e-5)
    return made.candidates()


def tuned(rows: list[int]) -> object:
    kernels.MOST_ROWS_OF_A_CPU = 4
    table = layer().tune(budget_s=0.2)
    return [(b.first, b.last, b.family.name, b.at_first.time_us) for b in table.buckets], linear(rows)


def program(rows: list[int]) -> object:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32), torch.nn.Softmax(-1)).eval()
    x = torch.randn(rows[0], 64)
    made = tilewright.compile(
        module, example_inputs=(x,), budget_s=10.0 * (len(rows) > 1)
    )  # for two small products and a softmax: enough beside other tests
    torch.testing.assert_close(made(x), module(x), rtol=1e-4, atol=1e-5)
    return [str(s.decision.kernel.schedule) for s in made.steps if s.decision is not None]


def any_rows(rows: list[int]) -> object:
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 96).eval()

    def at(count: int):
        return tilewright.load(module, LoadOptions(example_inputs=(torch.empty(count, 64),)))

    made = tilewright.compile_rows(at, last=rows[-1], budget_s=0.3)
    for count in rows:
        x = torch.randn(count, 64)
        torch.testing.assert_close(made(x), module(x), rtol=1e-4, atol=1e-5)
    return [(b.first, b.last, b.family.name, b.at_last.time_us) for b in made.table.buckets], made.table.measured


def explain(words: list[str]) -> object:
    programs.LEAST_BYTES = 0
    ceilings._measure = lambda target, key: time.sleep(0.3) or ceilings.Record(key, {"f32": 100.0}, 10.0, 8.0)
    counting(ceilings, "_measure", "measured")
    sys.argv = ["tilewright", "explain", *words, "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main()
    return [(p["chosen"]["candidate"], p["chosen"]["schedule"]) for p in json.loads(said.getvalue())["products"]]


if sys.argv[1] == "explain":
    found = explain(sys.argv[2:])
else:
    found = {"linear": linear, "tuned": tuned, "program": program, "rows": any_rows}[sys.argv[1]](list(map(int, sys.argv[2:])))
sys.stdout.write(json.dumps({"done": done, "found": found}))
