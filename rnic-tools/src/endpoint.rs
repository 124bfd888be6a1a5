//! Network endpoints, in the form that all programs accept: `HOST:PORT`.
//!
//! A host is a name (`localhost`), an IPv4 address, or an IPv6 address in brackets, with a scope
//! if necessary (`[fe80::1%eth0]`). A name may have several addresses: clients and servers try them
//! in the system's order.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

/// A host and a port, resolved when needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    port: u16,
}

/// Why no address of an endpoint could be used.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError<E: fmt::Display> {
    /// The name has no address.
    #[error("cannot find {endpoint}: {why}")]
    Unknown {
        /// Host and port as given.
        endpoint: Endpoint,
        /// Error of the resolver.
        why: String,
    },
    /// The only attempt failed, or an attempt for which another address would not help.
    #[error("{0}")]
    Failed(Box<E>),
    /// All addresses failed.
    #[error("cannot reach {endpoint}: {}", join_errors(tried))]
    Unreachable {
        /// Host and port as given.
        endpoint: Endpoint,
        /// The attempts in order.
        tried: Vec<E>,
    },
}

impl Endpoint {
    /// Parses `HOST:PORT` without resolving the host.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| format!("{text:?} is not HOST:PORT: {why}");
        let (host, port) = text.rsplit_once(':').ok_or_else(|| wrong("it has no port"))?;
        let port = port.parse().map_err(|_| wrong("the port is not a number from 0 to 65535"))?;
        let host = match host.strip_prefix('[').map(|rest| rest.strip_suffix(']')) {
            Some(Some(address)) if address.contains(':') => address,
            Some(_) => return Err(wrong("only IPv6 addresses are in brackets")),
            None if host.contains(':') => {
                return Err(wrong("an IPv6 address needs brackets, as in [::1]:7471"));
            }
            None => host,
        };
        match host {
            "" => Err(wrong("it has no host")),
            host => Ok(Endpoint { host: host.to_owned(), port }),
        }
    }

    /// Returns all addresses, in the system's order.
    pub fn addresses(&self) -> Result<Vec<SocketAddr>, String> {
        let found = (self.host.as_str(), self.port).to_socket_addrs();
        let mut addresses: Vec<SocketAddr> = Vec::new();
        for address in found.map_err(|e| self.not_found(&e))? {
            if let SocketAddr::V6(a) = address
                && a.ip().is_unicast_link_local()
                && a.scope_id() == 0
            {
                let ip = a.ip();
                return Err(format!("it is link-local: add the interface, as in [{ip}%eth0]"));
            }
            // The resolver may return an address once for each socket type.
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        if addresses.is_empty() {
            return Err("it has no address".to_owned());
        }
        Ok(addresses)
    }

    /// Adds a hint to the resolver's error, which is the same for an unknown name and interface.
    fn not_found(&self, error: &io::Error) -> String {
        match self.host.split_once('%') {
            Some((_, zone)) => format!("is there a network interface {zone:?} here? {error}"),
            None => error.to_string(),
        }
    }

    /// Calls `attempt` with each address until one succeeds, or fails with an error for which
    /// `may_try_next` returns false, so that another address would not help.
    pub fn try_each<T, E: fmt::Display>(
        &self,
        attempt: impl FnMut(SocketAddr) -> Result<T, E>,
        may_try_next: impl Fn(&E) -> bool,
    ) -> Result<T, EndpointError<E>> {
        match self.addresses() {
            Ok(addresses) => self.try_all(&addresses, attempt, may_try_next),
            Err(why) => Err(EndpointError::Unknown { endpoint: self.clone(), why }),
        }
    }

    fn try_all<T, E: fmt::Display>(
        &self,
        addresses: &[SocketAddr],
        mut attempt: impl FnMut(SocketAddr) -> Result<T, E>,
        may_try_next: impl Fn(&E) -> bool,
    ) -> Result<T, EndpointError<E>> {
        let mut tried = Vec::new();
        for address in addresses {
            match attempt(*address) {
                Ok(done) => return Ok(done),
                Err(e) if may_try_next(&e) && addresses.len() > 1 => tried.push(e),
                Err(e) => return Err(EndpointError::Failed(Box::new(e))),
            }
        }
        Err(EndpointError::Unreachable { endpoint: self.clone(), tried })
    }
}

