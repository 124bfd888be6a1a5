"""Boots the machine, runs the cases of `cases.py`, and reports the results. `run` calls it."""

import argparse
import fnmatch
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import cases
import wire
from guest import ADDRESS, DIES_WITH_US, HOST, PORT, Ended, Guest, GuestError, Job


class HostJob:
    """A command on the host, with its own daemon and process group."""

    def __init__(self, case, side, command, log):
        bin_folder = os.environ["RNIC_BIN"]
        config = log / "rnicd.toml"
        config.write_text(case.config)
        runner = [] if "{bin}" in command else shlex.split(os.environ["HOST_RUN"])
        words = [word.replace("{bin}", bin_folder) for word in shlex.split(command)]
        daemon = [f"{bin_folder}/rnicd", "exec", "--config", config, "--log", log / "rnicd.log"]
        self.paths = log / f"{side}.out", log / f"{side}.err"
        with open(self.paths[0], "wb") as out, open(self.paths[1], "wb") as err:
            self.process = subprocess.Popen(
                [*DIES_WITH_US, *daemon, "--", *runner, *words],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    def poll(self, seconds=0.0):
        try:
            self.process.wait(max(seconds, 0.001))
        except subprocess.TimeoutExpired:
            return None
        out, err = (path.read_bytes() for path in self.paths)
        return Ended(self.process.returncode, out, err)

    def stop(self):
        """Ends it with SIGTERM, so that daemon and program print their messages, then with
        SIGKILL."""
        for by in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, by)
            except ProcessLookupError:
                pass
            if ended := self.poll(5):
                return ended
        raise RuntimeError(f"process {self.process.pid} does not end")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def host_listens(port):
    """Returns True if a socket on the host listens at this port."""
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(name).read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A" and int(local.rsplit(":", 1)[1], 16) == port:
                return True
    return False


class Harness:
    """Runs cases in a machine, and boots a new one after a case has broken it."""

    def __init__(self, vm, log):
        self.vm = vm
        self.log = log
        self.guest = None
        self.boots = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.guest:
            self.guest.end()

    def boot(self):
        if self.guest:
            self.guest.end()
            self.guest = None
        log = self.log / f"machine-{len(self.boots) + 1}"
        log.mkdir()
        self.guest = Guest(self.vm, log, free_port())
        self.boots.append(self.guest.boot_seconds)
        devices = self.guest.run("ibv_devinfo")
        (log / "ibv_devinfo.txt").write_text(devices)
        if "siw0" not in devices or "PORT_ACTIVE" not in devices:
            raise GuestError(f"siw0 is not there:\n{devices}")

    def run(self, case):
        """Runs a case. Returns the deviations."""
        if self.guest is None:
            self.boot()
        broken = None
        try:
            # perftest listens again for its second connection, sometimes a little late. QEMU has
            # accepted that connection by then, so the host cannot recognise the refusal.
            for _ in range(3):
                faults, refused = self.run_booted(case)
                if not faults or not refused:
                    break
        except GuestError as error:
            faults, broken = [str(error)], "see its console.log"
        if trouble := self.guest.trouble() or broken:
            faults.append(f"guest's kernel: {trouble}")
            self.guest.end()
            self.guest = None
        return faults

    def start(self, case, side, where, command, log):
        if where == "host":
            return HostJob(case, side, command, log)
        return self.guest.start(f"exec {command}", case.seconds + 30)

    def run_booted(self, case):
        """Returns the deviations, and the number of connections that the guest refused."""
        log = self.log / case.name
        log.mkdir(exist_ok=True)
        self.guest.set_parameters(cases.SIW | case.siw)
        began = os.path.getsize(self.guest.capture)
        server, client = self.pair(case, log)
        inside = case.server[0] == case.client[0]
        seen = None if inside else self.caught(began, log)
        for side, ended in (("server", server), ("client", client)):
            where, command = getattr(case, side)
            (log / f"{side}.out").write_text(ended.out)
            (log / f"{side}.err").write_text(
                f"{ended.err}\n[{where}: {command}: exit code {ended.code}]\n"
            )
        return list(cases.faults(case, server, client, seen)), seen and seen.refused

    def pair(self, case, log):
        """Runs server and client. Returns both results. A stopped program has no exit code."""
        listening = PORT if case.server[0] == "guest" else free_port()
        where, command = case.server
        server = self.start(case, "server", where, fill(command, "", listening), log)
        client = None
        try:
            if not self.comes_to_listen(where, listening, server):
                return server.poll() or server.stop(), Ended(None, b"", b"not started")
            to, port = {
                ("guest", "guest"): (ADDRESS, PORT),
                ("guest", "host"): ("127.0.0.1", self.guest.forwarded),
                ("host", "guest"): (HOST, listening),
            }[(case.server[0], case.client[0])]
            where, command = case.client
            client = self.start(case, "client", where, fill(command, to, port), log)
            client_ended = client.poll(case.seconds)
            server_ended = server.poll(10 if client_ended else 1)
        finally:
            for job in sorted(filter(None, (client, server)), key=lambda job: isinstance(job, Job)):
                if not job.poll():  # host jobs first: a job of a broken guest cannot be stopped
                    job.stop().code = None
        return server_ended or server.poll(), client_ended or client.poll()

    def comes_to_listen(self, where, port, server):
        for _ in range(150):
            if self.guest.listens() if where == "guest" else host_listens(port):
                return True
            if server.poll(0.1):
                break
        return False

    def caught(self, began, log):
        """Returns the traffic since `began`, and writes it to its own capture file."""
        with open(self.guest.capture, "rb") as every, open(log / "wire.pcap", "wb") as own:
            own.write(every.read(wire.HEADER))
            every.seek(began)
            shutil.copyfileobj(every, own)
        seen = wire.read(log / "wire.pcap")
        (log / "wire.txt").write_text(str(seen))
        return seen


