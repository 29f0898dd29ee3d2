"""Checks of arguments that are no tensors."""

import numbers


def check_int(function, name, value):
    """The value as an int; TypeError for what is no integer, bool among it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{function}: {name} must be an int, but is {type(value).__name__}")
    return int(value)


def check_bool(function, name, value):
    """TypeError for what is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be a bool, but is {type(value).__name__}")
