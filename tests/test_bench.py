"""The benchmark tool: what it measures is right before it is timed, and what it writes is whole."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn import functional as F

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

TOOLS = Path(__file__).resolve().parent.parent / "tools"
sys.path.insert(0, str(TOOLS))
from bench import cases, gpu, oracle, peer_process, records, session, timing  # noqa: E402
from bench.arrays import make_inputs, repeated  # noqa: E402

PEER_PYTHON = os.environ.get("GATED_OPS_PEER_PYTHON")
BACKWARDS = ("swiglu_weighted_bwd", "rmsnorm_silu_gate_bwd")
QUICK_CASES = sum(len(cases.quick(op, "cpu")) for op in BACKWARDS)


def run_bench(*arguments, **environment):
    """The tool's table, at sizes and times so small that the figures mean nothing."""
    command = [sys.executable, str(TOOLS / "bench.py"), "--sizes", "quick", "--seconds", "0.002", "--rotate", "1"]
    environment = {**os.environ, **environment}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The table, the header and the records of a quick run on the CPU."""
    path = tmp_path_factory.mktemp("bench") / "cpu.json"
    table = run_bench("--peers", "paddle", "fla", "--calls", "--out", str(path), OMP_NUM_THREADS="2")
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
    on_one_thread = {op for op, _, _, provider in timed if provider == "ours, outputs given, one thread"}
    assert on_one_thread == with_given_outputs
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
        if r["provider"].startswith("copy"):
            assert "of_copy" not in r
        else:
            limit = copies[(*case, r["fresh_outputs"])]
            if r["provider"].endswith("one thread"):
                single = {tuple(one.values())[:4]: one["us"] for one in found if one["provider"] == "copy, one thread"}
                limit = single[case]
            assert r["copy_us"] == limit
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


@pytest.mark.parametrize("promised", [True, False], ids=["ours", "others"])
@pytest.mark.parametrize("rows", [7, 40000])  # fewer than are checked; more than are drawn and checked
def test_a_wrong_result_is_not_timed(rows, promised):
    case = cases.Case("rmsnorm_silu_gate_bwd", rows, 128)
    arrays, (tensors,) = make_inputs(
        case, 1, lambda array, n, skip: testing.bf16_tensor(repeated(array, n, skip).reshape(n, *array.shape[1:]), "cpu")
    )
    right = [testing.bits_of(tensor) for tensor in F.cake_rmsnorm_silu_gate_train_backward(**tensors)]
    oracle.check(case, arrays, right, promised)
    with pytest.raises(AssertionError, match="2 outputs in place of 3"):
        oracle.check(case, arrays, right[:2], promised)
    with pytest.raises(AssertionError, match="rows in place of"):
        oracle.check(case, arrays, [right[0][:-1], *right[1:]], promised)
    for output, at in ((0, (0, 7)), (1, (-1, 7)), (0, (rows // 2, 7)), (2, 7)):
        wrong = [array.copy() for array in right]
        wrong[output][at] = testing.to_bf16_bits(1e5)
        with pytest.raises(AssertionError):
            oracle.check(case, arrays, wrong, promised)


def test_calls_take_turns_and_rotate():
    numbers = {"a": [], "b": []}
    times = timing.time_calls({name: numbers[name].append for name in numbers}, seconds=0, at_least=4)
    assert sorted(numbers["a"] + numbers["b"]) == list(range(len(numbers["a"] + numbers["b"])))
    assert all(len(times[name]) == len(numbers[name]) - 1 >= 4 for name in numbers)  # one call warms up


@pytest.mark.parametrize("layout", ["contiguous", "unaligned"])
def test_inputs_repeat(layout):
    case = cases.Case("swiglu_weighted_bwd", 700, 2048, layout)

    def make(array, rows, skip):
        return repeated(array, rows, skip)[skip:].reshape(rows, *array.shape[1:])

    arrays, calls = make_inputs(case, 2, make)
    assert len(arrays["o1"]) == case.period < case.rows and [sorted(call) for call in calls] == [sorted(arrays)] * 2
    for name, array in arrays.items():
        both = np.concatenate([call[name] for call in calls])
        assert np.array_equal(both, array[np.arange(2 * case.rows) % case.period])
    assert (calls[0]["o1"].ctypes.data - calls[0]["o1"].base.ctypes.data) == (2 if layout == "unaligned" else 0)


def test_files_are_added_to(tmp_path):
    path = tmp_path / "results.json"
    case, other = cases.Case("swiglu_weighted", 8, 16), cases.Case("swiglu_weighted", 9, 16)
    head = {"commit": "abc", "device": "cpu", "versions": {"paddle": "3"}}
    records.File(path, head).add([records.timed(case, "ours", 2.0), records.timed(other, "ours", 1.0)])
    file = records.File(path, {**head, "versions": {"torch": "2"}}, add=True)
    assert not file.lacks(case, "ours") and file.lacks(case, "ours", "copy") and file.lacks(other, "copy")
    file.add([records.timed(case, "copy", 1.0), records.timed(case, "ours", 3.0), records.skipped(other, "copy", "why")])
    assert file.lacks(other, "copy")
    file.describe(gpu="a GPU")
    file.write()
    merged, found = records.load(path)
    assert merged == {**head, "versions": {"paddle": "3", "torch": "2"}, "gpu": "a GPU"}
    assert [(r["rows"], r["provider"], r.get("us")) for r in found] == [
        (8, "ours", 3.0), (8, "copy", 1.0), (9, "ours", 1.0), (9, "copy", None),
    ]  # fmt: skip
    file.add([records.timed(case, "FLA", 4.0, 2.0)])
    file = records.File(path, {**head, "commit": "def"}, add=True)  # a peer is what it was, and this library is not
    assert [(r["provider"], r["us"], r["commit"]) for r in file.records] == [("FLA", 4.0, "abc")]
    assert file.head["commit"] == "def"
    with pytest.raises(ValueError, match="gpu"):
        file.describe(gpu="another GPU")
    records.File(path, head).add([])
    assert records.load(path) == (head, [])


PEER = """
import json, os, sys
job = json.load(sys.stdin)
with open(os.environ["PEER_LOG"], "a") as log:
    log.write(json.dumps([sys.argv[-1], job]) + chr(10))
