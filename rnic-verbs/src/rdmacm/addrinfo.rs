//! Name resolution (`rdma_getaddrinfo(3)`).

use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::Arc;

use dns_lookup::{AddrInfoHints, getaddrinfo};
use libc::sockaddr;
use rnic_client::Function;

use super::ib;
use crate::c::*;
use crate::errno::{Errno, minus_one};
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Kind, live, publish, withdraw, zeroed};
use crate::ffi::pointers::{Fields, In, Out, Text, set};
use crate::ffi::socket_address::{Address, in_c, length};
use crate::log;
use crate::verbs::device::Device;
use crate::verbs::session;

/// The program's hints (`struct rdma_addrinfo`).
#[derive(Clone, Copy, Debug, Default)]
struct Hints {
    /// The address is for listening.
    passive: bool,
    /// `SOCK_STREAM` or `SOCK_DGRAM` for the QP type; 0 for any.
    socktype: i32,
    /// `IPPROTO_TCP` or `IPPROTO_UDP` for the port space; 0 for any.
    protocol: i32,
    /// The node is a numeric address, not a name.
    numeric: bool,
    /// `AF_INET` or `AF_INET6`; 0 for any.
    family: i32,
    /// The program wants `AF_IB` addresses.
    in_ib: bool,
    source: Option<Known>,
    destination: Option<Known>,
}

/// An address of any family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Ip(SocketAddr),
    Ib(sockaddr_ib),
}

impl Known {
    fn family(self) -> c_int {
        match self {
            Known::Ip(SocketAddr::V4(_)) => libc::AF_INET,
            Known::Ip(SocketAddr::V6(_)) => libc::AF_INET6,
            Known::Ib(_) => AF_IB.into(),
        }
    }

    fn length(self) -> u32 {
        match self {
            Known::Ip(address) => length(address),
            Known::Ib(address) => size_of_val(&address) as u32,
        }
    }

    fn in_c(self) -> rdma_sockaddr {
        match self {
            Known::Ip(address) => in_c(address),
            Known::Ib(address) => ib::in_union(address),
        }
    }
}

/// Result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    source: Option<Known>,
    destination: Option<Known>,
}

/// Looks up a node and a service, either of which may be missing. With neither, returns the
/// addresses in the hints, if any.
///
/// # Errors
///
/// The error of `getaddrinfo(3)`, `EAI_...`.
fn look_up(node: Option<&str>, service: Option<&str>, hints: &Hints) -> Result<Found, i32> {
    let mut found = Found { source: hints.source, destination: hints.destination };
    if node.is_some() || service.is_some() {
        let mut flags = 0;
        if hints.passive {
            flags |= libc::AI_PASSIVE;
        }
        if hints.numeric {
            flags |= libc::AI_NUMERICHOST;
        }
        let asked = AddrInfoHints {
            socktype: hints.socktype,
            protocol: hints.protocol,
            address: hints.family,
            flags,
        };
        let addresses = getaddrinfo(node, service, Some(asked)).map_err(|e| e.error_num())?;
        let first = Known::Ip(addresses.flatten().next().ok_or(libc::EAI_NONAME)?.sockaddr);
        if hints.passive {
            found.source = Some(first);
        } else {
            found.destination = Some(first);
        }
    }
    Ok(found)
}

/// A result list with one entry, and storage for its addresses.
#[repr(C)]
struct Answer {
    head: rdma_addrinfo,
    source: rdma_sockaddr,
    destination: rdma_sockaddr,
}

/// Body of a result list. The head holds all the data for the program.
struct AddressList {
    /// The session, for the calls that use the result.
    _device: Option<Arc<Device>>,
}

impl Body for AddressList {
    type Head = Answer;
    const KIND: Kind = Kind::AddressInfo;
}

fn get(node: Text, service: Text, hints: In<rdma_addrinfo>, to: Out<*mut rdma_addrinfo>) -> c_int {
    let (Ok(node), Ok(service)) = (node.read(), service.read()) else {
        log::debug(|| "rdma_getaddrinfo: node or service is not UTF-8".to_owned());
        return libc::EAI_NONAME;
    };
    let to = match to.required("res") {
        Ok(to) => to,
        Err(errno) => return minus_one(Err(errno)),
    };
    let hints = hints.optional();
    let hints = hints.as_ref();
    if node.is_none() && service.is_none() && hints.is_none() {
        let errno = invalid!("rdma_getaddrinfo: node, service and hints are all null");
        return minus_one(Err(errno));
    }
    // As in librdmacm, the session is opened first. Without a daemon the call has no rules.
    let device = session::open().ok();
    let admitted = device.as_ref().map_or(Ok(()), |of| of.admit(Function::GetAddrInfo.call()));
    if admitted.is_err() {
        return minus_one(admitted.map_err(|errno| errno.of("rdma_getaddrinfo")));
    }
    let wanted = known(hints);
    let in_ib = wanted.in_ib;
    let answered = look_up(node, service, &wanted)
        .map(|found| answer(found, in_ib, hints, device).map(|answer| to.write(answer)));
    match answered {
        Ok(answered) => minus_one(answered),
        Err(error) => {
            log::debug(|| {
                let node = node.unwrap_or("(null)");
                let service = service.unwrap_or("(null)");
                format!(
                    "rdma_getaddrinfo: no address for node {node}, service {service}: error \
                     {error} of getaddrinfo(3)"
                )
            });
            error
        }
    }
}

