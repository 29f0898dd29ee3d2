"""The version, and what of a Paddle the compiled library depends on. setup.py runs this file: it imports nothing of ours."""

import re

__version__ = "0.1.0"


def paddle_tag(paddle):
    """'paddle3.3.cpu' or 'paddle2.6.cu12', say, of the module paddle: release and build, which the library's must be too."""
    major, minor = re.findall(r"\d+", paddle.version.full_version)[:2]
    build = "cu" + paddle.version.cuda().split(".")[0] if paddle.is_compiled_with_cuda() else "cpu"
    return f"paddle{major}.{minor}.{build}"
