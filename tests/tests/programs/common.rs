//! Behaviour common to all programs: addresses, exit codes, and unread output.

use std::process::{Command, Output, Stdio};

use rnic_tests::{Daemon, built};

use super::{PERF, RCOPY, end, fails, run, start};

const RNICCTL: &str = "rnicctl";

fn alone(program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(built::program(program));
    command.args(arguments).env("RNIC_SOCKET", "/no/such/socket").stdin(Stdio::null());
    command.output().unwrap()
}

#[test]
fn wrong_usage_exits_with_2_and_the_reason() {
    for (program, arguments, word) in [
        (RCOPY, "send file", "HOST:PORT"),
        (RCOPY, "send file nowhere", "it has no port"),
        (RCOPY, "send file ::1:7471", "needs brackets"),
        (RCOPY, "send file localhost:7471/", "has an empty NAME"),
        (RCOPY, "serve --chunk 65MiB", "1 byte to 64MiB"),
        (RCOPY, "serve --clients 0", "at least 1"),
        (RCOPY, "serve --timeout 0", "above 0"),
        (RCOPY, "serve localhost:", "the port is not a number"),
        (PERF, "serve localhost:x", "the port is not a number"),
        (PERF, "frobnicate", "unrecognized subcommand"),
        (PERF, "bw --iters 0", "0 is not in 1.."),
        (PERF, "bw --to host --peer-socket x", "cannot be used with"),
        (RNICCTL, "disconnect", "<QP>"),
        (RNICCTL, "why x", "invalid value"),
    ] {
        let output = alone(program, &arguments.split(' ').collect::<Vec<_>>());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{program} {arguments}: {said}");
        assert!(said.contains(word), "{program} {arguments}: {said}");
    }
}

#[test]
fn a_missing_daemon_is_reported_with_its_socket() {
    for (program, arguments, code) in [
        (RCOPY, &["send", "/proc/version", "localhost:1"][..], 1),
        (RCOPY, &["serve"], 1),
        (PERF, &["bw"], 1),
        (PERF, &["serve", "127.0.0.1:0"], 1),
        (RNICCTL, &["status"], 3),
    ] {
        let output = alone(program, arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{program} {arguments:?}: {said}");
        assert!(said.contains("/no/such/socket: there is no such socket"), "{program}: {said}");
        assert!(output.stdout.is_empty(), "{program}");
    }
}

#[test]
fn host_names_are_accepted_everywhere() {
    let daemon = Daemon::start("");
    let folder = tempfile::tempdir().unwrap();
    let serving = |program, before: &str, arguments: &[&str]| {
        let mut server = start(&daemon, program, arguments);
        let address = server.line_after(before);
        let port = address.rsplit_once(':').unwrap().1.to_owned();
        (server, format!("localhost:{port}"))
    };
    let dir = folder.path().to_str().unwrap();
    let file = format!("{dir}/file");
    std::fs::write(&file, b"content").unwrap();
    // The second server is bound to the address that the resolver may list last.
    for (name, listen) in [("a", "localhost:0"), ("b", "127.0.0.1:0")] {
        let serve = ["serve", listen, "--once", "--dir", dir];
        let (server, address) = serving(RCOPY, " at ", &serve);
        let (code, said) = run(&daemon, RCOPY, &["send", &file, &format!("{address}/{name}")]);
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(end(server).0, Some(0));
    }
    let (server, address) = serving(PERF, "listening on ", &["serve", "localhost:0"]);
    let measure = ["lat", "--to", &address, "--iters", "3", "--rounds", "1"];
    let (code, said) = run(&daemon, PERF, &measure);
    assert_eq!(code, Some(0), "{said}");
    server.kill();
    // Unknown hosts, and a host without a listener.
    for (program, arguments) in [
        (RCOPY, &["send", &file, "a..b:1"][..]),
        (RCOPY, &["serve", "a..b:1", "--dir", dir]),
        (PERF, &["lat", "--to", "a..b:1"]),
        (PERF, &["serve", "a..b:1"]),
    ] {
        fails(run(&daemon, program, arguments), "cannot find a..b:1: ");
    }
    fails(run(&daemon, RCOPY, &["send", &file, "localhost:1"]), "127.0.0.1:1: ");
}

#[test]
fn unwritable_output_fails_except_closed_pipe() {
    let daemon = Daemon::start("");
    let to = |program: &str, arguments: &[&str], stdout: Stdio| {
        let mut command = Command::new(built::program(program));
        command.args(arguments).env("RNIC_SOCKET", daemon.socket()).stdout(stdout);
        let output = command.stderr(Stdio::piped()).stdin(Stdio::null()).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let gone = || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        Stdio::from(writer)
    };
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
    for (program, arguments) in [
        (PERF, &["lat", "--iters", "1", "--rounds", "1"][..]),
        (PERF, &["bw", "--iters", "1", "--rounds", "1", "--json"]),
        (RNICCTL, &["status"]),
        (RNICCTL, &["limits", "--json"]),
    ] {
        let (code, said) = to(program, arguments, gone());
        assert_eq!((code, said.as_str()), (Some(0), ""), "{program} {arguments:?}");
        let (code, said) = to(program, arguments, full());
        assert_eq!(code, Some(1), "{program} {arguments:?}: {said}");
        assert!(said.contains("cannot write to standard output: "), "{program}: {said}");
    }
}

/// A server prints its address and serves even if its output is closed.
#[test]
fn server_with_unread_output_keeps_serving() {
    let daemon = Daemon::start("");
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(built::program(RCOPY));
    command.args(["serve", "127.0.0.1:0", "--dir"]).arg(folder.path());
    command.env("RNIC_SOCKET", daemon.socket());
    let mut server = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    let mut out = std::io::BufReader::new(server.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    drop(out);
    let address = line.trim().rsplit(' ').next().unwrap();
    let file = std::env::current_exe().unwrap();
    for n in 0..3 {
        let to = format!("{address}/{n}");
        let (code, said) = run(&daemon, RCOPY, &["send", file.to_str().unwrap(), &to]);
        assert_eq!(code, Some(0), "{said}");
    }
    server.kill().unwrap();
    server.wait().unwrap();
}
