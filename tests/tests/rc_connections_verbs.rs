//! Connections of RC and UC QPs in librdmacm, with both ends in one program: states and attributes
//! of the QPs, events and their contents.

use rnic_tests::{Daemon, PATHS, Process, engine, verbs};

/// Runs a part of the program, once in memory and once with packets. The program sees these
/// devices.
fn run(part: &str, devices: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/rc_connections.c", scratch.path()) else { return };
    for path in PATHS {
        let daemon = Daemon::start(&engine(1, path));
        let mut command = verbs::command(&program, &daemon);
        command.env("RNIC_DEVICES", devices).arg(part);
        assert_eq!(Process::start(command).succeed(), ["done"], "{path}");
        daemon.is_empty();
    }
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
    run("port space IB", verbs::BOTH_DEVICES);
}