/// The text that was parsed.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

fn join_errors<E: fmt::Display>(tried: &[E]) -> String {
    let each: Vec<String> = tried.iter().map(E::to_string).collect();
    each.join("; ")
}

/// Returns a loopback address with port 0: IPv4, or IPv6 on a host without IPv4.
pub fn loopback() -> SocketAddr {
    let four = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    match UdpSocket::bind(four) {
        Ok(_) => four,
        Err(_) => SocketAddr::from((Ipv6Addr::LOCALHOST, 0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(text: &str) -> Vec<SocketAddr> {
        Endpoint::parse(text).unwrap().addresses().unwrap()
    }

    #[test]
    fn hosts_are_names_and_addresses_of_both_kinds() {
        assert_eq!(addresses("127.0.0.1:80"), [([127, 0, 0, 1], 80).into()]);
        assert_eq!(addresses("[::1]:80"), ["[::1]:80".parse().unwrap()]);
        assert!(addresses("localhost:80").iter().all(|a| a.ip().is_loopback() && a.port() == 80));
        for text in ["127.0.0.1:80", "[::1]:80", "localhost:80", "[fe80::1%eth0]:80"] {
            assert_eq!(Endpoint::parse(text).unwrap().to_string(), text);
        }
        // The loopback interface has index 1 everywhere.
        let SocketAddr::V6(scoped) = addresses("[fe80::1%lo]:80")[0] else { panic!() };
        assert_eq!(scoped.scope_id(), 1);
        let SocketAddr::V6(scoped) = addresses("[fe80::1%2]:80")[0] else { panic!() };
        assert_eq!(scoped.scope_id(), 2);
    }

    #[test]
    fn link_local_addresses_have_their_interface() {
        let wrong = |text| Endpoint::parse(text).unwrap().addresses().unwrap_err();
        let e = wrong("[fe80::1]:80");
        assert!(e.contains("is link-local: add the interface"), "{e}");
        let e = wrong("[fe80::1%no-such]:80");
        assert!(e.contains("is there a network interface \"no-such\" here?"), "{e}");
    }

    #[test]
    fn invalid_endpoints_are_refused() {
        for (text, why) in [
            ("127.0.0.1", "it has no port"),
            ("127.0.0.1:99999", "the port is not a number"),
            ("localhost:", "the port is not a number"),
            (":80", "it has no host"),
            ("::1:80", "needs brackets"),
            ("[::1:80", "only IPv6 addresses are in brackets"),
            ("[localhost]:80", "only IPv6 addresses are in brackets"),
            ("", "it has no port"),
        ] {
            let e = Endpoint::parse(text).unwrap_err();
            assert!(e.contains(&format!("{text:?} is not HOST:PORT: ")) && e.contains(why), "{e}");
        }
    }

    #[test]
    fn addresses_are_tried_in_turn() {
        let endpoint = Endpoint::parse("host:7").unwrap();
        let addresses = ["[::1]:7", "127.0.0.1:7", "127.0.0.2:7"].map(|a| a.parse().unwrap());
        // Outcomes by address; returns the number of attempts and the result.
        let tried = |outcomes: &[Result<u8, &'static str>]| {
            let mut asked = 0;
            let attempt = |address| {
                assert_eq!(address, addresses[asked]);
                asked += 1;
                outcomes[asked - 1]
            };
            let outcome = endpoint.try_all(&addresses[..outcomes.len()], attempt, |e| *e != "gone");
            (asked, outcome.map_err(|e| e.to_string()))
        };
        assert_eq!(tried(&[Ok(1), Ok(2)]), (1, Ok(1)));
        assert_eq!(tried(&[Err("silent"), Err("refused"), Ok(3)]), (3, Ok(3)));
        assert_eq!(tried(&[Err("gone"), Ok(2)]), (1, Err("gone".to_owned())));
        assert_eq!(tried(&[Err("refused")]), (1, Err("refused".to_owned())));
        let all = "cannot reach host:7: silent; refused".to_owned();
        assert_eq!(tried(&[Err("silent"), Err("refused")]), (2, Err(all)));
    }
}
