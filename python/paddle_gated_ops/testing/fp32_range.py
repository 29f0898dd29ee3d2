"""What FP32's range costs on the way to a result whose float64 value is unremarkable.

A chain of products such as ((SiLU * p) * d) may leave FP32's range before a later factor brings
it back. Below the normal range (2^-126) a result is rounded to a multiple of 2^-149, an absolute
error of at most 2^-150, and what follows multiplies that error. Above it the result is Inf, or
NaN once it meets a zero or an Inf of the other sign. The functions here follow the chains in the
order that ``reference`` documents. With ordinary inputs ``products_stay_inside`` says that nothing
of the kind can happen, and they are not called.
"""

import numpy as np

FP32_INF_FROM = 2.0**128 - 2.0**103  # this and larger values become Inf in FP32
BITS_POSITIVE, BITS_NEGATIVE, BITS_NAN = np.uint8(1), np.uint8(2), np.uint8(4)
BITS_ANY = np.uint8(7)

# Thresholds are wider than the range's ends by FP32's relative error of a few operations, so that
# an intermediate result on either side of an end is allowed for.
_NORMAL_BELOW = 2.0**-126 * (1.0 + 2.0**-10)
_OVERFLOW_FROM = 2.0**128 * (1.0 - 2.0**-10)
_VANISHES_BELOW = 2.0**-149
_ROUNDING = 2.0**-150


def products_stay_inside(factors):
    """Whether no product of any of the factors, nor a sum of 2^32 of them, can leave the range.

    Args:
        factors (sequence of float64 arrays): NaN and Inf make the answer False; zeros do not count
            (a product with a factor 0 is exact).
    """
    low = high = 1.0
    for factor in factors:
        magnitude = np.abs(factor)
        low *= np.min(magnitude, initial=1.0, where=magnitude > 0)
        high *= np.max(magnitude, initial=1.0)
    return bool(low > 2.0**-116 and high < 2.0**96)


def _rounding(value):
    magnitude = np.abs(value)
    return np.where((magnitude > 0) & (magnitude < _NORMAL_BELOW), _ROUNDING, 0.0)


def _clip(value, to_zero=False):
    """An intermediate result as FP32's range leaves it: 0, itself, or Inf; the sign stays."""
    magnitude = np.abs(value)
    value = np.where((magnitude < _VANISHES_BELOW) | to_zero, np.copysign(0.0, value), value)
    return np.where(magnitude >= _OVERFLOW_FROM, np.copysign(np.inf, value), value)


def _bits(positive, negative, nan):
    return positive * BITS_POSITIVE | negative * BITS_NEGATIVE | nan * BITS_NAN


def _bits_of(value):
    return _bits(value == np.inf, value == -np.inf, np.isnan(value))


def sum_bits(positive, negative, nan):
    """Bits of a sum from the sums of its positive and of its negative terms' magnitudes."""
    up, down = positive >= _OVERFLOW_FROM, negative >= _OVERFLOW_FROM
    return _bits(up, down, nan | (up & down))


def scaled(terms, relative):
    """terms * relative, Inf wherever relative is Inf."""
    return np.where(np.isinf(relative), np.inf, terms * relative)


def rstd_error(total, count, eps):
    """Relative error of 1 / sqrt(total / count + eps) that FP32's range is to blame for.

    Squares below the normal range, and their mean, carry an absolute error of 2^-150 each, which
    counts where neither the mean nor eps is far above it. Inf where FP32 decides: more than 1/16,
    or a sum of squares at the upper end of the range.

    Args:
        total (float64 array): sums of ``count`` squares.
        count (int): terms of a sum.
        eps (float): as in the formula.
    """
    with np.errstate(divide="ignore"):
        relative = np.where(total > 0, _ROUNDING / (total / count + eps), 0.0)
    edge = np.abs(total / FP32_INF_FROM - 1.0) < 2.0**-18
    undecided = edge | (relative > 1.0 / 16.0)
    # Below 2^-30 the 2^-20 that the bounds grant is ample.
    return np.where(undecided, np.inf, np.where(relative > 2.0**-30, relative, 0.0))


def swiglu_underflow(silu, dsilu, p, d, up):
    """Absolute errors of do1 [rows, 2I], probs_grad [rows] and o2_s [rows, I].

    Args:
        silu, dsilu: SiLU and SiLU' of the gate, [rows, I].
        p: [rows, 1]. d, up: [rows, I].
    """
    weighted = _rounding(silu) * np.abs(p) + _rounding(silu * p)
    slope = _rounding(dsilu) * np.abs(p) + _rounding(dsilu * p)
    slope = slope * np.abs(d) + _rounding((dsilu * p) * d)
    term = _rounding(silu) * np.abs(d) + _rounding(silu * d)
    term = term * np.abs(up) + _rounding((silu * d) * up)
    return {
        "do1": np.concatenate([slope * np.abs(up), weighted * np.abs(d)], axis=-1),
        "probs_grad": term.sum(axis=-1),
        "o2_s": weighted * np.abs(up),
    }


def swiglu_nonfinite(silu, dsilu, p, d, up, tiny):
    """Bits of do1, probs_grad and o2_s.

    Args: as for :func:`swiglu_underflow`, and ``tiny`` [rows, I]: where sigmoid may be 0 in FP32, or the number that it is.
    """
    kept, zeroed = (
        _swiglu_nonfinite(_clip(silu, zeros), _clip(dsilu, zeros), p, d, up) for zeros in (False, tiny)
    )
    return {name: bits | zeroed[name] for name, bits in kept.items()}


