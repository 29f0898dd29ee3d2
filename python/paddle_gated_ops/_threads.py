"""The number of threads of the CPU kernels."""

from __future__ import annotations

from ._checks import check_int
from ._library import C


def set_num_threads(n: int) -> None:
    """Sets how many threads a call on the CPU may use.

    Without a call it is the environment's GATED_OPS_NUM_THREADS, else OMP_NUM_THREADS (which importing Paddle sets to 1
    where it is unset), else the machine's number of cores. The results are the same bits whatever the number; small
    calls stay on the calling thread.

    Args:
        n (int): at least 1.

    Raises:
        TypeError: n is no integer.
        ValueError: n is below 1 or above 1024.
    """
    n = check_int("set_num_threads", "n", n)
    if not 1 <= n <= 1024:
        raise ValueError(f"set_num_threads: n must be from 1 to 1024, but is {n}")
    C.set_num_threads(n)


def get_num_threads() -> int:
    """How many threads a call on the CPU may use (int); see set_num_threads."""
    return C.get_num_threads()
