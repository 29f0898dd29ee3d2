"""The timer of the CPU."""

import time


def time_calls(calls, seconds, at_least=3):
    """The times of calls that take turns, so that what else the machine does meets all of them.

    Args:
        calls (dict): name to a function of i, the number of the call; whoever is called, i goes up.
        seconds (float): each is called for as long, and at_least times.

    Returns:
        dict: name to a list of seconds, one a call. What a call returns lives until its time is taken.
    """
    times = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    for i, call in enumerate(calls.values()):  # the first call starts threads and loads what is loaded once
        call(i)
    i = len(calls)
    while True:
        unfinished = [name for name in calls if spent[name] < seconds or len(times[name]) < at_least]
        if not unfinished:
            return times
        for name in unfinished:
            call = calls[name]
            turn_ends = time.perf_counter() + 1e-3
            end = 0
            while end < turn_ends:
                begin = time.perf_counter()
                result = call(i)
                end = time.perf_counter()
                del result
                i += 1
                times[name].append(end - begin)
                spent[name] += end - begin
