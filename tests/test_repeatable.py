"""The same inputs give the same bits: in each run, on any number of threads, on any vector unit with FMA, in any batch."""

import hashlib
import os
import platform
import shutil

import numpy as np
import pytest

import paddle_gated_ops
from calls import (
    array_of,
    assert_same_bits,
    order_revealing_inputs,
    raw,
    run_python,
    run_rmsnorm,
    run_swiglu,
    tensor_of,
    tensors_of,
)
from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn import functional as F

# A thread is worth its waking from 512 KiB of traffic on: these sizes keep eight of them busy.
LARGE_SWIGLU = (420, 1408)
LARGE_RMSNORM = 9001


@pytest.fixture
def num_threads():
    """Sets the number of threads; the test leaves the number as it was."""
    before = paddle_gated_ops.get_num_threads()
    yield paddle_gated_ops.set_num_threads
    paddle_gated_ops.set_num_threads(before)


def sum_of_rows(place, rows):
    """The weight's gradient in FP32, of terms whose sum tells the order of the additions."""
    grad_weight = tensor_of(np.full(128, np.nan, np.float32), place)
    run_rmsnorm(order_revealing_inputs(rows), place, eps=0.0, grad_weight=grad_weight)
    return array_of(grad_weight)


def test_the_sum_of_rows_tells_its_order(place):
    # So that the other tests of this file see where that order is not fixed.
    arrays = order_revealing_inputs(LARGE_RMSNORM)
    forward = sum_of_rows(place, LARGE_RMSNORM)
    whole_units = LARGE_RMSNORM // 16 * 16
    turned = {n: a if n == "weight" else np.concatenate([np.roll(a[:whole_units], 16, 0), a[whole_units:]])
              for n, a in arrays.items()}
    grad_weight = tensor_of(np.full(128, np.nan, np.float32), place)
    run_rmsnorm(turned, place, eps=0.0, grad_weight=grad_weight)
    assert np.mean(array_of(grad_weight) != forward) > 0.5


@pytest.mark.parametrize("x", ["random", "zeros"])
def test_a_thousand_runs_of_rmsnorm(place, x):
    inputs = testing.rmsnorm_silu_gate_inputs(2000, seed=1)
    if x == "zeros":
        inputs["x"][...] = 0
    first = run_rmsnorm(inputs, place)
    for _ in range(999):
        assert_same_bits(run_rmsnorm(inputs, place), first)


def test_twenty_sums_of_rows(place):
    first = sum_of_rows(place, LARGE_RMSNORM)
    for _ in range(19):
        np.testing.assert_array_equal(sum_of_rows(place, LARGE_RMSNORM), first)


def test_a_thousand_runs_of_swiglu(place):
    inputs = testing.swiglu_weighted_inputs(100, 2056, seed=2)
    first = run_swiglu(inputs, place)
    for _ in range(999):
        assert_same_bits(run_swiglu(inputs, place), first)


def test_number_of_threads(num_threads):
    swiglu = testing.swiglu_weighted_inputs(*LARGE_SWIGLU, seed=3)
    rmsnorm = testing.rmsnorm_silu_gate_inputs(LARGE_RMSNORM, seed=3)
    num_threads(1)
    expected = run_swiglu(swiglu, "cpu"), run_rmsnorm(rmsnorm, "cpu"), sum_of_rows("cpu", LARGE_RMSNORM)
    for count in (2, 3, 8):
        num_threads(count)
        for _ in range(5):
            assert_same_bits(run_swiglu(swiglu, "cpu"), expected[0])
            assert_same_bits(run_rmsnorm(rmsnorm, "cpu"), expected[1])
            np.testing.assert_array_equal(sum_of_rows("cpu", LARGE_RMSNORM), expected[2])


