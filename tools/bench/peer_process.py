"""Starts a peer's process and makes records of its answers."""

import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from . import records

_TOOLS = Path(__file__).resolve().parent.parent


def run(peer, command, cases, job, copies, progress):
    """Times a peer.

    Args:
        peer (str): a module of bench.peers.
        command (str): its interpreter, perhaps with words before it: "env NAME=value python3".
        cases (list of cases.Case): what.
        job (dict): device, threads, seconds and rotate.
        copies (dict): what records.copies_of returned: the limits.
        progress: called after each case.

    Returns:
        tuple: the versions of its packages by name, a record a case, and None; or two empty ones and why there are none.
    """
    # This Python's packages are no others': their interpreter finds its own.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryFile("w+") as said:
        words = [*shlex.split(command), "-m", "bench.peers", peer]
        try:
            process = subprocess.Popen(words, cwd=_TOOLS, env=environment, stderr=said, **pipes)
        except OSError as error:
            return {}, [], str(error)
        with process:
            json.dump({**job, "cases": cases}, process.stdin)
            process.stdin.close()
            answers = map(json.loads, process.stdout)
            first = next(answers, {})
            found = []
            for case, answer in zip(cases, answers):
                found.append(_record(case, first, answer, copies))
                progress()
        said.seek(0)
        died = f"exit status {process.returncode}: {said.read()[-300:]}"
    if "name" not in first:
        return {}, [], first.get("skipped", died)
    found += [records.skipped(case, first["name"], died) for case in cases[len(found) :]]
    return first["versions"], found, None


def _record(case, first, answer, copies):
    if "skipped" in answer:
        return records.skipped(case, first["name"], answer["skipped"])
    more = {"fresh_outputs": True, "others_cores": answer["others_cores"]} if first["device"] == "cpu" else {}
    if first["bytes_of_element"]:
        more["bytes"] = case.rows * case.columns * first["bytes_of_element"]
    return records.timed(case, first["name"], answer["us"], copies.get((*case, more.get("fresh_outputs"))), **more)
