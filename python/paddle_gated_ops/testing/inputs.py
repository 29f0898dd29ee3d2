"""Test inputs: random arrays for both ops, Paddle tensors from NumPy, and strided views.

Nothing here runs a compute kernel of Paddle: tensors are copied from host memory, and views come
from slicing, ``view``, ``transpose`` and ``as_strided``, which only change the description of the
memory. So tests do not depend on the installed Paddle having code for the GPU at hand, and
non-contiguous tensors are read back through their base buffer instead of a gather kernel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from .bf16 import bf16_ulp, from_bf16_bits, to_bf16_bits

if TYPE_CHECKING:
    from paddle import Tensor
    from paddle._typing import PlaceLike

__all__ = [
    "to_bf16_bits",
    "from_bf16_bits",
    "bf16_ulp",
    "swiglu_weighted_inputs",
    "rmsnorm_silu_gate_inputs",
    "bf16_tensor",
    "float_tensor",
    "tensor_of",
    "bits_of",
    "floats_of",
    "array_of",
    "VIEW_KINDS",
    "strided_view",
    "read_view",
    "damaged_canaries",
]

HEAD_DIM = 128  # the gated RMSNorm's last dimension


def _leading_shape(rows):
    return (rows,) if isinstance(rows, (int, np.integer)) else tuple(rows)


def _random_bf16(generator, shape):
    return to_bf16_bits(generator.standard_normal(shape, dtype=np.float32))


def swiglu_weighted_inputs(
    rows: int | tuple[int, ...], intermediate_size: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Random inputs of magnitude 1 for ``fused_swiglu_weighted_bwd``.

    Args:
        rows (int or tuple of int): the leading shape; a tuple may have any rank, 0 included.
        intermediate_size (int): I.
        seed (int): the same seed gives the same arrays.

    Returns:
        dict: ``o1`` uint16 BF16 bits [..., 2I], ``do2_s`` uint16 BF16 bits [..., I] (both
        standard normal), ``unzipped_probs`` float32 [...] (uniform in [0.05, 1)).
    """
    lead = _leading_shape(rows)
    generator = np.random.default_rng(seed)
    return {
        "o1": _random_bf16(generator, lead + (2 * intermediate_size,)),
        "do2_s": _random_bf16(generator, lead + (intermediate_size,)),
        "unzipped_probs": np.asarray(generator.uniform(0.05, 1.0, lead), dtype=np.float32),
    }


