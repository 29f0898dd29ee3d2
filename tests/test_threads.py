"""Threads: several of Python's at once, forked children, and how many a call on the CPU uses."""

import os
import threading
import time

import numpy as np
import pytest

import paddle_gated_ops
from calls import assert_same_bits, run_in_threads, run_python, run_rmsnorm, run_swiglu, tensors_of
from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn import functional as F

LARGE_SWIGLU = (420, 1408)  # eight threads' work: one is worth its waking from 512 KiB of traffic on
LARGE_RMSNORM = 9001


def digest_of_large_calls():
    """Both ops at sizes that use the threads: their outputs' bytes."""
    outputs = run_swiglu(testing.swiglu_weighted_inputs(*LARGE_SWIGLU), "cpu")
    outputs.update(run_rmsnorm(testing.rmsnorm_silu_gate_inputs(LARGE_RMSNORM), "cpu"))
    return b"".join(array.tobytes() for array in outputs.values())


@pytest.mark.parametrize("sizes", ["large", "small", "mixed"])
def test_python_threads_at_once(place, sizes):
    rows = {"large": [300] * 6, "small": [3] * 6, "mixed": [1, 300, 3, 150, 2, 300]}[sizes]
    swiglu = [testing.swiglu_weighted_inputs(n, 1408, seed=i) for i, n in enumerate(rows)]
    rmsnorm = [testing.rmsnorm_silu_gate_inputs(20 * n, seed=i) for i, n in enumerate(rows)]
    expected = [(run_swiglu(a, place), run_rmsnorm(b, place)) for a, b in zip(swiglu, rmsnorm)]
    before = paddle_gated_ops.get_num_threads()
    paddle_gated_ops.set_num_threads(3)
    start = threading.Barrier(len(rows))

    def work(i):
        start.wait(60)
        for _ in range(10):
            assert_same_bits(run_swiglu(swiglu[i], place), expected[i][0])
            assert_same_bits(run_rmsnorm(rmsnorm[i], place), expected[i][1])

    try:
        run_in_threads(work, len(rows))
    finally:
        paddle_gated_ops.set_num_threads(before)


def test_other_python_threads_run_meanwhile():
    # A call computes without the GIL: another thread gets on in the middle of it.
    rows = 200_000
    ones = np.full((rows, 128), 0x3F80, np.uint16)
    inputs = tensors_of({"grad_out": ones, "x": ones, "z": ones, "weight": ones[0]}, "cpu")
    before = paddle_gated_ops.get_num_threads()
    paddle_gated_ops.set_num_threads(1)
    done, times = threading.Event(), []

    def note_times():
        while not done.is_set():
            times.append(time.perf_counter())

    other = threading.Thread(target=note_times, daemon=True)
    other.start()
    calls = []
    try:
        for _ in range(5):
            begin = time.perf_counter()
            F.cake_rmsnorm_silu_gate_train_backward(**inputs)
            calls.append((begin, time.perf_counter()))
    finally:
        done.set()
        other.join()
        paddle_gated_ops.set_num_threads(before)
    # At either end of a call Python may switch threads anyway.
    meanwhile = [sum(begin + (end - begin) / 4 < t < end - (end - begin) / 4 for t in times) for begin, end in calls]
    assert max(meanwhile) > 0, f"nothing ran during {calls}"


WAIT_FOR_CHILD = """
import os, sys, time

def wait_for(child):
    end = time.monotonic() + 60
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > end:
            os.kill(child, 9)
            sys.exit("the child hangs")
        time.sleep(0.01)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, status
"""

FORK = WAIT_FOR_CHILD + """
import paddle, paddle_gated_ops
from test_threads import digest_of_large_calls

paddle_gated_ops.set_num_threads(4)
expected = digest_of_large_calls()
for generation in range(3):
    child = os.fork()
    if child == 0:
        same = digest_of_large_calls() == expected == digest_of_large_calls()
        same = same and len(os.listdir("/proc/self/task")) >= 4  # on threads of its own
        if generation == 0:  # a child's child, too
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(0 if digest_of_large_calls() == expected else 3)
            same = same and os.waitpid(grandchild, 0)[1] == 0
        os._exit(0 if same else 3)
    wait_for(child)
    assert digest_of_large_calls() == expected  # the parent's threads are still there
print("ok")
"""


def test_fork_after_use():
    assert run_python(FORK) == "ok"


