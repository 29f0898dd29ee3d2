"""Finds and loads the library once: its registered ops for graphs, its functions for eager calls."""

import importlib.machinery
import importlib.util
import json
import os

from ._version import paddle_tag

_NAME = __package__ + "._C"


def _find():
    folder = os.path.dirname(os.path.abspath(__file__))
    names = ["_C" + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    paths = [os.path.join(folder, name) for name in names]
    for path in paths:
        if os.path.exists(path):
            return path
    raise ImportError(
        f"paddle_gated_ops is installed without its compiled library: {paths[0]} is missing. Install it again with this "
        "Python (pip install --force-reinstall --no-deps ...); for work on a checkout, build it in place with "
        "pip install -e .",
        name=_NAME,
        path=paths[0],
    )


def build_info():
    """What setup.py wrote of the build, beside the library (dict)."""
    path = os.path.splitext(_find())[0] + ".json"
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError as error:
        message = f"{path} is missing, which every build writes: build paddle_gated_ops again."
        raise ImportError(message, name=_NAME, path=path) from error


def _check_paddle(paddle, path):
    built = build_info()
    if built["paddle_tag"] != paddle_tag(paddle):
        raise ImportError(
            f"paddle_gated_ops is built for Paddle {built['paddle']} ({built['paddle_tag']}), and this is Paddle "
            f"{paddle.version.full_version} ({paddle_tag(paddle)}): the library of one does not run with the other. Install "
            "paddle_gated_ops again with this Paddle (pip install --force-reinstall --no-deps, from its sources or a wheel "
            f"whose name holds +{paddle_tag(paddle)}), or the Paddle that it is built for.",
            name=_NAME,
            path=path,
        )


def _load():
    try:
        import paddle
    except ImportError as error:
        raise ImportError(
            f"paddle_gated_ops needs Paddle, which this Python cannot import ({error}). Install paddlepaddle or "
            "paddlepaddle-gpu, 2.6 or newer, and then paddle_gated_ops again, which is built against it.",
            name="paddle",
        ) from error
    from paddle.utils.cpp_extension.extension_utils import load_op_meta_info_and_register_op

    path = _find()
    _check_paddle(paddle, path)
    spec = importlib.util.spec_from_file_location(_NAME, path)
    # Python's loader first: where a symbol or a library is missing it says so, while Paddle's says less.
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:
        raise ImportError(
            f"paddle_gated_ops cannot load {path} with Paddle {paddle.__version__}: {error}. It is built against one "
            "Paddle; install it again with the one at hand.",
            name=_NAME,
            path=path,
        ) from error
    load_op_meta_info_and_register_op(path)
    spec.loader.exec_module(module)
    return module


C = _load()
