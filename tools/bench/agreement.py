"""Whether somebody else's result is the same function's. Alone: NumPy only, as peers use it too."""

import numpy as np

#: BF16 arithmetic throughout, eight roundings of 2^-8 in a row, each relative to terms of an output's usual size.
TOLERANCE = 2.0**-5


def assert_same_function(got, expected):
    """AssertionError where an output is further than TOLERANCE * (|expected| + its root mean square) from float64.

    Args:
        got, expected (dict): arrays by name, numbers.
    """
    for name, right in expected.items():
        value = np.asarray(got[name], dtype=np.float64)
        if value.shape != right.shape:
            raise AssertionError(f"{name}: shape {value.shape} in place of {right.shape}")
        bound = TOLERANCE * (np.abs(right) + np.sqrt(np.mean(np.square(right))))
        wrong = ~(np.abs(value - right) <= bound)
        if wrong.any():
            at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            raise AssertionError(f"{name}{[int(i) for i in at]}: {value[at]:.6g} in place of {right[at]:.6g}")
