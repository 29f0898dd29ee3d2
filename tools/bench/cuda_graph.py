"""How a CUDA graph of launches is timed, in numbers; as tools/bench_kernels.cu does it."""

import statistics

_MOST_SETS = 10000


def sets(case, rotate):
    """How many sets of buffers: those that move more than ``rotate`` bytes, but no more than a graph can be made of quickly.

    The smallest case moves 60 MB then, more than any L2 cache holds.
    """
    return min(_MOST_SETS, case.sets(rotate))


def launches(sets, case_bytes):
    """How many launches a graph has: each set of buffers at least once, and 2 GB of traffic or 200 launches."""
    return max(sets, int(min(200.0, 2e9 / max(case_bytes, 1e6))))


def median_us(replay, count):
    """The median over 11 replays, after two that warm up, of the time of one of a graph's launches.

    Args:
        replay: replays the graph once and returns microseconds.
        count (int): its launches.
    """
    return statistics.median([replay() for _ in range(13)][2:]) / count