def with_special_results(inputs, generator):
    """In some pieces of 128 columns one gradient of the output is 0, subnormal, NaN or Inf, and so are the results there."""
    name = "do2_s" if "do2_s" in inputs else "grad_out"
    pieces = inputs[name][:, : inputs[name].shape[1] // 128 * 128].reshape(len(inputs[name]), -1, 128)
    specials = testing.to_bf16_bits(np.array([1, 0, -0.0, 2.0**-130, np.nan, np.inf]))
    chosen = specials[generator.integers(0, len(specials), pieces.shape[:2])]
    np.put_along_axis(pieces, generator.integers(0, 128, (*pieces.shape[:2], 1)), chosen[..., None], 2)
    return {**inputs, name: np.concatenate([pieces.reshape(len(pieces), -1), inputs[name][:, pieces[0].size :]], 1)}


def tiled(inputs, times):
    return {n: a if n == "weight" else np.tile(a, (times, *[1] * (a.ndim - 1))) for n, a in inputs.items()}


def check_large_calls(times):
    """Calls of as many copies of a few rows, into new tensors and into the inputs' memory, have the bits of one copy's."""
    generator = np.random.default_rng(5)
    swiglu = with_special_results(testing.swiglu_weighted_inputs(1200, 2048, seed=5), generator)
    norm = with_special_results(testing.rmsnorm_silu_gate_inputs(14000, seed=5), generator)

    def results(swiglu, norm):
        found = run_swiglu(swiglu, "cpu") | run_rmsnorm(norm, "cpu")
        grad_weight = {"grad_weight": found.pop("grad_weight")}
        inputs = tensors_of({**swiglu, **norm}, "cpu")
        o1, do2_s, probs = (inputs[name] for name in swiglu)
        found["forward"] = array_of(F.fused_swiglu_weighted(o1, probs))
        found["normed"] = array_of(F.cake_rmsnorm_silu_gate(*(inputs[name] for name in ("x", "z", "weight"))))
        out = tensor_of(np.full(norm["x"].shape, 0x7FC0, np.uint16), "cpu")  # NaN
        F.cake_rmsnorm_silu_gate_train_forward(*(inputs[name] for name in ("x", "z", "weight")), out=out)
        found["normed into out"] = array_of(out)
        F.fused_swiglu_weighted_bwd_out(o1, do2_s, probs, do1=o1, o2_s=do2_s)
        tensors = [inputs[name] for name in ("grad_out", "x", "z", "weight")]
        gradients = F.cake_rmsnorm_silu_gate_train_backward(*tensors, grad_x=inputs["grad_out"], grad_z=inputs["z"])
        assert_same_bits({"grad_weight": array_of(gradients[2])}, grad_weight)
        return found | {f"{name}'s memory": array_of(inputs[name]) for name in ("o1", "do2_s", "grad_out", "z")}

    assert_same_bits(results(tiled(swiglu, times), tiled(norm, times)), tiled(results(swiglu, norm), times))


@pytest.mark.parametrize("isa", ["avx2", "avx512_bf16"])
def test_a_large_call_has_the_bits_of_a_small_one(isa):
    # From 128 MiB of traffic on, given outputs may be written past the caches: 770 and 466 MB, and a forward of 280.
    run_python("from test_repeatable import check_large_calls; check_large_calls(26)", GATED_OPS_CPU_ISA=isa)


def digest():
    """A hash of both ops' outputs at widths with and without a tail, over a wide range of magnitudes, on the CPU."""
    total = hashlib.sha256()
    generator = np.random.default_rng(4)
    for width in (1, 7, 128, 264, 1000):
        inputs = testing.swiglu_weighted_inputs(64, width, seed=width)
        # Exponents all over: sums in another order, or contracted products, would differ somewhere.
        inputs["o1"] ^= generator.integers(0, 8, inputs["o1"].shape).astype(np.uint16) << 7
        inputs["do2_s"] ^= generator.integers(0, 32, inputs["do2_s"].shape).astype(np.uint16) << 7
        for views in ({}, {"o1": "step2", "do2_s": "offset"}):
            for array in run_swiglu(inputs, "cpu", views).values():
                total.update(raw(array).tobytes())
    for array in run_swiglu(with_special_results(testing.swiglu_weighted_inputs(500, 1100), generator), "cpu").values():
        total.update(raw(array).tobytes())
    inputs = testing.rmsnorm_silu_gate_inputs(1000, seed=4)
    inputs["x"] ^= generator.integers(0, 8, inputs["x"].shape).astype(np.uint16) << 7
    for views in ({}, {"x": "step2", "z": "offset"}):
        for array in run_rmsnorm(inputs, "cpu", views).values():
            total.update(raw(array).tobytes())
    for array in run_rmsnorm(with_special_results(inputs, generator), "cpu").values():
        total.update(raw(array).tobytes())
    total.update(sum_of_rows("cpu", LARGE_RMSNORM).tobytes())
    return total.hexdigest()


def test_vector_units():
    """Whatever has FMA gives the same bits."""
    code = "from test_repeatable import digest; print(digest())"
    found = {isa: run_python(code, GATED_OPS_CPU_ISA=isa) for isa in ("avx2", "avx512", "avx512_bf16")}
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("file", ["test_values.py", "test_forward.py"])
def test_baseline_code_is_within_the_bounds(file):
    """Without FMA, the last bits differ, and the same tests hold."""
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", os.path.join(os.path.dirname(__file__), file)]
    code = f"import pytest; raise SystemExit(pytest.main({arguments!r}))"
    assert " passed" in run_python(code, timeout=600, GATED_OPS_CPU_ISA="baseline")


def test_omp_num_threads():
    code = "from test_repeatable import digest; print(digest())"
    found = {n: run_python(code, OMP_NUM_THREADS=n, GATED_OPS_NUM_THREADS=None) for n in ("1", "2", "8")}
    assert set(found.values()) == {digest()}, found


@pytest.mark.parametrize("width", [7, 8, 264])
def test_a_row_of_swiglu_in_any_batch(place, width):
    inputs = testing.swiglu_weighted_inputs(65536 if width == 8 else 4096, width, seed=5)
    whole = run_swiglu(inputs, place)
    for rows in (1, 2, 3, 256, 257):
        some = run_swiglu({name: array[:rows] for name, array in inputs.items()}, place)
        assert_same_bits(some, {name: array[:rows] for name, array in whole.items()})
    last = run_swiglu({name: array[-1:] for name, array in inputs.items()}, place)
    assert_same_bits(last, {name: array[-1:] for name, array in whole.items()})


def test_a_row_of_rmsnorm_in_any_batch(place):
    inputs = testing.rmsnorm_silu_gate_inputs(65536, seed=6)
    weight = inputs.pop("weight")
    whole = run_rmsnorm({**inputs, "weight": weight}, place, compute_grad_weight=False)
    for rows in (slice(0, 1), slice(0, 2), slice(0, 16), slice(0, 17), slice(0, 256), slice(0, 257), slice(-1, None)):
        some = {name: array[rows] for name, array in inputs.items()}
        got = run_rmsnorm({**some, "weight": weight}, place, compute_grad_weight=True)
        for name in ("grad_x", "grad_z"):  # with and without the weight's gradient, too
            np.testing.assert_array_equal(got[name], whole[name][rows])


FLUSHED = """
import ctypes, os, subprocess, sys, tempfile
import numpy as np
import paddle_gated_ops
from calls import run_rmsnorm, run_swiglu
from paddle_gated_ops import testing

paddle_gated_ops.set_num_threads(2)
tiny = np.float64(2.0) ** -130
swiglu = testing.swiglu_weighted_inputs(4000, 128)
swiglu["do2_s"] = testing.to_bf16_bits(testing.from_bf16_bits(swiglu["do2_s"]) * tiny)
rmsnorm = testing.rmsnorm_silu_gate_inputs(4000)
rmsnorm["grad_out"] = testing.to_bf16_bits(testing.from_bf16_bits(rmsnorm["grad_out"]) * tiny)

def digest():
    outputs = list(run_swiglu(swiglu, "cpu").values()) + list(run_rmsnorm(rmsnorm, "cpu").values())
    return [output.tobytes() for output in outputs]

before = digest()
# What Paddle's inference engine and libraries built with -ffast-math do to the thread that loads or runs them.
folder = tempfile.mkdtemp()
source = os.path.join(folder, "flush.c")
with open(source, "w") as file:
    file.write("#include <xmmintrin.h>\\nvoid flush(void) { _mm_setcsr(_mm_getcsr() | 0x8040); }\\n"
               "unsigned mode(void) { return _mm_getcsr(); }\\n")
library = os.path.join(folder, "flush.so")
subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
flush = ctypes.CDLL(library)
flush.flush()
mode = flush.mode()
assert np.float32(1e-39) * np.float32(0.5) == 0, "subnormals are still on"
assert digest() == before
assert flush.mode() & 0x8040 == 0x8040, "the caller's mode is not restored"
print("same")
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("cc") is None, reason="needs x86-64 and a C compiler")
def test_a_thread_without_subnormals():
    """The mode of the calling thread decides nothing, and comes back."""
    assert run_python(FLUSHED) == "same"
