"""Times the kernels on a GPU by tools/bench_kernels.cu, and what Paddle calls in Paddle's own CUDA graphs."""

import json
import subprocess
import time
from contextlib import suppress

import paddle

from . import cuda_graph, providers, records
from .buffers import make_sets
from .cases import NORM_SIZE

OURS, IN_PADDLE = "ours", "ours, captured in Paddle"

# bench_kernels.cu times a forward with its backward; the last number of its lines, and what that adds to its names:
_LAYOUTS = {
    ("swiglu", "contiguous"): (0, ""),
    ("swiglu", "unaligned"): (1, " unaligned"),
    ("norm", "contiguous"): (NORM_SIZE, ""),
    ("norm", "sliced"): (4 * NORM_SIZE, " z sliced"),
}


def _line(case):
    kind = "swiglu" if case.is_swiglu else "norm"
    return f"{kind} {case.rows} {case.columns} {_LAYOUTS[kind, case.layout][0]}"


def _name(case):
    return case.op + _LAYOUTS["swiglu" if case.is_swiglu else "norm", case.layout][1]


def time_kernels(cases, describe):
    """Yields each case's records of our kernel and of a copy; the first ones with that of an empty kernel.

    Args:
        cases (list of cases.Case): what.
        describe: called with a dict, the GPU as bench_kernels.cu describes it, before anything is timed.

    Raises:
        RuntimeError: the kernels could not be built or timed.
    """
    wanted = {(_name(case), case.rows, case.columns): case for case in cases}
    lines = "\n".join(dict.fromkeys(map(_line, cases)))
    command = ["bash", str(records.ROOT / "tools" / "bench_kernels.sh"), "cases"]
    before = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        with suppress(BrokenPipeError), process.stdin:  # one that has ended: its status is raised below
            process.stdin.write(lines + "\n")
        for answer in map(json.loads, process.stdout):
            if "gpu" in answer:
                describe(answer)
                continue
            if answer["op"] == "empty kernel":
                before = [records.without_traffic(records.LAUNCH, 0, 0, "an empty kernel", answer["us"])]
            case = wanted.get((answer["op"], answer["rows"], answer["columns"]))
            if case is not None:
                copy = records.timed(case, "copy", answer["copy_us"])
                yield [*before, copy, records.timed(case, OURS, answer["us"], answer["copy_us"])]
                before = []
    if process.returncode:
        raise RuntimeError(f"tools/bench_kernels.sh ended with exit status {process.returncode}; it says why above")


def _time_in_graph(provider, case):
    """The median time of a call in microseconds, launch cost aside."""
    from paddle.device.cuda.graphs import CUDAGraph

    call, count = provider.timed_call(), len(provider.sets)
    for i in range(2):
        call(i)
    paddle.device.synchronize()
    graph, kept = CUDAGraph(), [None] * count
    launches = cuda_graph.launches(count, case.bytes)
    graph.capture_begin()
    for i in range(launches):
        kept[i % count] = call(i)  # alive until its turn comes again: the outputs rotate too
    graph.capture_end()

    def replay():
        paddle.device.synchronize()
        begin = time.perf_counter()
        graph.replay()
        paddle.device.synchronize()
        return 1e6 * (time.perf_counter() - begin)

    us = cuda_graph.median_us(replay, launches)
    graph.reset()
    return us


def time_in_paddle(case, rotate, with_paddles, copies):
    """Records of our function and of Paddle's, called from Python while a graph captures them.

    Args:
        case (cases.Case): what.
        rotate (int): bytes that the sets of buffers move together, at least.
        with_paddles (bool): Paddle's as well.
        copies (dict): what records.copies_of returned: the limits.

    Raises:
        AssertionError: an output of this library is not what is promised.
    """
    place = paddle.device.get_device()
    arrays, sets = make_sets(case, place, cuda_graph.sets(case, rotate), with_outputs=False)
    (ours,) = (p._replace(name=IN_PADDLE) for p in providers.ours(case.op, sets) if p.fresh)
    ours.check(case, arrays)
    others, left_out = [], []
    if with_paddles:
        others, left_out = providers.right_ones(providers.paddles(case.op, sets, "gpu"), case, arrays)
    timed = [(p.name, _time_in_graph(p, case)) for p in (ours, *others)]
    return [*(records.timed(case, name, us, copies.get((*case, None))) for name, us in timed), *left_out]
