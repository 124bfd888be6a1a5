//! Environments of the daemon: terminals, the journal, read-only file systems, no `/proc`, no IPv4.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rnic_client::Context;
use rnic_tests::{DEADLINE, Process, built};
use rustix::process::Signal;

/// Starts a daemon without a configuration file. `script` runs the daemon as `"$@"`.
fn daemon(script: &str, folder: &Path) -> Process {
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg("sh").arg(built::program("rnicd")).arg("run");
    command.arg("--socket").arg(folder.join("s"));
    Process::start(command)
}

#[test]
fn a_hangup_ends_a_daemon_without_a_file() {
    let folder = tempfile::tempdir().unwrap();
    // The tests themselves may run under nohup(1).
    let mut daemon = daemon("exec env --default-signal=HUP \"$@\"", folder.path());
    daemon.line_after("listening");
    daemon.signal(Signal::HUP);
    daemon.succeed();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn nohup_keeps_a_daemon_without_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = daemon("trap '' HUP; exec \"$@\"", folder.path());
    daemon.line_after("listening");
    daemon.signal(Signal::HUP);
    // A signal with a higher number is delivered later.
    daemon.signal(Signal::TERM);
    let lines = daemon.succeed();
    let stops: Vec<_> = lines.iter().filter(|line| line.contains("stopping")).collect();
    assert!(stops.len() == 1 && stops[0].contains("signal=15"), "{lines:?}");
}

/// Returns the log of a daemon from start to end, with `JOURNAL_STREAM` set to `stream`.
fn logged(stream: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let script = format!(
        "exec 2>\"{0}\"; JOURNAL_STREAM={stream} RUST_LOG=debug exec \"$@\"",
        log.display()
    );
    let process = daemon(&script.replace("FILE", &log.display().to_string()), folder.path());
    let deadline = Instant::now() + DEADLINE;
    while Context::open_at(folder.path().join("s")).is_err() {
        assert!(Instant::now() < deadline, "the daemon does not serve");
        std::thread::yield_now();
    }
    process.signal(Signal::TERM);
    process.succeed();
    std::fs::read_to_string(log).unwrap()
}

#[test]
fn the_journal_gets_priorities() {
    let lines = logged("$(stat -c %d:%i \"FILE\")");
    assert!(lines.lines().all(|line| line.starts_with('<') && line[2..].starts_with('>')));
    for (priority, text) in [("<6>", "listening"), ("<7>", "session opened")] {
        let is_one = |line: &str| line.starts_with(priority) && line.contains(text);
        assert!(lines.lines().any(is_one), "{priority} {text}: {lines}");
    }
    // The variable names another stream than the daemon's standard error.
    let lines = logged("1:2");
    assert!(lines.lines().all(|line| !line.starts_with('<')), "{lines}");
}

/// Runs a script as root in its own mount namespace, with a folder that stays writable.
fn elsewhere(script: &str, folder: &Path) -> Option<Process> {
    if !rustix::process::geteuid().is_root() {
        rnic_tests::omit("not root: no mount namespace");
        return None;
    }
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-ec"]);
    command.arg(format!("mount --bind \"$2\" \"$2\"; {script}"));
    command.arg("sh").arg(built::program("rnicd")).arg(folder);
    Some(Process::start(command))
}

#[test]
fn daemon_on_a_read_only_root_serves() {
    let folder = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let metrics = other.path().join("metrics");
    let config = format!("[metrics]\nfile = \"{}\"\n", metrics.display());
    std::fs::write(folder.path().join("c"), config).unwrap();
    let read_only = "mount -o remount,bind,ro /;";
    let run = "exec \"$1\" run --config \"$2/c\" --socket";
    let there = other.path().display();
    let script = format!("{read_only} {run} {there}/s");
    let Some(refused) = elsewhere(&script, folder.path()) else { return };
    let (status, lines) = refused.finish();
    let said = lines.join("\n");
    assert!(!status.success() && said.contains(&format!("{there}/s")), "{said}");
    assert!(said.contains("Read-only file system"), "{said}");

    let script = format!("{read_only} {run} \"$2/s\"");
    let mut daemon = elsewhere(&script, folder.path()).unwrap();
    daemon.line_after("listening");
    Context::open_at(folder.path().join("s")).unwrap().status().unwrap();
    let said = daemon.line_after("cannot write metrics");
    assert!(said.contains(&metrics.display().to_string()), "{said}");
    daemon.signal(Signal::TERM);
    daemon.succeed();
}

#[test]
fn a_daemon_serves_without_proc() {
    let folder = tempfile::tempdir().unwrap();
    // Without this umask the daemon would have to change the socket's mode, through /proc.
    let script = "umask 007; mount -t tmpfs none /proc; exec \"$1\" run --socket \"$2/s\"";
    let Some(mut daemon) = elsewhere(script, folder.path()) else { return };
    daemon.line_after("listening");
    Context::open_at(folder.path().join("s")).unwrap().status().unwrap();
    daemon.signal(Signal::TERM);
    daemon.succeed();
}

#[test]
fn a_host_without_ipv4_runs_the_demo() {
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let script = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && echo ready && \
                  exec \"$0\" demo --size 1MiB";
    command.args(["--net", "sh", "-c", script]).arg(built::program("rnicd"));
    let (status, lines) = Process::start(command).finish();
    let said = lines.join("\n");
    if !lines.iter().any(|line| line == "ready") {
        rnic_tests::omit(&format!("no network namespace without IPv4: {said}"));
        return;
    }
    assert!(status.success(), "{said}");
}
