//! Behaviour common to all programs: addresses, exit codes, and unread output.

use std::process::{Command, Output, Stdio};

use rnic_tests::{Daemon, built};

use super::{PERF, PINGPONG, RCOPY, RKV, end, fails, run, start};

const RNICCTL: &str = "rnicctl";

fn alone(program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
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
        (RKV, "get", "<KEY>"),
        (RKV, "get k --server nowhere", "it has no port"),
        (RKV, "server localhost:x", "the port is not a number"),
        (RKV, "bench --gets 101", "101"),
        (PINGPONG, "client localhost:", "the port is not a number"),
        (PINGPONG, "client -n 0", "0 is not in 1.."),
        (PINGPONG, "server --poll --event", "cannot be used with"),
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
fn without_a_daemon_all_say_where_they_looked() {
    for (program, arguments, code) in [
        (RCOPY, &["send", "/proc/version", "localhost:1"][..], 1),
        (RCOPY, &["serve"], 1),
        (RKV, &["get", "k"], 1),
        (RKV, &["server"], 1),
        (PINGPONG, &["client"], 1),
        (PINGPONG, &["server"], 1),
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
fn a_name_does_for_an_address_everywhere() {
    let daemon = Daemon::start("");
    let folder = tempfile::tempdir().unwrap();
    let serving = |program, arguments: &[&str]| {
        let mut server = start(&daemon, program, arguments);
        let address = server.line_after(" at ");
        let port = address.rsplit_once(':').unwrap().1.to_owned();
        (server, format!("localhost:{port}"))
    };
    let (server, address) = serving(PINGPONG, &["server", "localhost:0", "--once"]);
    let (code, said) = run(&daemon, PINGPONG, &["client", &address, "-n", "3"]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(end(server).0, Some(0));
    let dir = folder.path().to_str().unwrap();
    let (server, address) = serving(RCOPY, &["serve", "localhost:0", "--once", "--dir", dir]);
    let to = format!("{address}/version");
    std::fs::write(folder.path().join("file"), b"content").unwrap();
    let file = format!("{dir}/file");
    let (code, said) = run(&daemon, RCOPY, &["send", &file, &to]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(end(server).0, Some(0));
    // Bound to the address that the resolver may list last.
    let (server, address) = serving(RKV, &["server", "127.0.0.1:0"]);
    let (code, said) = run(&daemon, RKV, &["put", "k", "v", "--server", &address]);
    assert_eq!(code, Some(0), "{said}");
    server.kill();
    // Unknown hosts, and a host without a listener.
    for (program, arguments) in [
        (PINGPONG, &["client", "a..b:1"][..]),
        (RCOPY, &["send", &file, "a..b:1"]),
        (RKV, &["get", "k", "--server", "a..b:1"]),
        (PINGPONG, &["server", "a..b:1"]),
    ] {
        fails(run(&daemon, program, arguments), "cannot find a..b:1: ");
    }
    fails(run(&daemon, PINGPONG, &["client", "localhost:1"]), "127.0.0.1:1: ");
}

#[test]
fn unwritable_output_fails_except_closed_pipe() {
    let daemon = Daemon::start("");
    let mut server = start(&daemon, RKV, &["server", "127.0.0.1:0"]);
    let address = server.line_after(" in all, at ");
    let to = |program: &str, arguments: &[&str], stdout: Stdio| {
        let mut command = Command::new(program);
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
    let rkv = |operation: &[&'static str]| -> Vec<String> {
        let server = ["--server".to_owned(), address.clone()];
        operation.iter().map(|s| (*s).to_owned()).chain(server).collect()
    };
    for (program, arguments) in [
        (RKV, rkv(&["put", "k", "v"])),
        (RKV, rkv(&["get", "k"])),
        (RKV, rkv(&["bench", "--seconds", "0.1", "--keys", "2"])),
        (RNICCTL, vec!["status".to_owned()]),
        (RNICCTL, vec!["limits".to_owned(), "--json".to_owned()]),
    ] {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (code, said) = to(program, &arguments, gone());
        assert_eq!((code, said.as_str()), (Some(0), ""), "{program} {arguments:?}");
        let (code, said) = to(program, &arguments, full());
        assert_eq!(code, Some(1), "{program} {arguments:?}: {said}");
        assert!(said.contains("cannot write to standard output: "), "{program}: {said}");
    }
    server.kill();
}

/// A server prints its address and serves even if its output is closed.
#[test]
fn server_with_unread_output_keeps_serving() {
    let daemon = Daemon::start("");
    let mut command = Command::new(built::program(PINGPONG));
    command.args(["server", "127.0.0.1:0"]).env("RNIC_SOCKET", daemon.socket());
    let mut server = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    let mut out = std::io::BufReader::new(server.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    drop(out);
    let address = line.trim().rsplit(' ').next().unwrap();
    for _ in 0..3 {
        let (code, said) = run(&daemon, PINGPONG, &["client", address, "-n", "2"]);
        assert_eq!(code, Some(0), "{said}");
    }
    server.kill().unwrap();
    server.wait().unwrap();
}
