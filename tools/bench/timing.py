"""The timer of the CPU, and how much of it was ours."""

import os
import time
from pathlib import Path


class OtherWork:
    """``with OtherWork() as other: ...``; then ``other.cores`` says how many cores others kept busy meanwhile.

    From 0.1 or so on, figures of as many threads as there are cores are too low. None where the system doesn't tell.
    """

    def __enter__(self):
        self.begin = self._now()
        return self

    def __exit__(self, *_):
        wall, busy, own = (after - before for before, after in zip(self.begin, self._now()))
        self.cores = round(max(0.0, (busy - own) / wall), 2) if busy else None

    @staticmethod
    def _now():
        try:
            user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        except OSError:
            return time.perf_counter(), 0.0, 0.0
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, time.process_time()


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
