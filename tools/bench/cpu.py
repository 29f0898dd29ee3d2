"""Times calls on the CPU, in turns with copies of as many bytes."""

import statistics
import time

import paddle

from . import providers
from .buffers import make_sets
from .cpu_copy import copier

_OUTPUT_SHARES = {"swiglu_weighted_bwd": (2, 1), "swiglu_weighted_clamp_bwd": (2, 1), "rmsnorm_silu_gate_bwd": (1, 1)}


def time_calls(calls, seconds, at_least=5):
    """The times of calls that take turns, so that what else the machine does meets all of them.

    Args:
        calls (dict): name to a function of i, the number of the call; whoever is called, i goes up.
        seconds (float): each is called for as long, and at_least times.

    Returns:
        dict: name to a list of seconds, one a call.
    """
    times = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    i = 0
    for call in calls.values():  # the first call starts threads and loads what is loaded once
        call(i)
        i += 1
    while True:
        unfinished = [name for name in calls if spent[name] < seconds or len(times[name]) < at_least]
        if not unfinished:
            return times
        for name in unfinished:
            call = calls[name]
            turn_ends = time.perf_counter() + 1e-3
            while True:
                begin = time.perf_counter()
                result = call(i)
                end = time.perf_counter()
                del result  # where outputs are new, the next call finds their memory free
                i += 1
                times[name].append(end - begin)
                spent[name] += end - begin
                if end > turn_ends:
                    break


def _copies(case, count, threads):
    """Copies of as many bytes, half read and half written, into given and into fresh memory: ({name: call}, twice).

    Fresh memory is as many tensors as the op has large outputs, in their proportion: an allocator may hand out 20 MiB that
    it has had back, and 40 MiB that nobody has touched.
    """
    shares = _OUTPUT_SHARES.get(case.op, (1,))
    unit = 8 * -(-case.bytes // (32 * sum(shares)))  # a multiple of 16 bytes: streaming stores need that alignment
    elements = unit * sum(shares)
    cuts = [(unit * sum(shares[:k]), unit * share) for k, share in enumerate(shares)]
    sources, targets = (list(paddle.zeros([count, elements], "bfloat16")) for _ in range(2))

    def into_given(copy):
        return lambda i: copy(targets[i % count].data_ptr(), sources[i % count].data_ptr(), 2 * elements)

    def into_fresh(copy):
        def call(i):
            source = sources[i % count].data_ptr()
            fresh = [paddle.empty([size], "bfloat16") for _, size in cuts]
            for target, (begin, size) in zip(fresh, cuts):
                copy(target.data_ptr(), source + 2 * begin, 2 * size)
            return fresh

        return call

    copiers = {f"copy, streaming={streaming}": copier(threads, streaming) for streaming in (False, True)}
    return tuple({f"{name}{kind.__name__}": kind(copy) for name, copy in copiers.items()} for kind in (into_given, into_fresh))


def _record(case, provider, fresh, times, copy_us):
    us = 1e6 * statistics.median(times)
    return {
        **case._asdict(),
        "provider": provider,
        "fresh_outputs": fresh,
        "bytes": case.bytes,
        "calls": len(times),
        "us": us,
        "copy_us": copy_us,
        "of_copy": copy_us / us,
    }


def run(case, threads, seconds, rotate, peers):
    """Times a case: yields a record for each provider.

    Args:
        case (cases.Case): what.
        threads (int): of the copies; the ops have theirs already.
        seconds (float): how long each is timed.
        rotate (int): bytes that the sets of buffers move together, at least.
        peers (list of str): whom else to time; "paddle" here.
    """
    count = case.sets(rotate)
    arrays, sets = make_sets(case, "cpu", count, with_outputs=True)
    found = providers.ours(case.op, sets)
    if "paddle" in peers:
        found += providers.paddles(case.op, sets, "cpu")
    reasons = {provider.name: provider.checked(case, arrays) for provider in found}
    calls = {
        provider.name: lambda i, call=provider.call, sets=provider.sets: call(sets[i % count])
        for provider in found
        if reasons[provider.name] is None
    }
    given, fresh = _copies(case, count, threads)
    times = time_calls({**calls, **given, **fresh}, seconds)
    copies = [1e6 * min(statistics.median(times[name]) for name in kind) for kind in (given, fresh)]
    for is_fresh, us in enumerate(copies):
        yield {**case._asdict(), "provider": "copy", "fresh_outputs": bool(is_fresh), "bytes": case.bytes, "us": us}
    for provider in found:
        if reasons[provider.name] is None:
            yield _record(case, provider.name, provider.fresh, times[provider.name], copies[provider.fresh])
        else:
            yield {**case._asdict(), "provider": provider.name, "skipped": reasons[provider.name]}
