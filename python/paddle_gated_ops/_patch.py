"""The drop-in: Paddle's own name for the op, on every device and version."""

from __future__ import annotations

import threading

import paddle.incubate.nn.functional as paddle_functional

from .incubate.nn.functional import fused_swiglu_weighted_bwd

_NAME = "fused_swiglu_weighted_bwd"
_MISSING = object()


class _Patch:
    """What ``patch_paddle`` returns. ``restore`` and the end of a ``with`` block undo it, once."""

    # All patches in place, in the order they were made, and what Paddle had before the first.
    _active: list[_Patch] = []
    _original: object = _MISSING
    _lock = threading.Lock()

    def __init__(self):
        self._apply()

    def _apply(self):
        with _Patch._lock:
            if self in _Patch._active:
                return
            if not _Patch._active:
                _Patch._original = getattr(paddle_functional, _NAME, _MISSING)
            _Patch._active.append(self)
            setattr(paddle_functional, _NAME, fused_swiglu_weighted_bwd)

    def restore(self) -> None:
        """Gives Paddle back what it had, unless another patch is still in place. A second call does nothing.

        Where somebody has given the name another function since, or deleted it, that stays.
        """
        with _Patch._lock:
            if self not in _Patch._active:
                return
            _Patch._active.remove(self)
            if _Patch._active:
                return
            original, _Patch._original = _Patch._original, _MISSING
            if getattr(paddle_functional, _NAME, None) is not fused_swiglu_weighted_bwd:
                return
            if original is _MISSING:
                delattr(paddle_functional, _NAME)
            else:
                setattr(paddle_functional, _NAME, original)

    def __enter__(self) -> _Patch:
        self._apply()
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


def patch_paddle() -> _Patch:
    """Makes ``paddle.incubate.nn.functional.fused_swiglu_weighted_bwd`` this package's function.

    Paddle has that name from 3.1 on, for GPUs alone; where it lacks it, the name is made. A script that calls it through the
    module (``paddle.incubate.nn.functional.fused_swiglu_weighted_bwd(...)``) then runs unchanged on the CPU and on Paddle
    2.6. Names that a script imported from the module before the call stay what they were.

        patch_paddle()                # from here on
        with patch_paddle(): ...      # in the block

    Returns:
        An object whose ``restore()`` undoes the patch; as a context manager it does so at the end of the block, and a block
        of a restored one patches again. Patches nest, and may be made by several threads: Paddle has its own again when
        each has been restored. Where somebody else has changed the name meanwhile, that stays.
    """
    return _Patch()
