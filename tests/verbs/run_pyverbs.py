"""Runs tests of rdma-core, and says of each in a line what came of it.

Called with the directory of the tests, a device, its address, and the names of what to run.
"""

import sys
import types
import unittest


class Lines(unittest.TestResult):
    """A line of each test: a word, its name, and why it was skipped."""

    def say(self, word, test, why=""):
        print(f"= {word} {test.id()} {why}", flush=True)

    def addSuccess(self, test):
        self.say("ok", test)

    def addSkip(self, test, reason):
        self.say("skipped", test, reason)

    def addFailure(self, test, err):
        print(self._exc_info_to_string(err, test), flush=True)
        self.say("failed", test)

    addError = addFailure


directory, device, address, *names = sys.argv[1:]
sys.path.insert(0, directory)
# What is not asked for is not loaded: tests of other devices need libraries for these.
tests = types.ModuleType("tests")
tests.__path__ = [directory]
sys.modules["tests"] = tests

from args_parser import parser

sys.argv[1:] = ["--dev", device, "--gid", "0"]
parser.parse_args()

from tests.base import RDMATestCase

# The kernel would say in /sys which network interface is the device's.
RDMATestCase._get_ip_mac = lambda self, device, port, gid: self.args.append(
    [device, port, gid, address, None]
)

unittest.defaultTestLoader.loadTestsFromNames(names).run(Lines())
