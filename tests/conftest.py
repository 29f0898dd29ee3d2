"""Environment and fixtures of all tests; sets what has to be set before Paddle is imported."""

import functools
import os

# Fresh outputs are filled with NaN bytes, so that an element left unwritten shows.
os.environ["GATED_OPS_POISON_OUTPUTS"] = "1"
# Importing Paddle sets it to 1 where it is unset: the tests would then see one thread only.
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import pytest  # noqa: E402


@functools.cache
def _why_no_gpu():
    import paddle

    if not paddle.is_compiled_with_cuda():
        return "needs a GPU build of Paddle: this one is a CPU build"
    if paddle.device.cuda.device_count() == 0:
        return "needs a GPU: Paddle sees none"
    return None


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and _why_no_gpu():
        pytest.skip(_why_no_gpu())


@pytest.fixture(params=["cpu", pytest.param("gpu:0", marks=pytest.mark.gpu)])
def place(request):
    """A place as a string, current device of the test: the CPU, and the first GPU if there is one.

    ``-m gpu`` and ``-m "not gpu"`` select one of them.
    """
    import paddle

    before = paddle.get_device()
    paddle.set_device(request.param)
    yield request.param
    paddle.set_device(before)


@pytest.fixture
def cuda():
    """The CUDA runtime. The test starts on the first GPU, and leaves no error for the next call to find."""
    import paddle

    from cuda_runtime import GPU, Cuda

    before = paddle.get_device()
    paddle.set_device(GPU)
    runtime = Cuda()
    yield runtime
    runtime.synchronize()
    assert runtime.runtime.cudaPeekAtLastError() == 0
    paddle.set_device(before)


@pytest.fixture(autouse=True, scope="session")
def _static_functions_live_on():
    """Paddle finds the executor of a to_static program by the Python id of objects: one that reuses the id of a program
    that is gone would now and then run with that program's variables."""
    import paddle

    to_static, kept = paddle.jit.to_static, []

    def keeping(*arguments, **options):
        kept.append(to_static(*arguments, **options))
        return kept[-1]

    paddle.jit.to_static = keeping
    yield
    paddle.jit.to_static = to_static


@pytest.fixture
def program():
    """A program under construction; static mode ends with the test."""
    import paddle

    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            yield paddle.static.default_main_program()
    finally:
        paddle.disable_static()
