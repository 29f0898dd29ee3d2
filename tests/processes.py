"""Checks that run in several processes: a test file starts itself with paddle.distributed.launch, and reads what came out.

In the file, ``CHECKS = collect(globals())`` names its functions ``check_*``, which take the process's rank; ``work(CHECKS)``
under ``if __name__ == "__main__"`` runs them in each process; a test gets their outcomes from ``outcomes(__file__)``.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback

import pytest

PROCESSES = 2
TIMEOUT_S = 240


def launch(script, *arguments, processes=PROCESSES, **environment):
    """Runs a script in several processes.

    Returns:
        tuple: exit status and text, what the launcher and the processes wrote.
    """
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", logs]
        command += ["--nproc_per_node", str(processes), str(script), *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}  # the processes share the cores
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=logs)
        text = done.stdout + done.stderr
        for name in sorted(os.listdir(logs)):
            if name.startswith("workerlog"):
                with open(os.path.join(logs, name), errors="replace") as log:
                    text += f"\n--- {name}\n" + log.read()[-6000:]
    return done.returncode, text


def collect(namespace):
    return {name: value for name, value in namespace.items() if name.startswith("check_")}


def work(checks):
    """What each process does: runs the checks, writes their outcomes."""
    import paddle.distributed as dist

    dist.init_parallel_env()
    rank = dist.get_rank()
    found = {}
    for name, check in checks.items():
        try:
            check(rank)
            found[name] = "passed"
        except BaseException:
            found[name] = traceback.format_exc()
            break  # the processes may not be in step any more
    with open(os.path.join(os.environ["GATED_OPS_TEST_OUTCOMES"], f"{rank}.json"), "w") as file:
        json.dump(found, file)


@functools.cache
def _outcomes(file):
    with tempfile.TemporaryDirectory() as folder:
        status, text = launch(file, GATED_OPS_TEST_OUTCOMES=folder)
        found = []
        for rank in range(PROCESSES):
            path = os.path.join(folder, f"{rank}.json")
            if status != 0 or not os.path.exists(path):
                return text, [{}] * PROCESSES
            with open(path) as outcome:
                found.append(json.load(outcome))
    return text, found


def assert_passed(file, name):
    """Fails unless the check passed in every process that file was started in."""
    text, found = _outcomes(file)
    for rank, outcome in enumerate(found):
        if outcome.get(name) != "passed":
            failures = [each for each in outcome.values() if each != "passed"]  # its own, or of a check before it
            pytest.fail("\n".join([f"{name} has not passed in process {rank}", *(failures or [text])]), pytrace=False)
