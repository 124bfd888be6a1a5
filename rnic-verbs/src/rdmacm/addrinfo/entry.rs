//! Name resolution (`rdma_getaddrinfo(3)`).

use std::ffi::{CStr, c_char, c_int};
use std::net::SocketAddr;
use std::ptr::null_mut;

use libc::sockaddr;

use crate::c::*;
use crate::errno::{Errno, minus_one};
use crate::ffi::handles::{Body, Kind, publish, withdraw, zeroed};
use crate::rdmacm::{Hints, look_up};
use crate::{log, system};

use crate::ffi::socket_address as addresses;

/// A result list with one entry, and the storage of its addresses.
#[repr(C)]
struct Answer {
    head: rdma_addrinfo,
    source: rdma_sockaddr,
    destination: rdma_sockaddr,
}

/// Body of a result list. The head holds all the data.
struct AddressList;

impl Body for AddressList {
    type Head = Answer;
    const KIND: Kind = Kind::AddressInfo;
}

/// rdma_getaddrinfo(3).
pub(crate) unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    to: *mut *mut rdma_addrinfo,
) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: `node` and `service` are null or C strings, `hints` is null or valid, and `to` has
    // room for a pointer (rdma_getaddrinfo(3)).
    unsafe {
        let (Ok(node), Ok(service)) = (text(node), text(service)) else {
            log::debug(|| "rdma_getaddrinfo: node or service is not UTF-8".to_owned());
            return libc::EAI_NONAME;
        };
        let hints = hints.as_ref();
        if node.is_none() && service.is_none() && hints.is_none() {
            let reason = format_args!("rdma_getaddrinfo: node, service and hints are all null");
            return minus_one(Err(Errno::invalid(reason)));
        }
        match look_up(node, service, &known(hints)) {
            Ok(found) => {
                to.write(answer(found.source, found.destination, hints));
                0
            }
            Err(error) => {
                log::debug(|| format!("no address for {node:?}, {service:?}: EAI error {error}"));
                error
            }
        }
    }
}

/// Returns the text of a C string, or `None` for a null pointer.
unsafe fn text<'a>(from: *const c_char) -> Result<Option<&'a str>, std::str::Utf8Error> {
    if from.is_null() {
        return Ok(None);
    }
    // SAFETY: `from` is not null, so it is a C string, which does not change during the call.
    unsafe { CStr::from_ptr(from) }.to_str().map(Some)
}

unsafe fn known(hints: Option<&rdma_addrinfo>) -> Hints {
    let Some(hints) = hints else { return Hints::default() };
    let address = |at: *mut sockaddr, length| match length {
        0 => None,
        // SAFETY: a length other than 0 means that `at` points to an address (rdma_getaddrinfo(3)).
        _ => unsafe { addresses::read(at) },
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
    Hints {
        socktype,
        protocol,
        passive: hints.ai_flags & RAI_PASSIVE != 0,
        numeric: hints.ai_flags & RAI_NUMERICHOST != 0,
        family: if hints.ai_flags & RAI_FAMILY != 0 { hints.ai_family } else { 0 },
        source: address(hints.ai_src_addr, hints.ai_src_len),
        destination: address(hints.ai_dst_addr, hints.ai_dst_len),
    }
}

fn answer(
    source: Option<SocketAddr>,
    destination: Option<SocketAddr>,
    hints: Option<&rdma_addrinfo>,
) -> *mut rdma_addrinfo {
    // SAFETY: zeros are an address of no family.
    let none = || unsafe { std::mem::zeroed::<rdma_sockaddr>() };
    let mut answer = Answer {
        head: zeroed(),
        source: source.map_or_else(none, addresses::in_c),
        destination: destination.map_or_else(none, addresses::in_c),
    };
    answer.head.ai_family = match destination.or(source) {
        Some(SocketAddr::V4(_)) => libc::AF_INET,
        Some(SocketAddr::V6(_)) => libc::AF_INET6,
        None => hints.map_or(0, |hints| hints.ai_family),
    };
    let asked = |of: fn(&rdma_addrinfo) -> c_int| hints.map(of).filter(|&n| n != 0);
    answer.head.ai_flags = hints.map_or(0, |hints| hints.ai_flags);
    let [tcp, udp] = [RDMA_PS_TCP, RDMA_PS_UDP].map(|space| space.cast_signed());
    let [rc, ud] = [IBV_QPT_RC, IBV_QPT_UD].map(|kind| kind.cast_signed());
    // Port space and QP type imply each other.
    let kind = asked(|hints| hints.ai_qp_type);
    let space = asked(|hints| hints.ai_port_space);
    answer.head.ai_qp_type = kind.unwrap_or(if space == Some(udp) { ud } else { rc });
    answer.head.ai_port_space = space.unwrap_or(if kind == Some(ud) { udp } else { tcp });
    let answer = publish(answer, AddressList).as_ptr();
    // SAFETY: the program does not have it yet.
    unsafe {
        let head = &raw mut (*answer).head;
        if let Some(source) = source {
            (*head).ai_src_len = addresses::length(source);
            (*head).ai_src_addr = (&raw mut (*answer).source).cast();
        }
        if let Some(destination) = destination {
            (*head).ai_dst_len = addresses::length(destination);
            (*head).ai_dst_addr = (&raw mut (*answer).destination).cast();
        }
        (*head).ai_next = null_mut();
        head
    }
}

/// rdma_freeaddrinfo(3).
pub(crate) unsafe extern "C" fn rdma_freeaddrinfo(list: *mut rdma_addrinfo) {
    if !list.is_null() {
        // SAFETY: no other thread uses `list`, now or later (rdma_freeaddrinfo(3)).
        let withdrawn = unsafe { withdraw::<AddressList>(list.cast()) };
        withdrawn.map_or_else(|errno| errno.log(), drop);
    }
}
