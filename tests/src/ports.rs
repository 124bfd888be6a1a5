//! Ports that one test has to itself.

use std::net::{Ipv6Addr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};

/// Returns a port of TCP and UDP that is free at all addresses. No other test gets it while this
/// process lives, and the kernel gives it to no outgoing connection, because it is below
/// `ip_local_port_range` (`ip(7)`).
///
/// # Panics
///
/// If there is none.
pub fn of_nobody() -> u16 {
    static TRIED: AtomicU16 = AtomicU16::new(0);
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let first = range.ok().and_then(|text| text.split_whitespace().next()?.parse().ok());
    let end: u16 = first.unwrap_or(32768).max(2 * PORTS);
    // Processes that look at the same time begin at different ones.
    let begin = (std::process::id() % u32::from(PORTS)) as u16;
    for _ in 0..PORTS {
        let nth = (begin + TRIED.fetch_add(1, Ordering::Relaxed)) % PORTS;
        let at = (Ipv6Addr::UNSPECIFIED, end - 1 - nth);
        if reserve(at.1) && TcpListener::bind(at).is_ok() && UdpSocket::bind(at).is_ok() {
            return at.1;
        }
    }
    panic!("no port between {} and {end} is free", end - PORTS);
}

/// Reserves a port among the processes that use this module, until this one ends. Returns false if
/// it is reserved already. The name of an abstract socket is as wide as a port number: it belongs
/// to a network namespace.
fn reserve(port: u16) -> bool {
    static RESERVED: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());
    let name = SocketAddrUnix::new_abstract_name(format!("rnic-tests port {port}").as_bytes());
    let name = name.expect("a short name");
    let flags = SocketFlags::CLOEXEC;
    let held = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None).expect("a socket");
    let reserved = bind(&held, &name).is_ok();
    if reserved {
        RESERVED.lock().expect("no panic while it is held").push(held);
    }
    reserved
}

/// From so many ports one is chosen.
const PORTS: u16 = 8192;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_port_is_given_out_once() {
        let port = of_nobody();
        assert!(!reserve(port));
        assert_ne!(of_nobody(), port);
        // The port itself is free for its owner.
        drop(TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).expect("free"));
    }
}
