//! Fault rules for each function of libibverbs and librdmacm that can fail.

use std::path::PathBuf;
use std::process::Command;

use rnic_client::faults::Verb;
use rnic_tests::{Client, Daemon, PATHS, Process, built, on_path, verbs};

const IWARP: &str = "rnicd0";
const ROCE: &str = "rnicd1";

/// Verbs that the program does not show: a call of `rnic-client`, an event, which cannot fail, and
/// a call that ends the connection request if it fails, as in the kernel.
const OTHERS: [&str; 3] = ["create_shared_buffer", "rdma_cm_event", "rdma_accept"];

/// Verbs that only the RoCE device has.
const OF_ROCE: [&str; 3] = ["create_ah", "init_ah_from_wc", "destroy_ah"];

/// Verbs whose second call finds no event (`EAGAIN`).
const OF_EVENTS: [&str; 2] = ["get_cq_event", "get_async_event"];

/// Returns the verbs of a device, each with the error number of its rule.
fn verbs_of(device: &str) -> Vec<(&'static str, usize)> {
    let all = Verb::names().filter(|verb| !OTHERS.contains(verb));
    all.filter(|verb| device == ROCE || !OF_ROCE.contains(verb)).zip(40..).collect()
}

/// Returns a rule for each verb, which fails its first call.
fn rules(verbs: &[(&str, usize)]) -> String {
    let rule = |(verb, errno): &(&str, usize)| {
        format!("name=errno-{errno} do=fail errno={errno} verb={verb} limit=1")
    };
    verbs.iter().map(rule).collect::<Vec<_>>().join("; ")
}

/// Checks the error numbers of both calls of each function.
fn check_calls(device: &str, mut found: Vec<String>) {
    let mut expected: Vec<_> = verbs_of(device)
        .iter()
        .map(|(verb, errno)| {
            let none = rustix::io::Errno::AGAIN.raw_os_error();
            let second = if OF_EVENTS.contains(verb) { none } else { 0 };
            format!("{verb} {errno} {second}")
        })
        .collect();
    expected.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, expected, "{device}");
}

/// Like [`check_calls`], and checks the records of the faults.
fn check(daemon: &Daemon, device: &str, found: Vec<String>) {
    check_calls(device, found);
    let log = daemon.json(&["fault", "log"]);
    for (verb, errno) in verbs_of(device) {
        let rule = format!("injected by fault errno-{errno}");
        assert!(log.as_array().unwrap().iter().any(|row| row["rule"] == rule), "{verb}");
    }
    daemon.is_empty();
}

fn program(scratch: &tempfile::TempDir) -> Option<PathBuf> {
    verbs::program("tests/fault_functions.c", scratch.path())
}

#[test]
fn each_function_fails_once_and_then_succeeds() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = program(&scratch) else { return };
    for path in PATHS {
        for device in [IWARP, ROCE] {
            let daemon = Daemon::start(&on_path(path));
            let mut command = verbs::command(&program, &daemon);
            command.arg(device).env("RNIC_DEVICES", device).env("RNIC_LOG", "debug");
            command.env("RNIC_FAULTS", rules(&verbs_of(device)));
            check(&daemon, device, Process::start(command).succeed());
        }
    }
}

/// Unlike rules of `RNIC_FAULTS`, these rules outlast the sessions of the program.
#[test]
fn rules_of_the_user_fail_each_function() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = program(&scratch) else { return };
    for device in [IWARP, ROCE] {
        let daemon = Daemon::start("");
        let client = Client::new(&daemon);
        client.context.set_faults(&rules(&verbs_of(device))).unwrap();
        drop(client);
        let mut command = verbs::command(&program, &daemon);
        command.arg(device).env("RNIC_DEVICES", device).env("RNIC_LOG", "debug");
        check(&daemon, device, Process::start(command).succeed());
    }
}

#[test]
fn rules_of_a_file_fail_each_function() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = program(&scratch) else { return };
    let file = scratch.path().join("faults.toml");
    for device in [IWARP, ROCE] {
        let rule = |(verb, errno): &(&str, usize)| {
            format!(
                "[[fault]]\nname = \"errno-{errno}\"\ndo = \"fail\"\nerrno = {errno}\n\
                 verb = \"{verb}\"\nlimit = 1\n"
            )
        };
        let rules: String = verbs_of(device).iter().map(rule).collect();
        std::fs::write(&file, rules).unwrap();
        let mut command = Command::new(built::program("rnicd"));
        command.args(["exec", "--faults"]).arg(&file).arg("--").arg(&program).arg(device);
        command.env("LD_LIBRARY_PATH", built::libraries()).env("RNIC_DEVICES", device);
        check_calls(device, Process::start(command).succeed());
    }
}

/// `rnic-run` queries the device for itself before it starts the program.
#[test]
fn rules_of_queries_spare_rnic_run() {
    let daemon = Daemon::start("");
    let mut command = Command::new(built::program("rnic-run"));
    command.args(["--no-start", "--lib-dir"]).arg(built::libraries()).arg("true");
    command.env("RNIC_SOCKET", daemon.socket());
    command.env("RNIC_FAULTS", "do=fail errno=EIO verb=query_device");
    Process::start(command).succeed();
}
