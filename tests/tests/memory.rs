//! Shared buffers beyond a limit or beyond the machine's memory are refused before any of their
//! pages exist, and the refusal names the limit. The actor has only 4 GiB of address space: a
//! library that allocates the pages first fails here, instead of exhausting the machine's memory.

use rnic_tests::Daemon;

/// Size of a shared buffer that is larger than the memory of any machine, in bytes.
const HUGE: &str = "1099511627776";

fn refused(config: &str) -> (String, Daemon) {
    let daemon = Daemon::start(config);
    let mut actor = daemon.actor(&["take", HUGE]);
    let said = actor.line_after("refused: ");
    let touched: u64 = actor.line_after("KiB touched: ").parse().unwrap();
    assert!(touched < 8 << 10, "{touched} KiB were touched first: {said}");
    actor.succeed();
    (said, daemon)
}

#[test]
fn the_limit_is_checked_before_allocation() {
    let (said, daemon) = refused("[limits.session]\nshared_bytes = \"64MiB\"\n");
    let limit = "limits.session.shared_bytes = 67108864 reached (asked for 1099511627776 more";
    assert!(said.contains(limit), "{said}");
    daemon.is_empty();
}

#[test]
fn memory_beyond_the_machine_is_refused() {
    let all = "shared_bytes = \"4TiB\"\n";
    let (said, daemon) =
        refused(&format!("[limits]\n{all}[limits.user]\n{all}[limits.session]\n{all}"));
    let start = "not enough memory: 1099511627776 more bytes needed, but only about ";
    assert!(said.starts_with(start), "{said}");
    // The refused reservation is released while the session continues.
    daemon.is_empty();
}