FORK_DURING_CALLS = WAIT_FOR_CHILD + """
import threading
import numpy as np, paddle, paddle_gated_ops
from calls import array_of, tensor_of, tensors_of
from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn import functional as F

# Every tensor is made beforehand, so that no lock of Paddle's allocator is at stake.
def arguments():
    rows = 9001
    tensors = tensors_of(testing.rmsnorm_silu_gate_inputs(rows), "cpu")
    tensors["grad_x"], tensors["grad_z"] = (tensor_of(np.zeros((rows, 128), np.uint16), "cpu") for _ in range(2))
    tensors["grad_weight"] = tensor_of(np.zeros(128, np.uint16), "cpu")
    floats = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows, "cpu") // 4
    tensors["workspace"] = tensor_of(np.zeros(floats, np.float32), "cpu")
    return tensors

paddle_gated_ops.set_num_threads(4)
mine, others = arguments(), arguments()
done = threading.Event()

def work():
    while not done.is_set():
        F.cake_rmsnorm_silu_gate_train_backward(**others)

worker = threading.Thread(target=work)
worker.start()
expected = array_of(F.cake_rmsnorm_silu_gate_train_backward(**mine)[0]).copy()
try:
    for i in range(30):
        time.sleep(0.0007 * i)
        child = os.fork()
        if child == 0:
            for _ in range(3):
                grad_x = F.cake_rmsnorm_silu_gate_train_backward(**mine)[0]
            os._exit(0 if np.array_equal(array_of(grad_x), expected) else 3)
        wait_for(child)
finally:
    done.set()
    worker.join()
print("ok")
"""


def test_fork_while_another_thread_is_in_a_call():
    assert run_python(FORK_DURING_CALLS) == "ok"


MULTIPROCESSING = """
import multiprocessing
import paddle_gated_ops
from test_threads import digest_of_large_calls

paddle_gated_ops.set_num_threads(4)
expected = digest_of_large_calls()
pool = multiprocessing.get_context("fork").Pool(2)
results = [pool.apply_async(digest_of_large_calls) for _ in range(4)]
assert all(result.get(60) == expected for result in results)
# Not terminate, which leaving a with block calls: Paddle's handler of SIGTERM prints a trace, and can hang in that.
pool.close()
pool.join()
print("ok")
"""


def test_forked_pool_after_use():
    assert run_python(MULTIPROCESSING) == "ok"


COUNT = """
import os
import paddle_gated_ops
from calls import run_rmsnorm, run_swiglu
from paddle_gated_ops import testing
from test_threads import LARGE_RMSNORM, LARGE_SWIGLU

def threads():
    return len(os.listdir("/proc/self/task"))

small = testing.swiglu_weighted_inputs(8, 128), testing.rmsnorm_silu_gate_inputs(100)
large = testing.swiglu_weighted_inputs(*LARGE_SWIGLU), testing.rmsnorm_silu_gate_inputs(LARGE_RMSNORM)
counts = []
for op, inputs in ((run_swiglu, 0), (run_rmsnorm, 1)):
    op(small[inputs], "cpu")
    before = threads()
    for number, arrays in ((1, large), (5, small), (3, large), (8, large), (2, large)):
        paddle_gated_ops.set_num_threads(number)
        op(arrays[inputs], "cpu")
        counts.append(threads() - before)
print(counts)
"""


def test_how_many_threads_are_started():
    # None for one thread or small work; then as many as are asked for, the caller being one; and they are kept.
    assert run_python(COUNT) == str([0, 0, 2, 7, 7] + [0, 0, 0, 0, 0])


ENVIRONMENTS = [
    # GATED_OPS_NUM_THREADS, OMP_NUM_THREADS, the number of threads
    ("3", "5", 3),
    ("3", None, 3),
    (None, "5", 5),
    ("4,2", "5", 4),
    (None, None, 1),  # importing Paddle sets OMP_NUM_THREADS to 1
    ("", "5", 5),
    ("0", "5", 5),
    ("-2", "5", 5),
    ("many", "5", 5),
]


@pytest.mark.parametrize("own, omp, expected", ENVIRONMENTS)
def test_environment(own, omp, expected):
    code = "import paddle_gated_ops as g; n = g.get_num_threads(); g.set_num_threads(7); print(n, g.get_num_threads())"
    assert run_python(code, GATED_OPS_NUM_THREADS=own, OMP_NUM_THREADS=omp) == f"{expected} 7"


@pytest.mark.parametrize("n", [1, 2, np.int64(3), 1024])
def test_set_num_threads(n):
    before = paddle_gated_ops.get_num_threads()
    try:
        assert paddle_gated_ops.set_num_threads(n) is None
        assert paddle_gated_ops.get_num_threads() == n
    finally:
        paddle_gated_ops.set_num_threads(before)


def test_more_threads_than_cores_and_tasks():
    before = paddle_gated_ops.get_num_threads()
    expected = digest_of_large_calls()
    try:
        paddle_gated_ops.set_num_threads(64 + (os.cpu_count() or 1))
        assert digest_of_large_calls() == expected
    finally:
        paddle_gated_ops.set_num_threads(before)
