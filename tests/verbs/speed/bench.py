"""Processes and the daemon that all programs of this folder share."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
BIN = pathlib.Path(os.environ.get("RNIC_BIN", ROOT / "target/release")).resolve()
# The Python with the packages from PyPI.
PYTHON = os.environ.get("RNIC_PYTHON", sys.executable)
DEADLINE = 60


class Missing(Exception):
    """A program or package that is not installed."""


class Failed(Exception):
    """A program that failed, with the end of its output."""

    def __init__(self, why, output=""):
        super().__init__("\n    ".join([why, *output.strip().splitlines()[-15:]]))


class Bench:
    """A daemon of this run and a folder for everything that the programs write."""

    def __init__(self, folder, stack):
        self.folder = pathlib.Path(folder)
        self.stack = stack
        self.metrics = self.folder / "metrics"
        os.environ["RNIC_SOCKET"] = str(self.folder / "socket")
        os.environ["TMPDIR"] = folder
        config = self.folder / "rnicd.toml"
        config.write_text(f'[metrics]\nfile = "{self.metrics}"\n')
        command = [BIN / "rnicd", "run", "--config", config, "--socket", self.folder / "socket"]
        self.daemon = self.start("rnicd", command)
        status = [BIN / "rnicctl", "status"]
        self.wait("rnicd", lambda: not subprocess.run(status, capture_output=True).returncode)

    def start(self, name, command, env=None):
        """Starts a server, which is stopped at the end of the run at the latest."""
        with open(self.folder / name, "w", encoding="utf-8") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                       env={**os.environ, **(env or {})}, start_new_session=True)
        self.stack.callback(end, process)
        return process

    def wait(self, name, ready, process=None):
        """Waits until a server is ready and returns what `ready` returned."""
        deadline = time.monotonic() + DEADLINE
        while not (result := ready()):
            if time.monotonic() > deadline or (process or self.daemon).poll() is not None:
                raise Failed(f"{name} did not start", self.output(name))
            time.sleep(0.02)
        return result

    def output(self, name):
        """Returns what a server has printed."""
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def run(self, command, env=None, timeout=DEADLINE):
        """Runs a program to its end and returns its output."""
        process = subprocess.Popen(command, text=True, errors="replace", stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   env={**os.environ, **(env or {})}, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise Failed(f"{shown(command)} took more than {timeout} s", output) from None
        finally:
            end(process)
        if process.returncode:
            raise Failed(f"{shown(command)} ended with {process.returncode}", output)
        return output

    def listens(self, port):
        """Returns true if the daemon listens on an RDMA port."""
        rows = json.loads(subprocess.check_output([BIN / "rnicctl", "--json", "listeners"]))
        return any(f":{port}" in json.dumps(row) for row in rows)

    def placed(self):
        """Returns the number of bytes that the daemon has written into programs' memory."""
        self.metrics.unlink(missing_ok=True)
        # The daemon writes its metrics when it reloads its configuration.
        self.daemon.send_signal(signal.SIGHUP)
        self.wait("rnicd", self.metrics.exists)
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            if line.startswith("rnicd_placed_bytes_total "):
                return int(line.split()[1])
        return 0


def over(side, *command):
    """Returns the command of a program over rnicd, or unchanged over TCP."""
    return [BIN / "rnic-run", "--no-start", *command] if side == "rnicd" else [*command]


def shown(command):
    return " ".join(str(word) for word in command)


def end(process):
    """Ends a process and the processes that it started."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def size_name(size):
    for unit, bytes_of in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= bytes_of:
            return f"{size // bytes_of} {unit}"
    return f"{size} B"
