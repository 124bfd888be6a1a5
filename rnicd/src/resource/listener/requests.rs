//! Requests to bind addresses and to listen, with checks of the rules.

use std::net::SocketAddr;

use rnic_abi::abi::control::{Refusal, ReplyBody};
use rnic_abi::roce::PortSpace;
use rnic_abi::types::*;

use super::Listener;
use crate::cm::BindTo;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::session::Session;
use crate::resource::{Manager, find, refuse};
use crate::system;

impl Manager {
    /// Binds a TCP address, or an address in a port space of the RoCE device.
    pub(in crate::resource) fn bind(
        &mut self,
        id: SessionId,
        space: Option<PortSpace>,
        to: BindTo,
        context: u64,
        now: Time,
    ) -> Answer {
        let address = to.address;
        self.may_serve(id, address)?;
        self.may_use_port(id, "bind", address)?;
        // Other daemons send requests for this port to `wired.port`.
        if space.is_some() && !self.wired_port.was_attempted() {
            self.open_wired_port();
        }
        let session = find(&mut self.sessions, id)?;
        self.policy.may_reach(&session.client.identity, "bind", address)?;
        let charge = session.account.charge(Kind::Listeners, 1)?;
        let handle = self.handles.listeners.allocate(id);
        let listener = ListenerId(handle.number());
        let address = match space {
            None => self.cm.bind(id, listener, to)?,
            Some(space) => self.cm.bind_service(id, listener, space, to)?,
        };
        // The kernel may have chosen a port that no rule allows. Nothing listens on it yet.
        if let Err(refusal) = self.policy.may_listen(&session.client.identity, address) {
            self.cm.close_listener(listener, now)?;
            return Err(refusal);
        }
        let object = Listener { context, address, _handle: handle, _charge: charge };
        session.listeners.insert(listener, object);
        Outcome::now(ReplyBody::Listener { listener, address })
    }

    /// Returns an error if the client may not accept connections at a local address.
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

    /// Returns an error if the kernel would not let the client use a local port because it is
    /// privileged. The kernel itself only checks the daemon, which may run as root, and does not
    /// check ports of the RoCE device.
    pub(in crate::resource) fn may_use_port(
        &mut self,
        id: SessionId,
        verb: &str,
        address: SocketAddr,
    ) -> Result<(), Refusal> {
        let who = &find(&mut self.sessions, id)?.client.identity;
        if who.uid == 0 || address.port() == 0 {
            return Ok(());
        }
        let first = system::first_unprivileged_port();
        if address.port() >= first || self.policy.names_port(who, address) {
            return Ok(());
        }
        Err(Refusal::NotAllowed {
            rule: "listen".to_owned(),
            what: format!(
                "{verb} {address} as user {}: ports below {first} \
                 (net.ipv4.ip_unprivileged_port_start) need root or a rule that lists them",
                who.uid
            ),
        })
    }

    /// Returns the session of a listener, and the listener's context. Returns `None` if the session
    /// is being closed.
    pub(in crate::resource) fn session_of_listener(
        &mut self,
        listener: ListenerId,
    ) -> Option<(&mut Session, u64)> {
        let owner = self.handles.listeners.owner(listener.0)?;
        let session = self.sessions.get_mut(&owner)?;
        let context = session.listener(listener).ok()?.context;
        Some((session, context))
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
        session.requests.retain(|_, of| of.listener != listener);
        self.end_held_accepts_of(listener);
        Outcome::done()
    }
}
