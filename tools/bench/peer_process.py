"""Starts peers' processes and makes records of their answers."""

import json
import os
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from . import records
from .peers import PEERS

_TOOLS = Path(__file__).resolve().parent.parent
_COMPILED_BY_ONE = 6  # cases: starting a process takes as long


def _ask(peer, command, cases, job, heard):
    """Gives a process of the peer's the job.

    Args:
        heard: called with each case, the process's first answer and that to the case.

    Returns:
        tuple: the first answer, {} where there was none; and why there are no more answers, for when some are missing.
    """
    # This Python's packages are no others': their interpreter finds its own.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # there are more processes than that
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryFile("w+") as said:
        words = [*shlex.split(command), "-m", "bench.peers", peer]
        try:
            process = subprocess.Popen(words, cwd=_TOOLS, env=environment, stderr=said, **pipes)
        except OSError as error:
            return {}, str(error)
        with process:
            with suppress(BrokenPipeError), process.stdin:  # one that has ended: its status tells why
                json.dump({**job, "cases": cases}, process.stdin)
            answers = map(json.loads, process.stdout)
            first = next(answers, {})
            for case, answer in zip(cases, answers):
                heard(case, first, answer)
        said.seek(0)
        return first, f"exit status {process.returncode}: {said.read()[-300:]}"


def compile_all(cases_of, command, job):
    """Lets peers compile their code, as many processes at once as there are cores: run() finds it in their caches on disk.

    What they choose by timing is not kept.

    Args:
        cases_of (dict): of each peer the cases.
        command, job: as for run().
    """
    parts = []
    for peer, cases in cases_of.items():
        count = -(-len(cases) // _COMPILED_BY_ONE)
        parts += [(peer, cases[k::count]) for k in range(count)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for peer, cases in parts:
            # What fails here fails again in run(), which tells why.
            pool.submit(_ask, peer, command, cases, {**job, "compile_only": True}, lambda *_: None)


def run(peer, command, cases, job, copies, describe, add):
    """Times a peer.

    Args:
        peer (str): a module of bench.peers.
        command (str): its interpreter, perhaps with words before it: "env NAME=value python3".
        cases (list of cases.Case): what.
        job (dict): device, threads, seconds and rotate.
        copies (dict): what records.copies_of returned: the limits.
        describe: called with the versions of its packages by name.
        add: called with a list of one record after each case.

    Returns:
        str: why it was not timed; None where it was.
    """
    name = PEERS[peer].name
    answered = []

    def heard(case, first, answer):
        if not answered:
            describe(first["versions"])
        answered.append(case)
        add([_record(case, name, first, answer, copies)])

    first, died = _ask(peer, command, cases, {**job, "compile_only": False}, heard)
    if "versions" not in first:
        return first.get("skipped", died)
    for case in cases[len(answered) :]:
        add([records.skipped(case, name, died)])


def _record(case, name, first, answer, copies):
    if "skipped" in answer:
        return records.skipped(case, name, answer["skipped"])
    more = {"fresh_outputs": True, "others_cores": answer["others_cores"]} if first["device"] == "cpu" else {}
    if first["bytes_of_element"]:
        more["bytes"] = case.rows * case.columns * first["bytes_of_element"]
    return records.timed(case, name, answer["us"], copies.get((*case, more.get("fresh_outputs"))), **more)
