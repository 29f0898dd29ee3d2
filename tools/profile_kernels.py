"""What Nsight Compute counts of each CUDA kernel, as a table: bytes that memory moved against those that the op has to, the
rate, registers, spills. Needs a GPU, nvcc and ncu; no Paddle: python tools/profile_kernels.py [FILE.md]
"""

import csv
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# kind, rows, columns, and the layout argument of tools/bench_kernels.cu: an offset of the rows, or the stride of z
CASES = [
    ("swiglu", 65536, 768, 0),
    ("swiglu", 65536, 1408, 0),
    ("swiglu", 65536, 2048, 0),
    ("swiglu", 60000, 3584, 0),
    ("swiglu", 32768, 7168, 0),
    ("swiglu", 65536, 2048, 1),
    ("swiglu", 65536, 2047, 0),
    ("norm", 32768, 128, 128),
    ("norm", 524288, 128, 128),
    ("norm", 524288, 128, 512),
]
METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__bytes_read.sum": "MB read",
    "dram__bytes_write.sum": "MB written",
    "launch__registers_per_thread": "registers",
    "smsp__sass_inst_executed_op_local.sum": "spill instructions",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps %",
    "l1tex__throughput.avg.pct_of_peak_sustained_active": "L1 %",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
}


def build(program):
    sources = [*ROOT.glob("ops/*/*_cuda.cu"), *ROOT.glob("ops/*/*_cpu.cc"), ROOT / "ops/common/parallel_for.cc"]
    flags = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-ffp-contract=off"]
    flags += [f"-arch={os.environ.get('GPU_ARCH', 'native')}", f"-I{ROOT / 'ops'}"]
    subprocess.run(["nvcc", *flags, ROOT / "tools/bench_kernels.cu", *sources, "-o", program], check=True)


def profile(program, case):
    """The kernels that one backward launches: [{metric: number, "kernel": name}]."""
    kind, rows, columns, layout = case
    launches = 1 if kind == "swiglu" else 2
    command = ["ncu", "--clock-control", "none", "--csv", "--print-units", "base", "--metrics", ",".join(METRICS)]
    command += ["--kernel-name", "regex:Bwd|SumChunks", "--launch-count", str(launches), str(program), "cases"]
    output = subprocess.run(
        command, input=f"{kind} {rows} {columns} {layout}\n", text=True, capture_output=True, check=True
    ).stdout
    table = output[output.index('"ID"') :]
    kernels = {}
    for line in csv.DictReader(io.StringIO(table)):
        if line["ID"]:
            kernel = kernels.setdefault(line["ID"], {"kernel": line["Kernel Name"].split("(")[0].split("::")[-1]})
            kernel[line["Metric Name"]] = float(line["Metric Value"].replace(",", ""))
    return list(kernels.values())


def main():
    rows_of_table = []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bench_kernels"
        build(program)
        for case in CASES:
            kind, rows, columns, layout = case
            count = rows * columns * (12 if kind == "swiglu" else 10) / 1e6
            for kernel in profile(program, case):
                read, written = kernel["dram__bytes_read.sum"] / 1e6, kernel["dram__bytes_write.sum"] / 1e6
                us = kernel["gpu__time_duration.sum"] / 1e3
                rate = f"{(read + written) / us:.2f}"
                cells = [kernel["kernel"], f"{rows}x{columns}", layout, f"{us:.1f}", f"{count:.0f}", f"{read:.0f}"]
                cells += [f"{written:.0f}", rate, *(f"{kernel[name]:.0f}" for name in list(METRICS)[3:])]
                rows_of_table.append(cells)
                print(*cells, flush=True)
    heads = ["kernel", "size", "layout", "us", "MB to move", "MB read", "MB written", "TB/s", *list(METRICS.values())[3:]]
    lines = [heads, ["---"] * len(heads), *rows_of_table]
    text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
