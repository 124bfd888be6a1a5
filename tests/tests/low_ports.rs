//! Ports that the kernel reserves for root (`ip_unprivileged_port_start`). A daemon that runs as
//! root must not bind them for other users.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::net::TcpListener;

use rnic_tests::{Daemon, omit};

const USER: u32 = 65_519;
const NAMED: u32 = 65_518;

/// Returns a free low port.
fn low_port() -> Option<u16> {
    let start = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
    let start: u16 = start.ok()?.trim().parse().ok()?;
    (600..start.min(1024)).rev().find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
}

#[test]
fn low_ports_need_root_or_a_rule() {
    let port = if rustix::process::geteuid().is_root() { low_port() } else { None };
    let Some(port) = port else {
        return omit("low ports require root and the default net.ipv4.ip_unprivileged_port_start");
    };
    let config = format!(
        "[control]\nmode = \"0666\"\n\
         [[listen]]\nwho = \"*\"\naddress = \"*\"\nports = \"*\"\n\
         [[listen]]\nwho = {NAMED}\naddress = \"*\"\nports = \"{port}\"\n"
    );
    let daemon = Daemon::start(&config);
    let binds = |user: u32, space: &str| {
        let address = format!("127.0.0.1:{port}");
        let (_, lines) = daemon.actor_as(user, &["bind", space, &address]).finish();
        lines.join("\n")
    };
    for space in ["connections", "datagrams"] {
        let said = binds(USER, space);
        assert!(said.contains("not allowed by listen") && said.contains("unprivileged"), "{said}");
        assert!(binds(NAMED, space).contains("bound"), "{space}: a rule allows the port");
        assert!(binds(0, space).contains("bound"), "{space}: root");
    }
    // A source port needs the same permission as a listening port.
    let said = binds(USER, "source");
    assert!(said.contains("connect from") && said.contains("not allowed by listen"), "{said}");
}
