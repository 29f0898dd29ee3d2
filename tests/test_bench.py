"""The benchmark tool: what it measures is right before it is timed, and what it writes is whole."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paddle_gated_ops import testing

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

TOOLS = Path(__file__).resolve().parent.parent / "tools"
sys.path.insert(0, str(TOOLS))
from bench import cases, oracle, records, timing  # noqa: E402
from bench.arrays import make_inputs  # noqa: E402

BACKWARDS = ("swiglu_weighted_bwd", "rmsnorm_silu_gate_bwd")


def run_bench(*arguments):
    """The tool's table, at sizes and times so small that the figures mean nothing."""
    command = [sys.executable, str(TOOLS / "bench.py"), "--sizes", "quick", "--seconds", "0.002", "--rotate", "1"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The table, the header and the records of a quick run on the CPU."""
    path = tmp_path_factory.mktemp("bench") / "cpu.json"
    table = run_bench("--peers", "paddle", "fla", "--calls", "--out", str(path))
    return table, path, *records.load(path)


def test_every_version_of_every_op_is_timed(measured):
    _, _, _, found = measured
    timed = {(r["op"], r["rows"], r["layout"], r["provider"]) for r in found if "us" in r}
    for op in cases.OPS:
        for case in cases.quick(op, "cpu"):
            for provider in ("copy", "ours", "Paddle, unfused", "Paddle, unfused, FP32 tensors"):
                assert (op, case.rows, case.layout, provider) in timed
    with_given_outputs = {op for op, _, _, provider in timed if provider == "ours, outputs given"}
    assert with_given_outputs == {"swiglu_weighted_bwd", "rmsnorm_silu_gate_bwd", "rmsnorm_silu_gate"}
    assert not [r for r in found if "skipped" in r]


def test_figures_fit_together(measured):
    _, _, _, found = measured
    copies = records.copies_of(found)
    for r in found:
        assert r["us"] > 0
        if r["op"] == "eager call":
            continue
        case = cases.Case(r["op"], r["rows"], r["columns"], r["layout"])
        assert r["bytes"] == case.bytes
        assert r["GB/s"] == pytest.approx(case.bytes / r["us"] / 1e3, abs=0.01)
        if r["provider"] != "copy":
            assert r["copy_us"] == copies[(*case, r["fresh_outputs"])]
            assert r["of_copy"] == pytest.approx(r["copy_us"] / r["us"], abs=1e-4)


def test_eager_calls_are_timed(measured):
    _, _, _, found = measured
    providers = [r["provider"] for r in found if r["op"] == "eager call"]
    for op in BACKWARDS:
        assert f"{op}, ours" in providers and f"{op}, ours, outputs given" in providers
    assert "Paddle's layer_norm" in providers


def test_table_and_picture(measured):
    table, path, head, found = measured
    assert len([line for line in table.splitlines() if line.startswith(cases.OPS)]) == len(
        [r for r in found if r["op"] in cases.OPS]
    )
    assert "fla is left out: " in table
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert head["device"] == "cpu" and head["versions"]["paddle"] and len(head["date"]) == 10


def test_bytes():
    assert cases.Case("swiglu_weighted_bwd", 3, 5).bytes == 12 * 3 * 5 + 8 * 3
    assert cases.Case("swiglu_weighted", 3, 5).bytes == 6 * 3 * 5 + 4 * 3
    assert cases.Case("rmsnorm_silu_gate_bwd", 3, 128).bytes == 10 * 3 * 128
    assert cases.Case("rmsnorm_silu_gate", 3, 128).bytes == 6 * 3 * 128
    assert cases.Case("rmsnorm_silu_gate", 1, 128).sets(7680) == 10
    assert cases.Case("rmsnorm_silu_gate", 1, 128).sets(7681) == 11


@pytest.mark.parametrize("place_of_fault", ["first row", "last row", "sum", "missing output"])
def test_a_wrong_result_is_not_timed(place_of_fault):
    case = cases.Case("rmsnorm_silu_gate_bwd", oracle.CHECKED_ROWS + 5, 128)
    arrays, _ = make_inputs(case, 1, np.asarray)

    def call(rows, faulty=True):
        inputs = {name: a if name == "weight" else a[rows] for name, a in arrays.items()}
        right = testing.reference.cake_rmsnorm_silu_gate_train_backward(**inputs)
        outputs = [testing.to_bf16_bits(getattr(right, name)) for name in oracle.OUTPUTS[case.op]]
        if faulty and place_of_fault == "missing output":
            return outputs[:-1]
        if faulty:
            output, at = {"first row": (0, (0, 7)), "last row": (1, (-1, 7)), "sum": (2, 7)}[place_of_fault]
            outputs[output][at] = testing.to_bf16_bits(1000.0)
        return outputs

    for assert_outputs in (oracle.assert_as_promised, oracle.assert_close):
        oracle.check(case, arrays, lambda rows: call(rows, faulty=False), assert_outputs)
        with pytest.raises(AssertionError):
            oracle.check(case, arrays, call, assert_outputs)


def test_calls_take_turns_and_rotate():
    numbers = {"a": [], "b": []}
    times = timing.time_calls({name: numbers[name].append for name in numbers}, seconds=0, at_least=4)
    assert sorted(numbers["a"] + numbers["b"]) == list(range(len(numbers["a"] + numbers["b"])))
    assert all(len(times[name]) == len(numbers[name]) - 1 >= 4 for name in numbers)  # one call warms up


def test_files_are_added_to(tmp_path):
    path = tmp_path / "results.json"
    case = cases.Case("swiglu_weighted", 8, 16)
    head = {"commit": "abc", "device": "cpu", "versions": {"paddle": "3"}}
    records.save(path, head, [records.timed(case, "ours", 2.0), records.timed(case, "copy", 1.0)])
    records.save(path, {**head, "versions": {"torch": "2"}}, [records.timed(case, "ours", 3.0)], add=True)
    merged, found = records.load(path)
    assert merged["versions"] == {"paddle": "3", "torch": "2"}
    assert {r["provider"]: r["us"] for r in found} == {"ours": 3.0, "copy": 1.0}
    with pytest.raises(ValueError, match="commit"):
        records.save(path, {**head, "commit": "def"}, [], add=True)
    assert json.loads(path.read_text())["header"]["commit"] == "abc"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_torch_compile(tmp_path):
    path = tmp_path / "cpu.json"
    run_bench("--ops", *BACKWARDS, "--peers", "torch_compile", "--out", str(path))
    _, found = records.load(path)
    assert len([r for r in found if r["provider"] == "torch.compile" and r["us"] > 0]) == 5


@pytest.mark.gpu
def test_gpu(tmp_path):
    path = tmp_path / "gpu.json"
    run_bench("--device", "gpu", "--ops", *BACKWARDS, "--peers", "paddle", "--calls", "--out", str(path))
    head, found = records.load(path)
    assert head["gpu"]
    for provider in ("copy", "ours", "ours, captured in Paddle"):
        timed = [r for r in found if r["op"] in BACKWARDS and r["provider"] == provider and r["us"] > 0]
        assert len(timed) == 5, provider
    # Either right and timed, or left out: a Paddle may have no machine code for the GPU at hand.
    assert len([r for r in found if r["provider"] == "Paddle, unfused"]) == 5