def rmsnorm_silu_gate_inputs(rows: int | tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of magnitude 1 for ``cake_rmsnorm_silu_gate_train_backward``.

    Args:
        rows (int or tuple of int): the leading shape; a tuple may have any rank, 0 included.
        seed (int): the same seed gives the same arrays.

    Returns:
        dict: ``grad_out``, ``x``, ``z`` uint16 BF16 bits [..., 128] (standard normal), ``weight``
        uint16 BF16 bits [128] (magnitudes from 0.5 to 1.5, all distinct, either sign).
    """
    shape = _leading_shape(rows) + (HEAD_DIM,)
    generator = np.random.default_rng(seed)
    weight = generator.permutation(np.linspace(0.5, 1.5, HEAD_DIM))
    weight *= generator.choice([-1.0, 1.0], HEAD_DIM)
    return {
        "grad_out": _random_bf16(generator, shape),
        "x": _random_bf16(generator, shape),
        "z": _random_bf16(generator, shape),
        "weight": to_bf16_bits(weight),
    }


def bf16_tensor(bits: ArrayLike, place: PlaceLike | None = None, stop_gradient: bool = True) -> Tensor:
    """A contiguous BF16 Paddle tensor from bit patterns.

    Args:
        bits (array_like): uint16, any shape.
        place (optional): a Paddle place or a string such as "cpu" or "gpu:0"; None: the current.
        stop_gradient (bool): as in ``paddle.to_tensor``.
    """
    import paddle

    bits = np.asarray(bits)
    if bits.dtype != np.uint16:
        raise TypeError(f"bits: expected a uint16 array, got {bits.dtype}")
    return paddle.to_tensor(bits, dtype="bfloat16", place=place, stop_gradient=stop_gradient)


def float_tensor(array: ArrayLike, place: PlaceLike | None = None, stop_gradient: bool = True) -> Tensor:
    """A contiguous FP32 Paddle tensor from numbers; arguments as for :func:`bf16_tensor`."""
    import paddle

    array = np.asarray(array, dtype=np.float32)
    return paddle.to_tensor(array, dtype="float32", place=place, stop_gradient=stop_gradient)


def tensor_of(array: ArrayLike, place: PlaceLike | None = None, stop_gradient: bool = True) -> Tensor:
    """:func:`bf16_tensor` of a uint16 array, :func:`float_tensor` of any other."""
    make = bf16_tensor if np.asarray(array).dtype == np.uint16 else float_tensor
    return make(array, place, stop_gradient)


def _host_copy(tensor, expected):
    name = str(tensor.dtype).rsplit(".", 1)[-1]
    if name != expected:
        raise TypeError(f"expected a {expected} tensor, got {name}")
    # Paddle would gather a strided tensor with a kernel. Empty views never count as contiguous.
    if math.prod(tensor.shape) and not tensor.is_contiguous():
        raise ValueError("expected a contiguous tensor; read_view() reads strided ones")
    return tensor.numpy()


def bits_of(tensor: Tensor) -> np.ndarray:
    """The bit patterns (uint16 array) of a contiguous BF16 tensor on any place."""
    return _host_copy(tensor, "bfloat16")


def floats_of(tensor: Tensor) -> np.ndarray:
    """The values (float32 array) of a contiguous FP32 tensor on any place."""
    return _host_copy(tensor, "float32")


def array_of(tensor: Tensor) -> np.ndarray:
    """:func:`bits_of` a BF16 tensor, :func:`floats_of` any other."""
    return bits_of(tensor) if "bfloat16" in str(tensor.dtype) else floats_of(tensor)


# Canary elements before and after the data: 64 keep a 128-byte alignment.
_GUARD = 64


def _contiguous(values, fill):
    buffer = np.full(values.size + 2 * _GUARD, fill, values.dtype)
    buffer[_GUARD : _GUARD + values.size] = values.ravel()
    shape = list(values.shape)
    return buffer, lambda base: base[_GUARD : _GUARD + values.size].reshape(shape)


def _offset(values, fill):
    buffer = np.full(values.size + 2 * _GUARD, fill, values.dtype)
    buffer[_GUARD + 1 : _GUARD + 1 + values.size] = values.ravel()
    shape = list(values.shape)
    return buffer, lambda base: base[_GUARD + 1 : _GUARD + 1 + values.size].reshape(shape)


def _columns(values, fill, before, after, step=1):
    n = values.shape[-1]
    if step > 0:
        cut = slice(before, before + step * n, step)
    else:
        cut = slice(before + n - 1, before - 1, -1)
    width = before + abs(step) * n + after
    buffer = np.full(values.shape[:-1] + (width,), fill, values.dtype)
    buffer[..., cut] = values
    return buffer, lambda base: base[..., cut]


def _transposed(values, fill):
    if values.ndim == 1:  # a column of a table
        buffer = np.full((values.size + 2, 3), fill, values.dtype)
        buffer[1:-1, 1] = values
        return buffer, lambda base: base[1 : values.size + 1, 1]
    n = values.shape[-1]
    buffer = np.full((n + 2,) + values.shape[-2::-1], fill, values.dtype)
    buffer[1:-1] = values.T
    return buffer, lambda base: base[1 : n + 1].transpose(list(range(values.ndim))[::-1])


def _row_slice(values, fill):
    n = values.shape[0]
    buffer = np.full((n + 3,) + values.shape[1:], fill, values.dtype)
    buffer[2 : 2 + n] = values
    return buffer, lambda base: base[2 : 2 + n]


def _broadcast_row(values, fill):
    import paddle

    row = values.reshape((-1,) + values.shape[-1:])[0] if values.ndim > 1 else values[:1]
    if not np.array_equal(np.broadcast_to(row, values.shape), values):
        raise ValueError("broadcast_row: the rows of values differ")
    buffer = np.full(row.size + _GUARD, fill, values.dtype)
    buffer[: row.size] = row
    strides = [0] * (values.ndim - 1) + [1 if values.ndim > 1 else 0]
    return buffer, lambda base: paddle.as_strided(base, list(values.shape), strides)


_BUILDERS = {
    "contiguous": _contiguous,
    "offset": _offset,
    "column_slice": lambda values, fill: _columns(values, fill, 3, 5),
    "packed": lambda values, fill: _columns(
        values, fill, values.shape[-1], 2 * values.shape[-1]
    ),
    "step2": lambda values, fill: _columns(values, fill, 2, 2, step=2),
    "reversed": lambda values, fill: _columns(values, fill, 3, 5, step=-1),
    "transposed": _transposed,
    "row_slice": _row_slice,
    "broadcast_row": _broadcast_row,
}

#: The kinds :func:`strided_view` knows.
VIEW_KINDS = tuple(_BUILDERS)


def _canary_like(array, canary):
    return to_bf16_bits(canary) if array.dtype == np.uint16 else np.float32(canary)


def strided_view(
    values: ArrayLike, kind: str, place: PlaceLike | None = None, canary: float = 1e30
) -> tuple[Tensor, Tensor]:
    """A tensor that holds ``values`` as a view of a larger buffer full of ``canary``.

    Kinds, with the buffer that the view is cut from for values of shape [..., n]:

    - ``contiguous``: [64 + numel + 64], the view begins at element 64 (128-byte aligned);
    - ``offset``: the same, one element later, so that its base is unaligned;
    - ``column_slice``: ``buffer[..., 3:3 + n]`` of [..., n + 8];
    - ``packed``: ``buffer[..., n:2 * n]`` of [..., 4 * n], a part of a packed projection;
    - ``step2``: ``buffer[..., 2:2 + 2 * n:2]`` of [..., 2 * n + 4];
    - ``reversed``: ``buffer[..., n + 2:2:-1]`` of [..., n + 8], the last stride is -1;
    - ``transposed``: all dimensions reversed, rows 1 to n of [n + 2, ...]; of rank 1: the middle
      column of a table [n + 2, 3];
    - ``row_slice``: ``buffer[2:2 + rows]`` of [rows + 3, ...];
    - ``broadcast_row``: one row at the start of a buffer [n + 64], with stride 0 in the leading
      dimensions (of rank 1: one element); the rows must be equal.

    Args:
        values (array_like): uint16 BF16 bits or float32. Rank 0 takes contiguous and offset only.
        kind (str): one of ``VIEW_KINDS``.
        place (optional): as for :func:`bf16_tensor`.
        canary (float): the filling, rounded to the dtype.

    Returns:
        tuple: (view, base). ``base`` is the whole buffer, contiguous. Empty values have nothing to
        share: view and base are then one empty tensor.

    Raises:
        ValueError: unknown kind; rows that differ for broadcast_row; rank 0 for a strided kind.
        TypeError: values are neither uint16 nor float32.
        RuntimeError: this Paddle copies where a view is expected (FLAGS_use_stride_kernel off).
    """
    values = np.ascontiguousarray(values).reshape(np.shape(values))
    if values.dtype not in (np.uint16, np.float32):
        raise TypeError(f"values: expected uint16 or float32, got {values.dtype}")
    if kind not in _BUILDERS:
        raise ValueError(f"kind: expected one of {VIEW_KINDS}, got {kind!r}")
    if values.ndim == 0 and kind not in ("contiguous", "offset"):
        raise ValueError(f"kind: a tensor of rank 0 has no {kind} view")
    if values.size == 0:
        base = tensor_of(values, place)
        return base, base
    buffer, cut = _BUILDERS[kind](values, _canary_like(values, canary))
    base = tensor_of(buffer, place)
    view = cut(base)
    _offset_in(view, base)
    return view, base


def _offset_in(view, base):
    """Elements from base's start to view's first one; raises where view is no view of base."""
    itemsize = 2 if "bfloat16" in str(base.dtype) else 4
    offset, rest = divmod(view.data_ptr() - base.data_ptr(), itemsize)
    reach = [(n - 1) * s for n, s in zip(view.shape, view.strides)]
    first = offset + sum(r for r in reach if r < 0)
    last = offset + sum(r for r in reach if r > 0)
    if rest or first < 0 or last >= math.prod(base.shape):
        raise RuntimeError("the tensor is not a view of base: this Paddle made a copy")
    return offset


def _view_of_array(flat, view, base):
    strides = [s * flat.itemsize for s in view.strides]
    start = flat[_offset_in(view, base) :]
    return np.lib.stride_tricks.as_strided(start, list(view.shape), strides)


def read_view(view: Tensor, base: Tensor) -> np.ndarray:
    """What ``view`` holds now (uint16 bits or float32), read through its contiguous base."""
    flat = base.numpy().reshape(-1)
    return flat.reshape(view.shape) if flat.size == 0 else _view_of_array(flat, view, base).copy()


def damaged_canaries(view: Tensor, base: Tensor, canary: float = 1e30) -> int:
    """How many elements of ``base`` outside ``view`` no longer hold the canary."""
    flat = base.numpy().reshape(-1)
    if flat.size == 0:
        return 0
    outside = np.ones(flat.size, dtype=bool)
    _view_of_array(outside, view, base)[...] = False
    found, expected = flat[outside], np.asarray(_canary_like(flat, canary))
    if flat.dtype == np.float32:  # bit patterns: a NaN may be the canary
        found, expected = found.view(np.uint32), expected.view(np.uint32)
    return int(np.count_nonzero(found != expected))
