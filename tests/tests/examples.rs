//! The library's examples run as they stand.

use std::process::Command;

use rnic_tests::{Daemon, PATHS, Process, binaries, engine};

#[test]
fn an_event_loop_around_poll_serves_many_peers_with_one_thread() {
    for path in PATHS {
        let daemon = Daemon::start(binaries!(), &engine(2, path));
        let example = |arguments: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_event-loop-example"));
            command.env("RNIC_SOCKET", daemon.socket()).args(arguments);
            Process::start(command)
        };
        let mut server = example(&["serve", "127.0.0.1:0", "6"]);
        let address = server.line_after("listening on ");
        let mut visitors: Vec<Process> = (0..6).map(|_| example(&["visit", &address])).collect();
        for visitor in &mut visitors {
            let said = visitor.line_after("100 messages there and back: ");
            assert_eq!(said, "Orderly", "{path}");
        }
        visitors.into_iter().for_each(|visitor| drop(visitor.succeed()));
        let lines = server.succeed();
        let ends = lines.iter().filter(|line| line.contains("ended: Orderly")).count();
        assert_eq!((ends, lines.last().map(String::as_str)), (6, Some("served 6")), "{lines:?}");
    }
}