def fill(command, to, port):
    return command.replace("{to}", to).replace("{port}", str(port))


def run_all(options, chosen):
    shutil.rmtree(options.log, ignore_errors=True)
    options.log.mkdir(parents=True)
    begun = time.monotonic()
    rows = []
    host_run = shutil.which(shlex.split(os.environ["HOST_RUN"])[0])
    print((options.vm / "versions").read_text().strip().replace("\n", ", "))
    with Harness(options.vm, options.log) as harness:
        for case in chosen:
            start = time.monotonic()
            if case.needs_host_run() and not host_run:
                faults = [f"no {os.environ['HOST_RUN']}"]
            else:
                faults = harness.run(case)
            rows.append(not faults)
            row = f"{'ok' if not faults else 'FAILED':6} {time.monotonic() - start:5.1f} s  {case.name:44}"
            print(f"{row} {'; '.join(faults)}".rstrip(), flush=True)
        boots = ", ".join(f"{seconds:.1f} s" for seconds in harness.boots) or "not at all"
        by = harness.guest.accelerator if harness.guest else "?"
    print(
        f"{sum(rows)} of {len(rows)} passed in {time.monotonic() - begun:.0f} s; machine made in "
        f"{os.environ.get('SIW_BUILD_SECONDS', '?')} s, booted in {boots} ({by}); logs: {options.log}"
    )
    return all(rows)


def main():
    parser = argparse.ArgumentParser(prog="run", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the table and end")
    parser.add_argument("--quick", action="store_true", help="only those of the short run")
    parser.add_argument("--vm", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "patterns", nargs="*", metavar="PATTERN", help="names of cases, as shell patterns"
    )
    options = parser.parse_args()
    patterns = options.patterns or ["*"]
    chosen = [
        case
        for case in (cases.quick() if options.quick else cases.CASES)
        if any(fnmatch.fnmatch(case.name, one) for one in patterns)
    ]
    if not chosen:
        parser.error("no case has such a name; --list shows them")
    if options.list:
        for case in chosen:
            print(case.name)
            for side, (where, command) in (("server", case.server), ("client", case.client)):
                print(f"    {side} on {where}: {command}")
        return 0
    # On SIGTERM or Ctrl-C the `with` and `finally` blocks end the machine and the programs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    try:
        return 0 if run_all(options, chosen) else 1
    except (GuestError, OSError) as error:
        print(f"siw: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
