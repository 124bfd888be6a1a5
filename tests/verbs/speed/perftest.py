"""perftest over the drop-in libraries with its own memory, compared to rnic-perf on shared buffers.

Both post each message separately, from a working set of one message, over the direct path of one
daemon.
"""

import json
import re
import shutil

from bench import BIN, Failed, Missing, end, free_port, over, size_name

# Program, bytes, and the goal for the ratio.
ROWS = [
    ("write_lat", 8, 1.5),
    ("send_bw", 8, 1.5),
    ("write_bw", 8, 1.5),
    ("write_lat", 65536, 1.6),
    ("send_bw", 65536, 1.6),
    ("write_bw", 65536, 1.6),
    ("send_bw", 1 << 20, 1.6),
    ("write_bw", 1 << 20, 1.6),
]


class Perftest:
    NAME = "perftest"
    SIDES = ("rnic-perf", "perftest")
    CASES = [
        (f"ib_{test} {size_name(size)} (goal of the ratio: at most {goal})", (test, size))
        for test, size, goal in ROWS
    ]

    def __init__(self, bench):
        if not shutil.which("ib_write_bw"):
            raise Missing("Debian package perftest")
        self.bench = bench

    def measure(self, side, case, seconds):
        test, size = case
        yield (self.native if side == "rnic-perf" else self.perftest)(test, size, seconds)

    def perftest(self, test, size, seconds):
        # About as many messages as fit in the time. ib_write_lat never yields to the worker, so
        # with few CPUs each message costs it a time slice of the scheduler.
        if test.endswith("lat"):
            count = 10000
        else:
            count = {8: 400000, 65536: 100000}.get(size, 5000)
        count = max(1000, int(count * seconds))
        port = free_port()
        words = [f"ib_{test}", "-R", "-F", "-s", str(size), "-n", str(count), "-p", str(port)]
        if test.endswith("bw"):
            # A completion for each request, as in rnic-perf.
            words += ["-t", "128" if size == 8 else "16", "--cq-mod", "1"]
        command = over("rnicd", *words)
        server = self.bench.start(words[0], command)
        try:
            self.bench.wait(words[0], lambda: self.bench.listens(port), server)
            output = self.bench.run([*command, "127.0.0.1"])
        finally:
            end(server)
        row = re.search(rf"^ *{size} +\d+ +(.*)$", output, re.M)
        if not row:
            raise Failed(f"{words[0]} printed no figures", output)
        figures = [float(figure) for figure in row[1].split()]
        # Latency: minimum, maximum, typical. Bandwidth: peak, average, in MiB.
        if test.endswith("lat"):
            return "", "us", figures[2]
        return "", "MB/s", figures[1] * 1.048576

    def native(self, test, size, seconds):
        op, kind = test.split("_")
        words = [kind, "--op", op, "--size", str(size), "--rounds", "1", "--json"]
        words += ["--seconds", str(seconds / 2)]
        if kind == "bw":
            depth = "128" if size == 8 else "16"
            words += ["--depth", depth, "--batch", "1", "--working-set", str(max(size, 4096))]
        report = json.loads(self.bench.run([BIN / "rnic-perf", *words]))
        figure = report["rows"][0]["figures"][0]
        if figure["unit"] == "us":
            return "", "us", figure["median"]
        return "", "MB/s", figure["median"] * {"MB/s": 1, "GB/s": 1000}[figure["unit"]]
