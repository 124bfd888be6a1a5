"""Valkey: SET and GET of valkey-benchmark, and the longest request with many connections."""

import csv
import os
import pathlib
import socket

from bench import DEADLINE, Missing, end, free_port, over, size_name


class Valkey:
    NAME = "valkey"
    SIDES = ("rnicd", "TCP")
    CASES = [
        (f"{size_name(size)}, connections: {clients}, pipeline: {pipeline}",
         (size, clients, pipeline))
        for clients in (1, 50)
        for pipeline in (1, 16)
        for size in (3, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10)
    ]

    def __init__(self, bench):
        folder = os.environ.get("RNIC_VALKEY")
        if not folder or not (pathlib.Path(folder) / "valkey-benchmark").exists():
            raise Missing("RNIC_VALKEY must name the folder of a valkey-server and a "
                          "valkey-benchmark that are built with BUILD_RDMA=yes")
        self.bench = bench
        self.folder = pathlib.Path(folder)

    def start(self, side):
        """Starts a server and returns it with its port."""
        port = free_port()
        words = ["--bind", "127.0.0.1", "--save", "", "--dir", self.bench.folder]
        if side == "rnicd":
            words += ["--port", "0", "--rdma-bind", "127.0.0.1", "--rdma-port", str(port)]
        else:
            words += ["--port", str(port)]
        name = f"valkey-server over {side}"
        process = self.bench.start(name, over(side, self.folder / "valkey-server", *words))
        listens = self.bench.listens if side == "rnicd" else accepts
        self.bench.wait(name, lambda: listens(port), process)
        return process, port

    def measure(self, side, case, seconds):
        size, clients, pipeline = case
        # A new server, because valkey-server leaks the CQ of each closed RDMA connection:
        # it destroys the CQ before the QP.
        server, port = self.start(side)
        # valkey-benchmark takes whole seconds.
        words = ["-h", "127.0.0.1", "-p", port, "-t", "set,get", "-d", size, "-c",
                 clients, "-P", pipeline, "--duration", max(1, round(seconds)), "--csv"]
        if side == "rnicd":
            words += ["--rdma"]
        command = over(side, self.folder / "valkey-benchmark", *map(str, words))
        try:
            output = self.bench.run(command, timeout=DEADLINE + 2 * seconds)
        finally:
            end(server)
        lines = [line for line in output.splitlines() if line.startswith('"')]
        for row in csv.DictReader(lines):
            yield row["test"], "k/s", float(row["rps"]) / 1000
            if clients > 1:
                yield f"{row['test']}, longest request", "ms", float(row["max_latency_ms"])


def accepts(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
