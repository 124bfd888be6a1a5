"""Speed of programs over rnicd and over TCP, as tables in Markdown.

A ratio above 1 means that the first column is faster, which is rnicd for most programs. The rows of
perftest compare rnic-perf, which uses shared buffers, with perftest over the drop-in libraries.
All programs run on this host, on the loopback interface and on one daemon of this run.

Each round measures every row once over rnicd and once over TCP. The results are medians of the
rounds. A run over rnicd in which the daemon places no data counts as failed. Programs that are not
installed are skipped, with a line that names the package:

  perftest  Debian: perftest
  valkey    RNIC_VALKEY: the folder with valkey-server and valkey-benchmark, version 9 or newer,
            built from source (for example Debian's source package valkey) with
            libibverbs-dev and librdmacm-dev: make -C src BUILD_RDMA=yes valkey-server
            valkey-benchmark
  nixl      RNIC_PYTHON: a Python with nixl-cu12 and numpy from PyPI (pip install --no-deps)
  mooncake  RNIC_PYTHON: a Python with mooncake-transfer-engine-non-cuda, or
            mooncake-transfer-engine, from PyPI (pip install --no-deps)
  openmpi   Debian: openmpi-bin, libopenmpi-dev

RNIC_BIN: the directory of the binaries, instead of target/release.
"""

import argparse
import contextlib
import re
import signal
import statistics
import sys
import tempfile

from bench import Bench, Failed, Missing
from mooncake import Mooncake
from nixl_writes import Nixl
from openmpi import OpenMpi
from perftest import Perftest
from valkey import Valkey

PROGRAMS = [Perftest, Valkey, Nixl, Mooncake, OpenMpi]
LESS_IS_FASTER = ("us", "ms")
# Handshakes place fewer bytes.
LEAST_PLACED = 2000


def main():
    parser = argparse.ArgumentParser(prog="python3 tests/verbs/speed", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX",
                        help="measure the rows that this matches, as in \"valkey.*4 KiB\"")
    parser.add_argument("--seconds", type=float, default=1, metavar="S",
                        help="time of a measurement [default: 1]; valkey and mooncake take "
                             "whole seconds, and at least one")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="[default: 5]")
    options = parser.parse_args()
    # The daemon and the servers end with this script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    failed = False
    # An ExitStack closes in reverse order.
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        bench = Bench(folder, stack)
        for program in PROGRAMS:
            cases = [(label, case) for label, case in program.CASES
                     if re.search(options.only, f"{program.NAME} {label}")]
            if not cases:
                continue
            try:
                with contextlib.ExitStack() as servers:
                    bench.stack = servers
                    failed |= measure(bench, program(bench), cases, options)
            except Missing as why:
                print(f"\n{program.NAME} is skipped: {why}")
            except Failed as why:
                print(f"\n{program.NAME} failed: {why}")
                failed = True
    sys.exit(failed)


def measure(bench, program, cases, options):
    """Measures a program and prints its table; returns true if a run failed."""
    figures, failures = {}, {}
    for number in range(options.rounds):
        for label, case in cases:
            for side in program.SIDES:
                progress(f"{program.NAME} {label}, {side}, round {number + 1}")
                try:
                    before = bench.placed()
                    for what, unit, value in list(program.measure(side, case, options.seconds)):
                        row = figures.setdefault((label, what, unit), {})
                        row.setdefault(side, []).append(value)
                    if side != "TCP" and bench.placed() - before < LEAST_PLACED:
                        raise Failed("the daemon has placed no data")
                except Failed as why:
                    failures[label, side] = why
    progress("")
    print(f"\n| {program.NAME} | {' | '.join(program.SIDES)} | ratio |\n| --- | --- | --- | --- |")
    for (label, what, unit), row in figures.items():
        name = ": ".join(filter(None, (label, what)))
        good = {side: statistics.median(row[side]) for side in program.SIDES
                if side in row and (label, side) not in failures}
        shown = [f"{rounded(good[side])} {unit}" if side in good else "failed"
                 for side in program.SIDES]
        ratio = ""
        if len(good) == 2:
            first, second = good.values()
            if unit in LESS_IS_FASTER:
                first, second = second, first
            ratio = f"{first / second:.2f}" if second else ""
        print(f"| {name} | {' | '.join(shown)} | {ratio} |", flush=True)
    for (label, side), why in failures.items():
        print(f"\n{program.NAME} {label}, {side}: {why}")
    return bool(failures)


def rounded(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def progress(line):
    """Prints the current row if the output is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
