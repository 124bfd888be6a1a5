"""NIXL: Writes from host memory with its UCX backend, one at a time and sixteen per request.

The class below runs this file itself as both agents, with the Python that has NIXL.
"""

import base64
import json
import os
import subprocess
import sys
import time

from bench import BIN, Failed, Missing, PYTHON, over, size_name

MARK = "nixl_writes: "


class Nixl:
    NAME = "nixl"
    SIDES = ("rnicd", "TCP")
    CASES = [
        (f"write {size_name(size)}" + (f", {batch} in a request" if batch > 1 else ""),
         (size, batch))
        for batch in (1, 16)
        for size in (64 << 10, 1 << 20)
    ]

    def __init__(self, bench):
        if subprocess.run([PYTHON, "-P", "-c", "import nixl_cu12"], capture_output=True).returncode:
            raise Missing("RNIC_PYTHON must name a Python with the packages nixl-cu12 and numpy")
        self.bench = bench

    def measure(self, side, case, seconds):
        if side == "rnicd":
            # The package has its own libibverbs. Its UCX calls the drop-in library if that is
            # loaded first.
            env = {"UCX_TLS": "rc_verbs,ud_verbs:aux",
                   "LD_PRELOAD": str(BIN / "verbs/libibverbs.so.1")}
        else:
            env = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
        words = [PYTHON, __file__, *map(str, case), str(seconds)]
        output = self.bench.run(over(side, *words), {"UCX_WARN_UNUSED_ENV_VARS": "n", **env})
        found = marked(output.splitlines())
        if found is None:
            raise Failed("the initiator printed no figure", output)
        size, batch = case
        each = found / batch
        yield ("", "us", each * 1e6) if batch == 1 else ("", "GB/s", size / each / 1e9)


def marked(lines):
    """Returns the value that an agent printed between log lines of NIXL and UCX."""
    for line in lines:
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    return None


def agent(name, size):
    """Makes an agent with registered memory."""
    import numpy
    from nixl_cu12 import nixl_agent, nixl_agent_config

    made = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = numpy.full(size, name == "initiator", dtype=numpy.uint8)
    made.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    return made, memory


def target(size):
    made, memory = agent("target", size)
    metadata = base64.b64encode(made.get_agent_metadata()).decode()
    print(MARK + json.dumps([metadata, memory.ctypes.data]), flush=True)
    sys.stdin.read()
    return bool(memory.all())


def initiator(size, batch, seconds):
    command = [sys.executable, __file__, "target", str(size * batch)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as peer:
        ready = marked(peer.stdout)
        if ready is None:
            raise SystemExit("the target did not start")
        metadata, address = ready
        made, memory = agent("initiator", size * batch)
        name = made.add_remote_agent(base64.b64decode(metadata))

        def pieces(start):
            places = [(start + number * size, size, 0) for number in range(batch)]
            return made.get_xfer_descs(places, "DRAM")

        request = made.initialize_xfer("WRITE", pieces(memory.ctypes.data), pieces(address), name)

        def write():
            state = made.transfer(request)
            while state == "PROC":
                state = made.check_xfer_state(request)
            if state != "DONE":
                raise SystemExit(f"a write ended with {state}")

        # The first one connects.
        write()
        count = 0
        start = time.perf_counter()
        while time.perf_counter() < start + seconds:
            write()
            count += 1
        each = (time.perf_counter() - start) / count
        peer.communicate()
        if peer.returncode:
            raise SystemExit("the target's memory differs from the written data")
        return each


def main():
    if sys.argv[1] == "target":
        status = 0 if target(int(sys.argv[2])) else 1
    else:
        each = initiator(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
        print(MARK + json.dumps(each))
        status = 0
    sys.stdout.flush()
    # Over TCP, an agent whose peer has exited crashes when it exits.
    os._exit(status)


if __name__ == "__main__":
    main()
