"""Calls of the registered ops: from graphs (PIR and the legacy IR), and on DistTensors."""

import paddle
from paddle.base import core
from paddle.base.framework import Variable
from paddle.base.layer_helper import LayerHelper

try:  # 3.x
    from paddle.base.framework import in_pir_mode
    from paddle.pir import Value
except ImportError:  # 2.6 has PIR for tests alone
    Value = Variable

    def in_pir_mode():
        return False


def in_graph_mode():
    """Whether ops now go into a program, in to_static too."""
    return not paddle.in_dynamic_mode()


def check_variables(function, variables, dtypes):
    """TypeError for what is no variable of a program, ValueError for a dtype other than that of the documentation."""
    for (name, variable), dtype in zip(variables.items(), dtypes):
        if not isinstance(variable, (Variable, Value)):
            raise TypeError(
                f"{function}: {name} must be a variable of the program (static graph mode is on), but is "
                f"{type(variable).__name__}"
            )
        actual = str(variable.dtype).rsplit(".", 1)[-1].lower()
        if {"bf16": "bfloat16", "fp32": "float32"}.get(actual, actual) != dtype:
            raise ValueError(f"{function}: {name} must have dtype {dtype}, but has {actual}")


def refuse_in_graph(function, given):
    """ValueError for arguments, {name: value}, that mean nothing in a graph."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{function}: {name} must be left out in a static graph, where outputs are variables of their own and "
                "the executor owns the memory"
            )


def call_registered(op, inputs, outputs, attributes=None):
    """Outputs of the registered op, a tuple of variables or DistTensors.

    Args:
        op (str): the registered name.
        inputs (dict): name to variable, in the registered order.
        outputs (dict): name to dtype, in the registered order.
        attributes (dict): name to value, in the registered order.
    """
    attributes = attributes or {}
    if paddle.in_dynamic_mode() or in_pir_mode():
        return tuple(core.eager._run_custom_op(op, *inputs.values(), *attributes.values()))
    helper = LayerHelper(op)
    variables = {name: helper.create_variable_for_type_inference(dtype) for name, dtype in outputs.items()}
    helper.append_op(
        type=op,
        inputs={name: [variable] for name, variable in inputs.items()},
        outputs={name: [variable] for name, variable in variables.items()},
        attrs=attributes,
    )
    for variable in variables.values():
        variable.stop_gradient = True
    return tuple(variables.values())