fn known(hints: Option<&rdma_addrinfo>) -> Hints {
    let Some(hints) = hints else { return Hints::default() };
    let address = |at: *mut sockaddr, length| {
        // SAFETY: `at` points to `length` bytes (rdma_getaddrinfo(3)).
        let address = unsafe { Address::with_length(at, length) }?;
        let ib = || address.read_ib().map(Known::Ib);
        address.read().map(Known::Ip).or_else(ib)
    };
    let stream = libc::SOCK_STREAM;
    let datagrams = libc::SOCK_DGRAM;
    let socktype = match (hints.ai_qp_type.cast_unsigned(), hints.ai_port_space.cast_unsigned()) {
        (IBV_QPT_UD, _) => datagrams,
        (0, RDMA_PS_UDP) => 0,
        _ => stream,
    };
    let protocol = match hints.ai_port_space.cast_unsigned() {
        RDMA_PS_TCP => libc::IPPROTO_TCP,
        RDMA_PS_UDP | RDMA_PS_IPOIB => libc::IPPROTO_UDP,
        _ => 0,
    };
    let wants_ib = hints.ai_family == i32::from(AF_IB);
    Hints {
        socktype,
        protocol,
        passive: hints.ai_flags & RAI_PASSIVE != 0,
        numeric: hints.ai_flags & RAI_NUMERICHOST != 0,
        family: if hints.ai_flags & RAI_FAMILY != 0 && !wants_ib { hints.ai_family } else { 0 },
        // As in librdmacm: names have IP addresses.
        in_ib: wants_ib && hints.ai_flags & ALL_IB == ALL_IB,
        source: address(hints.ai_src_addr, hints.ai_src_len),
        destination: address(hints.ai_dst_addr, hints.ai_dst_len),
    }
}

fn answer(
    mut found: Found,
    in_ib: bool,
    hints: Option<&rdma_addrinfo>,
    device: Option<Arc<Device>>,
) -> Result<*mut rdma_addrinfo, Errno> {
    let mut answer: Answer = Answer { head: zeroed(), source: zeroed(), destination: zeroed() };
    let asked = |of: fn(&rdma_addrinfo) -> c_int| hints.map(of).filter(|&n| n != 0);
    answer.head.ai_flags = hints.map_or(0, |hints| hints.ai_flags);
    let [tcp, udp] = [RDMA_PS_TCP, RDMA_PS_UDP].map(|space| space.cast_signed());
    let [rc, ud] = [IBV_QPT_RC, IBV_QPT_UD].map(|kind| kind.cast_signed());
    // Port space and QP type imply each other.
    let kind = asked(|hints| hints.ai_qp_type);
    let space = asked(|hints| hints.ai_port_space);
    answer.head.ai_qp_type = kind.unwrap_or(if space == Some(udp) { ud } else { rc });
    answer.head.ai_port_space = space.unwrap_or(if kind == Some(ud) { udp } else { tcp });
    if in_ib {
        let space = answer.head.ai_port_space.cast_unsigned();
        for end in [&mut found.source, &mut found.destination] {
            if let Some(Known::Ip(address)) = *end {
                *end = Some(Known::Ib(ib::found(address, space)));
            }
        }
    }
    let Found { source, destination } = found;
    answer.head.ai_family = match destination.or(source) {
        Some(known) => known.family(),
        None => hints.map_or(0, |hints| hints.ai_family),
    };
    answer.source = source.map_or_else(zeroed, Known::in_c);
    answer.destination = destination.map_or_else(zeroed, Known::in_c);
    let list = live::<AddressList>(publish(answer, AddressList { _device: device }).as_ptr())?;
    let at = Fields::at(&list);
    if let Some(source) = source {
        set!(list.head.ai_src_len = source.length());
        // SAFETY: the list is live.
        set!(list.head.ai_src_addr = unsafe { &raw mut (*at).source }.cast());
    }
    if let Some(destination) = destination {
        set!(list.head.ai_dst_len = destination.length());
        // SAFETY: as above.
        set!(list.head.ai_dst_addr = unsafe { &raw mut (*at).destination }.cast());
    }
    Ok(at.cast())
}

/// Flags with which the result has the family of the hints even if it is `AF_IB`.
const ALL_IB: c_int = RAI_FAMILY | RAI_NUMERICHOST;

fn free(list: *mut rdma_addrinfo) -> Result<(), Errno> {
    if list.is_null() {
        return Ok(());
    }
    // SAFETY: no thread uses `list`, now or later (rdma_freeaddrinfo(3)).
    unsafe { withdraw::<AddressList>(list.cast()) }.map(drop)
}

entry! {
    uncancelled rdma_getaddrinfo(
        node: Text, service: Text, hints: In<rdma_addrinfo>, to: Out<*mut rdma_addrinfo>,
    ) -> value<c_int> = get;
    plain rdma_freeaddrinfo(list: *mut rdma_addrinfo) -> nothing = free;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_the_peer_unless_the_program_listens() {
        let hints = Hints { numeric: true, ..Hints::default() };
        let here = Known::Ip("127.0.0.1:7471".parse().expect("an address"));
        let active = look_up(Some("127.0.0.1"), Some("7471"), &hints);
        assert_eq!(active, Ok(Found { source: None, destination: Some(here) }));
        let passive = Hints { passive: true, ..hints };
        let found = look_up(Some("127.0.0.1"), Some("7471"), &passive);
        assert_eq!(found, Ok(Found { source: Some(here), destination: None }));
        let found = look_up(None, Some("7471"), &Hints { family: libc::AF_INET, ..passive });
        assert_eq!(found.map(|f| f.source), Ok(Some(Known::Ip(([0; 4], 7471).into()))));
        let known = Hints { destination: Some(here), ..hints };
        assert_eq!(look_up(None, None, &known).map(|f| f.destination), Ok(Some(here)));
        assert_eq!(look_up(None, None, &hints), Ok(Found { source: None, destination: None }));
        assert_eq!(look_up(Some("no number"), None, &hints), Err(libc::EAI_NONAME));
    }
}
