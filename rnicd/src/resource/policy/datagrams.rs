//! The rules about one user's datagrams, as a worker asks them: copies of those that concern him.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rnic_core::engine::DatagramRules;

use super::subjects::Members;
use super::{Identity, Policy, stays_on_host};
use crate::config::AddressRule;

/// Who may exchange datagrams with whom. A copy for each QP costs no more than a reference.
#[derive(Clone, Debug)]
pub struct DatagramPolicy {
    /// Port of UDP at either end.
    port: u16,
    /// Where they may be sent from and received at; none if there are no such rules.
    listen: Option<Arc<[AddressRule]>>,
    /// Where they may go; none if there are no such rules.
    connect: Option<Arc<[AddressRule]>>,
    /// Addresses that do not leave this host are among them.
    host: bool,
}

impl Policy {
    /// The rules about this client's datagrams, between ports of this number.
    pub fn of_datagrams(&self, who: &Identity, port: u16) -> DatagramPolicy {
        let known = self.overflow.known(who);
        let of_client = |rules: &[(Members, AddressRule)]| {
            let his = |(members, rule): &(Members, AddressRule)| {
                let is_one = known.as_ref().is_some_and(|w| members.contain(w));
                is_one.then(|| rule.clone())
            };
            (!rules.is_empty()).then(|| rules.iter().filter_map(his).collect())
        };
        let (listen, connect) = (of_client(&self.listen), of_client(&self.connect));
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
