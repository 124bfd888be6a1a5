//! Reserves port numbers for a test.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Instant;

use crate::DEADLINE;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};

/// Returns a TCP and UDP port that is free at all addresses. No other test gets the port during the
/// life of this process. The kernel assigns it to no outgoing connection, because it is below
/// `ip_local_port_range` (`ip(7)`).
///
/// # Panics
///
/// If no port is free.
pub fn unused_port() -> u16 {
    static TRIED: AtomicU16 = AtomicU16::new(0);
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let first = range.ok().and_then(|text| text.split_whitespace().next()?.parse().ok());
    let end: u16 = first.unwrap_or(32768).max(2 * PORTS);
    // Concurrent processes start at different ports.
    let begin = (std::process::id() % u32::from(PORTS)) as u16;
    for _ in 0..PORTS {
        let nth = (begin + TRIED.fetch_add(1, Ordering::Relaxed)) % PORTS;
        let port = end - 1 - nth;
        if reserve(port) && !is_in_use(port) {
            return port;
        }
    }
    panic!("no port between {} and {end} is free", end - PORTS);
}

/// Returns true if the kernel lists a socket at the port in this network namespace. Binding a
/// socket to find out would keep the port in use: a process that another test starts holds a copy
/// of the socket until it calls exec.
fn is_in_use(port: u16) -> bool {
    ["tcp", "tcp6", "udp", "udp6"].iter().any(|protocol| {
        // The IPv6 tables are missing if IPv6 is disabled.
        let sockets = std::fs::read_to_string(format!("/proc/thread-self/net/{protocol}"));
        let is_at_port = |line: &str| {
            let local = line.split_whitespace().nth(1).and_then(|at| at.rsplit(':').next());
            local.and_then(|digits| u16::from_str_radix(digits, 16).ok()) == Some(port)
        };
        sockets.unwrap_or_default().lines().skip(1).any(is_at_port)
    })
}

/// Listens on an address where this process has listened before. Retries while a process that
/// another test is starting holds a copy of the former socket, until it calls exec.
///
/// # Panics
///
/// If the address is in use for longer than [`DEADLINE`].
pub fn listen_again(address: SocketAddr) -> TcpListener {
    let start = Instant::now();
    loop {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && start.elapsed() < DEADLINE => {
                std::thread::yield_now();
            }
            listener => return listener.expect("a socket that listens"),
        }
    }
}

/// Reserves a port among the processes that use this module, until this process ends. Returns false
/// if it is reserved already. The name of the abstract socket has the same scope as a port number:
/// the network namespace.
fn reserve(port: u16) -> bool {
    static RESERVED: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());
    let name = SocketAddrUnix::new_abstract_name(format!("rnic-tests port {port}").as_bytes());
    let name = name.expect("a short name");
    let flags = SocketFlags::CLOEXEC;
    let held = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None).expect("a socket");
    let reserved = bind(&held, &name).is_ok();
    if reserved {
        RESERVED.lock().expect("no thread panics with the lock").push(held);
    }
    reserved
}

/// Number of candidate ports.
const PORTS: u16 = 8192;

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

    use super::*;

    #[test]
    fn a_reserved_port_is_given_out_once() {
        let port = unused_port();
        assert!(!reserve(port));
        assert_ne!(unused_port(), port);
        // The owner of the reservation can use the port.
        drop(TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).expect("a free port"));
    }

    #[test]
    fn sockets_at_a_port_are_found() {
        for any in [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::UNSPECIFIED)] {
            let tcp = TcpListener::bind((any, 0)).expect("a free port");
            let udp = UdpSocket::bind((any, 0)).expect("a free port");
            for at in [tcp.local_addr(), udp.local_addr()] {
                assert!(is_in_use(at.expect("its address").port()));
            }
        }
        assert!(!is_in_use(unused_port()));
    }
}
