"""A run of the tool: what the file lacks, on one device; this library in its own process, then the peers, one at a time."""

import sys
import time
from contextlib import contextmanager

import numpy
import paddle
from tqdm import tqdm

import paddle_gated_ops

from . import calls, cpu, gpu, peer_process, records
from .peers import PEERS


class _ToDo:
    """What the file lacks of what the arguments ask for."""

    def __init__(self, arguments, cases, file):
        def lacking(found, *names):
            return [case for case in found if file.lacks(case, *names)]

        on_gpu = arguments.device == "gpu"
        paddles = ["Paddle, unfused"] if "paddle" in arguments.peers else []
        self.own = lacking(cases, "copy", "ours", *([] if on_gpu else paddles))
        self.in_paddle = lacking(cases, gpu.IN_PADDLE, *paddles) if on_gpu else []
        of_peers = [case for case in cases if not arguments.peer_ops or case.op in arguments.peer_ops]
        self.peers = {
            module: lacking([case for case in of_peers if case.op in peer.ops], peer.name)
            for module, peer in PEERS.items()
            if module in arguments.peers
        }
        self.eager_calls = arguments.calls and not any(record["op"] == records.EAGER_CALL for record in file.records)

    @property
    def total(self):
        return len(self.own) + len(self.in_paddle) + sum(map(len, self.peers.values())) + self.eager_calls


def run(arguments, cases):
    """Measures, and writes the table, the JSON and the picture.

    Raises:
        ValueError: this Paddle has no such device; or the file that is added to is of another machine or source.
        AssertionError, RuntimeError: a result of this library is wrong, or its kernels could not be timed.
    """
    paddle.set_device(arguments.device)
    on_gpu, threads = arguments.device == "gpu", paddle_gated_ops.get_num_threads()
    versions = {module.__name__: module.__version__ for module in (paddle, paddle_gated_ops, numpy)}
    head = records.header(arguments.device, threads, versions, arguments.commit)
    file = records.File(arguments.out, head, arguments.add)
    todo = _ToDo(arguments, cases, file)
    job = {"device": arguments.device, "threads": threads, "seconds": arguments.seconds, "rotate": arguments.rotate}
    left_out = {}
    # In a log file, where a bar cannot be redrawn, every redraw is a line.
    redraw = 0.1 if sys.stderr.isatty() else 10
    with tqdm(total=todo.total, unit=" cases", mininterval=redraw) as progress:

        def add(found):
            file.add(found)
            progress.update()

        @contextmanager
        def phase(name):
            progress.set_postfix_str(name, refresh=False)
            begin = time.perf_counter()
            yield
            progress.write(f"{name}: {time.perf_counter() - begin:.0f} s", sys.stderr)

        if todo.eager_calls:
            with phase(records.EAGER_CALL):
                add(calls.run(arguments.device))
        if on_gpu and any(todo.peers.values()):
            with phase("peers compile"):
                peer_process.compile_all(todo.peers, arguments.peer_python, job)
        if todo.own:
            with phase("this library"):
                if on_gpu:
                    for found in gpu.time_kernels(todo.own, lambda device: file.describe(**device)):
                        add(found)
                else:
                    for case in todo.own:
                        progress.set_postfix_str(str(case), refresh=False)
                        add(cpu.run(case, threads, arguments.seconds, arguments.rotate, arguments.peers))
        copies = records.copies_of(file.records)
        for peer, of_peer in todo.peers.items():
            if of_peer:
                with phase(peer):
                    reason = peer_process.run(peer, arguments.peer_python, of_peer, job, copies, file.describe, add)
                if reason:
                    left_out[peer] = " ".join(reason.split())
                    progress.update(len(of_peer))
        if todo.in_paddle:  # after the peers, whose processes need the memory
            with phase("in Paddle's graphs"):
                for case in todo.in_paddle:
                    add(gpu.time_in_paddle(case, arguments.rotate, "paddle" in arguments.peers, copies))
    file.write()
    print(records.table(file.records), *(f"{peer} is left out: {reason}" for peer, reason in left_out.items()), sep="\n")
    try:
        from . import plots

        picture = plots.draw(arguments.out) or "No picture: no op has enough sizes of one width."
    except ImportError as error:
        picture = f"No picture ({error}); --draw makes it elsewhere."
    print(f"\n{arguments.out}\n{picture}")
