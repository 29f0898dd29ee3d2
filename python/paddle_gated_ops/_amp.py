"""Automatic mixed precision: the casts that the differentiable functions make where auto_cast acts."""

import paddle
from paddle.base import core
from paddle.base.framework import _dygraph_tracer

from ._graph import is_tensor


def autocast_dtype():
    """'bfloat16' or 'float16' where paddle.amp.auto_cast acts, else None. On CPU it acts never."""
    state = _dygraph_tracer() if paddle.in_dynamic_mode() else _pir_state()
    if state is None or state._amp_level == core.AmpLevel.O0:
        return None
    return state._amp_dtype


def _pir_state():
    return core._get_amp_attrs() if hasattr(core, "_get_amp_attrs") else None


def cast_inputs(function, inputs):
    """The inputs of a function under auto_cast.

    Args:
        function (str): the public name.
        inputs (dict): name to (tensor, dtype), the dtype that the function takes.

    Returns:
        list: the tensors. Where auto_cast acts with bfloat16, those of float32 and bfloat16 are cast to the dtype that the
        function takes, by a differentiable cast; gradients then come back in the caller's dtype.

    Raises:
        ValueError: auto_cast acts with float16, which the ops do not compute.
    """
    active = autocast_dtype()
    if active is None:
        return [tensor for tensor, _ in inputs.values()]
    if active != "bfloat16":
        raise ValueError(f"{function}: auto_cast must be with dtype='bfloat16', but is with {active!r}")
    return [_cast(tensor, dtype) for tensor, dtype in inputs.values()]


def _cast(tensor, dtype):
    castable = (paddle.float32, paddle.bfloat16)
    wanted = getattr(paddle, dtype)
    if is_tensor(tensor) and tensor.dtype in castable and tensor.dtype != wanted:
        return tensor.astype(dtype)
    return tensor  # right already, or for the function's own checks to refuse
