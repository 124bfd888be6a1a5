//! Messages posted directly before `rdma_disconnect(3)`. An adapter has usually sent them by then,
//! so peers receive them before the event for the end of the connection.

use std::path::Path;
use std::process::Command;

use rnic_tests::{Daemon, PATHS, Process, ports, verbs};

/// Number of connections.
const COUNT: usize = 100;

/// With the default, the results would depend on the time that a connection needs.
const ENGINE: &str = "[engine]\nerror_deadline = \"1min\"\n";

fn program_at(program: &Path, daemon: &Daemon, arguments: &[&str]) -> Command {
    let mut command = verbs::command(program, daemon);
    command.env("RNIC_DEVICES", "rnicd1").args(arguments);
    command
}

/// Returns the number of messages that a server of `passive` receives from a client of `active`.
fn received(program: &Path, active: &Daemon, passive: &Daemon, at: &str) -> usize {
    let count = COUNT.to_string();
    let mut server = Process::start(program_at(program, passive, &["server", at, &count]));
    let port = server.line_after("port ");
    let client = Process::start(program_at(program, active, &["client", at, &count, &port]));
    assert_eq!(client.succeed(), ["sent"]);
    let said = server.succeed();
    let found = said.last().and_then(|line| line.strip_prefix("received ")?.parse().ok());
    found.unwrap_or_else(|| panic!("{said:?}"))
}

#[test]
fn last_messages_arrive_within_a_daemon() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/last_messages.c", scratch.path()) else { return };
    for path in PATHS {
        let daemon = Daemon::start(&format!(
            "{ENGINE}loopback = \"{path}\"
"
        ));
        assert_eq!(received(&program, &daemon, &daemon, "127.0.0.1"), COUNT, "{path}");
    }
}

#[test]
fn last_messages_arrive_between_daemons() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/last_messages.c", scratch.path()) else { return };
    let port = ports::unused_port();
    let daemon = |ip: &str| {
        let device = format!("[device]\naddresses = [\"{ip}\"]\n");
        Daemon::start(&format!("{device}{ENGINE}[wired]\nport = {port}\n"))
    };
    let active = daemon("127.0.0.1");
    let passive = daemon("127.0.0.2");
    assert_eq!(received(&program, &active, &passive, "127.0.0.2"), COUNT);
}
