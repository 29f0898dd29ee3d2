"""Which strided views share memory: ops/common/overlap.h against NumPy's exact answer."""

import ctypes
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

HARNESS = r"""
#include "common/overlap.h"
using namespace paddle_gated_ops;
static MemoryView View(const int64_t* v) {  // base, itemsize, ndim, sizes, strides
  MemoryView view = {reinterpret_cast<const char*>(v[0]), v[1], int(v[2]), {}, {}};
  for (int d = 0; d < view.ndim; ++d) view.sizes[d] = v[3 + d], view.strides[d] = v[3 + view.ndim + d];
  return view;
}
extern "C" int may_overlap(const int64_t* a, const int64_t* b) { return MayOverlap(View(a), View(b)); }
extern "C" int may_overlap_itself(const int64_t* a) { return MayOverlapItself(View(a)); }
extern "C" int is_same_memory(const int64_t* a, const int64_t* b) { return IsSameMemory(View(a), View(b)); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("overlap")
    (folder / "harness.cc").write_text(HARNESS)
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{ROOT / 'ops'}"]
    subprocess.run([*command, str(folder / "harness.cc"), "-o", str(folder / "harness.so")], check=True)
    return ctypes.CDLL(str(folder / "harness.so"))


def describe(view):
    strides = [stride // view.itemsize for stride in view.strides]
    numbers = [view.__array_interface__["data"][0], view.itemsize, view.ndim, *view.shape, *strides]
    return (ctypes.c_int64 * len(numbers))(*numbers)


def random_view(rng, buffer):
    """A view of up to three dimensions somewhere in the buffer, with strides of any sign and size, 0 among them."""
    itemsize = int(rng.choice([2, 4]))
    items = buffer.view({2: np.uint16, 4: np.uint32}[itemsize])
    while True:
        shape = rng.integers(1, 6, size=rng.integers(1, 4))
        strides = rng.integers(-12, 13, size=shape.size)
        reach = (shape - 1) * strides
        low, high = reach[reach < 0].sum(), reach[reach > 0].sum()
        start = rng.integers(0, items.size)
        if start + low >= 0 and start + high < items.size:
            return np.lib.stride_tricks.as_strided(items[start:], tuple(shape), tuple(strides * itemsize))


def shares_memory(a, b):
    return np.shares_memory(a, b, max_work=-1)


def overlaps_itself(view):
    places = np.zeros(view.shape, np.int64)
    for axis, (size, stride) in enumerate(zip(view.shape, view.strides)):
        places += (np.arange(size) * stride).reshape([-1 if d == axis else 1 for d in range(view.ndim)])
    return np.unique(places).size < places.size


def test_pairs(library):
    rng = np.random.default_rng(0)
    buffer = np.zeros(400, np.uint8)
    answers = []
    for _ in range(5000):
        a, b = random_view(rng, buffer), random_view(rng, buffer)
        expected = shares_memory(a, b)
        found = bool(library.may_overlap(describe(a), describe(b)))
        assert found == expected, (a.__array_interface__, b.__array_interface__)
        answers.append(expected)
    assert 0.2 < np.mean(answers) < 0.8  # both answers are common


def test_one_view(library):
    rng = np.random.default_rng(1)
    buffer = np.zeros(4000, np.uint8)
    answers = []
    for _ in range(5000):
        view = random_view(rng, buffer)
        expected = overlaps_itself(view)
        assert bool(library.may_overlap_itself(describe(view))) == expected, view.__array_interface__
        answers.append(expected)
    assert 0.2 < np.mean(answers) < 0.8


def test_large_views_are_decided(library):
    """Strides that nest cost a few steps, whatever the sizes: nothing is refused because the search gave up."""
    rows = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), (1 << 20, 64, 128), (64 * 512 * 2, 512 * 2, 2))
    address = rows.__array_interface__["data"][0]

    def shifted(elements):
        numbers = describe(rows)
        numbers[0] = address + 2 * elements
        return numbers

    assert not library.may_overlap_itself(shifted(0))
    for elements, expected in ((0, True), (127, True), (128, False), (256, False), (384, False), (385, True), (512, True)):
        assert bool(library.may_overlap(shifted(0), shifted(elements))) == expected
    assert not library.may_overlap(shifted(0), shifted(1 << 35))


def test_what_takes_too_long_is_refused(library):
    """Nine dimensions of even strides, at an odd distance: disjoint, but no search shows it; the answer comes in no time."""
    sizes, strides = [60] * 9, [1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051]
    even = (ctypes.c_int64 * 21)(0, 2, 9, *sizes, *(2 * stride for stride in strides))
    odd = (ctypes.c_int64 * 21)(2, 2, 9, *sizes, *(2 * stride for stride in strides))
    assert library.may_overlap(even, odd)


def test_same_memory(library):
    buffer = np.zeros((4, 6), np.uint16)
    assert library.is_same_memory(describe(buffer), describe(buffer))
    assert library.is_same_memory(describe(buffer[:1]), describe(np.lib.stride_tricks.as_strided(buffer, (1, 6), (2, 2))))
    for other in (buffer[:, :3], buffer.T, buffer[1:]):
        assert not library.is_same_memory(describe(buffer), describe(other))
