"""Calls of the functions, drawn, run and compared with float64."""

import functools
import math
from fractions import Fraction

import numpy as np
import paddle
from hypothesis import strategies as st

import paddle_gated_ops.incubate.nn.functional as F
from calls import BAD_CLAMP_VALUES, array_of, tensor_of
from fuzz.call import Call, local_array
from fuzz.memory import dense_strides
from paddle_gated_ops import testing

SWIGLU_OUTPUTS = ("do1", "probs_grad", "o2_s")
RMSNORM_OUTPUTS = ("grad_x", "grad_z", "grad_weight")

CLAMPS = [0.75, 1, 1e-3, 3e38, np.float32(2), np.float64(0.5), Fraction(1, 3)]
BAD_CLAMPS = [value for value, _ in BAD_CLAMP_VALUES] + [paddle.ones([1]), np.array(1.0), object(), 10**400]
EPSILONS = [1e-6, 1e-5, 1.0, 1, 0, 0.0, 1e-30, np.float32(1e-6), Fraction(1, 1000)]
BAD_EPSILONS = [None, "1e-6", True, [1e-6], 1j, -1e-6, -1e-60, 1e39, math.nan, math.inf, 10**400, paddle.ones([1]), object()]
BAD_BOOLS = [None, 0, 1, 1.0, "yes", np.bool_(True), [True], paddle.ones([1])]


@st.composite
def leading_shapes(draw):
    if draw(st.integers(0, 30)) == 30:
        return (2100,)  # enough for several threads
    rank = draw(st.integers(0, 4))
    return tuple(draw(st.integers(0, 40 if rank == 1 else 6 if rank == 2 else 3)) for _ in range(rank))


