"""A call under construction: its arguments, what is wrong with them, and the run that has to agree."""

import math
import os
import re

import numpy as np
import paddle
from hypothesis import strategies as st

from calls import array_of
from fuzz.foreign import NO_DENSE_TENSORS, NO_TENSORS, OLD
from fuzz.memory import WRONG_DTYPES, Buffers, View, layouts

PLACES = ("cpu", "gpu:0") if paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() else ("cpu",)


def other_shapes(shape):
    """Shapes that are none of the argument's, most of them."""
    shapes = [(), (0,), (1, *shape), (*shape, 1), shape[::-1], (math.prod(shape),), shape[1:], shape[:-1]]
    for d in range(len(shape)):
        shapes += [(*shape[:d], size, *shape[d + 1 :]) for size in (0, 1, shape[d] + 1, shape[d] + 2)]
    return shapes


class Call:
    """Draws the arguments of one call of ``function``; now and then some of ``names`` become what they must not be."""

    def __init__(self, draw, function, names, base):
        self.draw, self.function, self.base = draw, function, base
        self.broken = [draw(st.sampled_from(names)) for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2])))]
        self.place = draw(st.sampled_from(PLACES))
        self.mixes_places = len(PLACES) > 1 and draw(st.integers(0, 9)) == 9
        self.views, self.objects, self.foreign, self.twins, self.dist = {}, {}, {}, {}, []
        self.faults = []  # each the names of the arguments one of which the error has to name
        self.grad_enabled = draw(st.sampled_from([True, True, False]))
        self.seed = draw(st.integers(0, 999))
        kind = st.sampled_from(["normal"] * 6 + ["any", "finite", "zeros"])
        self.kinds = [draw(kind) for _ in range(3)]

    def __repr__(self):
        parts = {**self.views, **{name: f"<{what}>" for name, (what, _) in self.foreign.items()}}
        # Paddle ends the process where it prints a variable of a program that is gone.
        printable = (int, float, str, type(None))
        parts.update((name, v if isinstance(v, printable) else type(v).__name__) for name, v in self.objects.items())
        return f"{self.function}({parts}, twins={self.twins}, dist={self.dist}, faults={self.faults}, seed={self.seed})"

    # ---- Arguments

    def tensor(self, name, dtype, shape, dtypes=None):
        """Draws a tensor argument, by default of this dtype alone; returns the shape it really has, None for no tensor."""
        how = self.draw(st.sampled_from(["no tensor", "no dense tensor", "dtype", "shape"])) if name in self.broken else None
        if how in ("no tensor", "no dense tensor"):
            makers = NO_TENSORS if how == "no tensor" else NO_DENSE_TENSORS
            what = self.draw(st.sampled_from(sorted(makers)))
            self.foreign[name] = what, np.ones(shape, np.float32)
            self.faults.append({name})
            return None
        if how == "dtype":
            others = [each for each in ("bfloat16", "float32") if each not in (dtypes or (dtype,))]
            dtype = self.draw(st.sampled_from([*WRONG_DTYPES, *others]))
            self.faults.append({name})
        if how == "shape":
            shape = self.draw(st.sampled_from(other_shapes(shape)))
        self.views[name] = self._placed(name, dtype, tuple(shape))
        return self.views[name].shape

    def _placed(self, name, dtype, shape):
        """A view in memory of its own, or in that of an earlier argument."""
        trainable = dtype in ("bfloat16", "float32") and self.draw(st.integers(0, 5)) == 5
        earlier = {n: v for n, v in self.views.items() if v.dtype == dtype and math.prod(v.shape)}
        where = self.draw(st.sampled_from(["own"] * 5 + ["same", "shared"])) if earlier and math.prod(shape) else "own"
        if where == "own":
            strides, offset = self.draw(layouts(shape))
            number = 1 + max((view.memory for view in self.views.values()), default=-1)
            return View(dtype, shape, strides, offset, number, trainable)
        other = self.draw(st.sampled_from(sorted(earlier)))
        view = earlier[other]
        if view.shape == shape and (where == "same" or self.draw(st.booleans())):
            shift = 0 if where == "same" else self.draw(st.sampled_from([1, 2, 3, 8, *shape[-1:], math.prod(shape)]))
            if shift == 0 and self.draw(st.booleans()):
                self.twins[name] = other  # the same object
                return view
            return view._replace(offset=view.offset + shift, trainable=trainable)
        strides, offset = self.draw(layouts(shape))
        return View(dtype, shape, strides, offset + self.draw(st.integers(0, 200)), view.memory, trainable)

    def number(self, name, valid, invalid):
        """Draws an argument that is no tensor; returns its value."""
        broken = name in self.broken
        values = invalid if broken else valid
        # Not the value itself, which would be printed: Paddle ends the process where some are.
        self.objects[name] = values[self.draw(st.integers(0, len(values) - 1))]
        if broken:
            self.faults.append({name})
        return self.objects[name]

    def distribute(self, names):
        """Makes some of the tensors DistTensors, now and then. They are none of those that share memory."""
        if OLD or self.place != "cpu" or self.draw(st.integers(0, 11)) < 11:
            return
        chosen = [name for name in names if name in self.views and self.draw(st.booleans())]
        self.dist = [name for name in chosen if self.views[name].dtype in ("bfloat16", "float32")]

    # ---- What must be refused

    def shape_fault(self, right, name=None):
        """Notes that the shapes do not fit, where they do not: because of those that were changed."""
        if right:
            return
        changed = {name} if name else {n for n in self.broken if n in self.views}
        tensors = set(self.views) | set(self.foreign)
        self.faults.append(tensors if self.base in changed or not changed else changed)

    def output_faults(self, outputs, inputs, same):
        """Notes outputs that cannot be written.

        Args:
            outputs: the names of what the call may write, given or not.
            inputs: what it reads.
            same: {output: the inputs whose very memory it may be}.
        """
        outputs = [name for name in outputs if name in self.views]
        inputs = [name for name in inputs if name in self.views and name not in self.dist]
        for name in outputs:
            view = self.views[name]
            if view.overlaps_itself():
                self.faults.append({name})
            if view.trainable and self.grad_enabled and name != "workspace":
                self.faults.append({name})
            others = inputs + outputs[: outputs.index(name)]
            for other in others:
                allowed = other in same.get(name, ()) and view.is_same(self.views[other])
                if view.overlaps(self.views[other]) and not allowed:
                    self.faults.append({name, other})

    # ---- The run

    def _tensors(self):
        numbers = {view.memory for view in self.views.values()}
        places = dict.fromkeys(numbers, self.place)
        if self.mixes_places and len(numbers) > 1 and all(math.prod(view.shape) for view in self.views.values()):
            places[max(numbers)] = next(place for place in PLACES if place != self.place)
            self.faults.append(set(self.views))
        self.buffers = Buffers(self.views, self.seed, self.kinds, places)
        tensors = {name: self.buffers.tensors[self.twins.get(name, name)] for name in self.views}
        for name in self.dist:
            dist = paddle.distributed
            array = self.buffers.array(name)
            tensor = paddle.to_tensor(array, dtype=self.views[name].dtype, stop_gradient=not self.views[name].trainable)
            tensors[name] = dist.shard_tensor(tensor, dist.ProcessMesh([0], dim_names=["x"]), [dist.Replicate()])
            tensors[name].stop_gradient = not self.views[name].trainable
        return tensors

    def run(self, call):
        """What call(**arguments) returns, or None where it was refused, rightly."""
        record(self)
        self.tensors = self._tensors()
        arguments = {**self.objects, **self.tensors}
        makers = {**NO_TENSORS, **NO_DENSE_TENSORS}
        arguments.update((name, makers[what](array)) for name, (what, array) in self.foreign.items())
        versions = {name: tensor.inplace_version for name, tensor in self.tensors.items()}
        try:
            with paddle.set_grad_enabled(self.grad_enabled):
                result = call(**arguments)
        except (TypeError, ValueError) as error:
            message = str(error)
            assert self.faults, f"refused: {message}"
            names = {name for fault in self.faults for name in fault}
            function = r"\w+" if self.dist else self.function  # where one registered op serves several functions
            found = re.search(rf"\b{function}: .*?\b({'|'.join(sorted(names))})\b", message, re.S)
            assert found or "DistTensor" in message and self.dist, f"none of {sorted(names)} is in {message!r}"
            self.buffers.assert_written_only([])
            assert versions == {name: tensor.inplace_version for name, tensor in self.tensors.items()}
            return None
        assert not self.faults, f"should have been refused: {self.faults}"
        return result

    def inputs(self, names):
        return {name: self.buffers.array(name) for name in names}

    def outputs(self, names, returned):
        """The returned arrays by name; a tensor that was passed must have come back."""
        arrays = {}
        for name, tensor in zip(names, returned):
            if tensor is not None and name in self.views:
                assert tensor is self.tensors[name], name
                arrays[name] = self.buffers.array_now(name)
            else:
                arrays[name] = None if tensor is None else local_array(tensor)
        return arrays


def local_array(tensor):
    """The bits of a new tensor, DistTensors' too."""
    return array_of((tensor._local_value() if not OLD and tensor.is_dist() else tensor).detach())


def record(call):
    """Writes the call where tools/fuzz.sh finds it when the process is gone."""
    path = os.environ.get("GATED_OPS_FUZZ_LAST_CALL")
    if path:
        with open(path, "w") as file:
            file.write(repr(call))
