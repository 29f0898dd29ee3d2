"""Tensors of any layout, as views into buffers of random bits, and NumPy's account of the same memory."""

import math
from typing import NamedTuple

import numpy as np
import paddle
from hypothesis import strategies as st

from calls import places_of
from paddle_gated_ops.testing import to_bf16_bits

ARRAY_DTYPES = {"bfloat16": np.uint16, "float32": np.float32}
WRONG_DTYPES = ("float16", "float64", "int32", "int64", "uint8", "bool", "complex64")


class View(NamedTuple):
    """A strided view into the buffer of number ``memory``; strides and offset in elements."""

    dtype: str
    shape: tuple
    strides: tuple
    offset: int
    memory: int
    trainable: bool = False

    def elements(self):
        """Where each element lies in its buffer: an int64 array of the view's shape."""
        return self.offset + places_of(self.shape, self.strides)

    def overlaps(self, other):
        return self.memory == other.memory and bool(np.intersect1d(self.elements(), other.elements()).size)

    def overlaps_itself(self):
        elements = self.elements()
        return np.unique(elements).size < elements.size

    def is_same(self, other):
        """Whether both have each element in the same place."""
        return self.memory == other.memory and np.array_equal(self.elements(), other.elements())


def dense_strides(shape):
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


@st.composite
def layouts(draw, shape):
    """(strides, offset): dense, with gaps, permuted, backwards, broadcast, or whatever comes."""
    kind = draw(st.sampled_from(["dense"] * 5 + ["gaps"] * 5 + ["broadcast", "any"]))
    strides = list(dense_strides(shape))
    if kind == "any" and math.prod(shape) <= 5000:
        strides = [draw(st.integers(-40, 140)) for _ in shape]
    elif kind != "dense":
        span = 0
        for d in draw(st.permutations(range(len(shape)))):
            strides[d] = span + draw(st.sampled_from([1, 1, 2, 3, 8]))
            span += strides[d] * max(shape[d] - 1, 0)
            if draw(st.integers(0, 5)) == 5:
                strides[d] = -strides[d]
            if kind == "broadcast" and draw(st.booleans()):
                strides[d] = 0
    before = sum(min(0, stride * (size - 1)) for size, stride in zip(shape, strides) if size)
    return tuple(strides), draw(st.sampled_from([0, 0, 8, 1, 3])) - before


def random_bits(generator, kind, dtype, count):
    """``count`` numbers: of magnitude 1, of any bits (Inf and NaN among them), of any finite ones, zeros, or small ints."""
    if dtype not in ARRAY_DTYPES:
        return np.ones(count, dtype)
    bits = to_bf16_bits(generator.standard_normal(count))
    if kind == "whole":
        bits = to_bf16_bits(generator.integers(-2, 3, count))
    elif kind != "normal":
        bits = generator.integers(0, 65536, count).astype(np.uint16)
        if kind == "finite":
            bits[(bits & 0x7F80) == 0x7F80] = 0x3F80
        elif kind == "zeros":
            bits &= 0x8000
    return bits if dtype == "bfloat16" else (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class Buffers:
    """The buffers behind some views, each on its place. NumPy holds what was in them; the tensors are made once."""

    def __init__(self, views, seed, kinds, places):
        generator = np.random.default_rng(seed)
        self.views, self.bases, self.before = views, {}, {}
        for number in sorted({view.memory for view in views.values()}):
            here = [view for view in views.values() if view.memory == number]
            count = 9 + max(int(view.elements().max(initial=0)) for view in here)
            self.before[number] = random_bits(generator, kinds[number % len(kinds)], here[0].dtype, count)
            dtype = here[0].dtype
            self.bases[number] = paddle.to_tensor(self.before[number], dtype=dtype, place=places[number])
        self.tensors = {name: self._tensor(view) for name, view in views.items()}

    def _tensor(self, view):
        base = self.bases[view.memory]
        itemsize = self.before[view.memory].itemsize
        if math.prod(view.shape) == 0:  # has no place in a buffer
            empty = np.zeros(view.shape, self.before[view.memory].dtype)
            tensor = paddle.to_tensor(empty, dtype=view.dtype, place=base.place)
        else:
            tensor = paddle.as_strided(base, list(view.shape), list(view.strides), view.offset * itemsize)
        tensor.stop_gradient = not view.trainable
        return tensor

    def array(self, name):
        """What the view held before the call."""
        view = self.views[name]
        if math.prod(view.shape) == 0:
            return np.zeros(view.shape, self.before[view.memory].dtype)
        return self.before[view.memory][view.elements()]

    def array_now(self, name):
        view = self.views[name]
        return self.array(name) if math.prod(view.shape) == 0 else self.bases[view.memory].numpy()[view.elements()]

    def assert_written_only(self, names):
        """Not a bit outside the views of these names has changed."""
        for number, before in self.before.items():
            untouched = np.ones(before.size, bool)
            for name in names:
                view = self.views[name]
                if view.memory == number:
                    untouched[view.elements()] = False
            now = self.bases[number].numpy()
            np.testing.assert_array_equal(
                now[untouched].view(np.uint8), before[untouched].view(np.uint8), err_msg=f"memory of {self.views}"
            )
