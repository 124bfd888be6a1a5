//! `[[listen]]` and `[[connect]]`: addresses that users may listen on and connect to.

use std::fmt;
use std::net::SocketAddr;

use super::addresses::{Network, Ports};
use super::file_rules::{ConnectTable, ListenTable};
use super::subjects::Subjects;

/// Allows some users to use some addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressRule {
    /// Users and groups that the rule permits.
    pub who: Subjects,
    /// Addresses that they may use.
    pub network: Network,
    /// Ports of these addresses.
    pub ports: Ports,
}

impl AddressRule {
    /// Returns true if the rule covers this address and port. The user is not checked.
    pub fn covers(&self, address: SocketAddr) -> bool {
        self.network.contains(address.ip()) && self.ports.contains(address.port())
    }

    /// Returns true if the rule covers this IP address, with any port.
    pub fn covers_host(&self, address: SocketAddr) -> bool {
        self.network.contains(address.ip())
    }
}

impl fmt::Display for AddressRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.network, self.ports)
    }
}

impl From<ListenTable> for AddressRule {
    fn from(t: ListenTable) -> Self {
        AddressRule { who: t.who, network: t.address, ports: t.ports }
    }
}

impl From<ConnectTable> for AddressRule {
    fn from(t: ConnectTable) -> Self {
        AddressRule { who: t.who, network: t.network, ports: t.ports }
    }
}
