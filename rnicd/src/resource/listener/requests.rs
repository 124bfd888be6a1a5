//! Binding addresses and listening there: who may use which.

use std::net::SocketAddr;

use rnic_core::abi::control::{Refusal, ReplyBody};
use rnic_core::types::*;

use super::Listener;
use crate::cm::BindTo;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::{Manager, find, refuse};

/// Ports of which kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::resource) enum PortSpace {
    /// `RDMA_PS_TCP`.
    Connections,
    /// `RDMA_PS_UDP`.
    Datagrams,
}

impl Manager {
    pub(in crate::resource) fn bind(
        &mut self,
        id: SessionId,
        (space, to): (PortSpace, BindTo),
        context: u64,
        now: Time,
    ) -> Answer {
        let address = to.address;
        self.may_serve(id, address)?;
        let session = find(&mut self.sessions, id)?;
        self.policy.may_reach(&session.client.identity, "bind", address)?;
        let charge = session.account.charge(Kind::Listeners, 1)?;
        let handle = self.handles.listeners.allocate(id);
        let listener = ListenerId(handle.number());
        let address = match space {
            PortSpace::Connections => self.cm.bind(id, listener, to)?,
            PortSpace::Datagrams => self.cm.bind_datagrams(id, listener, to)?,
        };
        // A port may have been chosen that no rule allows; nobody listens on it yet.
        if let Err(refusal) = self.policy.may_listen(&session.client.identity, address) {
            self.cm.close_listener(listener, now)?;
            return Err(refusal);
        }
        let object = Listener { context, address, _handle: handle, _charge: charge };
        session.listeners.insert(listener, object);
        Outcome::now(ReplyBody::Listener { listener, address })
    }

    /// Refuses an address of this end that connections may not come to.
    pub(in crate::resource) fn may_serve(
        &mut self,
        id: SessionId,
        address: SocketAddr,
    ) -> Result<(), Refusal> {
        let allowed = &self.config.device.addresses;
        if !allowed.is_empty() && !allowed.contains(&address.ip()) {
            return Err(Refusal::NotAllowed {
                rule: "device.addresses".to_owned(),
                what: format!("serve {address}"),
            });
        }
        let session = find(&mut self.sessions, id)?;
        self.policy.may_listen(&session.client.identity, address)
    }

    pub(in crate::resource) fn listen(
        &mut self,
        id: SessionId,
        listener: ListenerId,
        backlog: u32,
    ) -> Answer {
        find(&mut self.sessions, id)?.listener(listener)?;
        let most = self.config.limits.device.of(Kind::Backlog);
        refuse::at_most("backlog", u64::from(backlog), "limits.backlog", most)?;
        self.cm.listen(listener, backlog)?;
        let address = find(&mut self.sessions, id)?.listener(listener)?.address;
        self.note("listening", Some(id), format!("{address}, backlog {backlog}"));
        Outcome::done()
    }

    pub(in crate::resource) fn close_listener(
        &mut self,
        id: SessionId,
        listener: ListenerId,
        now: Time,
    ) -> Answer {
        let session = find(&mut self.sessions, id)?;
        session.listener(listener)?;
        self.cm.close_listener(listener, now)?;
        session.listeners.remove(&listener);
        session.requests.retain(|_, of| *of != listener);
        Outcome::done()
    }
}
