//! Addresses of the family `AF_IB`: a GID, and a service ID with port space and port.
//!
//! An id stores such an address as the IP address of the GID and the port. This module converts the
//! other fields.

use std::net::{IpAddr, SocketAddr};

use rnic_client::{Gid, PortSpace, ServiceId};

use super::service::Service;
use super::state::{IbForm, IdBody, Phase};
use crate::c::{AF_IB, DEFAULT_PKEY, rdma_port_space, rdma_sockaddr, sockaddr_ib};
use crate::errno::Errno;
use crate::ffi::handles::zeroed;

impl IdBody {
    /// Returns the parts of the id's addresses that IP addresses lack, if it has `AF_IB` addresses.
    pub(super) fn ib(&self) -> Option<IbForm> {
        self.state.lock().ib
    }

    /// Returns the host address of an `AF_IB` address to bind, and keeps the rest.
    pub(super) fn own_ib(&self, address: &sockaddr_ib) -> Result<SocketAddr, Errno> {
        let (own, bound) = own(self.service, address)?;
        let mut state = self.state.lock();
        state.expect(&[Phase::Idle])?;
        state.ib = Some(IbForm { own, peer: own });
        Ok(bound)
    }

    /// Returns the host addresses of a source, if any, and of a peer, and keeps the rest.
    pub(super) fn peer_ib(
        &self,
        source: Option<&sockaddr_ib>,
        peer: &sockaddr_ib,
    ) -> Result<(Option<SocketAddr>, SocketAddr), Errno> {
        let (space, to) = peer_of(self.service, peer)?;
        let source = source.map(|source| own(self.service, source)).transpose()?;
        let mut state = self.state.lock();
        state.expect(&[Phase::Idle, Phase::Bound])?;
        let own = match (state.ib, state.phase) {
            (Some(form), Phase::Bound) => form.own,
            (None, Phase::Bound) => {
                return Err(invalid!("the id is bound to an IP address, and the peer's is AF_IB"));
            }
            _ => source.map_or(space, |(space, _)| space),
        };
        state.ib = Some(IbForm { own, peer: space });
        Ok((source.map(|(_, source)| source), to))
    }

    /// Forgets an `AF_IB` address that could not be bound, because an IP address follows.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the id is bound to an `AF_IB` address.
    pub(super) fn no_ib(&self) -> Result<(), Errno> {
        let mut state = self.state.lock();
        match (state.ib, state.phase) {
            (Some(_), phase) if phase != Phase::Idle => {
                Err(invalid!("the id has AF_IB addresses, and the given one is an IP address"))
            }
            _ => {
                state.ib = None;
                Ok(())
            }
        }
    }
}

/// Returns the port space and the host address of a local `AF_IB` address. As in the kernel, the
/// masked bits of the service ID must be those of a port space that the id can use.
fn own(service: Service, address: &sockaddr_ib) -> Result<(PortSpace, SocketAddr), Errno> {
    let mask = u64::from_be(address.sib_sid_mask);
    let id = u64::from_be(address.sib_sid) & mask;
    let spaces: &[PortSpace] = match service {
        Service::Rc(PortSpace::Ib) => &[PortSpace::Ib, PortSpace::Tcp],
        Service::Rc(_) => &[PortSpace::Tcp],
        Service::Ud => &[PortSpace::Udp],
        Service::Iwarp => return Err(of_iwarp()),
    };
    let agrees = |space: &&PortSpace| (ServiceId::new(**space, 0).0 ^ id) & mask & !PORT_MASK == 0;
    let space = spaces.iter().find(agrees).ok_or_else(|| {
        errno!(libc::EPROTONOSUPPORT, "service ID {id:#x} is not in the port space of the id")
    })?;
    Ok((*space, host_address(address, id)))
}

/// Returns the port space and the host address of a peer. Its service ID counts in full.
fn peer_of(service: Service, address: &sockaddr_ib) -> Result<(PortSpace, SocketAddr), Errno> {
    let id = u64::from_be(address.sib_sid);
    let found = ServiceId(id).port().map(|(space, _)| space);
    let space = found.filter(|space| match service {
        Service::Rc(_) => *space != PortSpace::Udp,
        Service::Ud => *space == PortSpace::Udp,
        Service::Iwarp => false,
    });
    let space = space.ok_or_else(|| match service {
        Service::Iwarp => of_iwarp(),
        _ => errno!(libc::EPROTONOSUPPORT, "service ID {id:#x} is not in a port space of the id"),
    })?;
    Ok((space, host_address(address, id)))
}

fn of_iwarp() -> Errno {
    invalid!("AF_IB addresses belong to the RoCE device")
}

fn host_address(address: &sockaddr_ib, service: u64) -> SocketAddr {
    let port = (service & PORT_MASK) as u16;
    SocketAddr::new(Gid(address.sib_addr).address(), port)
}

