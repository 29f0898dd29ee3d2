"""Times the ops beside a copy of as many bytes, Paddle's own functions and other libraries: python tools/bench.py --help"""

import argparse
import os
import sys


def parse_arguments():
    from bench.cases import OPS

    parser = argparse.ArgumentParser(prog="tools/bench.py", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), metavar="OP", help=f"of {', '.join(OPS)}")
    parser.add_argument("--rows", nargs="+", type=int, help="these numbers of rows alone, of the chosen sizes")
    parser.add_argument("--sizes", choices=["table", "sweep", "quick"], default="table")
    parser.add_argument("--peers", nargs="*", choices=["paddle"], default=["paddle"], help="whom else to time")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each version is timed (default: %(default)s)")
    parser.add_argument("--rotate", type=float, default=256, help="MiB that the buffers move together, at least")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    from bench import cases, cpu

    import paddle_gated_ops

    choose = {"table": cases.table, "sweep": cases.sweep, "quick": lambda op, device: cases.quick(op)}[arguments.sizes]
    chosen = [case for op in arguments.ops for case in choose(op, arguments.device)]
    if arguments.rows:
        chosen = [case for case in chosen if case.rows in arguments.rows]
    threads, rotate = paddle_gated_ops.get_num_threads(), int(arguments.rotate * 2**20)
    for case in chosen:
        for r in cpu.run(case, threads, arguments.seconds, rotate, arguments.peers):
            line = r.get("skipped") or f"{r['us']:10.1f} us {r['bytes'] / r['us'] / 1e3:7.2f} GB/s {r.get('of_copy', 1):7.1%}"
            print(f"{str(case):40} {r['provider']:32} {'fresh' if r.get('fresh_outputs') else 'given':6} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
