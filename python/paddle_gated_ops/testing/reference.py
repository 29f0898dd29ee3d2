"""Both backward ops, and the forwards they belong to, in float64 NumPy.

Independent of the library's C++ sources; tested against central differences of the forwards.
Every function takes BF16 bit patterns (uint16 arrays) or real numbers (anything else, taken as
float64) and computes in float64 in the order that the library documents, so that Inf and NaN
arise where the formulas give them:

    SiLU(g)  = g * s,  SiLU'(g) = s * (1 + g * (1 - s)),  s = sigmoid(g)

    o2_s = ((SiLU(gate) * p) * up)          do1_up = ((SiLU(gate) * p) * d)
    do1_gate = (((SiLU'(gate) * p) * d) * up)
    probs_grad = sum over the row of ((SiLU(gate) * d) * up)

    n = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps),  a = SiLU(z) * dy
    y = ((SiLU(z) * n) * w)                 grad_z = ((SiLU'(z) * dy) * (n * w))
    grad_x = rstd * (a * w - n * mean(a * w * n))
    grad_weight = sum over the rows of (a * n)

The clamped form of weighted SwiGLU has min(gate, c) in place of gate and clip(up, -c, c) in place of
up, and no gradient where they differ; NaN is not clamped.

With the values come the magnitudes that the bounds in ``tolerance`` are made of. Sums are
pairwise, and exact over blocks: their error is below 2^-47 of the terms' magnitudes, the bounds
start at 2^-20 of them.
"""

import math
from typing import NamedTuple

import numpy as np

from . import fp32_range
from .bf16 import from_bf16_bits

__all__ = [
    "Magnitudes",
    "Forward",
    "SwigluWeightedBwd",
    "RmsnormSiluGateBwd",
    "sigmoid",
    "swiglu_weighted",
    "rmsnorm_silu_gate",
    "fused_swiglu_weighted",
    "fused_swiglu_weighted_bwd",
    "cake_rmsnorm_silu_gate",
    "cake_rmsnorm_silu_gate_train_backward",
]

HEAD_DIM = 128
TINY_SIGMOID = 2.0**-126  # FP32's smallest normal number

# Elements in one pass: the float64 temporaries of a pass then stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 15

# From |gate| = 104 on, FP32's sigmoid is exactly 0 or 1, and a larger gate costs no accuracy.
_GATE_CAP = 104.0


class Magnitudes(NamedTuple):
    """What the error bound of an output is made of; arrays of the output's shape.

    Attributes:
        terms: sum of |term| * (1 + min(|gate|, 104) / 16), float64. In FP32 an error of 1 - s,
            or of exp(-gate), grows with |gate| until sigmoid is 0 or 1; past 104 the factor
            would only make room for wrong derivatives.
        tiny_sigmoid: sum of the products of a term's other factors, over the terms whose
            sigmoid(gate) is below 2^-126, float64.
        underflow: absolute error from intermediate results below FP32's normal range, float64;
            0 where there are none.
        nonfinite: uint8 bits: results besides the true one that FP32 may give because an
            intermediate result leaves its range: 1 is +Inf, 2 is -Inf, 4 is NaN.
    """

    terms: np.ndarray
    tiny_sigmoid: np.ndarray
    underflow: np.ndarray
    nonfinite: np.ndarray


class SwigluWeightedBwd(NamedTuple):
    """``fused_swiglu_weighted_bwd`` in float64; ``magnitudes`` is a dict by output name."""

    do1: np.ndarray
    probs_grad: np.ndarray
    o2_s: np.ndarray
    magnitudes: dict


class Forward(NamedTuple):
    """A forward's only output, in float64, with the Magnitudes of its bound."""

    value: np.ndarray
    magnitudes: Magnitudes


class RmsnormSiluGateBwd(NamedTuple):
    """``cake_rmsnorm_silu_gate_train_backward`` in float64; ``magnitudes`` by output name."""

    grad_x: np.ndarray
    grad_z: np.ndarray
    grad_weight: np.ndarray
    magnitudes: dict


