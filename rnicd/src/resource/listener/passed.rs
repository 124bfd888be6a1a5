//! Connections over TCP sockets that clients made and passed: who may use which.
//!
//! A call on such a socket never waits for bytes or room, but the kernel serialises all calls on
//! one socket: a client that sends from memory of which it serves a page itself (a mapped file of a
//! FUSE file system) holds the socket for as long as it likes, and the daemon's next call with it,
//! whatever its flags (seen, by userfaultfd). So only clients may pass sockets that could
//! stop the daemon anyway, or whom a rule allows it (`sockets = true`).

use std::net::TcpStream;

use rnic_core::abi::control::{Event, Refusal, ReplyBody};
use rnic_core::types::*;

use super::Listener;
use crate::cm;
use crate::reaper::Passed;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::{Manager, find, refuse};
use crate::socket::Socket;

impl Manager {
    pub(in crate::resource) fn serve_over(
        &mut self,
        id: SessionId,
        context: u64,
        descriptor: Option<Passed>,
        now: Time,
    ) -> Answer {
        let socket = self.passed(id, descriptor)?;
        let addresses = cm::examine(&socket)?;
        self.may_serve(id, addresses.local)?;
        let session = find(&mut self.sessions, id)?;
        let charge = session.account.charge(Kind::Listeners, 1)?;
        let handle = self.handles.listeners.allocate(id);
        let listener = ListenerId(handle.number());
        self.cm.serve_over(id, listener, addresses, socket, now)?;
        let address = addresses.local;
        let object = Listener { context, address, _handle: handle, _charge: charge };
        session.listeners.insert(listener, object);
        Outcome::now(ReplyBody::Listener { listener, address })
    }

    /// Tells a session that a connection it passed brings no request.
    pub(in crate::resource) fn no_request(&mut self, listener: ListenerId, reason: String) {
        let Some(owner) = self.handles.listeners.owner(listener.0) else { return };
        let Ok(session) = find(&mut self.sessions, owner) else { return };
        let Ok(context) = session.listener(listener).map(|l| l.context) else { return };
        let request = RequestId(0);
        session.tell(&Event::RequestWithdrawn { listener, context, request, reason });
    }

    /// Refuses another descriptor of a user with too many that are not closed yet: each holds one
    /// of the daemon's.
    pub fn may_pass(&self, user: u32, id: Option<SessionId>) -> Result<(), Refusal> {
        let Some(session) = id.and_then(|id| self.sessions.get(&id)) else { return Ok(()) };
        let rights = session.account.rights();
        let check = |used: usize, limit: u64, key: &dyn Fn() -> String| match used as u64 >= limit {
            true => Err(Refusal::Limit { key: key(), limit, used: used as u64, wanted: 1 }),
            false => Ok(()),
        };
        let limit = self.capacity.closing_of_user(rights.user_count(Kind::Closing));
        check(self.reaper.closing(user), limit, &|| rights.user_key(Kind::Closing))?;
        let key = || self.capacity.closing_key(self.config.limits.device.count(Kind::Closing));
        check(self.reaper.closing_of_all(), self.capacity.closing, &key)
    }

    /// How many descriptors of clients may wait to be closed.
    pub fn most_closing(&self) -> u64 {
        self.capacity.closing.max(1)
    }

    /// What a client passed, from here on closed only where closing may take its time.
    pub(in crate::resource) fn passed(
        &mut self,
        id: SessionId,
        descriptor: Option<Passed>,
    ) -> Result<Socket, Refusal> {
        let descriptor = descriptor.ok_or_else(refuse::lost_descriptor)?;
        let client = &find(&mut self.sessions, id)?.client;
        let user = client.identity.uid;
        if client.may_pass_sockets() {
            let stream = TcpStream::from(descriptor.into_inner());
            return Ok(Socket::passed(stream, user, self.reaper.clone()));
        }
        let what = format!("a socket of user {user}");
        Err(Refusal::NotAllowed { rule: "user.sockets".to_owned(), what })
    }
}
