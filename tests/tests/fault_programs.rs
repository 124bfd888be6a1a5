//! Fault rules as perftest reports them (docs/fault-examples.md).

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rnic_tests::{
    DEADLINE, Daemon, PATHS, Process, in_path, omit, on_path, output_text, ports, verbs,
};

/// Device, program, rule for the third of ten requests, and output of the client. An iWARP Write
/// that the peer refuses has completed before, so the rules for refusals select Reads there. An
/// iWARP request that fails locally flushes those before it, so its own status may come later.
const ROWS: [(&str, &str, &str, &str); 14] = [
    ("rnicd1", "ib_write_bw", "complete status=loc-prot-err opcode=write", "Failed status 4:"),
    ("rnicd1", "ib_write_bw", "refuse as=access-error opcode=write", "Failed status 10:"),
    ("rnicd1", "ib_write_bw", "terminate code=1/2/01 opcode=write", "Failed status 9:"),
    ("rnicd1", "ib_write_bw", "disconnect opcode=write", "Failed status 5:"),
    ("rnicd1", "ib_write_bw", "qp-fatal opcode=write", "Failed status 5:"),
    ("rnicd1", "ib_write_bw", "fail errno=ENOMEM verb=post_send", "Couldn't post send: qp 0"),
    ("rnicd1", "ib_write_bw", "end-session opcode=write", "poll CQ failed -19"),
    ("rnicd0", "ib_write_bw", "end-session opcode=write", "poll CQ failed -19"),
    ("rnicd0", "ib_write_bw", "disconnect opcode=write", "Failed status 5:"),
    ("rnicd0", "ib_write_bw", "qp-fatal opcode=write", "Failed status 5:"),
    ("rnicd0", "ib_write_bw", "device-fatal opcode=write", "Failed status 5:"),
    ("rnicd0", "ib_read_lat", "refuse as=access-error opcode=read", "Failed status 10:"),
    ("rnicd0", "ib_read_lat", "refuse as=invalid-request opcode=read", "Failed status 11:"),
    ("rnicd0", "ib_read_lat", "terminate code=1/2/01 opcode=read", "Failed status 11:"),
];

/// Runs a server and its client. Returns the output of the client.
fn run_pair(daemon: &Daemon, device: &str, program: &str) -> String {
    let port = ports::unused_port().to_string();
    let command = || {
        let mut command = verbs::command(Path::new(program), daemon);
        command.args(["-n", "10", "-s", "64", "-F", "-p", &port]).env("RNIC_DEVICES", device);
        command
    };
    let with_cm = |mut command: Command| {
        if device == "rnicd0" {
            command.arg("-R");
        }
        command
    };
    let _server = Process::start(with_cm(command()));
    let begun = Instant::now();
    let is_early = || begun.elapsed() < DEADLINE;
    if device == "rnicd0" {
        let listens = || daemon.json(&["listeners"]).to_string().contains(&format!(":{port}\""));
        while !listens() {
            assert!(is_early(), "the server does not listen");
        }
    }
    loop {
        let output = with_cm(command()).arg("127.0.0.1").output().unwrap();
        let text = output_text(&output);
        // On the RoCE device, perftest exchanges the QP numbers over TCP. The client is started
        // again until it finds its server.
        if output.status.success() || !text.contains("Couldn't connect to") {
            return text;
        }
        assert!(is_early(), "{text}");
    }
}

#[test]
fn perftest_prints_the_status_of_a_rule() {
    if !in_path("ib_write_bw") {
        return omit("no ib_write_bw here: Debian package perftest");
    }
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        for (device, program, rule, printed) in ROWS {
            daemon.control(&["fault", "add", &format!("nth=3 do={rule}")]);
            let text = run_pair(&daemon, device, program);
            assert!(text.contains(printed), "{rule} on {device}, {path}: {text}");
            daemon.control(&["fault", "clear"]);
        }
    }
}
