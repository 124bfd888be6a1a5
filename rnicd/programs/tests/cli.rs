//! Tests of the binaries in a shell: exit codes, signals, sockets and leftover files.

#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

fn rnicd() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rnicd"));
    command.env_remove("RUST_LOG").env_remove("RNIC_SOCKET").stdin(Stdio::null());
    command
}

fn rnicctl(socket: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rnicctl"))
        .args(args)
        .arg("--socket")
        .arg(socket)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A running daemon, killed if the test fails.
struct Daemon(Child);

impl Daemon {
    /// Starts a daemon and waits until it logs that it listens.
    fn start(socket: &Path) -> Daemon {
        // The tests themselves may run under nohup(1), which makes its children ignore SIGHUP.
        let mut command = Command::new("env");
        command.args(["--default-signal=HUP", env!("CARGO_BIN_EXE_rnicd"), "run", "--socket"]);
        command.arg(socket).env_remove("RUST_LOG").env_remove("RNIC_SOCKET");
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let line = lines.find(|l| l.as_ref().is_ok_and(|l| l.contains("listening")));
        assert!(line.is_some(), "the daemon ended");
        // Keep reading, or the daemon would lose its standard error.
        std::thread::spawn(move || lines.for_each(drop));
        Daemon(child)
    }

    fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn signals_stop_in_order_and_leave_nothing() {
    // SIGHUP ends a daemon without a configuration file to reload.
    for signal in ["TERM", "INT", "HUP"] {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let mut daemon = Daemon::start(&socket);
        assert!(rnicctl(&socket, &["status"]).status.success());
        daemon.signal(signal);
        assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn second_daemon_names_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let mut first = Daemon::start(&socket);
    let second = rnicd().arg("run").arg("--socket").arg(&socket).output().unwrap();
    assert_eq!(second.status.code(), Some(75));
    let said = text(&second.stderr);
    assert!(said.contains(&format!("pid {}", first.0.id())), "{said}");
    assert!(rnicctl(&socket, &["status"]).status.success());
    first.0.kill().unwrap();
    first.0.wait().unwrap();
    assert!(socket.exists());
    let _third = Daemon::start(&socket);
    assert!(rnicctl(&socket, &["status"]).status.success());
}

#[test]
fn a_file_in_the_way_is_no_configuration_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    std::fs::write(&path, "").unwrap();
    let output = rnicd().arg("run").arg("--socket").arg(&path).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
}

#[test]
fn rnicctl_prints_tables_and_json() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let alone = rnicctl(&socket, &["status"]);
    assert_eq!(alone.status.code(), Some(3));
    assert!(text(&alone.stderr).contains(&socket.display().to_string()));
    let _daemon = Daemon::start(&socket);
    for what in ["status", "clients", "qps", "cqs", "mrs", "listeners"] {
        let table = rnicctl(&socket, &[what]);
        assert!(table.status.success() && !table.stdout.is_empty(), "{what}");
        let json = rnicctl(&socket, &[what, "--json"]);
        let parsed: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
        assert!(parsed.is_object() || parsed.is_array(), "{what}");
    }
    let limits = text(&rnicctl(&socket, &["limits"]).stdout);
    let memory = limits.lines().find(|l| l.contains("limits.shared_bytes")).unwrap();
    assert!(memory.contains("GiB") || memory.contains("MiB"), "{memory}");
    let json = rnicctl(&socket, &["limits", "--json"]);
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&json.stdout).unwrap();
    let exact = rows.iter().find(|r| r["key"] == "limits.shared_bytes").unwrap();
    assert!(exact["limit"].as_u64().unwrap() >= 1 << 20, "{exact}");
    let clients = text(&rnicctl(&socket, &["clients"]).stdout);
    assert!(clients.starts_with("SESSION"), "{clients}");
    assert!(clients.contains("rnicctl"), "{clients}");
    for wrong in [&["nonsense"][..], &[], &["why", "x"], &["drain"], &["disconnect"]] {
        assert_eq!(rnicctl(&socket, wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn configuration_is_printed_and_checked() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rnicd.toml");
    let printed = rnicd().arg("print-config").output().unwrap();
    assert!(printed.status.success());
    std::fs::write(&file, &printed.stdout).unwrap();
    let checked = rnicd().args(["check-config", "--config"]).arg(&file).output().unwrap();
    assert!(checked.status.success(), "{}", text(&checked.stderr));
    let said = text(&checked.stdout);
    assert!(said.contains("limits.session.qps") && said.contains("Worst case"), "{said}");
    // The option name may be omitted, but the file must not be given twice.
    let positional = rnicd().arg("check-config").arg(&file).output().unwrap();
    assert_eq!(text(&positional.stdout), said);
    let twice = rnicd().arg("check-config").arg(&file).arg("--config").arg(&file).output();
    assert_eq!(twice.unwrap().status.code(), Some(2));

    std::fs::write(&file, "[limits]\nqqs = 4\n").unwrap();
    for command in ["check-config", "run"] {
        let refused = rnicd().args([command, "--config"]).arg(&file).output().unwrap();
        assert_eq!(refused.status.code(), Some(78));
        let said = text(&refused.stderr);
        assert!(said.contains(&format!("{}:2:1: limits.qqs = 4", file.display())), "{said}");
    }
}

#[test]
fn output_to_a_reader_that_has_gone_is_no_error() {
    let mut child = rnicd().arg("print-config").stdout(Stdio::piped()).spawn().unwrap();
    let mut first = [0];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
