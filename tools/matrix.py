#!/usr/bin/env python3
"""Installs the package in every way that people do, each in a fresh environment, and checks both ops there.

    python3 tools/matrix.py              the whole matrix; writes tools/results/install_matrix.json and .md, cell by cell
    python3 tools/matrix.py --resume     the same, without the cells that passed in the run that these files are of
    python3 tools/matrix.py --ci         the cells of CI; writes nothing
    python3 tools/matrix.py --list       prints the cells and runs none

A cell is a Paddle, a Python, a setuptools, a pip and a way to install. The cells are no full product: every pair of values
of two axes stands in one of them, where it can exist. In each cell uv makes the environment, the way is gone from a fresh
copy of the checkout, and ``paddle_gated_ops.run_check()`` runs from an empty folder. Cells without their Python, or without
nvcc for a GPU Paddle, are reported as left out. Logs: build/matrix/. What uv downloads lies in UV_CACHE_DIR, else in a
folder that goes with the run; where there is a ccache, it is used. Any Python 3.9 or newer runs this; uv comes from PyPI
where it is missing.
"""
import argparse
import datetime
import glob
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "matrix"
RESULTS = ROOT / "tools" / "results" / "install_matrix"
AXES = ("paddle", "python", "setuptools", "pip", "way")
PYTHONS = {  # for which there are wheels
    "paddlepaddle 2.6.2": ["3.9", "3.10", "3.11", "3.12"],
    "paddlepaddle 3.0.0": ["3.9", "3.10", "3.11", "3.12", "3.13"],
    "paddlepaddle 3.1.1": ["3.9", "3.10", "3.11", "3.12", "3.13"],
    "paddlepaddle 3.2.2": ["3.9", "3.10", "3.11", "3.12", "3.13"],
    "paddlepaddle 3.3.1": ["3.9", "3.10", "3.11", "3.12", "3.13"],
    "paddlepaddle-gpu 2.6.2": ["3.9", "3.10", "3.11", "3.12"],
}
SETUPTOOLS = {"65": "==65.*", "79": "==79.*", "80": "==80.*", "newest": ""}
PIPS = {"22": "==22.*", "newest": ""}
WAYS = {  # commands of the environment's Python, in a copy of the checkout; {dist} is a glob
    "pip install .": ["pip install ."],
    "pip install --no-build-isolation .": ["pip install --no-build-isolation ."],
    "pip install -e .": ["pip install -e ."],
    "pip install --no-build-isolation -e .": ["pip install --no-build-isolation -e ."],
    "pip wheel .": ["pip wheel --no-deps -w dist .", "pip install dist/*.whl"],
    "python -m build": ["build", "pip install dist/*.whl"],
    "python -m build --no-isolation": ["build --no-isolation", "pip install dist/*.whl"],
    "sdist, then pip install": ["build --sdist", "pip install dist/*.tar.gz"],
}
CHECK = """
import os, sys
import paddle_gated_ops
from paddle_gated_ops import _library
editable = sys.argv[1] in _library.C.__file__
assert editable == (sys.argv[2] == "editable"), _library.C.__file__
paddle_gated_ops.run_check()
"""


def can_exist(cell):
    # setuptools 65 and pip 22 use pkgutil.ImpImporter, which Python 3.12 does not have.
    old = cell["setuptools"] == "65" or cell["pip"] == "22"
    return cell["python"] in PYTHONS[cell["paddle"]] and not (old and cell["python"] in ("3.12", "3.13"))


def all_pairs():
    """The fewest cells a greedy choice finds such that each pair of values that can meet does."""
    pythons = sorted(set(sum(PYTHONS.values(), [])), key=lambda version: int(version[2:]))
    product = itertools.product(PYTHONS, pythons, SETUPTOOLS, PIPS, WAYS)
    candidates = {}
    for values in product:
        cell = dict(zip(AXES, values))
        if can_exist(cell):
            candidates[values] = set(itertools.combinations(cell.items(), 2))
    missing, chosen = set().union(*candidates.values()), []
    while missing:
        best = max(candidates, key=lambda values: len(candidates[values] & missing))
        missing -= candidates[best]
        chosen.append(dict(zip(AXES, best)))
    order = list(PYTHONS)
    return sorted(chosen, key=lambda cell: (order.index(cell["paddle"]), pythons.index(cell["python"])))


def ci_cells():
    """Each way to install once, by turns with the oldest of everything and the newest."""
    oldest = {"paddle": "paddlepaddle 2.6.2", "python": "3.9", "setuptools": "65", "pip": "22"}
    newest = {"paddle": "paddlepaddle 3.3.1", "python": "3.13", "setuptools": "newest", "pip": "newest"}
    return [{**(newest if number % 2 else oldest), "way": way} for number, way in enumerate(WAYS)]


