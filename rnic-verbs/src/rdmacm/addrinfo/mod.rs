//! Name resolution (`rdma_getaddrinfo(3)`).

pub(crate) mod entry;

use std::net::SocketAddr;

use dns_lookup::{AddrInfoHints, getaddrinfo};

/// Hints of the program (`struct rdma_addrinfo`).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hints {
    /// The address is for listening.
    pub(crate) passive: bool,
    /// `SOCK_STREAM` or `SOCK_DGRAM` for the QP type; 0 for any.
    pub(crate) socktype: i32,
    /// `IPPROTO_TCP` or `IPPROTO_UDP` for the port space; 0 for any.
    pub(crate) protocol: i32,
    /// The node is a numeric address, not a name.
    pub(crate) numeric: bool,
    /// `AF_INET` or `AF_INET6`; 0 for any.
    pub(crate) family: i32,
    pub(crate) source: Option<SocketAddr>,
    pub(crate) destination: Option<SocketAddr>,
}

/// Result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) source: Option<SocketAddr>,
    pub(crate) destination: Option<SocketAddr>,
}

/// Looks up a node and a service, either of which may be missing. Without both, returns the
/// addresses of the hints, if any.
///
/// # Errors
///
/// The error of `getaddrinfo(3)`, `EAI_...`.
pub(crate) fn look_up(
    node: Option<&str>,
    service: Option<&str>,
    hints: &Hints,
) -> Result<Found, i32> {
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
        let first = addresses.flatten().next().ok_or(libc::EAI_NONAME)?.sockaddr;
        if hints.passive {
            found.source = Some(first);
        } else {
            found.destination = Some(first);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_the_peer_unless_the_program_listens() {
        let hints = Hints { numeric: true, ..Hints::default() };
        let here: SocketAddr = "127.0.0.1:7471".parse().expect("an address");
        let active = look_up(Some("127.0.0.1"), Some("7471"), &hints);
        assert_eq!(active, Ok(Found { source: None, destination: Some(here) }));
        let passive = Hints { passive: true, ..hints };
        let found = look_up(Some("127.0.0.1"), Some("7471"), &passive);
        assert_eq!(found, Ok(Found { source: Some(here), destination: None }));
        let found = look_up(None, Some("7471"), &Hints { family: libc::AF_INET, ..passive });
        assert_eq!(found.map(|f| f.source), Ok(Some(([0; 4], 7471).into())));
        let known = Hints { destination: Some(here), ..hints };
        assert_eq!(look_up(None, None, &known).map(|f| f.destination), Ok(Some(here)));
        assert_eq!(look_up(None, None, &hints), Ok(Found { source: None, destination: None }));
        assert_eq!(look_up(Some("no number"), None, &hints), Err(libc::EAI_NONAME));
    }
}
