"""Times calls on the CPU, in turns with copies of as many bytes."""

import statistics

import paddle

from . import providers, records
from .buffers import make_sets
from .cpu_copy import copier
from .timing import time_calls

_OUTPUT_SHARES = {"swiglu_weighted_bwd": (2, 1), "swiglu_weighted_clamp_bwd": (2, 1), "rmsnorm_silu_gate_bwd": (1, 1)}


def _copies(case, count, threads):
    """Copies of as many bytes, half read and half written, into given and into fresh memory: ({name: call}, twice).

    Fresh memory is as many tensors as the op has large outputs, in their proportion: an allocator may hand out 20 MiB that
    it has had back, and 40 MiB that nobody has touched.
    """
    shares = _OUTPUT_SHARES.get(case.op, (1,))
    unit = 8 * -(-case.bytes // (32 * sum(shares)))  # a multiple of 16 bytes: streaming stores need that alignment
    elements = unit * sum(shares)
    cuts = [(unit * sum(shares[:k]), unit * share) for k, share in enumerate(shares)]
    sources, targets = ([whole[i] for i in range(count)] for whole in paddle.zeros([2, count, elements], "bfloat16"))

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

    copies = [copier(threads, streaming) for streaming in (False, True)]
    return tuple({f"{kind.__name__} {k}": kind(copy) for k, copy in enumerate(copies)} for kind in (into_given, into_fresh))


def run(case, threads, seconds, rotate, peers):
    """Times a case: a list of records.

    Args:
        case (cases.Case): what.
        threads (int): of the copies; the ops have theirs already.
        seconds (float): how long each is timed.
        rotate (int): bytes that the sets of buffers move together, at least.
        peers (list of str): whom else to time; "paddle" here.

    Raises:
        AssertionError: an output of this library is not what is promised.
    """
    count = case.sets(rotate)
    arrays, sets = make_sets(case, "cpu", count, with_outputs=True)
    found, left_out = providers.ours(case.op, sets), []
    for provider in found:
        provider.check(case, arrays)
    if "paddle" in peers:
        others, left_out = providers.right_ones(providers.paddles(case.op, sets, "cpu"), case, arrays)
        found += others
    given, fresh = _copies(case, count, threads)
    times = time_calls({**{provider.name: provider.timed_call() for provider in found}, **given, **fresh}, seconds)
    us = {name: 1e6 * statistics.median(each) for name, each in times.items()}
    copies = [min(us[name] for name in kind) for kind in (given, fresh)]
    return [
        *(records.timed(case, "copy", copies[kind], fresh_outputs=bool(kind)) for kind in (0, 1)),
        *(records.timed(case, p.name, us[p.name], copies[p.fresh], fresh_outputs=p.fresh) for p in found),
        *left_out,
    ]