def find_python(version):
    """An interpreter of this version that runs, or None: pyenv's, else that on PATH."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    for path in [*glob.glob(f"{pyenv}/versions/{version}.*/bin/python"), shutil.which(f"python{version}")]:
        if path and subprocess.run([path, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:
            return path
    return None


def find_uv(scratch):
    if shutil.which("uv"):
        return shutil.which("uv")
    subprocess.run([sys.executable, "-m", "venv", scratch / "uv"], check=True)
    subprocess.run([scratch / "uv/bin/python", "-m", "pip", "install", "-q", "uv"], check=True)
    return str(scratch / "uv/bin/uv")


def extra_packages(paddle):
    """What Paddle 2.6 needs and does not declare."""
    return ["numpy<2", "decorator"] if paddle.split()[1].startswith("2.") else []


def why_left_out(cell):
    if find_python(cell["python"]) is None:
        return f"no Python {cell['python']} here"
    path = os.path.join(os.environ.get("CUDA_HOME", ""), "bin") + os.pathsep + os.environ["PATH"]
    if "gpu" in cell["paddle"] and shutil.which("nvcc", path=path) is None:
        return "no nvcc here"
    return None


class Failed(Exception):
    pass


def run_cell(cell, uv, folder, log):
    """Makes the environment, installs, checks; returns the versions that came. Raises Failed with the step's name."""
    python = folder / "env/bin/python"
    package, version = cell["paddle"].split()
    setuptools, pip = "setuptools" + SETUPTOOLS[cell["setuptools"]], "pip" + PIPS[cell["pip"]]
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{setuptools}\n")
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CXXFLAGS", "LDFLAGS")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    # What is built in isolation gets the cell's setuptools too; PIP_CONSTRAINT does it for pip before 25.3.
    isolated = {} if "isolation" in cell["way"] else {"PIP_BUILD_CONSTRAINT": str(constraints)}
    if shutil.which("ccache") and "CXX" not in env:  # the sources are the same in all cells, but for the headers' versions
        env.update(CXX="ccache c++", CCACHE_BASEDIR=str(folder), CCACHE_NOHASHDIR="1")
    env.update(isolated, PIP_CONSTRAINT=str(constraints), UV_PYTHON_DOWNLOADS="never", OMP_NUM_THREADS=str(os.cpu_count()))

    def step(command, cwd=folder, **variables):
        log.write(f"$ {' '.join(map(str, command))}\n")
        log.flush()
        done = subprocess.run(command, cwd=cwd, env={**env, **variables}, stdout=log, stderr=subprocess.STDOUT,
                              stdin=subprocess.DEVNULL, timeout=1500)
        if done.returncode:
            raise Failed(" ".join(Path(word).name if "/" in str(word) else str(word) for word in command)[:200])

    step([uv, "venv", "-q", "--python", find_python(cell["python"]), folder / "env"])
    packages = [f"{package}=={version}", *extra_packages(cell["paddle"]), setuptools, pip, "wheel", "build"]
    step([uv, "pip", "install", "-q", "--python", python, *packages])
    checkout = folder / "checkout"
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=shutil.ignore_patterns(
        ".*", "build", "dist", "log", "__pycache__", "*.so", "_C.*.json", "*.egg-info"))
    for command in WAYS[cell["way"]]:
        words = [word for pattern in command.split() for word in (
            sorted(glob.glob(str(checkout / pattern))) if "*" in pattern else [pattern])]
        # `python -m build` isolates in an environment that knows nothing of this one but that it is activated.
        activated = {"VIRTUAL_ENV": str(folder / "env")} if words[0] == "build" else {}
        step([python, "-m", *words], cwd=checkout, **activated)
    (folder / "empty").mkdir()
    step([python, "-c", CHECK, str(checkout), "editable" if " -e " in cell["way"] else "installed"], cwd=folder / "empty")
    report = "import importlib.metadata as m, platform; print(platform.python_version(), *(m.version(n) for n in " \
             "('setuptools', 'pip', 'numpy', 'paddle_gated_ops')), sep='\\n')"
    came = subprocess.run([python, "-c", report], env=env, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(("python", "setuptools", "pip", "numpy", "paddle_gated_ops"), came.stdout.split()))


