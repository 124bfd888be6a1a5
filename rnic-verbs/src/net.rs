//! Addresses and routes of this host, for programs of the verbs API.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use crate::c;

/// Returns the address that this host uses towards other hosts, or a loopback address if it has no
/// network.
pub(crate) fn own_address() -> IpAddr {
    // Documentation addresses (RFC 5737, RFC 3849). Nothing is sent: the kernel only finds a route.
    let away: [(IpAddr, IpAddr); 2] = [
        (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into()),
        (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into()),
    ];
    let route = |(from, to)| source_towards(SocketAddr::new(from, 0), SocketAddr::new(to, 9));
    let towards_others = away.into_iter().find_map(|pair| route(pair).ok().map(|a| a.ip()));
    towards_others.or_else(interface_address).unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// Returns an interface address, for a host that has no routes beyond its own links.
fn interface_address() -> Option<IpAddr> {
    let found = if_addrs::get_if_addrs().ok()?;
    let mut addresses: Vec<IpAddr> = found.into_iter().map(|found| found.ip()).collect();
    let is_link_local = |address: &IpAddr| match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    addresses.retain(|address| !address.is_loopback() && !is_link_local(address));
    addresses.sort_by_key(IpAddr::is_ipv6);
    addresses.first().copied()
}

/// Returns the source address that the kernel chooses for a peer. Sends nothing.
pub(crate) fn source_towards(from: SocketAddr, peer: SocketAddr) -> std::io::Result<SocketAddr> {
    let socket = UdpSocket::bind(SocketAddr::new(from.ip(), 0))?;
    // The kernel accepts no datagrams to port 0, but still finds a route.
    socket.connect(peer)?;
    socket.local_addr()
}

/// Returns true for a multicast or broadcast address, which bind(2) would accept.
pub(crate) fn is_multicast_or_broadcast(ip: IpAddr) -> bool {
    // Without SO_BROADCAST, connecting to a broadcast address of this host's networks fails with
    // EACCES.
    let is_broadcast = || {
        let connected = source_towards((Ipv4Addr::UNSPECIFIED, 0).into(), (ip, 9).into());
        connected.is_err_and(|error| error.raw_os_error() == Some(libc::EACCES))
    };
    ip.is_multicast() || ip.is_ipv4() && is_broadcast()
}

/// The MTU that iWARP reports. TCP determines the segment size, so the value has no effect.
pub(crate) const IWARP_MTU: c::ibv_mtu = c::IBV_MTU_1024;
