//! Name resolution: tries all addresses of a name in turn, as `std::net` does.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

use crate::error::Error;

/// Calls `attempt` with each address until it succeeds. Stops at errors that another address cannot
/// fix.
pub(crate) fn try_each<T>(
    addresses: impl ToSocketAddrs,
    mut attempt: impl FnMut(SocketAddr) -> Result<T, Error>,
) -> Result<T, Error> {
    let resolved = addresses.to_socket_addrs().map_err(unresolved)?;
    let mut last = no_address();
    for address in resolved {
        match attempt(address) {
            Err(error) if concerns_address(&error) => last = error,
            settled => return settled,
        }
    }
    Err(last)
}

/// Returns true if another address may succeed.
pub(crate) fn concerns_address(error: &Error) -> bool {
    matches!(error, Error::Refused { .. } | Error::Unreachable { .. })
}

pub(crate) fn unresolved(error: io::Error) -> Error {
    Error::io("cannot resolve the address", error)
}

pub(crate) fn no_address() -> Error {
    unresolved(io::Error::new(io::ErrorKind::NotFound, "the name has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unreachable(address: SocketAddr) -> Error {
        Error::Unreachable { reason: address.to_string() }
    }

    #[test]
    fn each_address_is_tried_until_one_succeeds() {
        let [a, b, c] = [1, 2, 3].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let mut tried = Vec::new();
        let found = try_each(&[a, b, c][..], |address| {
            tried.push(address);
            if address == b { Ok(address.port()) } else { Err(unreachable(address)) }
        });
        assert_eq!((found.ok(), tried), (Some(2), vec![a, b]));
        let failed = try_each(&[a, b][..], |address| Err::<(), _>(unreachable(address)));
        assert_eq!(failed.unwrap_err().to_string(), unreachable(b).to_string());
    }

    #[test]
    fn other_errors_end_the_search() {
        let mut attempts = 0;
        let failed = try_each("127.0.0.1:1", |_| {
            attempts += 1;
            Err::<(), _>(Error::DaemonGone)
        });
        assert!(matches!(failed, Err(Error::DaemonGone)) && attempts == 1);
        let failed = try_each(&[][..], |_: SocketAddr| Ok(()));
        assert!(failed.unwrap_err().to_string().contains("no address"));
        let failed = try_each("127.0.0.1", |_| Ok(()));
        assert!(failed.unwrap_err().to_string().starts_with("cannot resolve the address"));
    }
}
