"""Times calls on the CPU, in turns with copies of as many bytes."""

import statistics

import paddle

import paddle_gated_ops

from . import providers, records
from .buffers import make_sets
from .cpu_copy import copier
from .timing import OtherWork, time_calls

_OUTPUT_SHARES = {"swiglu_weighted_bwd": (2, 1), "swiglu_weighted_clamp_bwd": (2, 1), "rmsnorm_silu_gate_bwd": (1, 1)}


def _copies(case, count, threads):
    """Copies of as many bytes, half read and half written: {(into new memory, number of threads, which copier): call}.

    New memory is as many tensors as the op has large outputs, in their proportion: an allocator may hand out 20 MiB that it
    has had back, and 40 MiB that nobody has touched.
    """
    shares = _OUTPUT_SHARES.get(case.op, (1,))
    unit = 8 * -(-case.bytes // (32 * sum(shares)))  # a multiple of 16 bytes: streaming stores need that alignment
    elements = unit * sum(shares)
    cuts = [(unit * sum(shares[:k]), unit * share) for k, share in enumerate(shares)]
    sources, targets = ([whole[i] for i in range(count)] for whole in paddle.zeros([2, count, elements], "bfloat16"))

    def into_given(copy):
        return lambda i: copy(targets[i % count].data_ptr(), sources[i % count].data_ptr(), 2 * elements)

    def into_new(copy):
        def call(i):
            source = sources[i % count].data_ptr()
            new = [paddle.empty([size], "bfloat16") for _, size in cuts]
            for target, (begin, size) in zip(new, cuts):
                copy(target.data_ptr(), source + 2 * begin, 2 * size)
            return new

        return call

    return {
        (new, number, streaming): (into_new if new else into_given)(copier(number, streaming))
        for new, number in [(False, threads), (True, threads), (False, 1)]
        for streaming in (False, True)
    }


def _on_one_thread(call, threads):
    def single(i):
        paddle_gated_ops.set_num_threads(1)
        call(i)
        paddle_gated_ops.set_num_threads(threads)

    return single


def run(case, threads, seconds, rotate, peers):
    """Times a case: a list of records. Into given outputs also on one thread, where there are more.

    Args:
        case (cases.Case): what.
        threads (int): what paddle_gated_ops.get_num_threads() says; the copies take as many.
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
    calls = {provider.name: provider.timed_call() for provider in found}
    singles = {}
    if threads > 1:
        singles = {f"{p.name}, one thread": _on_one_thread(calls[p.name], threads) for p in found if not p.fresh}
    copies = _copies(case, count, threads)
    with OtherWork() as other:
        times = time_calls({**calls, **singles, **copies}, seconds)
    us = {name: 1e6 * statistics.median(each) for name, each in times.items()}

    def best(new, number):
        return min(us[new, number, streaming] for streaming in (False, True))

    def record(name, time, copy_us, new=False):
        return records.timed(case, name, time, copy_us, fresh_outputs=new, others_cores=other.cores)

    return [
        *(record("copy", best(new, threads), None, new) for new in (False, True)),
        *(record(p.name, us[p.name], best(p.fresh, threads), p.fresh) for p in found),
        *(record("copy, one thread", best(False, 1), None) for _ in singles),
        *(record(name, us[name], best(False, 1)) for name in singles),
        *left_out,
    ]
