//! The programs as real processes: their output, exit codes and leftovers when the other side, the
//! daemon, the network or the disk fails or misbehaves.

mod common;
mod copy;
mod hosts;
mod lists;
mod perf;
mod talker;

use std::ffi::OsStr;
use std::process::Command;

use rnic_tests::{Daemon, Process, built};

const RCOPY: &str = "rnic-copy";
const PERF: &str = "rnic-perf";

/// Starts a program as a client of this daemon.
fn start<A: AsRef<OsStr>>(daemon: &Daemon, program: &str, arguments: &[A]) -> Process {
    let mut command = Command::new(built::program(program));
    command.args(arguments).env("RNIC_SOCKET", daemon.socket());
    Process::start(command)
}

/// Runs a program to its end. Returns its exit code and output.
fn run<A: AsRef<OsStr>>(daemon: &Daemon, program: &str, arguments: &[A]) -> (Option<i32>, String) {
    end(start(daemon, program, arguments))
}

/// Waits for a program's end. Returns its exit code and output.
fn end(process: Process) -> (Option<i32>, String) {
    let (status, lines) = process.finish();
    (status.code(), lines.join("\n"))
}

/// Checks for exit code 1 and for these words in the output.
fn fails(ended: (Option<i32>, String), words: &str) {
    let (code, said) = ended;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(words), "no {words:?} in {said:?}");
    assert!(!said.contains("panicked"), "{said}");
}
