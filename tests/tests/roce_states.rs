//! State changes of RC, UC and UD QPs by programs of the C API.

use rnic_tests::{Daemon, Process, verbs};

#[test]
fn state_changes_follow_ibv_modify_qp() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/roce_states.c", scratch.path()) else { return };
    let daemon = Daemon::start("");
    let mut command = verbs::command(&program, &daemon);
    command.env("RNIC_LOG", "debug");
    assert_eq!(Process::start(command).succeed(), ["done"]);
    daemon.is_empty();
}

#[test]
fn a_program_sees_the_selected_devices() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/roce_states.c", scratch.path()) else { return };
    let daemon = Daemon::start("");
    for (named, seen) in [
        // The default.
        ("", &["rnicd1"][..]),
        ("rnicd0", &["rnicd0"]),
        ("rnicd1,rnicd0", &["rnicd1", "rnicd0"]),
        ("rnicd0,rnicd1", &["rnicd0", "rnicd1"]),
        ("mlx5_0", &[]),
    ] {
        let mut command = verbs::command(&program, &daemon);
        command.arg("names").env("RNIC_DEVICES", named);
        assert_eq!(Process::start(command).succeed(), seen, "{named}");
    }
    daemon.is_empty();
}
