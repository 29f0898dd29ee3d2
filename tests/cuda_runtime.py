"""The CUDA runtime, called past Paddle, for what only a GPU can show. No compute kernel of Paddle's runs here."""

import contextlib
import ctypes
import pathlib

import numpy as np
import paddle

from calls import array_of
from paddle_gated_ops._library import C

ROOT = pathlib.Path(__file__).resolve().parent.parent
GPU = "gpu:0"
SWIGLU_OUTPUTS = ("do1", "probs_grad", "o2_s")
RMSNORM_OUTPUTS = ("grad_x", "grad_z", "grad_weight")
NOT_READY = 600  # cudaErrorNotReady
DEFAULT = 4  # cudaMemcpyDefault: the pointers tell the direction


class Cuda:
    """The CUDA runtime that the library is linked to."""

    def __init__(self):
        self.runtime = ctypes.CDLL(C.__file__)

    def call(self, name, *arguments):
        error = getattr(self.runtime, name)(*arguments)
        assert error == 0, f"{name}: CUDA error {error}"

    def synchronize(self):
        paddle.device.cuda.synchronize()
        self.call("cudaDeviceSynchronize")

    def copy(self, to, source, count):
        """Copies bytes between addresses of host and device, once all work is done."""
        self.synchronize()
        self.call("cudaMemcpy", ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(count), DEFAULT)
        self.synchronize()

    def copy_on(self, stream, to, source, count):
        """Copies between addresses of the device in the stream's order."""
        arguments = ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(count), DEFAULT
        self.call("cudaMemcpyAsync", *arguments, ctypes.c_void_p(stream.cuda_stream))

    def upload(self, tensor, array, first=0):
        """Writes the array's elements into a contiguous tensor, from its flat element ``first`` on."""
        array = np.ascontiguousarray(array)
        self.copy(tensor.data_ptr() + first * array.itemsize, array.ctypes.data, array.nbytes)

    def download(self, tensor, first, count, dtype):
        """``count`` elements of a contiguous tensor from its flat element ``first`` on."""
        array = np.empty(count, dtype)
        self.copy(array.ctypes.data, tensor.data_ptr() + first * array.itemsize, array.nbytes)
        return array

    def is_busy(self, stream):
        error = self.runtime.cudaStreamQuery(ctypes.c_void_p(stream.cuda_stream))
        assert error in (0, NOT_READY), f"CUDA error {error}"
        return error == NOT_READY


def named(names, outputs):
    return dict(zip(names, map(array_of, outputs)))


def as_poison(array):
    return np.full_like(array, 0x7FC0 if array.dtype == np.uint16 else np.nan)


@contextlib.contextmanager
def captured():
    from paddle.device.cuda.graphs import CUDAGraph

    graph = CUDAGraph()
    graph.capture_begin()
    try:
        yield graph
    finally:
        graph.capture_end()


class Graph:
    """A captured graph of the runtime's own, not of Paddle's."""

    def __init__(self, cuda, handle):
        self.cuda, self.handle, self.executable = cuda, handle, ctypes.c_void_p()
        cuda.call("cudaGraphInstantiate", ctypes.byref(self.executable), handle, ctypes.c_ulonglong(0))

    def node_types(self):
        """The kinds of its nodes, 0 for a kernel."""
        count = ctypes.c_size_t()
        self.cuda.call("cudaGraphGetNodes", self.handle, None, ctypes.byref(count))
        nodes = (ctypes.c_void_p * count.value)()
        self.cuda.call("cudaGraphGetNodes", self.handle, nodes, ctypes.byref(count))
        kinds = []
        for node in nodes:
            kind = ctypes.c_int(-1)
            self.cuda.call("cudaGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
            kinds.append(kind.value)
        return kinds

    def launch(self, stream):
        self.cuda.call("cudaGraphLaunch", self.executable, ctypes.c_void_p(stream.cuda_stream))

    def destroy(self):
        self.cuda.call("cudaGraphExecDestroy", self.executable)
        self.cuda.call("cudaGraphDestroy", self.handle)


def capture(cuda, stream, work):
    """The graph of what work() puts on the stream.

    In the strictest mode, where a synchronization, or memory asked of CUDA, by whatever thread ends it with an error.
    """
    handle = ctypes.c_void_p()
    with paddle.device.cuda.stream_guard(stream):
        cuda.call("cudaStreamBeginCapture", ctypes.c_void_p(stream.cuda_stream), 0)
        try:
            work()
        finally:
            error = cuda.runtime.cudaStreamEndCapture(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(handle))
    assert error == 0, f"the capture ended with CUDA error {error}"
    return Graph(cuda, handle)


class Delay:
    """Keeps a stream busy for some 20 ms, by copying on the device."""

    def __init__(self, cuda):
        self.cuda, self.half = cuda, 1 << 30
        self.buffer = paddle.empty([2 * self.half], "uint8")

    def put_on(self, stream):
        start = self.buffer.data_ptr()
        for _ in range(40):
            self.cuda.copy_on(stream, start + self.half, start, self.half)


@contextlib.contextmanager
def much_memory():
    paddle.device.cuda.empty_cache()
    try:
        yield
    finally:
        paddle.device.cuda.empty_cache()
