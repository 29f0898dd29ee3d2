#!/usr/bin/env python3
"""Builds a release from the last commit into dist/, and checks each file in a fresh environment.

    python3 tools/release.py                   the source distribution, and a wheel for each Paddle and Python
    python3 tools/release.py --only 3.3.1      the wheels whose line holds this, "paddlepaddle 3.3.1, Python 3.11" say

The wheels are built from the source distribution. A check installs Paddle and the wheel alone, and runs
``paddle_gated_ops.run_check()`` from an empty folder. Any Python 3.9 or newer runs this.
"""
import argparse
import glob
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from matrix import PYTHONS, ROOT, extra_packages, find_python, find_uv, why_left_out

CHECK = """
import importlib.metadata, sys
import paddle, paddle_gated_ops
from paddle_gated_ops._version import __version__, paddle_tag
assert __version__ == sys.argv[1], __version__
assert importlib.metadata.version("paddle_gated_ops") == f"{__version__}+{paddle_tag(paddle)}"
paddle_gated_ops.run_check()
"""


def run(*command, cwd):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    subprocess.run(command, cwd=cwd, env=env, check=True)


def environment(uv, folder, python, packages):
    """A new environment; returns its interpreter."""
    run(uv, "venv", "-q", "--python", find_python(python), folder, cwd=ROOT)
    run(uv, "pip", "install", "-q", "--python", folder / "bin/python", *packages, cwd=ROOT)
    return folder / "bin/python"


def release_version():
    """The version in the sources. Ends the process where the commit is not what would be released."""
    version = runpy.run_path(str(ROOT / "python/paddle_gated_ops/_version.py"))["__version__"]
    status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    changed = status.stdout
    if changed:
        sys.exit(f"error: a release is built from a commit, and these files differ from it:\n{changed}")
    if f"\n## {version}\n" not in (ROOT / "CHANGELOG.md").read_text():
        sys.exit(f"error: CHANGELOG.md says nothing of {version}.")
    return version


def build_sdist(uv, scratch, dist):
    run("git", "archive", "-o", scratch / "commit.tar", "HEAD", cwd=ROOT)
    shutil.unpack_archive(scratch / "commit.tar", scratch / "commit")
    python = environment(uv, scratch / "sdist", f"3.{sys.version_info.minor}", ["build"])
    run(python, "-m", "build", "--sdist", "-o", dist, cwd=scratch / "commit")
    return glob.glob(f"{dist}/*.tar.gz")[0]


def build_and_check_wheel(uv, folder, dist, sdist, paddle, python, version):
    package = "==".join(paddle.split())
    builder = environment(uv, folder / "build", python, [package, *extra_packages(paddle), "pip", "setuptools", "wheel"])
    before = set(dist.glob("*.whl"))
    run(builder, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", dist, sdist, cwd=folder)
    (wheel,) = set(dist.glob("*.whl")) - before
    # Paddle imports setuptools, and does not say so.
    user = environment(uv, folder / "use", python, [package, *extra_packages(paddle), "setuptools", wheel])
    (folder / "empty").mkdir()
    run(user, "-c", CHECK, version, cwd=folder / "empty")


def main():
    parser = argparse.ArgumentParser(description="Builds a release into dist/ and checks it.")
    parser.add_argument("--only", metavar="TEXT", default="", help="build the wheels whose line holds this text")
    options = parser.parse_args()
    version, dist = release_version(), ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        scratch = Path(name)
        os.environ.setdefault("UV_CACHE_DIR", str(scratch / "cache"))
        uv = find_uv(scratch)
        sdist = build_sdist(uv, scratch, dist)
        for paddle, pythons in PYTHONS.items():
            for python in pythons:
                line = f"{paddle}, Python {python}"
                reason = why_left_out({"paddle": paddle, "python": python})
                if options.only in line and reason is None:
                    with tempfile.TemporaryDirectory(dir=scratch) as folder:
                        build_and_check_wheel(uv, Path(folder), dist, sdist, paddle, python, version)
                if options.only in line:
                    print(f"{line}: {reason or 'built and checked'}", flush=True)
            run(uv, "cache", "clean", "-q", paddle.split()[0], cwd=ROOT)
    for path in sorted(dist.iterdir()):
        print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
    return 0 if any(dist.glob("*.whl")) else 1


if __name__ == "__main__":
    sys.exit(main())