/// Returns the `AF_IB` form of an address: all bits of its service ID count.
pub(super) fn in_c(address: SocketAddr, space: PortSpace) -> sockaddr_ib {
    let gid = match address.ip() {
        IpAddr::V6(ip) if ip.is_unspecified() => Gid([0; 16]),
        IpAddr::V4(ip) if ip.is_unspecified() => Gid([0; 16]),
        ip => Gid::from(ip),
    };
    let scope = match address {
        SocketAddr::V6(address) => address.scope_id(),
        SocketAddr::V4(_) => 0,
    };
    sockaddr_ib {
        sib_family: AF_IB,
        sib_pkey: DEFAULT_PKEY,
        sib_flowinfo: 0,
        sib_addr: gid.0,
        sib_sid: ServiceId::new(space, address.port()).0.to_be(),
        sib_sid_mask: u64::MAX,
        sib_scope_id: scope.into(),
    }
}

/// Returns the `AF_IB` form of the result of a lookup. Without a port, the mask excludes the port
/// bits.
pub(super) fn found(address: SocketAddr, space: rdma_port_space) -> sockaddr_ib {
    let port = address.port();
    let mask = if port == 0 { !PORT_MASK } else { u64::MAX };
    let sid = u64::from(space) << 16 | u64::from(port);
    sockaddr_ib {
        sib_sid: sid.to_be(),
        sib_sid_mask: mask.to_be(),
        ..in_c(address, PortSpace::Tcp)
    }
}

/// Returns an address in the form of the C structures.
pub(super) fn in_union(address: sockaddr_ib) -> rdma_sockaddr {
    let mut to: rdma_sockaddr = zeroed();
    to.sib = address;
    to
}

/// Bits of a service ID that are the port (`RDMA_IB_IP_PORT_MASK`).
const PORT_MASK: u64 = 0xFFFF;

#[cfg(test)]
mod tests {
    use super::*;

    fn address(sid: u64, mask: u64) -> sockaddr_ib {
        let loopback = in_c(([127, 0, 0, 1], 0).into(), PortSpace::Tcp);
        sockaddr_ib { sib_sid: sid.to_be(), sib_sid_mask: mask.to_be(), ..loopback }
    }

    const TCP: u64 = 0x0106_1D2F;
    const UDP: u64 = 0x0111_1D2F;
    const IB: u64 = 0x013F_1D2F;
    const SPACE: u64 = !PORT_MASK;
    const ALL: u64 = u64::MAX;

    #[test]
    fn mask_selects_port_space_and_port() {
        let [of_tcp, of_ib] = [PortSpace::Tcp, PortSpace::Ib].map(Service::Rc);
        let found = |service, sid, mask| {
            let found = own(service, &address(sid, mask)).map_err(|errno| errno.number());
            found.map(|(space, address)| (space, address.port()))
        };
        assert_eq!(found(of_tcp, TCP, ALL), Ok((PortSpace::Tcp, 7471)));
        assert_eq!(found(of_tcp, TCP, SPACE), Ok((PortSpace::Tcp, 0)));
        assert_eq!(found(of_tcp, 0, 0), Ok((PortSpace::Tcp, 0)));
        assert_eq!(found(of_tcp, IB, PORT_MASK), Ok((PortSpace::Tcp, 7471)));
        assert_eq!(found(of_ib, IB, ALL), Ok((PortSpace::Ib, 7471)));
        assert_eq!(found(of_ib, TCP, ALL), Ok((PortSpace::Tcp, 7471)));
        assert_eq!(found(of_ib, 0, 0), Ok((PortSpace::Ib, 0)));
        assert_eq!(found(Service::Ud, UDP, ALL), Ok((PortSpace::Udp, 7471)));
        for (service, sid) in
            [(of_tcp, IB), (of_tcp, UDP), (of_ib, UDP), (Service::Ud, TCP), (of_tcp, TCP | 1 << 63)]
        {
            assert_eq!(found(service, sid, ALL), Err(libc::EPROTONOSUPPORT));
        }
        assert_eq!(found(Service::Iwarp, TCP, ALL), Err(libc::EINVAL));
    }

    #[test]
    fn service_id_of_a_peer_counts_in_full() {
        let found = |service, sid| {
            let found = peer_of(service, &address(sid, 0)).map_err(|errno| errno.number());
            found.map(|(space, address)| (space, address.port()))
        };
        assert_eq!(found(Service::Rc(PortSpace::Tcp), IB), Ok((PortSpace::Ib, 7471)));
        assert_eq!(found(Service::Ud, UDP), Ok((PortSpace::Udp, 7471)));
        assert_eq!(found(Service::Rc(PortSpace::Ib), UDP), Err(libc::EPROTONOSUPPORT));
        assert_eq!(found(Service::Rc(PortSpace::Ib), 7471), Err(libc::EPROTONOSUPPORT));
        assert_eq!(found(Service::Iwarp, TCP), Err(libc::EINVAL));
    }

    #[test]
    fn addresses_keep_gid_and_port() {
        for text in ["127.0.0.1:7471", "[2001:db8::7]:65535", "[fe80::1%3]:80"] {
            let address: SocketAddr = text.parse().expect("an address");
            let form = in_c(address, PortSpace::Ib);
            let host = host_address(&form, u64::from_be(form.sib_sid));
            assert_eq!((host.ip(), host.port()), (address.ip(), address.port()));
        }
        assert_eq!(in_c(([0; 4], 1).into(), PortSpace::Tcp).sib_addr, [0; 16]);
    }
}
