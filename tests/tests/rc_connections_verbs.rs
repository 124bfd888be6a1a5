//! Connections of RC and UC QPs in librdmacm, with both ends in one program: states and attributes
//! of the QPs, events and their contents.

use rnic_tests::verbs::{BOTH_DEVICES, run_part};

fn run(part: &str, devices: &str) {
    run_part("tests/rc_connections.c", part, "workers = 1\n", devices);
}

macro_rules! parts {
    ($($name:ident: $part:literal,)*) => {
        $(#[test]
        fn $name() {
            run($part, "rnicd1");
        })*
    };
}

parts! {
    qps_of_ids_connect: "connected",
    port_space_limits_the_qp_types: "QP types",
    program_may_own_the_qps: "own QP",
    parameters_reach_the_peer: "parameters",
    rejections_have_status_28: "rejected",
    missing_listener_has_status_8: "no listener",
    private_data_have_their_maximum: "private data",
    srqs_serve_connected_qps: "SRQ",
    connection_may_name_a_ud_qp: "UD QP",
    ids_have_addresses_and_a_path: "addresses",
    last_send_before_a_disconnect_succeeds: "last Send",
    endpoints_block: "endpoints",
}

#[test]
fn port_space_ib_needs_no_selection() {
    run("port space IB", BOTH_DEVICES);
}
