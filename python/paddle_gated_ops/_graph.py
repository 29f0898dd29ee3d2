"""Calls of the registered ops: from graphs (PIR and the legacy IR), and on DistTensors."""

import os

import paddle
from paddle.base import core
from paddle.base.framework import Variable
from paddle.base.layer_helper import LayerHelper

from ._library import C

try:  # 3.x
    from paddle import _C_ops
    from paddle.base.framework import in_pir_mode
    from paddle.jit.marker import unified
    from paddle.pir import Value

    _run_custom_op = _C_ops._run_custom_op  # type: ignore[attr-defined]
except ImportError:  # 2.6
    from paddle.jit import not_to_static as unified  # type: ignore[assignment]

    # 2.6 translates bytecode where a graph breaks, and fails at keyword-only parameters: not in this package's files.
    core.eval_frame_skip_file_prefix((os.path.dirname(os.path.abspath(__file__)),))

    _run_custom_op = core.eager._run_custom_op
    Value = Variable

    def in_pir_mode() -> bool:
        return False


# unified marks a function that serves eager mode and graphs alike: to_static calls it as it is, and does not rewrite it.
__all__ = ["call_registered", "check_dtype", "check_variables", "in_graph_mode", "is_tensor", "refuse_buffers", "unified"]


def in_graph_mode():
    """Whether ops now go into a program, in to_static too."""
    return not paddle.in_dynamic_mode()


def is_tensor(value):
    """Whether it is a Tensor in eager mode, a variable in a graph.

    Ask before reading any attribute: in eager mode those of a variable whose program is gone end the process.
    """
    return isinstance(value, paddle.Tensor if paddle.in_dynamic_mode() else (Variable, Value))


def check_variables(function, variables, dtypes):
    """The checks of a call that goes into a program, before anything does.

    Args:
        function (str): the public name; C has ``check_<function>_shapes``.
        variables (dict): name to argument.
        dtypes (sequence): the dtype of each.

    Raises:
        TypeError: an argument is no variable.
        ValueError: a dtype or shape other than that of the documentation, as far as the shape is known.
    """
    for (name, variable), dtype in zip(variables.items(), dtypes):
        if not is_tensor(variable):
            raise TypeError(
                f"{function}: {name} must be a variable of the program (static graph mode is on), but is "
                f"{type(variable).__name__}"
            )
        check_dtype(function, name, variable, dtype)
    getattr(C, f"check_{function}_shapes")(*(list(variable.shape) for variable in variables.values()))


def check_dtype(function, name, variable, dtype):
    """ValueError where a variable or tensor has another dtype."""
    actual = str(variable.dtype).rsplit(".", 1)[-1].lower()
    actual = {"bf16": "bfloat16", "fp32": "float32"}.get(actual, actual)
    if actual != dtype:
        raise ValueError(f"{function}: {name} must have dtype {dtype}, but has {actual}")


def refuse_buffers(function, given):
    """ValueError for arguments, {name: value}, that a registered op does not take."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{function}: {name} must be left out in a static graph and for DistTensors, where each output is a new "
                "tensor and the framework owns the memory"
            )


def call_registered(op, inputs, outputs, attributes=None, differentiable=False):
    """Outputs of the registered op, a tuple of variables or DistTensors.

    Args:
        op (str): the registered name.
        inputs (dict): name to variable, in the registered order.
        outputs (dict): name to dtype, in the registered order.
        attributes (dict): name to value, in the registered order.
        differentiable (bool): whether gradients flow through; else the outputs have stop_gradient True.
    """
    attributes = attributes or {}
    if paddle.in_dynamic_mode() or in_pir_mode():
        variables = _run_custom_op(op, *inputs.values(), *attributes.values())
        variables = variables if isinstance(variables, (list, tuple)) else [variables]
    else:
        if differentiable:
            inputs = _all_or_none_stopped(inputs)
        variables = _append_legacy_op(op, inputs, outputs, attributes)
    if not differentiable:
        if paddle.in_dynamic_mode():
            return tuple(variable.detach() for variable in variables)
        for variable in variables:
            variable.stop_gradient = True
    return tuple(variables)


def _all_or_none_stopped(inputs):
    """The inputs of a differentiable op of the legacy IR, whose grad op of a part of the gradients does not infer its types.

    Where some inputs have stop_gradient True, copies that have it not stand in for them: the op's gradient is whole then,
    and the backward goes no further than the copies.
    """
    if all(variable.stop_gradient for variable in inputs.values()):
        return inputs
    return {name: _passing(variable) if variable.stop_gradient else variable for name, variable in inputs.items()}


def _passing(variable):
    copy = paddle.assign(variable)
    copy.stop_gradient = False
    return copy


def _append_legacy_op(op, inputs, outputs, attributes):
    helper = LayerHelper(op)
    variables = {name: helper.create_variable_for_type_inference(dtype) for name, dtype in outputs.items()}
    helper.append_op(
        type=op,
        inputs={name: [variable] for name, variable in inputs.items()},
        outputs={name: [variable] for name, variable in variables.items()},
        attrs=attributes,
    )
    return list(variables.values())
