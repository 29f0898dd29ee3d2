"""Paddle's places, as arguments."""

import re

from paddle.base import core

from ._library import C


def check_place(function, place):
    """ValueError for a place where the ops do not run, TypeError for what is no place. None is the current one."""
    if place is None:
        return
    if isinstance(place, str):
        if not re.fullmatch(r"cpu|gpu(:\d+)?", place):
            raise ValueError(f"{function}: place must be 'cpu', 'gpu' or 'gpu:N', but is {place!r}")
        on_gpu = place.startswith("gpu")
    else:
        on_gpu = _is_gpu(function, place)
    if on_gpu and not C.with_cuda:
        raise ValueError(f"{function}: place must be the CPU, as paddle_gated_ops is built without CUDA, but is {place}")


def _is_gpu(function, place):
    if isinstance(place, core.CPUPlace):
        return False
    if isinstance(place, core.CUDAPlace):
        return True
    if isinstance(place, core.Place) and (place.is_cpu_place() or place.is_gpu_place()):
        return place.is_gpu_place()
    if type(place).__name__.endswith("Place"):
        raise ValueError(f"{function}: place must be the CPU or a GPU, but is {place}")
    raise TypeError(f"{function}: place must be a Paddle place, a string or None, but is {type(place).__name__}")
