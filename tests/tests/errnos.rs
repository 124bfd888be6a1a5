//! What the C API says to what it must refuse: the number of `errno(3)` that programs expect, and
//! the request at which a list of them was refused.

use rnic_tests::{Daemon, Process, binaries, verbs};

#[test]
fn calls_are_refused_by_the_numbers_that_programs_expect() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/errnos.c", scratch.path()) else { return };
    let daemon = Daemon::start(binaries!(), "");
    let command = verbs::command(&program, &daemon);
    assert_eq!(Process::start(command).succeed(), ["done"]);
    daemon.is_empty();
}
