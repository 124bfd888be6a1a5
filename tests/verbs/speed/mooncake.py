"""Mooncake's transfer engine: its transfer_engine_bench with memory of the host."""

import re
import subprocess

from bench import Failed, Missing, PYTHON, end, over, size_name

LISTENS = re.compile(r"listening on (127\.0\.0\.1:\d+)")
FIGURE = re.compile(r"throughput ([\d.]+) MB/s")


class Mooncake:
    NAME = "mooncake"
    SIDES = ("rnicd", "TCP")
    CASES = [
        (f"{operation} {size_name(size)}", (operation, size))
        for operation in ("write", "read")
        for size in (64 << 10, 256 << 10, 1 << 20, 4 << 20)
    ]

    def __init__(self, bench):
        where = "import mooncake; print(mooncake.__path__[0])"
        found = subprocess.run([PYTHON, "-P", "-c", where], capture_output=True, text=True)
        if found.returncode:
            raise Missing("RNIC_PYTHON must name a Python with the package "
                          "mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda")
        self.bench = bench
        self.program = found.stdout.strip() + "/transfer_engine_bench"

    def measure(self, side, case, seconds):
        operation, size = case
        # The benchmark takes whole seconds.
        words = ["--metadata_server=P2PHANDSHAKE", "--local_server_name=127.0.0.1",
                 f"--block_size={size}", "--batch_size=8", "--threads=1",
                 f"--duration={max(1, round(seconds))}", "--buffer_size=67108864",
                 f"--operation={operation}", "--report_unit=MB"]
        words += (["--protocol=rdma", "--device_name=rnicd1"] if side == "rnicd" else
                  ["--protocol=tcp"])
        command = over(side, self.program, *words)
        name = "transfer_engine_bench"
        target = self.bench.start(name, [*command, "--mode=target"])
        try:
            def segment():
                output = self.bench.output(name)
                # The buffers are allocated after the port is known.
                return "numa node num" in output and LISTENS.search(output)

            found = self.bench.wait(name, segment, target)
            output = self.bench.run([*command, f"--segment_id={found[1]}"])
        finally:
            end(target)
        figure = FIGURE.search(output)
        if not figure:
            raise Failed("transfer_engine_bench printed no figure", output)
        yield "", "MB/s", float(figure[1])
