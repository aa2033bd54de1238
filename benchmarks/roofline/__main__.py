"""Read bandwidth of this machine, by number of threads.

python -m benchmarks.roofline
"""

import argparse

from benchmarks.roofline import measure_bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__)
    parser.add_argument("--threads", type=int, nargs="*", default=(), help="default: 1 and all")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each measurement")
    arguments = parser.parse_args()
    for bandwidth in measure_bandwidth(arguments.threads, seconds=arguments.seconds):
        print(
            f"{bandwidth.threads} threads: {bandwidth.best / 1e9:.1f} GB/s "
            f"(median pass {bandwidth.median / 1e9:.1f})"
        )


if __name__ == "__main__":
    main()
