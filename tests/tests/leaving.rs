//! Requesters whose peer leaves under traffic: each gets `IBV_WC_RETRY_EXC_ERR` for its oldest
//! request, and no access error, because QPs stop answering before their memory is released.

use rnic_tests::verbs::{BOTH_DEVICES, run_part};

fn leaves_by(way: &str) {
    run_part("tests/leaving.c", way, "", BOTH_DEVICES);
}

#[test]
fn peer_is_killed_under_traffic() {
    leaves_by("kill");
}

#[test]
fn peer_exits_under_traffic() {
    leaves_by("exit");
}

#[test]
fn peer_destroys_its_qps_under_traffic() {
    leaves_by("destroy");
}
