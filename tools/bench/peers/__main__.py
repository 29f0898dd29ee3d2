"""One peer, in its own process: python -m bench.peers PEER, a job in JSON on stdin, answers in JSON lines on stdout.

The job has device, threads, seconds, rotate, compile_only and cases. The first answer has versions, device and
bytes_of_element (null: the op's), or skipped; then comes one answer a case, in order, with us, or skipped.
"""

import importlib
import importlib.metadata
import json
import os
import statistics
import sys

import numpy as np
import torch

from .. import cuda_graph, oracle
from ..arrays import make_inputs
from ..cases import Case
from ..timing import OtherWork, time_calls


def _tensor(array, rows, skip, device):
    """arrays.repeated as a tensor; the array alone goes to the device."""
    if array.dtype == np.uint16:
        once = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        once = torch.from_numpy(array)
    times = -(-rows // len(once))
    flat = torch.empty(skip + times * once.numel(), dtype=once.dtype, device=device)
    whole = flat[skip:].view(times, *once.shape)
    whole.copy_(once.to(device))
    return whole.view(-1, *once.shape[1:])[:rows]


def _array(tensor):
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _time_on_gpu(call, count, case_bytes):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), [None] * count
    launches = cuda_graph.launches(count, case_bytes)
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            kept[i % count] = call(i)  # alive until its turn comes again: the outputs rotate too
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay():
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    return cuda_graph.median_us(replay, launches)


def _time(peer, function, case, job):
    """{"us": the median time of a call}, after the check of its outputs; on a CPU others_cores as well.

    compile_only: {} after one call, unchecked.
    """
    on_gpu, compile_only = job["device"] == "gpu", job["compile_only"]
    device = "cuda" if on_gpu else "cpu"
    count = 1 if compile_only else cuda_graph.sets(case, job["rotate"]) if on_gpu else case.sets(job["rotate"])
    arrays, inputs = make_inputs(case, count, lambda *what: _tensor(*what, device), getattr(peer, "PROBS", None))
    prepare = getattr(peer, "prepare", lambda op, tensors: tensors)
    inputs = [prepare(case.op, tensors) for tensors in inputs]
    outputs = function(**inputs[0])
    if compile_only:
        return {}
    oracle.check(case, arrays, outputs, promised=False, names=getattr(peer, "OUTPUTS", None), read=_array)
    del outputs

    def call(i):
        return function(**inputs[i % count])

    if on_gpu:
        return {"us": _time_on_gpu(call, count, case.bytes)}
    with OtherWork() as other:
        times = time_calls({"it": call}, job["seconds"])["it"]
    return {"us": 1e6 * statistics.median(times), "others_cores": other.cores}


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers

    def answer(**content):
        print(json.dumps(content), file=answers, flush=True)

    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    try:
        peer = importlib.import_module(f"bench.peers.{sys.argv[1]}")
        functions = peer.functions(job["device"])
        if job["device"] == "gpu" and not torch.cuda.is_available():
            raise ImportError("this PyTorch sees no GPU")
    except ImportError as error:
        return answer(skipped=str(error))
    versions = {name: importlib.metadata.version(name) for name in peer.PACKAGES}
    answer(versions=versions, device=job["device"], bytes_of_element=getattr(peer, "BYTES", None))
    for fields in job["cases"]:
        case = Case(*fields)
        try:
            with torch.no_grad():
                answer(**_time(peer, functions[case.op], case, job))
        except Exception as error:
            answer(skipped=f"{type(error).__name__}: {error}")
        getattr(peer, "forget", lambda: None)()
        if job["device"] == "gpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