def to_float64(values):
    """float64 values of BF16 bits (uint16) or of real numbers (any other dtype)."""
    values = np.asarray(values)
    return from_bf16_bits(values) if values.dtype == np.uint16 else values.astype(np.float64)


def _sigmoids(gate):
    """sigmoid(gate) and sigmoid(-gate) = 1 - sigmoid(gate), both without cancellation."""
    small = np.exp(-np.abs(gate))  # never overflows
    larger = 1.0 / (1.0 + small)
    smaller = small * larger
    positive = gate >= 0
    return np.where(positive, larger, smaller), np.where(positive, smaller, larger)


def sigmoid(gate):
    """1 / (1 + exp(-gate)) in float64, to a relative error of 2^-51 down to 2^-1022."""
    return _sigmoids(to_float64(gate))[0]


class Gate(NamedTuple):
    """A gate with what the formulas need of it; arrays of one shape."""

    silu: np.ndarray
    dsilu: np.ndarray
    dsilu_terms: np.ndarray  # s + |s * gate * (1 - s)|
    dsilu_factor: np.ndarray  # |1 + gate * (1 - s)|
    magnitude: np.ndarray  # |gate|
    growth: np.ndarray  # 1 + min(|gate|, 104) / 16
    tiny: np.ndarray  # sigmoid below 2^-126
    any_tiny: bool


def _gate(gate):
    s, complement = _sigmoids(gate)
    slope = gate * complement
    factor = 1.0 + slope
    magnitude = np.abs(gate)
    tiny = s < TINY_SIGMOID
    return Gate(
        silu=gate * s,
        dsilu=s * factor,
        dsilu_terms=s * (1.0 + np.abs(slope)),
        dsilu_factor=np.abs(factor),
        magnitude=magnitude,
        growth=1.0 + np.minimum(magnitude, _GATE_CAP) / 16.0,
        tiny=tiny,
        any_tiny=bool(tiny.any()),
    )


def _zeros(shape):
    return np.broadcast_to(0.0, shape)


def _no_bits(shape):
    return np.broadcast_to(np.uint8(0), shape)


def _tree_sum_rows(terms):
    """Sum over axis 0 by halving, vectorized: log2(rows) roundings on the way."""
    while len(terms) > 1:
        half = len(terms) // 2
        rest = terms[2 * half :]
        terms = terms[:half] + terms[half : 2 * half]
        if len(rest):
            terms[0] += rest[0]
    return terms[0] if len(terms) else np.zeros(terms.shape[1:])


def _exact_sum(parts):
    """Sum of a list of [n] arrays, correctly rounded where it is finite."""
    stacked = np.stack(parts, axis=-1)
    total = stacked.sum(axis=-1)
    for i in np.flatnonzero(np.isfinite(total)):
        total[i] = math.fsum(stacked[i])
    return total


# Weighted SwiGLU


