"""ONNX's Loop for the reference evaluator, whose own takes an absent condition for false and joins scanned matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from onnx.reference.op_run import OpRun


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
