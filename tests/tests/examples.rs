//! The library's examples run unchanged.

use std::process::Command;

use rnic_tests::{Daemon, PATHS, Process, built, engine};

#[test]
fn poll_loop_serves_many_peers_in_one_thread() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let example = |arguments: &[&str]| {
            let mut command = Command::new(built::example("event_loop"));
            command.env("RNIC_SOCKET", daemon.socket()).args(arguments);
            Process::start(command)
        };
        let mut server = example(&["serve", "127.0.0.1:0", "6"]);
        let address = server.line_after("listening on ");
        let mut visitors: Vec<Process> = (0..6).map(|_| example(&["visit", &address])).collect();
        for visitor in &mut visitors {
            let said = visitor.line_after("100 messages echoed: ");
            assert_eq!(said, "Orderly", "{path}");
        }
        visitors.into_iter().for_each(|visitor| drop(visitor.succeed()));
        let lines = server.succeed();
        let ends = lines.iter().filter(|line| line.contains("ended: Orderly")).count();
        assert_eq!((ends, lines.last().map(String::as_str)), (6, Some("served 6")), "{lines:?}");
    }
}

#[test]
fn get_returns_the_stored_value() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let example = |arguments: &[&str]| {
            let mut command = Command::new(built::example("kv"));
            command.env("RNIC_SOCKET", daemon.socket()).args(arguments);
            command
        };
        let mut server = Process::start(example(&["serve", "127.0.0.1:0"]));
        let address = server.line_after("listening on ");
        let get = |key: &str| example(&["get", &address, key]).output().unwrap();
        assert_eq!(get("colour").status.code(), Some(1), "{path}");
        for value in ["red", "dark blue"] {
            Process::start(example(&["put", &address, "colour", value])).succeed();
            let found = get("colour");
            let text = String::from_utf8_lossy(&found.stdout);
            assert_eq!((found.status.code(), text.trim_end()), (Some(0), value), "{path}");
        }
        assert_eq!(get("shape").status.code(), Some(1), "{path}");
        server.kill();
    }
}

#[test]
fn streams_echo_more_than_they_can_hold() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let example = |arguments: &[&str]| {
            let mut command = Command::new(built::example("async_echo"));
            command.env("RNIC_SOCKET", daemon.socket()).args(arguments);
            Process::start(command)
        };
        let mut server = example(&["serve", "127.0.0.1:0"]);
        let address = server.line_after("listening on ");
        let sizes = ["0", "1", "3000000"];
        let visitors: Vec<Process> =
            sizes.iter().map(|size| example(&["visit", &address, size])).collect();
        for (visitor, size) in visitors.into_iter().zip(sizes) {
            let lines = visitor.succeed();
            assert_eq!(lines, [format!("{size} bytes echoed")], "{path}");
        }
        server.kill();
    }
}
