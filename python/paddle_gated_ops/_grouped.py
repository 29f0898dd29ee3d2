"""Matrix products of rows that are sorted by expert, each expert's rows with that expert's matrix.

``counts`` holds each expert's number of rows. Experts without rows are left out of the products, as Paddle 2.6 refuses
empty matrices. What the products need beside their result is one expert's share of it.
"""

import paddle
from paddle import _C_ops
from paddle.nn.functional import linear


def cast(tensor, dtype):
    """The tensor itself where it has the dtype already."""
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def _empty(shape, dtype, place):
    return _C_ops.empty(shape, dtype, place)  # paddle.empty of 2.6 knows the current device alone


def _used(counts):
    """(expert, first row, row after the last) of each expert that has rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, start, start + count
        start += count


def grouped_matmul(rows, weights, counts, transpose=False):
    """Products in eager mode, without autograd.

    Args:
        rows (Tensor): [rows, in].
        weights (Tensor): [experts, in, out], with ``transpose`` [experts, out, in]; cast to rows' dtype one by one.
        counts (sequence): of ints, one an expert.

    Returns:
        Tensor: [rows, out], rows' dtype.
    """
    out = _empty([rows.shape[0], weights.shape[1 if transpose else 2]], rows.dtype, rows.place)
    for expert, start, end in _used(counts):
        product = paddle.matmul(rows[start:end], cast(weights[expert], rows.dtype), transpose_y=transpose)
        out[start:end].copy_(product, False)  # a plain copy of memory, which an assignment to out[start:end] is not
    return out


def grouped_matmul_in_graph(rows, weights, counts):
    """The same of plain differentiable ops, for programs and DistTensors."""
    used = list(_used(counts))
    if not used:
        return paddle.zeros([0, weights.shape[2]], rows.dtype)
    # split, not slices: it refuses another number of rows when the program runs. linear, not matmul: that of 3.3 takes no
    # variables of the legacy IR.
    parts = rows.split([end - start for _, start, end in used])
    return paddle.concat([linear(part, cast(weights[expert], rows.dtype)) for part, (expert, _, _) in zip(parts, used)])


def grouped_weight_grad(rows, grad_out, counts, weights):
    """The gradient of grouped_matmul's weights, in eager mode, without autograd.

    Args:
        rows (Tensor): [rows, in].
        grad_out (Tensor): [rows, out], rows' dtype.
        counts (sequence): of ints, one an expert.
        weights (Tensor): [experts, in, out].

    Returns:
        Tensor: of the weights' shape and dtype. Experts without rows have zeros.
    """
    grad = paddle.empty_like(weights)
    for expert, count in enumerate(counts):
        if not count:
            grad[expert].zero_()
    for expert, start, end in _used(counts):
        product = paddle.matmul(rows[start:end], grad_out[start:end], transpose_x=True)
        grad[expert].copy_(cast(product, weights.dtype), False)
    return grad


def add_grouped_weight_grad(rows, grad_out, counts, main_grad):
    """Adds the gradient of grouped_matmul's weights to main_grad (float32, [experts, in, out]), in place."""
    for expert, start, end in _used(counts):
        product = paddle.matmul(rows[start:end], grad_out[start:end], transpose_x=True)
        main_grad[expert].add_(cast(product, paddle.float32))
