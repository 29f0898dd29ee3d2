"""A run of the tool: all cases on one device, the library's own process first, then the peers', one at a time."""

import sys

import numpy
import paddle
from tqdm import tqdm

import paddle_gated_ops

from . import calls, cpu, gpu, peer_process, records
from .peers import PEERS


def run(arguments, cases):
    """Measures, and writes the table, the JSON and the picture.

    Raises:
        ValueError: this Paddle has no such device; or the file that is added to is of another machine or source.
        AssertionError, RuntimeError: a result of this library is wrong, or its kernels could not be timed.
    """
    paddle.set_device(arguments.device)
    threads = paddle_gated_ops.get_num_threads()
    versions = {module.__name__: module.__version__ for module in (paddle, paddle_gated_ops, numpy)}
    more = {}
    peers = [peer for peer in PEERS if peer in arguments.peers]
    peer_cases = [case for case in cases if not arguments.peer_ops or case.op in arguments.peer_ops]
    found, left_out = [], {}
    # In a log file, where a bar cannot be redrawn, every redraw is a line.
    redraw = 0.1 if sys.stderr.isatty() else 10
    total = len(cases) + len(peer_cases) * len(peers) + arguments.calls
    with tqdm(total=total, unit=" cases", mininterval=redraw) as progress:
        if arguments.device == "gpu":
            device, of_cases = gpu.run(cases, arguments.rotate, arguments.peers, progress.update)
            more.update(device)
            found += of_cases
        else:
            for case in cases:
                progress.set_postfix_str(str(case), refresh=False)
                found += cpu.run(case, threads, arguments.seconds, arguments.rotate, arguments.peers)
                progress.update()
        job = {"device": arguments.device, "threads": threads, "seconds": arguments.seconds, "rotate": arguments.rotate}
        copies = records.copies_of(found)
        for peer in peers:
            progress.set_postfix_str(peer, refresh=False)
            packages, of_peer, reason = peer_process.run(
                peer, arguments.peer_python, peer_cases, job, copies, progress.update
            )
            versions.update(packages)
            found += of_peer
            if reason:
                left_out[peer] = " ".join(reason.split())
                progress.update(len(peer_cases))
        if arguments.calls:
            found += calls.run(arguments.device)
            progress.update()
    print(records.table(found), *(f"{peer} is left out: {reason}" for peer, reason in left_out.items()), sep="\n")
    head = records.header(arguments.device, threads, versions, arguments.commit, **more)
    records.save(arguments.out, head, found, add=arguments.add)
    try:
        from . import plots

        picture = plots.draw(arguments.out) or "No picture: no op has enough sizes of one width."
    except ImportError as error:
        picture = f"No picture ({error}); --draw makes it elsewhere."
    print(f"\n{arguments.out}\n{picture}")
