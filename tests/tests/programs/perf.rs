//! `rnic-perf` and `rnic-bench`: every measurement runs. The tests ignore the results, which depend
//! on the machine.

use std::process::Command;

use rnic_tests::{Daemon, Process, built, omit};

use super::PERF;

const BENCH: &str = "rnic-bench";

/// Runs a measurement and checks its JSON rows.
fn measures(command: &mut Command, arguments: &str) {
    command.args(arguments.split(' ')).arg("--json");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{arguments}: {e}: {said}"));
    let rows = rows["rows"].as_array().unwrap_or_else(|| panic!("{arguments}: {rows}"));
    assert!(!rows.is_empty(), "{arguments}");
    for row in rows {
        assert!(row["failure"].is_null(), "{arguments}: {row}");
    }
    assert!(output.status.success(), "{arguments}: {said}");
}

fn measures_with_daemons(arguments: &str) {
    let mut command = Command::new(built::program(BENCH));
    let (subcommand, options) = arguments.split_once(' ').unwrap();
    command.arg(subcommand).arg("--rnicd").arg(built::program("rnicd"));
    measures(&mut command, &format!("{options} --rounds 1 --seconds 0.01"));
}

#[test]
fn bandwidth_latency_and_rate_are_measured() {
    let daemon = Daemon::start("");
    for program in [PERF, BENCH] {
        for arguments in
            ["bw --size 4KiB --working-set 64KiB", "lat --op send,read", "rate --qps 2", "lat --rc"]
        {
            let mut command = Command::new(built::program(program));
            command.env("RNIC_SOCKET", daemon.socket());
            measures(&mut command, &format!("{arguments} --iters 100 --rounds 1"));
        }
    }
    daemon.is_empty();
}

#[test]
fn many_idle_objects_are_measured() {
    measures_with_daemons("scale --qps 10 --only qps");
}

#[test]
fn neighbours_are_measured() {
    measures_with_daemons("neighbours --only one");
}

#[test]
fn the_table_of_goals_is_measured() {
    measures_with_daemons("all --qps 10 --only direct");
}

#[test]
fn other_benchmarks_are_measured() {
    if Command::new("ucx_perftest").arg("-h").output().is_err() {
        return omit("ucx_perftest is not installed (Debian package ucx-utils)");
    }
    measures_with_daemons("compare --sizes 8 --only direct");
}

#[test]
fn a_missed_bound_fails_the_smoke_test() {
    // Without a working daemon, every ratio misses its bound.
    let mut command = Command::new(built::program(BENCH));
    command.args(["smoke", "--rnicd", "/bin/false", "--seconds", "0.01"]);
    let (status, lines) = Process::start(command).finish();
    assert_eq!(status.code(), Some(1), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("not measured")), "{lines:?}");
}
