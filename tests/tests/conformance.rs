//! Every requirement has a test or a reason, every MUST has code, and the summary is up to date.

use rnic_tests::conformance::{Record, SUMMARY, root, summary};

#[test]
fn every_requirement_has_a_test_or_a_reason() {
    let record = Record::read(&root()).unwrap();
    assert_eq!(record.requirements.len(), 660);
    let faults = record.faults();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_summary_is_up_to_date() {
    let record = Record::read(&root()).unwrap();
    let text = std::fs::read_to_string(root().join(SUMMARY)).unwrap();
    assert!(text == summary(&record), "run `cargo run -p rnic-tests --bin conformance`");
}
