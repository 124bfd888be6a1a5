//! Socket addresses of C.

use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{AF_INET, AF_INET6, sockaddr, sockaddr_in, sockaddr_in6};

use crate::c::rdma_sockaddr;

/// Reads an address. Returns `None` for a null pointer and for families other than IPv4 and IPv6.
pub(crate) unsafe fn read(from: *const sockaddr) -> Option<SocketAddr> {
    // SAFETY: `from` is null or points to an address with the size and alignment of its family.
    unsafe {
        match i32::from(from.as_ref()?.sa_family) {
            AF_INET => {
                let from = &*from.cast::<sockaddr_in>();
                let ip = u32::from_be(from.sin_addr.s_addr).into();
                Some(SocketAddrV4::new(ip, u16::from_be(from.sin_port)).into())
            }
            AF_INET6 => {
                let from = &*from.cast::<sockaddr_in6>();
                let ip = from.sin6_addr.s6_addr.into();
                let port = u16::from_be(from.sin6_port);
                let address = SocketAddrV6::new(ip, port, from.sin6_flowinfo, from.sin6_scope_id);
                Some(address.into())
            }
            _ => None,
        }
    }
}

/// Returns the C form of an address.
pub(crate) fn in_c(address: SocketAddr) -> rdma_sockaddr {
    // SAFETY: zeros are an address of no family.
    let mut to: rdma_sockaddr = unsafe { std::mem::zeroed() };
    match address {
        SocketAddr::V4(address) => {
            to.sin = sockaddr_in {
                sin_family: AF_INET as u16,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*address.ip()).to_be() },
                sin_zero: [0; 8],
            };
        }
        SocketAddr::V6(address) => {
            to.sin6 = sockaddr_in6 {
                sin6_family: AF_INET6 as u16,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            };
        }
    }
    to
}

/// Returns the length of an address in bytes.
pub(crate) fn length(address: SocketAddr) -> u32 {
    let length = match address {
        SocketAddr::V4(_) => size_of::<sockaddr_in>(),
        SocketAddr::V6(_) => size_of::<sockaddr_in6>(),
    };
    length as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_were_written() {
        for text in ["127.0.0.1:7471", "[fe80::1%3]:80", "[2001:db8::7]:65535"] {
            let address: SocketAddr = text.parse().expect("an address");
            let written = in_c(address);
            // SAFETY: it has just been written.
            let read = unsafe { read((&raw const written).cast()) };
            assert_eq!(read, Some(address));
        }
        // SAFETY: null is no address.
        assert_eq!(unsafe { read(std::ptr::null()) }, None);
    }
}