def _swiglu_arrays(o1, do2_s, unzipped_probs):
    """Flat [rows, 2I], [rows, I], [rows] arrays, not converted yet, after a check of the shapes."""
    o1, do2_s, probs = (np.asarray(a) for a in (o1, do2_s, unzipped_probs))
    lead, width = o1.shape[:-1], o1.shape[-1]
    if width % 2:
        raise ValueError(f"o1: expected an even last dimension, got {width}")
    if do2_s.shape != lead + (width // 2,):
        raise ValueError(f"do2_s: expected {lead + (width // 2,)}, got {do2_s.shape}")
    if probs.shape not in (lead, lead + (1,)):
        raise ValueError(f"unzipped_probs: expected {lead} or {lead + (1,)}, got {probs.shape}")
    rows = math.prod(lead)
    return o1.reshape(rows, width), do2_s.reshape(rows, width // 2), probs.reshape(rows)


def _clamped(gate, up, clamp_value):
    """The halves as the clamped form has them; ``clamp_value`` is rounded to FP32, None is none."""
    if clamp_value is None:
        return gate, up
    clamp = float(np.float32(clamp_value))
    return np.minimum(gate, clamp), np.clip(up, -clamp, clamp)  # both keep NaN


def swiglu_weighted(o1, unzipped_probs, clamp_value=None):
    """Weighted SwiGLU in float64: ``o2_s = SiLU(gate) * p * up``, gate and up the halves of o1.

    Args:
        o1: [..., 2I].
        unzipped_probs: [...] or [..., 1].
        clamp_value (float, optional): c of the clamped form, rounded to FP32 first.

    Returns:
        float64 array [..., I].
    """
    gate, up = _clamped(*np.split(to_float64(o1), 2, axis=-1), clamp_value)
    probs = to_float64(unzipped_probs)
    if probs.ndim < gate.ndim:
        probs = probs[..., None]
    with np.errstate(all="ignore"):
        return gate * _sigmoids(gate)[0] * probs * up


def _swiglu_block(o1, do2_s, probs, clamp_value):
    half = do2_s.shape[-1]
    o1 = to_float64(o1)
    gate_values, up = _clamped(o1[:, :half], o1[:, half:], clamp_value)
    d = to_float64(do2_s)
    p = to_float64(probs)[:, None]
    gate = _gate(gate_values)

    weighted = gate.silu * p
    scale = p * d * up
    abs_scale = np.abs(scale)
    o2_s = weighted * up
    do1 = np.empty(o1.shape)
    do1[:, :half] = ((gate.dsilu * p) * d) * up
    do1[:, half:] = weighted * d
    probs_terms = (gate.silu * d) * up

    do1_terms = np.empty(o1.shape)
    do1_terms[:, :half] = gate.dsilu_terms * abs_scale * gate.growth
    do1_terms[:, half:] = np.abs(do1[:, half:]) * gate.growth
    terms = {
        "do1": do1_terms,
        "probs_grad": (np.abs(probs_terms) * gate.growth).sum(axis=-1),
        "o2_s": np.abs(o2_s) * gate.growth,
    }
    shapes = {name: t.shape for name, t in terms.items()}

    if gate.any_tiny:
        do1_tiny = np.empty(o1.shape)
        do1_tiny[:, :half] = np.where(gate.tiny, gate.dsilu_factor * abs_scale, 0.0)
        do1_tiny[:, half:] = np.where(gate.tiny, gate.magnitude * np.abs(p * d), 0.0)
        products = np.where(gate.tiny, gate.magnitude * np.abs(d * up), 0.0)
        tiny = {
            "do1": do1_tiny,
            "probs_grad": products.sum(axis=-1),
            "o2_s": np.where(gate.tiny, gate.magnitude * np.abs(p * up), 0.0),
        }
    else:
        tiny = {name: _zeros(shape) for name, shape in shapes.items()}

    factors = (gate.silu, gate.dsilu, p, d, up)
    if fp32_range.products_stay_inside(factors):
        underflow = {name: _zeros(shape) for name, shape in shapes.items()}
        nonfinite = {name: _no_bits(shape) for name, shape in shapes.items()}
    else:
        underflow = fp32_range.swiglu_underflow(*factors)
        nonfinite = fp32_range.swiglu_nonfinite(*factors, gate.tiny)
    magnitudes = {
        name: Magnitudes(terms[name], tiny[name], underflow[name], nonfinite[name])
        for name in terms
    }
    beyond = np.concatenate([gate_values != o1[:, :half], up != o1[:, half:]], axis=-1)
    beyond &= ~np.isnan(o1)
    if beyond.any():  # no gradient passes there, whatever the terms
        do1 = np.where(beyond, 0.0, do1)
        parts = (np.where(beyond, part.dtype.type(0), part) for part in magnitudes["do1"])
        magnitudes["do1"] = Magnitudes(*parts)
    return SwigluWeightedBwd(do1, probs_terms.sum(axis=-1), o2_s, magnitudes)


def swiglu_blocks(o1, do2_s, unzipped_probs, clamp_value=None):
    """Yields (rows, SwigluWeightedBwd) for slices of the flattened rows, in order."""
    o1, do2_s, probs = _swiglu_arrays(o1, do2_s, unzipped_probs)
    step = max(1, _BLOCK_ELEMENTS // max(1, do2_s.shape[-1]))
    for start in range(0, len(o1), step):
        rows = slice(start, min(start + step, len(o1)))
        with np.errstate(all="ignore"):
            block = _swiglu_block(o1[rows], do2_s[rows], probs[rows], clamp_value)
        yield rows, block


def _empty_magnitudes(shape):
    return Magnitudes(np.empty(shape), np.empty(shape), np.empty(shape), np.empty(shape, np.uint8))


def _store(whole, rows, part):
    """Writes one block of rows into an output of any leading shape."""
    flat = whole.reshape((math.prod(whole.shape[: whole.ndim + 1 - part.ndim]),) + part.shape[1:])
    flat[rows] = part


def fused_swiglu_weighted_bwd(o1, do2_s, unzipped_probs, clamp_value=None):
    """Backward of weighted SwiGLU in float64, with the magnitudes of its error bounds.

    Args:
        o1: [..., 2I], BF16 bits or numbers.
        do2_s: [..., I], the same.
        unzipped_probs: [...] or [..., 1], numbers.
        clamp_value (float, optional): c of the clamped form, rounded to FP32 first.

    Returns:
        SwigluWeightedBwd: do1 [..., 2I], probs_grad (unzipped_probs' shape), o2_s [..., I].

    Raises:
        ValueError: shapes that do not fit.
    """
    shapes = {
        "do1": np.shape(o1),
        "probs_grad": np.shape(unzipped_probs),
        "o2_s": np.shape(do2_s),
    }
    values = {name: np.empty(shape) for name, shape in shapes.items()}
    magnitudes = {name: _empty_magnitudes(shape) for name, shape in shapes.items()}
    for rows, block in swiglu_blocks(o1, do2_s, unzipped_probs, clamp_value):
        for name in shapes:
            _store(values[name], rows, getattr(block, name))
            for whole, part in zip(magnitudes[name], block.magnitudes[name]):
                _store(whole, rows, part)
    return SwigluWeightedBwd(magnitudes=magnitudes, **values)


def fused_swiglu_weighted(o1, unzipped_probs, clamp_value=None):
    """Weighted SwiGLU in float64, with the magnitudes of its error bound.

    Args: as for :func:`swiglu_weighted`; o1 BF16 bits or numbers.

    Returns:
        Forward: [..., I].
    """
    # The backward recomputes it; its other input does not matter.
    half = np.shape(o1)[-1] // 2
    whole = fused_swiglu_weighted_bwd(
        o1, np.zeros(np.shape(o1)[:-1] + (half,)), unzipped_probs, clamp_value
    )
    return Forward(whole.o2_s, whole.magnitudes["o2_s"])


# Gated RMSNorm


def _rstd(x, eps):
    """1 / sqrt(mean(x^2) + eps) of each row [rows, 1], and its relative error from FP32's range.

    A sum of squares past FP32's range is Inf, as in FP32: rstd is then 0. The error is 0 for
    ordinary rows, and Inf where FP32 decides the result (a sum at the edge of its range, or a
    mean of squares that vanishes beside no eps).
    """
    eps = float(np.float32(eps))
    total = (x * x).sum(axis=-1, keepdims=True)
    relative = fp32_range.rstd_error(total, x.shape[-1], eps)
    total = np.where(total >= fp32_range.FP32_INF_FROM, np.inf, total)
    return 1.0 / np.sqrt(total / x.shape[-1] + eps), relative


def rmsnorm_silu_gate(x, z, weight, eps=1e-6):
    """Gated RMSNorm in float64: ``SiLU(z) * (x * rstd) * weight`` over the last dimension.

    Args:
        x, z: [..., n].
        weight: [n].
        eps (float): rounded to FP32 first.

    Returns:
        float64 array [..., n].
    """
    x, z, weight = (to_float64(a) for a in (x, z, weight))
    with np.errstate(all="ignore"):
        return (z * _sigmoids(z)[0]) * (x * _rstd(x, eps)[0]) * weight


def cake_rmsnorm_silu_gate(x, z, weight, eps=1e-6):
    """Gated RMSNorm in float64, with the magnitudes of its error bound.

    Args:
        x, z: [..., 128], BF16 bits or numbers.
        weight: [128], the same.
        eps (float): rounded to FP32 first.

    Returns:
        Forward: x's shape.
    """
    x, z, weight = (to_float64(a) for a in (x, z, weight))
    with np.errstate(all="ignore"):
        gate = _gate(z)
        rstd, rstd_relative = _rstd(x, eps)
        n = x * rstd
        value = (gate.silu * n) * weight
        terms = np.abs(value) * gate.growth
        tiny = np.where(gate.tiny, gate.magnitude * np.abs(n * weight), 0.0)
        under, bits = _zeros(x.shape), _no_bits(x.shape)
        if not fp32_range.products_stay_inside((gate.silu, x, rstd, n, weight)):
            under = fp32_range.rmsnorm_forward_underflow(gate.silu, n, weight)
            bits = fp32_range.rmsnorm_forward_nonfinite(gate.silu, n, weight, gate.tiny)
        if rstd_relative.any():
            under = under + fp32_range.scaled(terms, rstd_relative)
            bits = np.where(np.isinf(rstd_relative), np.uint8(7), bits)
    return Forward(value, Magnitudes(terms, tiny, under, bits))


class _WeightSums(NamedTuple):
    """Sums over the rows of a block, [128] each."""

    value: np.ndarray
    terms: np.ndarray
    tiny_sigmoid: np.ndarray
    underflow: np.ndarray
    positive: np.ndarray  # as FP32 sees them: Inf where a term leaves its range
    negative: np.ndarray
    nan: np.ndarray  # FP32 may give NaN


def _rmsnorm_block(grad_out, x, z, weight, eps):
    dy, x, gate = to_float64(grad_out), to_float64(x), _gate(to_float64(z))
    shape = x.shape
    rstd, rstd_relative = _rstd(x, eps)
    n = x * rstd
    a = gate.silu * dy
    aw = a * weight
    mean = (aw * n).mean(axis=-1, keepdims=True)
    grad_x = rstd * (aw - n * mean)
    u = gate.dsilu * dy
    v = n * weight
    grad_z = u * v
    dw = a * n

    abs_n, abs_v = np.abs(n), np.abs(v)
    aw_terms = np.abs(aw) * gate.growth
    x_terms = rstd * (aw_terms + abs_n * (aw_terms * abs_n).mean(axis=-1, keepdims=True))
    z_terms = gate.dsilu_terms * np.abs(dy) * abs_v * gate.growth
    dw_terms = np.abs(dw) * gate.growth

    x_tiny = z_tiny = _zeros(shape)
    w_tiny = np.zeros(shape[-1])
    if gate.any_tiny:
        a_tiny = np.where(gate.tiny, gate.magnitude * np.abs(dy), 0.0)
        aw_tiny = a_tiny * np.abs(weight)
        x_tiny = rstd * (aw_tiny + abs_n * (aw_tiny * abs_n).mean(axis=-1, keepdims=True))
        z_tiny = np.where(gate.tiny, gate.dsilu_factor * np.abs(dy) * abs_v, 0.0)
        w_tiny = _tree_sum_rows(a_tiny * abs_n)

    x_under = z_under = _zeros(shape)
    x_bits = z_bits = _no_bits(shape)
    w_under, w_nan = np.zeros(shape[-1]), np.zeros(shape[-1], bool)
    positive, negative = np.maximum(dw, 0.0), np.maximum(-dw, 0.0)
    if not fp32_range.products_stay_inside((gate.silu, gate.dsilu, dy, x, rstd, n, weight)):
        parts = (gate.silu, gate.dsilu, dy, n, weight, rstd)
        x_under, z_under, w_under = fp32_range.rmsnorm_underflow(*parts)
        x_bits, z_bits, positive, negative, w_nan = fp32_range.rmsnorm_nonfinite(*parts, gate.tiny)
        w_under = _tree_sum_rows(w_under)
    if rstd_relative.any():
        # grad_x holds rstd three times, grad_z and grad_weight once.
        x_under = x_under + fp32_range.scaled(x_terms, 3.0 * rstd_relative)
        z_under = z_under + fp32_range.scaled(z_terms, rstd_relative)
        w_under = w_under + _tree_sum_rows(fp32_range.scaled(dw_terms, rstd_relative))
        undecided = np.isinf(rstd_relative)
        x_bits = np.where(undecided, np.uint8(7), x_bits)
        z_bits = np.where(undecided, np.uint8(7), z_bits)
        positive = np.where(undecided, np.inf, positive)
        negative = np.where(undecided, np.inf, negative)

    sums = _WeightSums(
        _tree_sum_rows(dw),
        _tree_sum_rows(dw_terms),
        w_tiny,
        w_under,
        _tree_sum_rows(positive),
        _tree_sum_rows(negative),
        w_nan,
    )
    magnitudes = {
        "grad_x": Magnitudes(x_terms, x_tiny, x_under, x_bits),
        "grad_z": Magnitudes(z_terms, z_tiny, z_under, z_bits),
    }
    return grad_x, grad_z, magnitudes, sums


def _rmsnorm_arrays(grad_out, x, z, weight):
    grad_out, x, z = (np.asarray(a) for a in (grad_out, x, z))
    if x.shape[-1:] != (HEAD_DIM,):
        raise ValueError(f"x: expected a last dimension of {HEAD_DIM}, got {x.shape}")
    for name, array in (("grad_out", grad_out), ("z", z)):
        if array.shape != x.shape:
            raise ValueError(f"{name}: expected x's shape {x.shape}, got {array.shape}")
    if np.shape(weight) != (HEAD_DIM,):
        raise ValueError(f"weight: expected ({HEAD_DIM},), got {np.shape(weight)}")
    flat = (math.prod(x.shape[:-1]), HEAD_DIM)
    return tuple(a.reshape(flat) for a in (grad_out, x, z)) + (to_float64(weight),)


def rmsnorm_blocks(grad_out, x, z, weight, eps):
    """Yields (rows, grad_x, grad_z, magnitudes, weight sums) for slices of the flattened rows."""
    grad_out, x, z, weight = _rmsnorm_arrays(grad_out, x, z, weight)
    step = _BLOCK_ELEMENTS // HEAD_DIM
    for start in range(0, len(x), step):
        rows = slice(start, min(start + step, len(x)))
        with np.errstate(all="ignore"):
            block = _rmsnorm_block(grad_out[rows], x[rows], z[rows], weight, eps)
        yield (rows,) + block


def total_grad_weight(sums):
    """grad_weight [128] and its Magnitudes from the sums of all blocks."""
    if not sums:
        shape = (HEAD_DIM,)
        zeros = np.zeros(shape)
        return zeros, Magnitudes(zeros, zeros, zeros, _no_bits(shape))
    columns = list(zip(*sums))
    with np.errstate(all="ignore"):
        value, terms, tiny, underflow, positive, negative = map(_exact_sum, columns[:6])
    bits = fp32_range.sum_bits(positive, negative, np.any(columns[6], axis=0))
    return value, Magnitudes(terms, tiny, underflow, bits)


def cake_rmsnorm_silu_gate_train_backward(grad_out, x, z, weight, eps=1e-6):
    """Backward of the SiLU-gated RMSNorm in float64, with the magnitudes of its error bounds.

    Args:
        grad_out, x, z: [..., 128], BF16 bits or numbers.
        weight: [128], the same.
        eps (float): rounded to FP32 first.

    Returns:
        RmsnormSiluGateBwd: grad_x and grad_z of x's shape, grad_weight [128] (zeros without rows).

    Raises:
        ValueError: shapes that do not fit.
    """
    shape = np.shape(x)
    values = {name: np.empty(shape) for name in ("grad_x", "grad_z")}
    magnitudes = {name: _empty_magnitudes(shape) for name in values}
    sums = []
    for rows, grad_x, grad_z, parts, block_sums in rmsnorm_blocks(grad_out, x, z, weight, eps):
        for name, block in (("grad_x", grad_x), ("grad_z", grad_z)):
            _store(values[name], rows, block)
            for whole, part in zip(magnitudes[name], parts[name]):
                _store(whole, rows, part)
        sums.append(block_sums)
    grad_weight, magnitudes["grad_weight"] = total_grad_weight(sums)
    return RmsnormSiluGateBwd(grad_weight=grad_weight, magnitudes=magnitudes, **values)
