"""What the differentiable functions share in eager mode."""

import paddle

from ._library import C


def needs_node(*tensors):
    """Whether a call on these must be recorded: gradients are enabled and somebody wants one."""
    return paddle.is_grad_enabled() and not all(getattr(tensor, "stop_gradient", True) for tensor in tensors)


def any_dist(*tensors):
    """Whether one of these is a DistTensor, whose gradients the registered op records."""
    return C.any_dist(*tensors)


def refuse_create_graph(function):
    """NotImplementedError in a backward that is itself being recorded. Without it the second gradient would be None."""
    if paddle.is_grad_enabled():
        raise NotImplementedError(f"{function}: the gradient has no gradient of its own; call with create_graph=False")
