"""Open MPI over UCX: half the round-trip time and the bandwidth of two ranks (pingpong.c)."""

import pathlib
import re
import shutil

from bench import Failed, Missing, over, size_name

FIGURES = re.compile(r"half a round trip ([\d.]+) us, bandwidth ([\d.]+) MB/s")


class OpenMpi:
    NAME = "openmpi"
    SIDES = ("rnicd", "TCP")
    CASES = [(size_name(size), size) for size in (8, 4 << 10, 64 << 10, 1 << 20)]

    def __init__(self, bench):
        for program, package in (("mpirun", "openmpi-bin"), ("mpicc", "libopenmpi-dev")):
            if not shutil.which(program):
                raise Missing(f"Debian package {package}")
        self.bench = bench
        self.program = bench.folder / "pingpong"
        source = pathlib.Path(__file__).with_name("pingpong.c")
        bench.run(["mpicc", "-O2", "-Wall", "-o", self.program, source])

    def measure(self, side, size, seconds):
        transports = {"rnicd": "rc_verbs,ud_verbs,self", "TCP": "tcp,self"}[side]
        env = {"UCX_TLS": transports, "OMPI_ALLOW_RUN_AS_ROOT": "1",
               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if side == "TCP":
            env["UCX_NET_DEVICES"] = "lo"
        words = ["mpirun", "--oversubscribe", "-np", "2"]
        for name, value in (("plm", "isolated"), ("pml", "ucx"), ("opal_common_ucx_tls", "any"),
                            ("opal_common_ucx_devices", "any")):
            words += ["--mca", name, value]
        output = self.bench.run(over(side, *words, self.program, str(size), str(seconds)), env)
        found = FIGURES.search(output)
        if not found:
            raise Failed("mpirun printed no figures", output)
        yield "half a round trip", "us", float(found[1])
        yield "bandwidth", "MB/s", float(found[2])
