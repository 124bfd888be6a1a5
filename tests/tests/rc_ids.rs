//! Ids of librdmacm on the RoCE device: options, addresses, channels and the loss of the device.

use rnic_tests::{Daemon, Process, verbs};

/// Starts a part of the program, which sees only the RoCE device, with a daemon at 127.0.0.1.
fn start(part: &str) -> Option<(Daemon, Process)> {
    let scratch = tempfile::tempdir().unwrap();
    let program = verbs::program("tests/rc_ids.c", scratch.path())?;
    // Other loopback addresses belong to other hosts only if the device has a list of addresses.
    let device = match part {
        "unreachable" => "[device]\naddresses = [\"127.0.0.1\"]\n",
        _ => "",
    };
    let daemon = Daemon::start(device);
    let mut command = verbs::command(&program, &daemon);
    command.env("RNIC_DEVICES", "rnicd1").arg(part);
    let started = Process::start(command);
    Some((daemon, started))
}

macro_rules! parts {
    ($($name:ident: $part:literal,)*) => {
        $(#[test]
        fn $name() {
            let Some((daemon, program)) = start($part) else { return };
            assert_eq!(program.succeed(), ["done"]);
            daemon.is_empty();
        })*
    };
}

parts! {
    options_have_their_length_and_effect: "options",
    pending_events_follow_an_id: "migrated",
    listeners_share_a_port_by_address: "listeners",
    backlog_counts_unfetched_requests: "backlog",
    resolved_ids_have_a_source_port: "source port",
    a_source_port_in_use_is_replaced: "taken port",
    af_ib_addresses_name_gid_and_service: "AF_IB",
    lookups_return_af_ib_addresses: "lookup",
    rdma_notify_establishes_a_connection: "notified",
    silent_hosts_are_unreachable: "unreachable",
}

#[test]
fn every_id_is_notified_of_the_daemons_end() {
    let Some((daemon, mut program)) = start("removed") else { return };
    program.line_after("ready");
    daemon.kill();
    assert_eq!(program.succeed().last().map(String::as_str), Some("done"));
}
