//! Every requirement has a test or a reason, and the report says so.

use rnic_tests::conformance::{REPORT, Record, render, root};

#[test]
fn every_requirement_has_a_test_or_a_reason() {
    let record = Record::read(&root()).unwrap();
    assert_eq!(record.requirements.len(), 525);
    let faults = record.faults();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_report_is_up_to_date() {
    let record = Record::read(&root()).unwrap();
    let report = std::fs::read_to_string(root().join(REPORT)).unwrap();
    assert!(report == render(&record), "run `cargo run -p rnic-tests --bin conformance`");
}
