"""The weight_attr of the layers."""

from paddle import ParamAttr


def checked_weight_attr(layer, weight_attr):
    """The ParamAttr of what Paddle's layers take for one; ValueError for False, TypeError for what is none."""
    if weight_attr is False:
        raise ValueError(f"{layer}: weight_attr must not be False, as the layer has no form without its weights")
    try:
        attr = ParamAttr._to_attr(weight_attr)
    except TypeError:
        attr = None
    if not isinstance(attr, ParamAttr):  # a list makes several
        raise TypeError(
            f"{layer}: weight_attr must be a ParamAttr, a name, an initializer, a regularizer or None, but is "
            f"{type(weight_attr).__name__}"
        )
    return attr