print(json.dumps({"versions": {"torch": "2"}, "device": job["device"], "bytes_of_element": None}), flush=True)
for case in job["cases"][: int(os.environ.get("PEER_ANSWERS", "100"))]:
    print(json.dumps({} if job["compile_only"] else {"us": 7.0, "others_cores": 0.0}), flush=True)
sys.exit("no more")
"""


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """The interpreter of a peer that times nothing, and a function that returns what it has been asked: [(peer, job)]."""
    program, log = tmp_path / "peer", tmp_path / "peer.log"
    program.write_text(f"#!{sys.executable}\n{PEER}")
    program.chmod(0o755)
    monkeypatch.setenv("PEER_LOG", str(log))
    return str(program), lambda: [tuple(json.loads(line)) for line in log.read_text().splitlines()]


def test_what_a_file_lacks_is_measured(tmp_path, peer):
    command, asked = peer
    path = tmp_path / "cpu.json"
    arguments = ["--ops", "rmsnorm_silu_gate", "--peers", "torch_compile", "--peer-python", command, "--out", str(path)]
    table = run_bench(*arguments, PEER_ANSWERS="2")
    assert "skipped: exit status 1: no more" in table
    before = records.load(path)[1]
    assert [r["us"] for r in before if r["provider"] == "torch.compile" and "us" in r] == [7.0, 7.0]
    run_bench(*arguments, "--add")
    quick = [list(case) for case in cases.quick("rmsnorm_silu_gate", "cpu")]
    assert [job["cases"] for _, job in asked()] == [quick, quick[2:]]
    head, after = records.load(path)
    assert head["versions"]["torch"] == "2"
    assert [r["us"] for r in after if r["provider"] == "torch.compile"] == [7.0] * len(quick)
    assert [r for r in after if "us" in r and r in before] == [r for r in before if "us" in r]
    run_bench(*arguments, "--add")
    assert len(asked()) == 2 and records.load(path) == (head, after)


def test_a_peer_that_ends_at_once_is_left_out():
    many = 9999 * cases.quick("rmsnorm_silu_gate", "gpu")  # more than a pipe holds
    reason = peer_process.run("fla", "false", many, {"device": "gpu"}, {}, None, None)
    assert reason.startswith("exit status 1")


def test_peers_compile_each_case_once(peer):
    command, asked = peer
    wanted = {"torch_compile": cases.sweep("swiglu_weighted_bwd", "gpu"), "fla": cases.table("rmsnorm_silu_gate", "gpu")}
    peer_process.compile_all(wanted, command, {"device": "gpu"})
    assert all(job["compile_only"] for _, job in asked())
    for name, its_cases in wanted.items():
        compiled = [cases.Case(*case) for of, job in asked() if of == name for case in job["cases"]]
        assert sorted(compiled) == sorted(its_cases)


@pytest.mark.skipif(not PEER_PYTHON, reason="GATED_OPS_PEER_PYTHON names no Python with PyTorch")
def test_torch_compile(tmp_path):
    path = tmp_path / "cpu.json"
    run_bench("--ops", *BACKWARDS, "--peers", "torch_compile", "--peer-python", PEER_PYTHON, "--out", str(path))
    _, found = records.load(path)
    assert len([r for r in found if r["provider"] == "torch.compile" and r["us"] > 0]) == QUICK_CASES


BENCH_KERNELS = """
import json, sys
print(json.dumps({"gpu": "a GPU", "sm": 90}))
print(json.dumps({"op": "empty kernel", "rows": 0, "columns": 0, "us": 0.5, "copy_us": 0.5}))
for line in sys.stdin:
    kind, rows, columns, layout = line.split()
    stem, suffix = ("swiglu_weighted", " unaligned") if kind == "swiglu" else ("rmsnorm_silu_gate", " z sliced")
    for name, us in ((stem + "_bwd", 4.0), (stem, 2.0)):
        name += suffix if layout in ("1", "512") else ""
        print(json.dumps({"op": name, "rows": int(rows), "columns": int(columns), "us": us, "copy_us": us / 2}))
