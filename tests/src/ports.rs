//! Ports that are nobody's unless somebody asks for them by number.

use std::net::{Ipv6Addr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicU16, Ordering};

/// A port of TCP and UDP that is free at all addresses, each time another one. It is below those
/// that the kernel gives to outgoing connections (`ip_local_port_range`, `ip(7)`), so that none of
/// them takes it before its owner does: where thousands are made, a port that the kernel has chosen
/// is somebody else's a moment after it was let go of.
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
        if TcpListener::bind(at).is_ok() && UdpSocket::bind(at).is_ok() {
            return at.1;
        }
    }
    panic!("no port between {} and {end} is free", end - PORTS);
}

/// From so many ports one is chosen.
const PORTS: u16 = 8192;