def _swiglu_nonfinite(silu, dsilu, p, d, up):
    weighted = _clip(silu * p)
    terms = _clip(silu * d) * up
    nan = np.isnan(terms)
    positive = np.where(nan, 0.0, np.maximum(terms, 0.0)).sum(axis=-1)
    negative = np.where(nan, 0.0, np.maximum(-terms, 0.0)).sum(axis=-1)
    gate_grad = _clip(_clip(dsilu * p) * d) * up
    return {
        "do1": np.concatenate([_bits_of(gate_grad), _bits_of(weighted * d)], axis=-1),
        "probs_grad": sum_bits(positive, negative, nan.any(axis=-1)),
        "o2_s": _bits_of(weighted * up),
    }


def rmsnorm_forward_underflow(silu, n, w):
    """Absolute errors of y = (silu * n) * w, [rows, 128].

    Args:
        silu, n: [rows, 128]. w: [128].
    """
    error_silu, error_n = _rounding(silu), _rounding(n)
    error_a = error_silu * (np.abs(n) + error_n) + error_n * np.abs(silu) + _rounding(silu * n)
    return error_a * np.abs(w)


def rmsnorm_forward_nonfinite(silu, n, w, tiny):
    """Bits of y, [rows, 128]. Args: as above, and ``tiny`` [rows, 128]: where sigmoid may be 0, or the number that it is."""
    kept, zeroed = (_bits_of(_clip(_clip(silu, zeros) * _clip(n)) * w) for zeros in (False, tiny))
    return kept | zeroed


def rmsnorm_underflow(silu, dsilu, dy, n, w, rstd):
    """Absolute errors of grad_x, grad_z and of grad_weight's terms, [rows, 128] each.

    Args:
        silu, dsilu: SiLU and SiLU' of z, [rows, 128].
        dy, n: [rows, 128]. w: [128]. rstd: [rows, 1].
    """
    a, u, v = silu * dy, dsilu * dy, n * w
    aw = a * w
    error_n = _rounding(n)
    error_a = _rounding(silu) * np.abs(dy) + _rounding(a)
    error_u = _rounding(dsilu) * np.abs(dy) + _rounding(u)
    error_v = error_n * np.abs(w) + _rounding(v)
    error_aw = error_a * np.abs(w) + _rounding(aw)

    error_term = error_aw * (np.abs(n) + error_n) + error_n * np.abs(aw) + _rounding(aw * n)
    mean = (aw * n).mean(axis=-1, keepdims=True)
    error_mean = error_term.mean(axis=-1, keepdims=True) + _rounding(mean)
    error_nm = error_mean * (np.abs(n) + error_n) + error_n * np.abs(mean) + _rounding(n * mean)
    grad_x = rstd * (error_aw + error_nm)
    # (u * n) * w is as good as u * (n * w): the larger error counts.
    grad_z = error_u * (np.abs(v) + error_v) + error_v * np.abs(u)
    error_un = error_u * (np.abs(n) + error_n) + error_n * np.abs(u) + _rounding(u * n)
    grad_z = np.maximum(grad_z, error_un * np.abs(w))
    grad_weight = error_a * (np.abs(n) + error_n) + error_n * np.abs(a) + _rounding(a * n)
    return grad_x, grad_z, grad_weight


def rmsnorm_nonfinite(silu, dsilu, dy, n, w, rstd, tiny):
    """Bits of grad_x and grad_z, and grad_weight's terms as FP32 sees them.

    Args: as for :func:`rmsnorm_underflow`, and ``tiny`` [rows, 128]: where sigmoid may be 0, or the number
    that it is.

    Returns:
        tuple: bits of grad_x, bits of grad_z [rows, 128]; the terms' positive and negative parts
        [rows, 128], Inf where FP32 overflows; and where FP32 may give NaN [128].
    """
    kept, zeroed = (
        _rmsnorm_nonfinite(_clip(silu, zeros), _clip(dsilu, zeros), dy, _clip(n), w, rstd) for zeros in (False, tiny)
    )
    grad_x, grad_z = kept[0] | zeroed[0], kept[1] | zeroed[1]
    # A sigmoid that vanishes excuses no NaN: (u * n) * w then meets no Inf.
    finite = np.isfinite(dy) & np.isfinite(n) & np.isfinite(w)
    grad_z = np.where(tiny & finite, grad_z & ~BITS_NAN, grad_z)
    return grad_x, grad_z, np.maximum(kept[2], zeroed[2]), np.maximum(kept[3], zeroed[3]), kept[4] | zeroed[4]


def _rmsnorm_nonfinite(silu, dsilu, dy, n, w, rstd):
    u = _clip(dsilu * dy)
    grad_z = _bits_of(u * _clip(n * w)) | _bits_of(_clip(u * n) * w)

    a = _clip(silu * dy)
    aw = _clip(a * w)
    terms = _clip(aw * n)
    mean = _clip(terms.mean(axis=-1, keepdims=True))
    grad_x = _bits_of(rstd * (aw - _clip(n * mean)))
    # A sum may overflow before it is complete, with either sign, or in both directions.
    sizes = np.abs(terms).sum(axis=-1, keepdims=True)
    any_order = (sizes >= _OVERFLOW_FROM) | (np.abs(aw) + np.abs(n * mean) >= _OVERFLOW_FROM)
    grad_x = np.where(any_order, BITS_ANY, grad_x)

    terms = a * n
    nan = np.isnan(terms)
    positive = np.where(nan, 0.0, np.maximum(terms, 0.0))
    negative = np.where(nan, 0.0, np.maximum(-terms, 0.0))
    return grad_x, grad_z, positive, negative, nan.any(axis=0)
