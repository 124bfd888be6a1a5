"""Runs tests of rdma-core and prints a line with the outcome of each.

Arguments: the folder of the tests, a device, its address, and the names of the tests to run.
"""

import sys
import types
import unittest


class Lines(unittest.TestResult):
    """Prints a line for each test: outcome, name, and the reason if it was skipped."""

    def report(self, word, test, why=""):
        print(f"= {word} {test.id()} {why}", flush=True)

    def addSuccess(self, test):
        self.report("ok", test)

    def addSkip(self, test, reason):
        self.report("skipped", test, reason)

    def addFailure(self, test, err):
        print(self._exc_info_to_string(err, test), flush=True)
        self.report("failed", test)

    addError = addFailure


directory, device, address, *names = sys.argv[1:]
sys.path.insert(0, directory)
# Other test modules are not loaded, since some need the libraries of other devices.
tests = types.ModuleType("tests")
tests.__path__ = [directory]
sys.modules["tests"] = tests

from args_parser import parser

sys.argv[1:] = ["--dev", device, "--gid", "0"]
parser.parse_args()

from tests.base import RDMATestCase

# The tests would look in /sys for the network interface of the device.
RDMATestCase._get_ip_mac = lambda self, device, port, gid: self.args.append(
    [device, port, gid, address, None]
)

unittest.defaultTestLoader.loadTestsFromNames(names).run(Lines())