def run_all(cells, scratch, after_each):
    """Runs the cells; each gets result ('passed', 'failed', 'left out'), date, and seconds and came, or reason."""
    uv = find_uv(scratch)
    os.environ.setdefault("UV_CACHE_DIR", str(scratch / "cache"))
    LOGS.mkdir(parents=True, exist_ok=True)
    for number, cell in enumerate(cells, 1):
        if cell.get("result") == "passed":
            continue
        cell["date"] = datetime.date.today().isoformat()
        reason = why_left_out(cell)
        if reason:
            cell.update(result="left out", reason=reason)
        else:
            log_path, begin = LOGS / f"{number:02}.log", time.time()
            folder = Path(tempfile.mkdtemp(dir=scratch))
            with open(log_path, "w") as log:
                try:
                    cell.update(result="passed", came=run_cell(cell, uv, folder, log))
                except (Failed, subprocess.TimeoutExpired) as error:
                    cell.update(result="failed", reason=str(error))
            cell["seconds"] = round(time.time() - begin)
            shutil.rmtree(folder)
            if cell["result"] == "failed":
                print("".join(log_path.read_text(errors="replace").splitlines(True)[-40:]), file=sys.stderr)
        name = ", ".join(f"{axis} {cell[axis]}" for axis in AXES)
        print(f"[{number}/{len(cells)}] {name}: {cell['result']} {cell.get('reason', '')}", flush=True)
        after_each()
        following = cells[number] if number < len(cells) else {}
        if any(following.get(axis) != cell[axis] for axis in ("paddle", "python")):
            subprocess.run([uv, "cache", "clean", "-q", cell["paddle"].split()[0]], check=True)


def numbers_in(text):
    return [int(number) for number in re.findall(r"\d+", text)] or [99]


def markdown(report):
    """The tables of a report: how many cells ran, by Paddle and value; and each cell."""
    cells = report["cells"]
    ran = [cell for cell in cells if cell["result"] != "left out"]
    passed = sum(cell["result"] == "passed" for cell in ran)
    paddles = list(dict.fromkeys(cell["paddle"] for cell in cells))
    lines = [
        f"# Installs, {report['date']}",
        "",
        f"{passed} of {len(ran)} cells passed, {len(cells) - len(ran)} could not run ({report['reached']} reached); made by "
        f"`python3 tools/matrix.py` on {report['system']} with {report['compiler']}.",
        "The numbers are how many cells of a Paddle passed with the value; a dash: the two cannot meet, or could not here.",
        "",
        "| | " + " | ".join(paddles) + " |",
        "|---" * (len(paddles) + 1) + "|",
    ]
    for axis in AXES[1:]:
        for value in sorted({cell[axis] for cell in cells}, key=numbers_in):
            row = []
            for paddle in paddles:
                results = [cell["result"] for cell in ran if cell["paddle"] == paddle and cell[axis] == value]
                failed = f", {results.count('failed')} FAILED" if "failed" in results else ""
                row.append(f"{results.count('passed')}{failed}" if results else "-")
            label = f"`{value}`" if axis == "way" else f"{axis} {value}"
            lines.append(f"| {label} | " + " | ".join(row) + " |")
    lines += ["", "| Paddle | Python | setuptools | pip | NumPy | way | |", "|---|---|---|---|---|---|---|"]
    for cell in cells:
        came = cell.get("came", cell)
        row = [cell["paddle"], *(came.get(axis, "") for axis in ("python", "setuptools", "pip", "numpy"))]
        row += [f"`{cell['way']}`", f"{cell['result']} {cell.get('reason', '')}".strip()]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def record(cells):
    """Writes the results of the cells that have been reached."""
    done = [cell for cell in cells if "result" in cell]
    compiler = subprocess.run(["c++", "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    report = {
        "date": max(cell["date"] for cell in done),
        "system": platform.platform(),
        "compiler": compiler.splitlines()[0],
        "reached": f"{len(done)} of {len(cells)}",
        "cells": done,
    }
    RESULTS.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(markdown(report))


def main():
    parser = argparse.ArgumentParser(description="Installs the package in every way, in fresh environments.")
    parser.add_argument("--ci", action="store_true", help="run CI's cells only")
    parser.add_argument("--resume", action="store_true", help="keep what passed in the run of the results' files")
    parser.add_argument("--list", action="store_true", help="print the cells, run none")
    parser.add_argument("--only", metavar="REGEX", default="", help="run the cells whose line in --list matches")
    options = parser.parse_args()
    cells = ci_cells() if options.ci else all_pairs()
    cells = [cell for cell in cells if re.search(options.only, ", ".join(cell.values()))]
    if options.list:
        print("\n".join(", ".join(cell.values()) for cell in cells))
        return 0
    recorded = not options.ci and not options.only
    if options.resume:
        report = json.loads(RESULTS.with_suffix(".json").read_text())
        passed = {tuple(cell[axis] for axis in AXES): cell for cell in report["cells"] if cell["result"] == "passed"}
        cells = [passed.get(tuple(cell.values()), cell) for cell in cells]
    with tempfile.TemporaryDirectory(prefix="install-matrix-") as scratch:
        run_all(cells, Path(scratch), lambda: record(cells) if recorded else None)
    counts = {result: sum(cell["result"] == result for cell in cells) for result in ("passed", "failed", "left out")}
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
