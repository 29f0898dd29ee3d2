"""Times the kernels on a GPU by tools/bench_kernels.cu, and what Paddle calls in Paddle's own CUDA graphs."""

import json
import subprocess
import time

import paddle

from . import cuda_graph, providers, records
from .buffers import make_sets
from .cases import NORM_SIZE

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


def _time_kernels(cases, update):
    """The GPU as bench_kernels describes it, and records of our kernels and of copies."""
    wanted = {(_name(case), case.rows, case.columns): case for case in cases}
    lines = "\n".join(dict.fromkeys(map(_line, cases)))
    command = ["bash", str(records.ROOT / "tools" / "bench_kernels.sh"), "cases"]
    found, device = [], {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write(lines + "\n")
        process.stdin.close()
        for answer in map(json.loads, process.stdout):
            if "gpu" in answer:
                device = answer
                continue
            if answer["op"] == "empty kernel":
                found.append(records.without_traffic("launch", 0, 0, "an empty kernel", answer["us"]))
            case = wanted.get((answer["op"], answer["rows"], answer["columns"]))
            if case is not None:
                found.append(records.timed(case, "copy", answer["copy_us"]))
                found.append(records.timed(case, "ours", answer["us"], answer["copy_us"]))
                update()
    if process.returncode:
        raise RuntimeError(f"tools/bench_kernels.sh ended with exit status {process.returncode}; it says why above")
    return device, found


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

    return cuda_graph.median_us(replay, launches)


def _time_paddle(case, rotate, copies):
    """Records of our function and of Paddle's, called from Python while a graph captures them."""
    place = paddle.device.get_device()

    def versions(count):
        arrays, sets = make_sets(case, place, count, with_outputs=False)
        (ours,) = (p._replace(name="ours, captured in Paddle") for p in providers.ours(case.op, sets) if p.fresh)
        return arrays, ours, providers.paddles(case.op, sets, "gpu")

    arrays, ours, others = versions(1)
    ours.check(case, arrays)
    right, left_out = providers.right_ones(others, case, arrays)
    names = {provider.name for provider in [ours, *right]}
    _, ours, others = versions(case.sets(rotate))
    timed = [(p.name, _time_in_graph(p, case)) for p in [ours, *others] if p.name in names]
    return [*(records.timed(case, name, us, copies.get((*case, None))) for name, us in timed), *left_out]


def run(cases, rotate, peers, update):
    """Times all cases: what the header says of the GPU, and records.

    Args:
        cases (list of cases.Case): what.
        rotate (int): bytes that the sets of buffers of Paddle's calls move together, at least.
        peers (list of str): whom else to time; "paddle" here.
        update: called after each case.

    Raises:
        AssertionError: an output of this library is not what is promised.
        RuntimeError: the kernels could not be built or timed.
    """
    device, found = _time_kernels(cases, update)
    if "paddle" in peers:
        copies = records.copies_of(found)
        found += [record for case in cases for record in _time_paddle(case, rotate, copies)]
        paddle.device.cuda.empty_cache()  # the peers' processes need the memory
    return device, found
