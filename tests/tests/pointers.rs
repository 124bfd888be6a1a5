//! Invalid pointers, passed to the functions of the C library that `librnic_preload.so` interposes.

use std::path::{Path, PathBuf};
use std::process::Command;

use rnic_tests::{Daemon, Process, built};

/// Returns the names of the interposed functions that take a path.
fn interposed() -> Vec<&'static str> {
    let sources = [
        include_str!("../../rnic-verbs/preload/src/lib.rs"),
        include_str!("../../rnic-verbs/preload/src/results.rs"),
        include_str!("../../rnic-verbs/preload/src/globs.rs"),
        include_str!("../../rnic-verbs/preload/src/walks.rs"),
    ];
    let lines = sources.into_iter().flat_map(str::lines);
    let functions = lines.filter_map(|line| line.strip_prefix("    fn ")?.split_once(" ["));
    functions.map(|(name, _)| name).collect()
}

fn built(folder: &Path) -> PathBuf {
    let program = folder.join("pointers");
    let built = Command::new("cc")
        .args(["-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pointers.c"))
        .args(["-ldl"])
        .status()
        .expect("a C compiler");
    assert!(built.success());
    program
}

/// Returns a command that runs a program under `rnic-run`.
fn rnic_run(daemon: &Daemon) -> Command {
    let mut command = Command::new(built::program("rnic-run"));
    command.arg("--no-start").arg("--lib-dir").arg(built::libraries());
    command.env("RNIC_SOCKET", daemon.socket()).env_remove("LD_PRELOAD");
    command
}

#[test]
fn a_path_in_two_pages_leads_to_the_devices() {
    let scratch = tempfile::tempdir().unwrap();
    let daemon = Daemon::start("");
    let mut command = rnic_run(&daemon);
    command.arg(built(scratch.path())).arg("devices");
    assert_eq!(Process::start(command).succeed(), ["found"]);
}

#[test]
fn a_first_call_keeps_the_loaders_error() {
    let scratch = tempfile::tempdir().unwrap();
    let daemon = Daemon::start("");
    let mut command = rnic_run(&daemon);
    command.arg(built(scratch.path())).arg("error");
    assert_eq!(Process::start(command).succeed(), ["kept"]);
}

#[test]
fn paths_are_read_on_older_kernels() {
    let scratch = tempfile::tempdir().unwrap();
    let daemon = Daemon::start("");
    let program = built(scratch.path());
    let mut command = rnic_run(&daemon);
    command.arg(&program).args(["devices", "older"]);
    assert_eq!(Process::start(command).succeed(), ["found"]);
    // On such a kernel, all pointers have the same results with and without the preload library.
    let without = Process::start(Command::new(&program)).succeed();
    let mut command = rnic_run(&daemon);
    command.arg(&program).args(["all", "older"]);
    assert_eq!(Process::start(command).succeed(), without);
}

#[test]
fn invalid_pointers_fail_as_without_the_library() {
    let scratch = tempfile::tempdir().unwrap();
    let program = built(scratch.path());
    let daemon = Daemon::start("");
    let without = Process::start(Command::new(&program)).succeed();
    let mut command = rnic_run(&daemon);
    command.args(["sh", "-c", "echo \"$LD_PRELOAD\" && exec \"$0\""]).arg(&program);
    let with = Process::start(command).succeed();
    let (preloaded, with) = with.split_first().expect("a line");
    let libraries = ["librnic_preload.so", "libibverbs.so.1", "librdmacm.so.1"];
    let libraries = libraries.map(|name| format!("{}", built::libraries().join(name).display()));
    assert_eq!(*preloaded, libraries.join(":"));
    assert_eq!(with, without);
    let functions = interposed();
    assert!(functions.len() > 50, "{functions:?}");
    for function in functions {
        let tried = without.iter().any(|line| line.starts_with(&format!("{function}, ")));
        assert!(tried, "{function} is not tried");
    }
}
