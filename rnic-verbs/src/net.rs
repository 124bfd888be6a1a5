//! What this host has for addresses, as far as a verbs program asks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use crate::c;

/// The address that this host has towards others, or its loopback address if it has no others.
pub(crate) fn own_address() -> IpAddr {
    // Documentation addresses (RFC 5737, RFC 3849): nothing is sent, the kernel looks for a route.
    let away: [(IpAddr, IpAddr); 2] = [
        (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into()),
        (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into()),
    ];
    let route = |(from, to)| source_towards(SocketAddr::new(from, 0), SocketAddr::new(to, 9));
    let towards_others = away.into_iter().find_map(|pair| route(pair).ok().map(|a| a.ip()));
    towards_others.or_else(interface_address).unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// An address of a host that has no way to others than its own links.
fn interface_address() -> Option<IpAddr> {
    let found = if_addrs::get_if_addrs().ok()?;
    let mut addresses: Vec<IpAddr> = found.into_iter().map(|found| found.ip()).collect();
    addresses.retain(|address| !address.is_loopback());
    addresses.sort_by_key(IpAddr::is_ipv6);
    addresses.first().copied()
}

/// The source address that the kernel chooses towards a peer, without sending anything.
pub(crate) fn source_towards(from: SocketAddr, peer: SocketAddr) -> std::io::Result<SocketAddr> {
    let socket = UdpSocket::bind(SocketAddr::new(from.ip(), 0))?;
    // The kernel takes no datagrams to port 0, but finds routes all the same.
    socket.connect(peer)?;
    socket.local_addr()
}

/// Returns true for a multicast or broadcast address. bind(2) takes those.
pub(crate) fn is_of_many(ip: IpAddr) -> bool {
    // Without SO_BROADCAST, a broadcast address of any network of this host is EACCES.
    let is_broadcast = || {
        let connected = source_towards((Ipv4Addr::UNSPECIFIED, 0).into(), (ip, 9).into());
        connected.is_err_and(|error| error.raw_os_error() == Some(libc::EACCES))
    };
    ip.is_multicast() || ip.is_ipv4() && is_broadcast()
}

/// The size of packets as verbs number it. Over TCP the path decides, and nobody asks us.
pub(crate) fn verbs_mtu() -> c::ibv_mtu {
    c::IBV_MTU_1024
}
