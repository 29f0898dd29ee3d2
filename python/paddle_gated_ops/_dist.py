"""DistTensors of Paddle 3: tensors, and variables of a program, that are spread over processes."""

import paddle


def rows_are_sharded(*tensors):
    """Whether one of these [..., columns] is a DistTensor that is sharded along its leading dimensions."""
    return any(
        placement.is_shard() and placement.get_dim() < len(tensor.shape) - 1
        for tensor in tensors
        if hasattr(tensor, "is_dist") and tensor.is_dist()
        for placement in tensor.placements
    )


def reduced(tensor):
    """The DistTensor with its partial sums added up, the same in all processes."""
    dist = paddle.distributed
    placements = [dist.Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return dist.reshard(tensor, tensor.process_mesh, placements)
