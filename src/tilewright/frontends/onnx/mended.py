"""ONNX's Loop and Resize for the reference evaluator, whose own ones misread some models.

Its Loop takes an absent condition for false and joins scanned matrices; its Resize misreads some coordinates, and axes counted
from the back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from onnx.reference.op_run import OpRun

_MODE = "coordinate_transformation_mode"


def loop_operator() -> type[OpRun]:
    """The operator class to give `ReferenceEvaluator` as one of its `new_ops`."""
    from onnx.reference.ops import op_loop

    class Loop(op_loop.Loop):
        """Runs the body while its condition holds, at most M times; an absent bound does not bind (ONNX Loop)."""

        op_domain = ""

        def _run(self, M: Any, cond: Any, *carried: Any, context: Any = None, body: Any = None, **more: Any) -> tuple[Any, ...]:
            names, run_body = body.input_names, cast("Any", self)._run_body
            state = list(carried)
            turns: list[list[Any]] = []
            going = cond is None or bool(np.asarray(cond).all())
            while going and (M is None or len(turns) < int(np.asarray(M).reshape(()))):
                values = {**(context or {}), names[0]: np.array(len(turns), np.int64), names[1]: np.array(True)}
                values.update(zip(names[2:], state, strict=True))
                results = list(run_body(values, **more))
                going = bool(np.asarray(results[0]).all())
                state = results[1 : 1 + len(state)]
                turns.append(results[1 + len(state) :])
            scanned = body.proto_.output[1 + len(state) :]
            return (*state, *(_stacked([t[i] for t in turns], info) for i, info in enumerate(scanned)))

    return Loop


def _stacked(parts: list[Any], info: Any) -> np.ndarray:
    """The results of the iterations stacked along a new first axis; of none, an empty array of the declared type."""
    from onnx.helper import tensor_dtype_to_np_dtype

    if parts:
        return np.stack(parts)
    type = info.type.tensor_type
    dtype = tensor_dtype_to_np_dtype(type.elem_type) if type.elem_type else np.float32
    return np.empty((0, *(d.dim_value for d in type.shape.dim)), dtype)


def resize_operator() -> type[OpRun]:
    """The operator class to give `ReferenceEvaluator` as one of its `new_ops`."""
    from onnx.reference.ops import op_resize

    class Resize(op_resize.Resize):
        """Reads coordinate 0 where `pytorch_half_pixel` leaves one element of an axis, as the operator's definition says."""

        op_domain = ""

        def _run(self, *given: Any, **more: Any) -> tuple[Any, ...]:
            run = cast("Any", super()._run)
            found: list[Any] = [*given, None, None]
            x, roi, scales, sizes = found[0], found[1], found[2], found[3]
            axes = list(range(x.ndim))
            if more.get("axes") is not None:
                axes = more["axes"] = [int(a) % x.ndim for a in more["axes"]]
            wanted: list[Any] = [] if sizes is None else list(sizes)
            by_size = bool(wanted)
            lengths = [x.shape[a] for a in axes]
            stretched = wanted if by_size else [n * float(s) for n, s in zip(lengths, scales, strict=True)]
            kept = by_size and more.get("keep_aspect_ratio_policy") not in (None, "stretch", b"stretch")
            if kept:
                most = max if "smaller" in str(more["keep_aspect_ratio_policy"]) else min
                factor = most(w / n for w, n in zip(wanted, lengths, strict=True))
                stretched = [math.floor(n * factor + 0.5) for n in lengths]
            whole = [math.floor(n) for n in stretched]
            if more.get(_MODE) == "align_corners" and whole != stretched and more.get("antialias"):
                raise NotImplementedError("Resize by fractions of an extent with corners and antialiasing")
            ends = [w == 1 != n for w, n in zip(whole, lengths, strict=True)]
            if more.get(_MODE) != "pytorch_half_pixel" or not any(ends):
                return run(*given, **more)
            if kept:
                raise NotImplementedError("Resize to one element by pytorch_half_pixel and an aspect ratio")

            def factors(those: bool) -> tuple[Any, Any]:
                """Scales or sizes of the axes that end with one element, or of the others; the rest stay."""
                if by_size:
                    return None, np.array([w if e == those else n for w, e, n in zip(wanted, ends, lengths, strict=True)])
                return np.array([s if e == those else 1.0 for s, e in zip(scales, ends, strict=True)], np.float32), None

            # Axes one after another are all of them at once. A coordinate that starts at 0 is 0 for the one element.
            (x,) = run(x, roi, *factors(True), **{**more, _MODE: "asymmetric"})
            lengths = [1 if e else n for e, n in zip(ends, lengths, strict=True)]
            return run(x, roi, *factors(False), **more)

    return Resize
