"""The demo: trains a small mixture-of-experts classifier on handwritten digits with the two fused backward ops."""

import argparse
import contextlib
import io
import os
import sys
import warnings

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def parse_arguments():
    parser = argparse.ArgumentParser(
        prog="tools/demo.sh",
        description=(
            "Trains a small ERNIE-style mixture-of-experts classifier on scikit-learn's handwritten digits. The "
            "gradients of its experts (weighted SwiGLU) and of its norm (gated RMSNorm) are the two ops of "
            "paddle_gated_ops; beside it, on the same batches, trains the same model on Paddle's own unfused FP32 "
            "functions. Exit status 1 unless the test accuracy is 95 % or more, all checked gradients are within the "
            "promised bound of float64, and the loss is within 2 % of the unfused model's in every epoch."
        ),
        epilog="The CPU's threads: OMP_NUM_THREADS, else all the cores this process may use.",
    )
    parser.add_argument("--device", help="cpu, gpu or gpu:N (default: the GPU if this Paddle sees one, else the CPU)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the batches (default: 0)")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images (default: 12)")
    parser.add_argument(
        "--picture", default=os.path.join(ROOT, "demo-curves.png"), help="PNG file of the curves (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be 1 or more")
    return arguments


def import_paddle():
    """Imports Paddle with threads, and without what it says about that, which is meant for builds with OpenBLAS."""
    # Paddle sets 1 where nothing is set, and the ops follow.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    said = io.StringIO()
    with contextlib.redirect_stderr(said), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No ccache found")
        import paddle
    sys.stderr.writelines(line for line in said.getvalue().splitlines(True) if "OMP_NUM_THREADS" not in line)
    return paddle


def main():
    arguments = parse_arguments()
    paddle = import_paddle()
    import digits
    import picture
    import report
    from tqdm import tqdm
    from training import BATCH_SIZE, train

    import paddle_gated_ops

    try:
        paddle.set_device(arguments.device or ("gpu" if paddle.device.cuda.device_count() else "cpu"))
    except ValueError as error:
        sys.exit(f"error: --device {arguments.device}: {error}")
    data = digits.load(arguments.seed)
    print(
        f"Training on {paddle.get_device()} with Paddle {paddle.__version__}: {len(data.train_images)} images of "
        f"handwritten digits, {arguments.epochs} epochs, seed {arguments.seed}",
        flush=True,
    )
    steps = arguments.epochs * len(range(0, len(data.train_images), BATCH_SIZE))
    # In a log file, where a bar cannot be redrawn, every redraw is a line.
    with tqdm(total=steps, unit=" steps", mininterval=0.1 if sys.stderr.isatty() else 10) as progress:
        result = train(data, arguments.epochs, arguments.seed, progress)
    picture.save(result, arguments.picture)

    threads = paddle_gated_ops.get_num_threads() if paddle.get_device() == "cpu" else None
    print(f"\n{report.text(result, threads)}\nBoth training curves: {arguments.picture}")
    if not all(condition.met for condition in report.conditions(result)):
        sys.exit(1)


if __name__ == "__main__":
    main()
