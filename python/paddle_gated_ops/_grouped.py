"""Matrix products of rows that are sorted by expert, each expert's rows with that expert's matrix.

``counts`` holds each expert's number of rows. Experts without rows are left out of the products, as Paddle 2.6 refuses
empty matrices. What the experts' products need beside their results is one expert's share: casts too are made by parts.
"""

import paddle


def _used(counts):
    """(expert, first row, row after the last) of each expert that has rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, start, start + count
        start += count


def _cast(tensor, dtype):
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def grouped_matmul(rows, weights, counts, dtype, out_dtype, transpose=False):
    """Products in eager mode, without autograd.

    Args:
        rows (Tensor): [rows, in].
        weights (Tensor): [experts, in, out], with ``transpose`` [experts, out, in].
        counts (sequence): of ints, one an expert.
        dtype (paddle.dtype): of the products' operands.
        out_dtype (paddle.dtype): of the result.

    Returns:
        Tensor: [rows, out].
    """
    out = paddle.empty([rows.shape[0], weights.shape[1 if transpose else 2]], out_dtype)
    for expert, start, end in _used(counts):
        part, matrix = _cast(rows[start:end], dtype), _cast(weights[expert], dtype)
        out[start:end] = _cast(paddle.matmul(part, matrix, transpose_y=transpose), out_dtype)
    return out


def grouped_matmul_in_graph(rows, weights, counts, dtype, out_dtype):
    """The same of plain differentiable ops, for programs and DistTensors."""
    used = list(_used(counts))
    if not used:
        return paddle.zeros([0, weights.shape[2]], out_dtype)
    # split, not slices: it refuses another number of rows when the program runs.
    parts = rows.split([end - start for _, start, end in used])
    products = [
        paddle.matmul(_cast(part, dtype), _cast(weights[expert], dtype)) for part, (expert, _, _) in zip(parts, used)
    ]
    return _cast(paddle.concat(products), out_dtype)


def grouped_weight_grad(rows, grad_out, counts, dtype, like):
    """The gradient of grouped_matmul's weights, in eager mode, without autograd.

    Args:
        rows (Tensor): [rows, in].
        grad_out (Tensor): [rows, out].
        counts (sequence): of ints, one an expert.
        dtype (paddle.dtype): of the products' operands.
        like (Tensor): the weights, [experts, in, out].

    Returns:
        Tensor: of the weights' shape and dtype. Experts without rows have zeros.
    """
    grad = paddle.empty(like.shape, like.dtype)
    for expert, start, end in _used(counts):
        grad[expert] = _cast(_weight_product(rows, grad_out, start, end, dtype), like.dtype)
    for expert, count in enumerate(counts):
        if not count:
            grad[expert] = 0.0
    return grad


def add_grouped_weight_grad(rows, grad_out, counts, dtype, main_grad):
    """Adds the gradient of grouped_matmul's weights to main_grad (float32, [experts, in, out]), in place."""
    for expert, start, end in _used(counts):
        main_grad[expert].add_(_cast(_weight_product(rows, grad_out, start, end, dtype), paddle.float32))


def _weight_product(rows, grad_out, start, end, dtype):
    return paddle.matmul(_cast(rows[start:end], dtype), _cast(grad_out[start:end], dtype), transpose_x=True)
