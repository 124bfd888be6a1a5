//! Reports of tests that cannot run on this machine.

use std::io::Write;

/// Reports a test, or a part of it, that this machine cannot run.
///
/// Writes to standard error directly, because the test runner captures the output of `eprintln!`
/// in tests that pass.
///
/// # Panics
///
/// If `RNIC_TEST_ALL` is set.
pub fn omit(why: &str) {
    assert!(std::env::var_os("RNIC_TEST_ALL").is_none(), "RNIC_TEST_ALL is set, but {why}");
    report(&format!("NOT TESTED: {why}"));
}

/// Returns true if `RNIC_TEST_TIMING` is set: the machine is quiet and tests may measure time.
///
/// Without it, reports that `what` is not measured. This does not count as a skipped test:
/// `RNIC_TEST_ALL` does not require the timing suite.
pub fn timing(what: &str) -> bool {
    let measured = std::env::var_os("RNIC_TEST_TIMING").is_some();
    if !measured {
        report(&format!("NOT MEASURED without RNIC_TEST_TIMING=1: {what}"));
    }
    measured
}

fn report(line: &str) {
    // A closed standard error is no reason to fail a test.
    let _ = writeln!(std::io::stderr(), "{line}");
}
