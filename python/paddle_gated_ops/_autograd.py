"""What the differentiable functions share in eager mode."""

import weakref

import paddle

from ._graph import is_tensor
from ._library import C


def needs_node(*tensors):
    """Whether a call on these must be recorded: gradients are enabled and somebody wants one."""
    return paddle.is_grad_enabled() and any(is_tensor(tensor) and not tensor.stop_gradient for tensor in tensors)


def refused_gradients(function, wanted):
    """What a backward must return where it is itself being recorded, else None: NotImplementedError then comes of it.

    Without it the second gradient would be None. The engine asks for None in the place of a gradient that this call does not
    ask for, so one place alone is filled: the first input that was trainable, which the rest of the model comes through.
    """
    if not paddle.is_grad_enabled():
        return None
    message = f"{function}: the gradient has no gradient of its own; call with create_graph=False"
    gradients = [None] * len(wanted)
    gradients[wanted.index(True)] = C.no_gradient_tensor(message)
    return tuple(gradients)


def checked_main_grad(function, name, weight):
    """The weight's main_grad, None where it has none; ValueError where a gradient cannot be added to it in place."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return None
    if not isinstance(main_grad, paddle.Tensor):
        found = type(main_grad).__name__
    elif main_grad.dtype != paddle.float32 or list(main_grad.shape) != list(weight.shape):
        found = f"{main_grad.dtype} of shape {list(main_grad.shape)}"
    else:
        return main_grad
    raise ValueError(
        f"{function}: main_grad of {name} must be a float32 Tensor of the weight's shape {list(weight.shape)}, but is "
        f"{found}"
    )


def save_inputs(ctx, *own, **inputs):
    """Saves a node's inputs by name, with what tells whether one is written to before the backward; and its own tensors."""
    ctx.save_for_backward(*inputs.values(), *own)
    ctx.saved = [(name, weakref.ref(tensor), tensor.inplace_version) for name, tensor in inputs.items()]


def saved_inputs(ctx, function):
    """The tensors of ``save_inputs``; RuntimeError where an input was written to since, as of Paddle's own
    functions.

    What recompute puts in the place of an input has no history to compare with.
    """
    tensors = ctx.saved_tensor()
    for tensor, (name, original, version) in zip(tensors, ctx.saved):
        if original() is tensor and tensor.inplace_version != version:
            raise RuntimeError(
                f"{function}: {name} was written to between forward and backward, {tensor.inplace_version - version} "
                "time(s); the gradient needs what it held before"
            )
    return tensors
