//! Memory of programs of the C verbs API: registered, it stays what it was to them.

use std::path::Path;
use std::process::Command;

use rnic_tests::daemon::Daemon;
use rnic_tests::{binaries, verbs};

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/registered.c");

/// Runs a part of the program, with a daemon of its own.
fn run(part: &str) {
    run_with(part, &[]);
}

/// The same with more in its environment.
fn run_with(part: &str, variables: &[(&str, &str)]) {
    let daemon = Daemon::start(binaries!(), "");
    let scratch = tempfile::tempdir().unwrap();
    let program = scratch.path().join("registered");
    let libraries = verbs::directory();
    let built = Command::new("cc")
        .args(["-Wall", "-Werror", "-pthread", "-o"])
        .args([&program, Path::new(SOURCE)])
        .arg(libraries.join("libibverbs.so.1"))
        .status()
        .expect("a C compiler");
    assert!(built.success());
    let ran = Command::new("timeout")
        .arg("60")
        .arg(&program)
        .arg(part)
        .env("LD_LIBRARY_PATH", libraries)
        .env("RNIC_SOCKET", daemon.socket())
        .env("RNIC_LOG", "debug")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{part}: {}: {said}{errors}", ran.status);
    assert_eq!(said, "done\n", "{errors}");
    daemon.is_empty();
}

#[test]
fn it_is_shared_while_a_region_names_it_and_private_again() {
    run("back");
}

#[test]
fn a_few_small_ones_are_shared_if_they_are_whole_pages() {
    run("small");
}

#[test]
fn what_took_its_place_is_left_alone() {
    run("unmapped");
}

#[test]
fn it_stays_private_beside_other_threads() {
    run("threads");
}

#[test]
fn it_is_shared_beside_threads_that_store_if_that_is_asked_for() {
    run_with("stored", &[("RNIC_ADOPT", "always")]);
}

#[test]
fn pages_that_others_have_a_part_of_are_not_taken_from_threads() {
    run_with("arena", &[("RNIC_ADOPT", "always")]);
}

#[test]
fn a_forked_child_has_memory_and_a_device_of_its_own() {
    run("fork");
}

#[test]
fn blocks_of_the_heap_leave_their_neighbours_alone() {
    run("heap");
}

#[test]
fn a_stack_in_use_stays_where_it_is() {
    run("stack");
}

#[test]
fn what_another_region_reaches_stays_where_it_is() {
    run("reached");
}

#[test]
fn a_forked_child_has_what_the_program_put_in_its_place() {
    run("replaced");
}

#[test]
fn it_is_private_again_beside_other_threads() {
    run("beside");
}

#[test]
fn starting_other_programs_changes_nothing() {
    run("start");
}

/// A program that forks by itself and never heard of us: Python's `multiprocessing` with `fork`.
#[test]
fn python_workers_are_forked_beside_registered_memory() {
    let daemon = Daemon::start(binaries!(), "");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/registered.py");
    let ran = Command::new("timeout")
        .args(["60", "python3", script])
        .env("LD_LIBRARY_PATH", verbs::directory())
        .env("RNIC_SOCKET", daemon.socket())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{}: {said}{errors}", ran.status);
    assert_eq!(said, "done\n", "{errors}");
    daemon.is_empty();
}
