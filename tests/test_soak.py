"""The tools that run for minutes, in short: memory stays where it was, and the worst errors are within their bounds."""

import pathlib
import re
import subprocess
import sys

import pytest

TOOLS = pathlib.Path(__file__).resolve().parent.parent / "tools"


def run(tool, *arguments):
    command = [sys.executable, str(TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_memory_stays_where_it_was(place):
    done = run("soak.py", "--place", place, "--calls", "2000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^\w.*: 2000 calls, bytes: host [+-]\d+", done.stdout, re.M)) == (12 if place == "cpu" else 10)


LEAK = """
import sys
sys.path.insert(0, {tools!r})
import soak

kept = []
soak.calls = lambda place: ({{"leaking": lambda: kept.append(bytes(800))}}, {{"leaking": lambda: int("x")}})
sys.argv[1:] = ["--calls", "10000"]
soak.main()
"""


def test_a_leak_is_found():
    code = LEAK.format(tools=str(TOOLS))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "memory grew in leaking" in done.stderr, done.stdout + done.stderr


def test_worst_errors(place):
    done = run("worst_errors.py", "--place", place, "--elements", "1000000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^(normal|gates|bits), 1000000 elements, .*: 0\.\d{4}$", done.stdout, re.M)) == 24


@pytest.mark.parametrize("tool", ["soak.py", "worst_errors.py"])
def test_help(tool):
    done = run(tool, "--help")
    assert done.returncode == 0 and "--place" in done.stdout
