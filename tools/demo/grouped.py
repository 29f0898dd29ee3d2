"""Matrix products of rows that are sorted by expert, each expert's rows with that expert's matrix.

``counts``, a list, holds each expert's number of rows, 0 for some: those are left out of the products, as Paddle 2.6
refuses empty matrices.
"""

import paddle


def grouped_matmul(rows, weights, counts, transpose=False):
    """From rows [rows, in] and weights [experts, in, out] ([experts, out, in] with ``transpose``) to [rows, out]."""
    used = [expert for expert, count in enumerate(counts) if count]
    parts = rows.split([counts[expert] for expert in used])
    matrices = weights.unbind()
    return paddle.concat(
        [paddle.matmul(part, matrices[expert], transpose_y=transpose) for part, expert in zip(parts, used)]
    )


def grouped_weight_grad(rows, grad_out, counts):
    """The gradient [experts, in, out] of grouped_matmul's weights, from rows [rows, in] and grad_out [rows, out]."""
    unused = paddle.zeros([rows.shape[1], grad_out.shape[1]], rows.dtype)
    parts = zip(counts, rows.split(counts), grad_out.split(counts))
    return paddle.stack(
        [paddle.matmul(part, grad, transpose_x=True) if count else unused for count, part, grad in parts]
    )
