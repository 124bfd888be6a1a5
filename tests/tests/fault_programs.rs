//! Fault rules as perftest reports them (docs/fault-examples.md).

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rnic_tests::{
    DEADLINE, Daemon, PATHS, Process, in_path, omit, on_path, output_text, ports, verbs,
};

/// Rules for the third of ten Writes, and the output of `ib_write_bw`.
const RULES: [(&str, &str); 6] = [
    ("complete status=loc-prot-err opcode=write", "Failed status 4:"),
    ("refuse as=access-error opcode=write", "Failed status 10:"),
    ("terminate code=1/2/01 opcode=write", "Failed status 9:"),
    ("disconnect opcode=write", "Failed status 5:"),
    ("qp-fatal opcode=write", "Failed status 5:"),
    ("fail errno=ENOMEM verb=post_send", "Couldn't post send: qp 0"),
];

fn ib_write_bw(daemon: &Daemon, port: &str) -> Command {
    let mut command = verbs::command(Path::new("ib_write_bw"), daemon);
    command.args(["-n", "10", "-s", "64", "-F", "-p", port]).env("RNIC_DEVICES", "rnicd1");
    command
}

/// Returns the output of a client, which is started again until it finds its server.
fn client(daemon: &Daemon) -> String {
    let port = ports::unused_port().to_string();
    let _server = Process::start(ib_write_bw(daemon, &port));
    let begun = Instant::now();
    loop {
        let output = ib_write_bw(daemon, &port).arg("127.0.0.1").output().unwrap();
        let text = output_text(&output);
        let has_posted = text.contains("Failed status") || text.contains("post send");
        if has_posted || output.status.success() {
            return text;
        }
        assert!(begun.elapsed() < DEADLINE, "{text}");
    }
}

#[test]
fn perftest_prints_the_status_of_a_rule() {
    if !in_path("ib_write_bw") {
        return omit("no ib_write_bw here: Debian package perftest");
    }
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        for (rule, printed) in RULES {
            daemon.control(&["fault", "add", &format!("nth=3 do={rule}")]);
            let text = client(&daemon);
            assert!(text.contains(printed), "{rule}, {path}: {text}");
            daemon.control(&["fault", "clear"]);
        }
    }
}
