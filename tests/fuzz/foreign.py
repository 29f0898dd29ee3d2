"""What is passed where a tensor belongs, and the errors that may come of it. Each maker takes an array of the right kind."""

import gc

import numpy as np
import paddle

OLD = paddle.__version__.startswith("2.")


def _variable(array):
    """A variable of a program, and the program."""
    device = paddle.get_device()
    paddle.enable_static()
    try:
        program = paddle.static.Program()
        with paddle.static.program_guard(program, paddle.static.Program()):
            return paddle.static.data("x", list(array.shape), "float32"), program
    finally:
        paddle.disable_static()
        paddle.set_device(device)  # disable_static() makes the first GPU the current device


_kept = []


def _variable_of_a_program(array):
    variable, program = _variable(array)
    _kept[:] = [program]
    return variable


def _variable_of_a_deleted_program(array):
    variable, program = _variable(array)
    del program
    gc.collect(0)
    return variable


def _cleared(how):
    def make(array):
        tensor = paddle.ones([max(1, array.size)])
        getattr(tensor, how)()
        return tensor

    return make


def _ones(array):
    return paddle.ones([2, 3]) if array.ndim < 2 else paddle.ones(list(array.shape[-2:]))


def _selected_rows(array):
    table = paddle.ones([4, 3])
    table.stop_gradient = False
    paddle.nn.functional.embedding(paddle.to_tensor([1, 2]), table, sparse=True).sum().backward()
    return table.grad


NO_TENSORS = {
    "an int": lambda array: 3,
    "a float": lambda array: 1.5,
    "a bool": lambda array: True,
    "a string": lambda array: "x",
    "bytes": lambda array: b"x",
    "a list": lambda array: [1.0],
    "a tuple": lambda array: (),
    "a dict": lambda array: {},
    "an array": lambda array: array,
    "an array's number": lambda array: np.float32(1),
    "an object": lambda array: object(),
    "a class": lambda array: paddle.Tensor,
    "a function": lambda array: _ones,
    "a dtype": lambda array: paddle.bfloat16,
    "a place": lambda array: paddle.CPUPlace(),
    "a layer": lambda array: paddle.nn.ReLU(),
    "a list with a tensor": lambda array: [_ones(array)],
    "the tensor's own memory": lambda array: _ones(array).value().get_tensor(),
    "a variable": _variable_of_a_program,
    "a variable of a deleted program": _variable_of_a_deleted_program,
    "a program": lambda array: _variable(array)[1],
}

# Tensors of another kind, or without content.
NO_DENSE_TENSORS = {
    "a tensor that never was anything": lambda array: paddle.Tensor(),
    "a tensor that was not constructed": lambda array: paddle.Tensor.__new__(paddle.Tensor),
    "a tensor that was cleared": _cleared("_clear"),
    "a tensor without its data": _cleared("_clear_data"),
    "a sparse COO tensor": lambda array: _ones(array).to_sparse_coo(2),
    "a sparse CSR tensor": lambda array: paddle.ones([2, 3]).to_sparse_csr(),
    "selected rows": _selected_rows,
}
