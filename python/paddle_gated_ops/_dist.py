"""DistTensors of Paddle 3: tensors, and variables of a program, that are spread over processes."""

import paddle


def distributed(*tensors):
    """Those of the tensors that are DistTensors."""
    return [tensor for tensor in tensors if hasattr(tensor, "is_dist") and tensor.is_dist()]


def rows_are_sharded(*tensors):
    """Whether one of these [..., columns] is a DistTensor that is sharded along its leading dimensions."""
    return any(
        placement.is_shard() and placement.get_dim() < len(tensor.shape) - 1
        for tensor in distributed(*tensors)
        for placement in tensor.placements
    )


def reduced(tensor):
    """The DistTensor with its partial sums added up, the same in all processes."""
    dist = paddle.distributed
    placements = [dist.Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return dist.reshard(tensor, tensor.process_mesh, placements)


def with_fp32_gradient(weight, *others):
    """The BF16 weight in FP32, for an op of a program, where it or one of the others is a DistTensor; else as it is.

    Each process has a part of the weight's gradient. The parts are added up in FP32 by the gradient of this reshard, which
    leaves the value alone, before the gradient of the cast rounds their sum.
    """
    spread = distributed(weight, *others)
    if not spread:
        return weight
    if weight is not spread[0]:
        # An op with a DistTensor makes its dense operands, and what they come from, replicated ones; this has no other use.
        (spread[0] + weight).get_defining_op().erase()
    return reduced(weight.astype("float32"))