"""


@pytest.fixture
def fake_nvcc(tmp_path, monkeypatch):
    """Its every program is the one above."""
    program, nvcc = tmp_path / "program", tmp_path / "nvcc"
    program.write_text(f"#!{sys.executable}\n{BENCH_KERNELS}")
    nvcc.write_text(f'#!/bin/sh\nfor target; do :; done\ncp -p "{program}" "$target"\n')
    for file in (program, nvcc):
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_kernel_times_become_records(fake_nvcc):
    wanted = [case for op in cases.OPS if op != "swiglu_weighted" for case in cases.table(op, "gpu")]
    device = {}
    found = list(gpu.time_kernels(wanted, device.update))
    assert device["gpu"] == "a GPU" and len(found) == len(wanted)
    found = sum(found, [])
    assert found[0]["provider"] == "an empty kernel" and found[0]["us"] == 0.5
    ours = {tuple(r.values())[:4]: r for r in found if r["provider"] == "ours"}
    assert set(ours) == {tuple(case) for case in wanted}
    assert all(r["of_copy"] == 0.5 and r["us"] == (4.0 if r["op"].endswith("_bwd") else 2.0) for r in ours.values())


def test_a_run_on_a_gpu(tmp_path, fake_nvcc, peer, monkeypatch, capsys):
    command, asked = peer
    monkeypatch.setattr(session.paddle, "set_device", lambda device: None)
    monkeypatch.setattr(gpu, "time_in_paddle", lambda case, *_: [records.timed(case, gpu.IN_PADDLE, 5.0, 4.0)])
    path = tmp_path / "gpu.json"
    ops = ["swiglu_weighted_bwd", "rmsnorm_silu_gate"]
    peers = ["torch_compile", "fla", "liger"]
    line = ["bench.py", "--device", "gpu", "--ops", *ops, "--sizes", "table", "sweep", "--peers", *peers]
    monkeypatch.setattr(sys, "argv", [*line, "--peer-python", command, "--out", str(path), "--add"])
    tool = runpy.run_path(str(TOOLS / "bench.py"))
    arguments = tool["parse_arguments"]()
    wanted = tool["chosen_cases"](arguments)
    assert {case.rows for case in wanted} >= {8, 2**20}
    session.run(arguments, wanted)
    head, found = records.load(path)
    assert head["gpu"] == "a GPU" and head["versions"]["torch"] == "2"
    names = {case: [r["provider"] for r in found if tuple(r.values())[:4] == tuple(case)] for case in wanted}
    for case, of_case in names.items():
        theirs = ["Liger SwiGLU (do1 alone)"] if case.is_swiglu else ["FLA rms_norm_gated"]
        assert sorted(of_case) == sorted(["copy", "ours", "torch.compile", "ours, captured in Paddle", *theirs]), case
    limits = {tuple(r.values())[:4]: r["us"] for r in found if r["provider"] == "copy"}
    assert all(r["copy_us"] == limits[tuple(r.values())[:4]] for r in found if r["provider"] == "torch.compile")
    timed = [job["cases"] for _, job in asked() if not job["compile_only"]]
    assert [len(of_peer) for of_peer in timed] == [len(wanted), *(sum(c.op == op for c in wanted) for op in ops[::-1])]
    assert "peers compile" in capsys.readouterr().err
    before = len(asked())
    session.run(arguments, wanted)
    assert len(asked()) == before and records.load(path) == (head, found)


@pytest.mark.gpu
def test_gpu(tmp_path):
    path = tmp_path / "gpu.json"
    run_bench("--device", "gpu", "--ops", *BACKWARDS, "--peers", "paddle", "--calls", "--out", str(path))
    head, found = records.load(path)
    assert head["gpu"]
    for provider in ("copy", "ours", "ours, captured in Paddle"):
        timed = [r for r in found if r["op"] in BACKWARDS and r["provider"] == provider and r["us"] > 0]
        assert len(timed) == QUICK_CASES, provider
    # Either right and timed, or left out: a Paddle may have no machine code for the GPU at hand.
    assert len([r for r in found if r["provider"] == "Paddle, unfused"]) == QUICK_CASES
