"""The virtual machine, and commands that run in it. `init` is its counterpart."""

import base64
import os
import queue
import re
import subprocess
import threading
import time

ADDRESS = "10.0.2.15"  # the guest's, in QEMU's user network
HOST = "10.0.2.2"  # the guest's address for the host
PORT = 18515  # of servers in the guest; forwarded from a loopback port of the host
# Prefix of a command that must die with this process, whatever ends it.
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL", "--"]


class GuestError(Exception):
    """The machine did not behave as expected."""


class Ended:
    """The result of a command."""

    def __init__(self, code, out, err):
        self.code = code
        self.out = out.decode(errors="replace")
        self.err = err.decode(errors="replace")


class Job:
    """A command that runs in the guest."""

    def __init__(self, guest, number):
        self.guest = guest
        self.number = number
        self.answer = queue.Queue()
        self.ended = None

    def poll(self, seconds=0.0):
        """Returns the result, or None if the command still runs after this time."""
        if self.ended is None:
            try:
                self.ended = self.answer.get(timeout=max(seconds, 0.001))
            except queue.Empty:
                self.guest.check()
        return self.ended

    def stop(self):
        """Kills the command and its children."""
        self.guest.say(f"stop {self.number}")
        if self.poll(20) is None:
            raise GuestError(f"command {self.number} survives its end")
        return self.ended


class Guest:
    """A booted machine. It ends with `end` or with this process."""

    def __init__(self, vm, log, forwarded):
        self.log = log
        self.forwarded = forwarded
        self.capture = f"{log}/all.pcap"
        self.console = f"{log}/console.log"
        self.jobs = {}
        self.numbers = 0
        self.ready = threading.Event()
        self.accelerator, cpu = ("kvm", "host") if has_kvm() else ("tcg", "max")
        started = time.monotonic()
        command = [
            *DIES_WITH_US, "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot",
            "-display", "none", "-accel", self.accelerator, "-cpu", cpu, "-smp", "1", "-m", "512",
            "-kernel", f"{vm}/vmlinuz", "-initrd", f"{vm}/initrd",
            "-append", "console=ttyS0 panic=-1 LIFETIME=3600",
            "-serial", f"file:{self.console}",
            "-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{self.forwarded}-{ADDRESS}:{PORT}",
            "-device", "virtio-net-pci,netdev=net,romfile=",
            "-object", f"filter-dump,id=dump,netdev=net,file={self.capture},maxlen=70000",
            "-device", "virtio-serial-pci", "-chardev", "stdio,id=control,signal=off",
            "-device", "virtserialport,chardev=control,name=control",
        ]  # fmt: skip
        with open(f"{self.log}/qemu.log", "wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self.listen, daemon=True).start()
        try:
            while not self.ready.wait(0.2):
                if self.process.poll() is not None or time.monotonic() - started > 180:
                    raise GuestError(
                        f"the machine did not boot: see {self.log}/qemu.log, {self.console}"
                    )
        except BaseException:
            self.end()
            raise
        self.boot_seconds = time.monotonic() - started

    def end(self):
        self.process.kill()
        self.process.wait()

    def listen(self):
        """Reads the messages of `init`."""
        for line in self.process.stdout:
            word, *rest = line.decode("ascii", errors="replace").rstrip("\n").split(" ")
            if word == "ready":
                self.ready.set()
            elif word == "ended":
                number, code, out, err = rest
                ended = Ended(int(code), base64.b64decode(out), base64.b64decode(err))
                self.jobs.pop(int(number)).answer.put(ended)

    def say(self, line):
        self.check()
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def trouble(self):
        """Returns a kernel error of the machine, which is unusable afterwards."""
        with open(self.console, errors="replace") as console:
            said = re.search(r"(kernel BUG at .*|BUG: .*|WARNING: .*|Oops: .*)", console.read())
        return said and said[1].strip()

    def check(self):
        if self.process.poll() is not None:
            raise GuestError(f"the machine has ended: see {self.console}")

    def start(self, command, seconds):
        """Starts a shell command, which is killed after `seconds`."""
        self.numbers += 1
        number = self.numbers
        job = self.jobs[number] = Job(self, number)
        self.say(f"start {number} {seconds} {base64.b64encode(command.encode()).decode()}")
        return job

    def run(self, command, seconds=30):
        """Returns the output of a command that must succeed."""
        ended = self.start(command, seconds).poll(seconds + 10)
        if ended is None:
            raise GuestError(f"no answer from the guest to: {command}")
        if ended.code != 0:
            raise GuestError(f"{command}: exit code {ended.code}: {ended.err.strip()}")
        return ended.out

    def listens(self):
        """Returns True if a program in the guest listens."""
        return re.search(rf":{PORT}\s", self.run("netstat -ltn")) is not None

    def set_parameters(self, parameters):
        """Sets parameters of siw."""
        for name, value in parameters.items():
            self.run(f"echo {value} >/sys/module/siw/parameters/{name}")


def has_kvm():
    """Returns True if KVM is usable. A /dev/kvm alone does not imply it."""
    with open("/proc/cpuinfo") as info:
        flags = re.search(r"^flags.*\b(vmx|svm)\b", info.read(), re.M)
    return bool(flags) and os.access("/dev/kvm", os.R_OK | os.W_OK)
