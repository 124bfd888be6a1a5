//! Socket addresses of C.

use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{AF_INET, AF_INET6, sa_family_t, sockaddr, sockaddr_in, sockaddr_in6};

use crate::c::{AF_IB, rdma_sockaddr, sockaddr_ib};
use crate::ffi::handles::zeroed;
use crate::ffi::pointers::Argument;

/// A socket address that a program passes.
#[derive(Clone, Copy)]
pub(crate) struct Address(*const sockaddr);

impl Argument for Address {
    type C = *const sockaddr;

    unsafe fn from_c(c: *const sockaddr) -> Self {
        Address(c)
    }
}

impl Address {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Returns the address, or `None` for a null pointer and for families other than IPv4 and IPv6.
    pub(crate) fn read(self) -> Option<SocketAddr> {
        if self.is_null() {
            return None;
        }
        // SAFETY: `from_c` guarantees an address with the size of its family.
        unsafe {
            match i32::from((&raw const (*self.0).sa_family).read_unaligned()) {
                AF_INET => {
                    let from = self.0.cast::<sockaddr_in>().read_unaligned();
                    let ip = u32::from_be(from.sin_addr.s_addr).into();
                    Some(SocketAddrV4::new(ip, u16::from_be(from.sin_port)).into())
                }
                AF_INET6 => {
                    let from = self.0.cast::<sockaddr_in6>().read_unaligned();
                    let ip = from.sin6_addr.s6_addr.into();
                    let port = u16::from_be(from.sin6_port);
                    let flow = from.sin6_flowinfo;
                    Some(SocketAddrV6::new(ip, port, flow, from.sin6_scope_id).into())
                }
                _ => None,
            }
        }
    }

    /// Returns an address of the family `AF_IB`, or `None` for a null pointer and other families.
    pub(crate) fn read_ib(self) -> Option<sockaddr_ib> {
        if self.is_null() {
            return None;
        }
        // SAFETY: `from_c` guarantees an address with the size of its family.
        unsafe {
            let family = (&raw const (*self.0).sa_family).read_unaligned();
            (family == AF_IB).then(|| self.0.cast::<sockaddr_ib>().read_unaligned())
        }
    }

    /// Returns the argument for an address of `length` bytes, or `None` if that is too short for
    /// its family.
    ///
    /// # Safety
    ///
    /// `from` is null or points to `length` bytes.
    pub(crate) unsafe fn with_length(from: *const sockaddr, length: u32) -> Option<Address> {
        if from.is_null() || (length as usize) < size_of::<sa_family_t>() {
            return None;
        }
        // SAFETY: `length` includes the family.
        let family = unsafe { (&raw const (*from).sa_family).read_unaligned() };
        let needed = match i32::from(family) {
            AF_INET6 => size_of::<sockaddr_in6>(),
            _ if family == AF_IB => size_of::<sockaddr_ib>(),
            _ => size_of::<sockaddr_in>(),
        };
        if (length as usize) < needed { None } else { Some(Address(from)) }
    }
}

/// Returns the address in a structure of the library, or `None` if there is none.
pub(crate) fn from_c(address: &rdma_sockaddr) -> Option<SocketAddr> {
    // The union has the size of every family.
    Address(std::ptr::from_ref(address).cast()).read()
}

/// Returns the `AF_IB` address in a structure of the library, or `None` for other families.
pub(crate) fn ib_from_c(address: &rdma_sockaddr) -> Option<sockaddr_ib> {
    // As above.
    Address(std::ptr::from_ref(address).cast()).read_ib()
}

/// Returns the C form of an address.
pub(crate) fn in_c(address: SocketAddr) -> rdma_sockaddr {
    let mut to: rdma_sockaddr = zeroed();
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
            assert_eq!(from_c(&written), Some(address));
            let at = (&raw const written).cast();
            // SAFETY: the union is longer than each of these lengths.
            let read = |length| unsafe { Address::with_length(at, length) }.and_then(Address::read);
            assert_eq!(read(length(address)), Some(address));
            assert_eq!(read(length(address) - 1), None);
            assert_eq!(read(1), None);
        }
        assert_eq!(Address(std::ptr::null()).read(), None);
        assert_eq!(from_c(&zeroed()), None);
    }
}
