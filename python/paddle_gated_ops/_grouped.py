"""Matrix products of rows that are sorted by expert, each expert's rows with that expert's matrix.

``counts`` holds each expert's number of rows. Experts without rows are left out of the products, as Paddle 2.6 refuses
empty matrices. What the products need beside their result is one expert's share of it, where slices are views; with
FLAGS_use_stride_kernel=0 it is the result's size, as the experts' products are put together by a copy.
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


def _slices_are_views():
    """Whether writing to a slice writes to its tensor. A slice is a copy without the flag, which may change at any time."""
    flag = "FLAGS_use_stride_kernel"
    return paddle.get_flags([flag])[flag]


def grouped_matmul(rows, weights, counts, transpose=False):
    """Products in eager mode, without autograd.

    Args:
        rows (Tensor): [rows, in].
        weights (Tensor): [experts, in, out], with ``transpose`` [experts, out, in]; cast to rows' dtype one by one.
        counts (sequence): of ints, one an expert.

    Returns:
        Tensor: [rows, out], rows' dtype.
    """
    used = list(_used(counts))
    products = (
        paddle.matmul(rows[start:end], cast(weights[expert], rows.dtype), transpose_y=transpose)
        for expert, start, end in used
    )
    if used and not _slices_are_views():
        return paddle.concat(list(products))
    out = _empty([rows.shape[0], weights.shape[1 if transpose else 2]], rows.dtype, rows.place)
    for (_, start, end), product in zip(used, products):
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


def _weight_grads(rows, grad_out, counts, dtype):
    """(expert, its gradient) of each expert that has rows, one at a time."""
    for expert, start, end in _used(counts):
        yield expert, cast(paddle.matmul(rows[start:end], grad_out[start:end], transpose_x=True), dtype)


def grouped_weight_grad(rows, grad_out, counts, dtype):
    """The gradient of grouped_matmul's weights, in eager mode, without autograd.

    Args:
        rows (Tensor): [rows, in].
        grad_out (Tensor): [rows, out], rows' dtype.
        counts (sequence): of ints, one an expert.
        dtype (paddle.dtype): of the result.

    Returns:
        Tensor: [experts, in, out]. Experts without rows have zeros.
    """
    shape = [rows.shape[1], grad_out.shape[1]]
    grads = _weight_grads(rows, grad_out, counts, dtype)
    if not _slices_are_views():
        zeros = _C_ops.full(shape, 0.0, dtype, rows.place)
        grads = dict(grads)
        return paddle.stack([grads.get(expert, zeros) for expert in range(len(counts))])
    out = _empty([len(counts), *shape], dtype, rows.place)
    for expert, count in enumerate(counts):
        if not count:
            out[expert].zero_()
    for expert, grad in grads:
        out[expert].copy_(grad, False)
    return out


def add_grouped_weight_grad(rows, grad_out, counts, main_grad):
    """Adds the gradient of grouped_matmul's weights to main_grad (float32, [experts, in, out]), in place."""
    if not _slices_are_views():
        main_grad.add_(grouped_weight_grad(rows, grad_out, counts, paddle.float32))
        return
    for expert, grad in _weight_grads(rows, grad_out, counts, paddle.float32):
        main_grad[expert].add_(grad)
