"""Host time of a session's call beside onnxruntime's, and the throughput of several threads that share a session.

    python benchmarks/session_calls.py [--rounds 15] [--calls 1000] [--layers 2] [--seconds 0.7]

The first table is of a product of 3 x 24 by 24 x 8, whose work is nothing: µs of a call, on one thread, the least of rounds
that take turns (in brackets the median). The second is of BERT (hidden 256) with open batch and length, at 28 shapes in random
order: calls a second from several threads of Python at once, each call on one thread; the medians of nine turns, and of their
ratios.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))


def pair(source: Any) -> tuple[Any, Any]:
    """A session of ours, and onnxruntime's, for calls on one thread."""
    import onnxruntime

    import tilewright.ort

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    ours = tilewright.ort.InferenceSession(source, options, budget_s=5)
    return ours, onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def product(rows: int | str) -> bytes:
    """The model of one product, of so many rows, or with open ones."""
    from onnx import TensorProto, helper, numpy_helper

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [rows, e]) for n, e in (("x", 24), ("y", 8)))
    weight = numpy_helper.from_array(np.ones((24, 8), np.float32), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


def ways(session: Any, kind: type) -> dict[str, Callable[[], object]]:
    """Ways to call a session of the product."""
    x = np.ones((3, 24), np.float32)
    binding, held = session.io_binding(), session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("y")
    value, memory = kind.ortvalue_from_numpy(x), kind.ortvalue_from_shape_and_type((3, 8), np.float32)
    held.bind_ortvalue_input("x", value)
    held.bind_ortvalue_output("y", memory)
    return {
        "`run`": lambda: session.run(None, {"x": x}),
        "`run_with_ort_values`": lambda: session.run_with_ort_values(["y"], {"x": value}),
        "`run_with_iobinding`, new memory": lambda: session.run_with_iobinding(binding),
        "`run_with_iobinding`, memory bound": lambda: session.run_with_iobinding(held),
    }


def times_us(contenders: list[Callable[[], object]], rounds: int, calls: int) -> list[str]:
    """Least and median time of a call of each, in turns."""
    taken: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for call, times in zip(contenders, taken, strict=True):
            call()
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - begun) / calls * 1e6)
    return [f"{min(t):.1f} ({statistics.median(t):.1f})" for t in taken]


def throughput(session: Any, threads: int, seconds: float, feeds: Callable[[int, int], Any]) -> float:
    """Calls a second from so many threads."""
    counts, ends = [0] * threads, time.perf_counter() + seconds

    def work(index: int) -> None:
        rng = random.Random(index)
        while time.perf_counter() < ends:
            session.run(None, feeds(rng.randint(1, 4), rng.randrange(16, 65, 8)))
            counts[index] += 1

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    return sum(counts) / seconds


@click.command()
@click.option("--rounds", default=15, show_default=True)
@click.option("--calls", default=1000, show_default=True)
@click.option("--layers", default=2, show_default=True)
@click.option("--seconds", default=0.7, show_default=True)
def main(rounds: int, calls: int, layers: int, seconds: float) -> None:
    """Print both tables."""
    import onnxruntime
    from transformer_exports import exported, feeds

    import tilewright.ort

    print("| a call | extents | ours, µs | onnxruntime |\n|---|---|---:|---:|")
    for rows, said in ((3, "fixed"), ("rows", "open")):
        ours, theirs = pair(product(rows))
        mine, other = ways(ours, tilewright.ort.OrtValue), ways(theirs, onnxruntime.OrtValue)
        for name, call in mine.items():
            print(f"| {name} | {said} | {' | '.join(times_us([call, other[name]], rounds, calls))} |")
    config = {
        "hidden_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "vocab_size": 100,
    }
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = pair(exported(Path(folder), "bert-calls", dynamo=False, opset=17, dynamic=True, config=config))
        for session in (ours, theirs):
            for batch, length in itertools.product(range(1, 5), range(16, 65, 8)):  # instances are made
                session.run(None, feeds(batch, length))
        print("\n| threads | ours, calls a second | onnxruntime | ratio |\n|---:|---:|---:|---:|")
        for threads in (1, 2, 4):
            found = [[throughput(s, threads, seconds, feeds) for s in (ours, theirs)] for _ in range(9)]
            medians = [f"{statistics.median(f):.0f}" for f in zip(*found, strict=True)]
            print(f"| {threads} | {' | '.join(medians)} | {statistics.median(a / b for a, b in found):.2f} |")


if __name__ == "__main__":
    main()
