"""Times the ops beside a copy of as many bytes, Paddle's own functions and other libraries' versions: a table on screen,
JSON and a picture in files.

Some rows of every version's outputs are compared with float64 before it is timed. Buffers rotate, so that no cache holds the
next call's. Times are medians: of calls on a CPU, in turns with the copies; of CUDA graphs of many launches on a GPU. The
JSON is whole after each case: a run that was ended goes on with --add.
"""

import argparse
import os
import sys

from bench import cases, records
from bench.peers import PEERS


def parse_arguments():
    parser = argparse.ArgumentParser(
        prog="tools/bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--ops", nargs="+", choices=cases.OPS, default=list(cases.OPS), metavar="OP", help=f"of {', '.join(cases.OPS)}"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=["table", "sweep", "quick"],
        default=["table"],
        help="sizes that people run; from 8 rows to 2^20; a few small ones (default: table)",
    )
    parser.add_argument("--rows", nargs="+", type=int, help="of these sizes, those with as many rows")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=["paddle", *PEERS],
        default=["paddle", *PEERS],
        help="whom else to time (default: all that are installed)",
    )
    parser.add_argument(
        "--peer-ops", nargs="+", choices=cases.OPS, metavar="OP", help="of the ops, those that the peers are timed with"
    )
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        metavar="COMMAND",
        help="the Python that has PyTorch and the libraries upon it, 'env NAME=value python3' say (default: this one)",
    )
    parser.add_argument("--calls", action="store_true", help="also what an eager call on tiny tensors costs the host")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long a CPU version is timed (default: %(default)s)")
    parser.add_argument("--rotate", type=float, help="MiB that the buffers move together, at least (default: 256, GPU 600)")
    parser.add_argument("--out", metavar="FILE", help="JSON; the picture goes beside it (default: build/bench/DEVICE.json)")
    parser.add_argument(
        "--add", action="store_true", help="measure what FILE lacks, and this library anew if FILE is of another commit"
    )
    parser.add_argument("--commit", help="of the source, where git does not know it")
    parser.add_argument("--draw", metavar="FILE", help="measure nothing; draw this JSON's picture and print README's tables")
    arguments = parser.parse_args()
    arguments.out = arguments.out or str(records.ROOT / "build" / "bench" / f"{arguments.device}.json")
    arguments.rotate = int(2**20 * (arguments.rotate or (600 if arguments.device == "gpu" else 256)))
    return arguments


def chosen_cases(arguments):
    tables = {"table": cases.table, "sweep": cases.sweep, "quick": cases.quick}
    found = [case for size in arguments.sizes for op in arguments.ops for case in tables[size](op, arguments.device)]
    return list(dict.fromkeys(case for case in found if not arguments.rows or case.rows in arguments.rows))


def main():
    arguments = parse_arguments()
    if arguments.draw:
        from bench import plots, summary

        return print(*summary.tables(*records.load(arguments.draw)), plots.draw(arguments.draw), sep="\n")
    # Importing Paddle sets this to 1 where it is unset, and the CPU kernels follow it.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    from bench import session

    session.run(arguments, chosen_cases(arguments))


if __name__ == "__main__":
    main()
