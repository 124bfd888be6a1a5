//! A worker's copy of the rules about one user's datagrams.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rnic_core::engine::DatagramRules;

use super::subjects::Members;
use super::{Identity, Policy, stays_on_host};
use crate::config::AddressRule;

/// Rules about the datagrams of a QP. Cloning shares the rules.
#[derive(Clone, Debug)]
pub struct DatagramPolicy {
    /// UDP port at both ends.
    port: u16,
    /// Addresses to send from and receive at. `None` without `[[listen]]` rules.
    listen: Option<Arc<[AddressRule]>>,
    /// Addresses to send to. `None` without `[[connect]]` rules.
    connect: Option<Arc<[AddressRule]>>,
    /// Addresses of this host or its links ([`stays_on_host`]) are allowed.
    host: bool,
}

impl Policy {
    /// Returns the rules about this client's datagrams, with this port at both ends.
    pub fn of_datagrams(&self, who: &Identity, port: u16) -> DatagramPolicy {
        let known = self.overflow.known(who);
        let of_client = |rules: &[(Members, AddressRule)]| {
            let matching = |(members, rule): &(Members, AddressRule)| {
                let is_one = known.as_ref().is_some_and(|w| members.contain(w));
                is_one.then(|| rule.clone())
            };
            (!rules.is_empty()).then(|| rules.iter().filter_map(matching).collect())
        };
        let listen = of_client(&self.listen);
        let connect = of_client(&self.connect);
        let loopback = SocketAddr::new([127, 0, 0, 1].into(), port);
        let host = self.may_reach(who, "send datagrams to", loopback).is_ok();
        DatagramPolicy { port, listen, connect, host }
    }
}

impl DatagramPolicy {
    fn allows(&self, rules: Option<&Arc<[AddressRule]>>, ip: IpAddr) -> bool {
        let address = SocketAddr::new(ip, self.port);
        (self.host || !stays_on_host(ip))
            && rules.is_none_or(|rules| rules.iter().any(|rule| rule.covers(address)))
    }
}

impl DatagramRules for DatagramPolicy {
    fn may_send(&self, from: IpAddr, to: IpAddr) -> bool {
        self.may_receive(from) && self.allows(self.connect.as_ref(), to)
    }

    fn may_receive(&self, at: IpAddr) -> bool {
        self.allows(self.listen.as_ref(), at)
    }
}
