//! Shared buffers larger than what may be had, or than what there is: refused by name before a page
//! of them exists. The actor may have 4 GiB of address space, so that a library that tries all the
//! same fails here instead of taking the machine's memory.

use rnic_tests::{Daemon, binaries};

/// Nobody has as much.
const HUGE: &str = "1099511627776";

fn refused(config: &str) -> (String, Daemon) {
    let daemon = Daemon::start(binaries!(), config);
    let mut actor = daemon.actor(&["take", HUGE]);
    let said = actor.line_after("refused: ");
    let touched: u64 = actor.line_after("KiB touched: ").parse().unwrap();
    assert!(touched < 8 << 10, "{touched} KiB were touched before: {said}");
    actor.succeed();
    (said, daemon)
}

#[test]
fn the_limit_is_asked_before_memory_is_taken() {
    let (said, daemon) = refused("[limits.session]\nshared_bytes = \"64MiB\"\n");
    let limit = "limits.session.shared_bytes = 67108864 reached (asked for 1099511627776 more";
    assert!(said.contains(limit), "{said}");
    daemon.is_empty();
}

#[test]
fn what_the_machine_does_not_have_is_not_taken() {
    let all = "shared_bytes = \"4TiB\"\n";
    let (said, daemon) =
        refused(&format!("[limits]\n{all}[limits.user]\n{all}[limits.session]\n{all}"));
    let start = "1099511627776 more bytes of memory wanted, but only about ";
    assert!(said.starts_with(start), "{said}");
    // What was reserved for it is free again, while the session goes on.
    daemon.is_empty();
}
