"""Products of rows that are sorted by expert, each expert's rows with that expert's matrix, of Paddle's own functions."""

import paddle


def grouped_matmul(rows, weights, counts):
    """From rows [rows, in] and weights [experts, in, out] to [rows, out].

    ``counts``, a list, holds each expert's number of rows, 0 for some: those are left out of the products, as Paddle 2.6
    refuses empty matrices.
    """
    used = [expert for expert, count in enumerate(counts) if count]
    parts = rows.split([counts[expert] for expert in used])
    matrices = weights.unbind()
    return paddle.concat([paddle.matmul(part, matrices[expert]) for part, expert in zip(parts, used)])