def swiglu_call(draw, function, names, backward=True):
    """The call with its inputs, and the shapes that outputs should have."""
    call = Call(draw, function, names, base="o1")
    lead = draw(leading_shapes())
    width = draw(st.sampled_from([*range(0, 12), 16, 33, 64, 127, 128, 129, 255, 256, 257, 264, 300]))
    width = min(width, 96) if lead == (2100,) else width
    o1 = call.tensor("o1", "bfloat16", lead + (2 * width,))
    do2_s = call.tensor("do2_s", "bfloat16", lead + (width,)) if backward else None
    probs = lead + draw(st.sampled_from([(), (1,)]))
    probs = call.tensor("unzipped_probs", "float32", probs)
    if o1 is not None:
        right = len(o1) > 0 and o1[-1] % 2 == 0
        call.shape_fault(right, "o1")
        if right:
            call.shape_fault(probs is None or probs in (o1[:-1], o1[:-1] + (1,)))
            call.shape_fault(do2_s is None or do2_s == o1[:-1] + (o1[-1] // 2,))
    return call, {"do1": o1, "probs_grad": probs, "o2_s": do2_s}


def swiglu_bwd(draw):
    call, _ = swiglu_call(draw, "fused_swiglu_weighted_bwd", ["o1", "do2_s", "unzipped_probs"])
    call.objects["name"] = draw(st.sampled_from([None, "x", 3]))
    call.distribute(["o1", "do2_s", "unzipped_probs"])
    check_swiglu_bwd(call, call.run(F.fused_swiglu_weighted_bwd), None)


def swiglu_clamp_bwd(draw):
    names = ["o1", "do2_s", "unzipped_probs", "clamp_value"]
    call, _ = swiglu_call(draw, "fused_swiglu_weighted_clamp_bwd", names)
    clamp_value = call.number("clamp_value", CLAMPS, [*BAD_CLAMPS, None])
    call.distribute(names[:3])
    check_swiglu_bwd(call, call.run(F.fused_swiglu_weighted_clamp_bwd), clamp_value)


def swiglu_bwd_out(draw):
    names = ["o1", "do2_s", "unzipped_probs"]
    call, shapes = swiglu_call(draw, "fused_swiglu_weighted_bwd_out", names + list(SWIGLU_OUTPUTS))
    for name, dtype in zip(SWIGLU_OUTPUTS, ("bfloat16", "float32", "bfloat16")):
        if shapes[name] is not None and draw(st.booleans()):
            shape = call.tensor(name, dtype, shapes[name])
            call.shape_fault(shape is None or shape == shapes[name], name)
    call.output_faults(SWIGLU_OUTPUTS, names, {"do1": ["o1"], "o2_s": ["do2_s"]})
    call.distribute(names)
    if call.dist:
        call.faults.append(set(call.views))
    check_swiglu_bwd(call, call.run(F.fused_swiglu_weighted_bwd_out), None)


def check_swiglu_bwd(call, returned, clamp_value):
    if returned is None:
        return
    inputs = call.inputs(["o1", "do2_s", "unzipped_probs"])
    testing.assert_swiglu_weighted_bwd(inputs, call.outputs(SWIGLU_OUTPUTS, returned), as_float(clamp_value))
    call.buffers.assert_written_only([name for name in SWIGLU_OUTPUTS if name in call.views])
    assert all(tensor.stop_gradient for name, tensor in zip(SWIGLU_OUTPUTS, returned) if name not in call.views)


def as_float(value):
    return None if value is None else float(value)


def backward(call, output, names, grad):
    """Runs autograd from the output, where it was recorded; the gradients of ``names`` as arrays, None where none is due."""
    trainable = [name for name in names if call.views[name].trainable]
    recorded = bool(trainable) and call.grad_enabled
    assert output.stop_gradient == (not recorded)
    if recorded:
        grad = tensor_of(grad, call.place)
        if call.dist:
            dist = paddle.distributed
            grad = dist.shard_tensor(grad, dist.ProcessMesh([0], dim_names=["x"]), [dist.Replicate()])
        paddle.autograd.backward([output], [grad])
    grads = {name: call.tensors[name].grad for name in names}
    assert all((grads[name] is not None) == (recorded and name in trainable) for name in names)
    return {name: None if grad is None else local_array(grad) for name, grad in grads.items()}


def swiglu_forward(draw):
    names = ["o1", "unzipped_probs"]
    call, _ = swiglu_call(draw, "fused_swiglu_weighted", [*names, "clamp_value"], backward=False)
    clamp_value = call.number("clamp_value", [None, *CLAMPS], BAD_CLAMPS)
    call.distribute(names)
    output = call.run(F.fused_swiglu_weighted)
    if output is None:
        return
    inputs, clamp_value = call.inputs(names), as_float(clamp_value)
    testing.assert_swiglu_weighted(inputs, local_array(output), clamp_value)
    inputs["do2_s"] = testing.swiglu_weighted_inputs(output.shape[:-1], output.shape[-1], call.seed)["do2_s"]
    grads = backward(call, output, names, inputs["do2_s"])
    # What is not wanted is not there: the op's own result stands in, which other tests compare with float64.
    with paddle.no_grad():
        tensors = {name: tensor_of(array, call.place) for name, array in inputs.items()}
        op = F.fused_swiglu_weighted_bwd
        op = op if clamp_value is None else functools.partial(F.fused_swiglu_weighted_clamp_bwd, clamp_value=clamp_value)
        own = dict(zip(SWIGLU_OUTPUTS, map(array_of, op(**tensors))))
    for name, output_name in zip(names, SWIGLU_OUTPUTS):
        own[output_name] = own[output_name] if grads[name] is None or twin(call, names) else grads[name]
    testing.assert_swiglu_weighted_bwd(inputs, own, clamp_value)
    call.buffers.assert_written_only([])


def twin(call, names):
    """Whether two of the arguments are one object, whose gradient is a sum."""
    return any(name in call.twins for name in names)


def rmsnorm_call(draw, function, names, backward=True):
    call = Call(draw, function, names, base="x")
    shape = draw(leading_shapes()) + (128,)
    shapes = {"x": call.tensor("x", "bfloat16", shape), "z": call.tensor("z", "bfloat16", shape)}
    if backward:
        shapes["grad_out"] = call.tensor("grad_out", "bfloat16", shape)
    weight = call.tensor("weight", "bfloat16", (128,))
    if shapes["x"] is not None:
        right = len(shapes["x"]) > 0 and shapes["x"][-1] == 128
        call.shape_fault(right, "x")
        if right:
            for name in shapes:
                call.shape_fault(shapes[name] in (None, shapes["x"]))
    call.shape_fault(weight in (None, (128,)), "weight")
    return call, shapes["x"]


def rmsnorm_bwd(draw):
    inputs, buffers = ["x", "z", "grad_out", "weight"], ["grad_x", "grad_z", "grad_weight", "workspace"]
    options = ["eps", "accumulate_grad_weight", "compute_grad_weight"]
    function = "cake_rmsnorm_silu_gate_train_backward"
    call, shape = rmsnorm_call(draw, function, inputs + buffers + options)
    given = [name for name in buffers if shape is not None and draw(st.booleans())]
    for name in ("grad_x", "grad_z"):
        if name in given:
            found = call.tensor(name, "bfloat16", shape)
            call.shape_fault(found in (None, shape), name)
    if "grad_weight" in given:
        dtype = draw(st.sampled_from(["bfloat16", "float32"]))
        found = call.tensor("grad_weight", dtype, (128,), dtypes=("bfloat16", "float32"))
        call.shape_fault(found in (None, (128,)), "grad_weight")
    if "workspace" in given:
        rows = math.prod(shape[:-1])
        least = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(rows, call.place) // 4
        found = call.tensor("workspace", "float32", (least + draw(st.sampled_from([0, 0, 1, 100, -1])),))
        if found is not None:
            view = call.views["workspace"]
            dims = zip(view.strides, dense_strides(found), found)
            dense = math.prod(found) == 0 or all(s == d or n == 1 for s, d, n in dims)
            call.shape_fault(dense and math.prod(found) >= least, "workspace")
    eps = call.number("eps", EPSILONS, BAD_EPSILONS)
    accumulate = call.number("accumulate_grad_weight", [False, "grad_weight" in given], BAD_BOOLS)
    compute = call.number("compute_grad_weight", [True, True, False], BAD_BOOLS)
    if accumulate is True and (compute is False or "grad_weight" not in call.views):
        call.faults.append({"accumulate_grad_weight"})
    same = {name: ["x", "z", "grad_out"] for name in ("grad_x", "grad_z")}
    call.output_faults(buffers, inputs, same)
    call.distribute(inputs)
    if call.dist and (given or accumulate):
        call.faults.append({*given, "accumulate_grad_weight"})

    returned = call.run(F.cake_rmsnorm_silu_gate_train_backward)
    if returned is None:
        return
    arrays = call.inputs(inputs)
    if "grad_weight" in call.views and compute is False:
        assert returned[2] is None
    options = dict(eps=float(eps), compute_grad_weight=compute)
    if accumulate:
        options["initial_grad_weight"] = call.buffers.array("grad_weight")
    testing.assert_rmsnorm_silu_gate_bwd(arrays, call.outputs(RMSNORM_OUTPUTS, returned), **options)
    written = [name for name in buffers if name in call.views and (compute or name in ("grad_x", "grad_z"))]
    call.buffers.assert_written_only(written)


def rmsnorm_forward(draw):
    names = ["x", "z", "weight"]
    call, _ = rmsnorm_call(draw, "cake_rmsnorm_silu_gate", [*names, "eps"], backward=False)
    eps = call.number("eps", EPSILONS, BAD_EPSILONS)
    call.distribute(names)
    output = call.run(F.cake_rmsnorm_silu_gate)
    if output is None:
        return
    inputs = call.inputs(names)
    testing.assert_rmsnorm_silu_gate(inputs, local_array(output), float(eps))
    inputs["grad_out"] = testing.rmsnorm_silu_gate_inputs(output.shape[:-1], call.seed)["grad_out"]
    grads = backward(call, output, names, inputs["grad_out"])
    with paddle.no_grad():
        tensors = {name: tensor_of(array, call.place) for name, array in inputs.items()}
        own = dict(zip(RMSNORM_OUTPUTS, map(array_of, F.cake_rmsnorm_silu_gate_train_backward(**tensors, eps=eps))))
    for name, output_name in zip(names, RMSNORM_OUTPUTS):
        own[output_name] = own[output_name] if grads[name] is None or twin(call, names) else grads[name]
    testing.assert_rmsnorm_silu_gate_bwd(inputs, own, float(eps))
    call.buffers.assert_written_only([])


def rmsnorm_train_forward(draw):
    names = ["x", "z", "weight"]
    call, shape = rmsnorm_call(draw, "cake_rmsnorm_silu_gate_train_forward", [*names, "out", "eps"], backward=False)
    eps = call.number("eps", EPSILONS, BAD_EPSILONS)
    if shape is not None and draw(st.booleans()):
        found = call.tensor("out", "bfloat16", shape)
        call.shape_fault(found in (None, shape), "out")
    call.output_faults(["out"], names, {"out": ["x", "z"]})
    call.distribute(names)
    if call.dist:
        call.faults.append(set(call.views))
    output = call.run(F.cake_rmsnorm_silu_gate_train_forward)
    if output is None:
        return
    testing.assert_rmsnorm_silu_gate(call.inputs(names), call.outputs(["out"], [output])["out"], float(eps))
    call.buffers.assert_written_only([name for name in ["out"] if name in call.views])


OPS = {
    "swiglu_bwd": swiglu_bwd,
    "swiglu_clamp_bwd": swiglu_clamp_bwd,
    "swiglu_bwd_out": swiglu_bwd_out,
    "swiglu_forward": swiglu_forward,
    "rmsnorm_bwd": rmsnorm_bwd,
    "rmsnorm_forward": rmsnorm_forward,
    "rmsnorm_train_forward": rmsnorm_train_forward,
}
