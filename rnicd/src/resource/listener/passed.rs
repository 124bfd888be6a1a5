//! Connections over TCP sockets that clients have connected and passed.
//!
//! The daemon's calls on such a socket never wait for data or buffer space, but the kernel
//! serialises all calls on a socket. A client that sends from memory whose page faults it handles
//! itself (a mapped file of its FUSE file system) can hold the socket lock indefinitely, and so
//! block the daemon's next call regardless of flags (observed with userfaultfd). So a client may
//! pass sockets only if it could stop the daemon anyway, or if it has `sockets = true`.

use std::net::TcpStream;

use rnic_abi::abi::control::{Event, Refusal, ReplyBody};
use rnic_abi::types::*;

use super::Listener;
use crate::cm;
use crate::reaper::Passed;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::{Manager, find};
use crate::socket::Socket;

impl Manager {
    pub(in crate::resource) fn serve_over(
        &mut self,
        id: SessionId,
        context: u64,
        descriptor: Passed,
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

    /// Notifies a session that a connection which it has passed has ended without a request.
    pub(in crate::resource) fn no_request(&mut self, listener: ListenerId, reason: String) {
        let Some((session, context)) = self.session_of_listener(listener) else { return };
        let request = RequestId(0);
        session.tell(&Event::RequestWithdrawn { listener, context, request, reason });
    }

    /// Returns an error if too many passed descriptors wait to be closed, because each of them
    /// occupies a descriptor of the daemon.
    pub fn may_pass(&self, user: u32, id: Option<SessionId>) -> Result<(), Refusal> {
        let Some(session) = id.and_then(|id| self.sessions.get(&id)) else { return Ok(()) };
        let rights = session.account.rights();
        let check = |used: usize, limit: u64, key: &dyn Fn() -> String| {
            if used as u64 >= limit {
                Err(Refusal::Limit { key: key(), limit, used: used as u64, wanted: 1 })
            } else {
                Ok(())
            }
        };
        let limit = self.capacity.closing_of_user(rights.user_count(Kind::Closing));
        check(self.reaper.closing(user), limit, &|| rights.user_key(Kind::Closing))?;
        let key = || self.capacity.closing_key(self.config.limits.device.count(Kind::Closing));
        check(self.reaper.closing_of_all(), self.capacity.closing, &key)
    }

    /// Returns the maximum number of client descriptors that may wait to be closed.
    pub fn most_closing(&self) -> u64 {
        self.capacity.closing.max(1)
    }

    /// Takes a passed socket. From here on only the reaper closes it, because a close may block.
    pub(in crate::resource) fn passed(
        &mut self,
        id: SessionId,
        descriptor: Passed,
    ) -> Result<Socket, Refusal> {
        let client = &find(&mut self.sessions, id)?.client;
        let user = client.identity.uid;
        if client.may_pass_sockets() {
            let stream = TcpStream::from(descriptor.into_inner());
            return Ok(Socket::passed(stream, user, self.reaper.clone()));
        }
        let what = format!("pass a TCP socket as user {user}");
        Err(Refusal::NotAllowed { rule: "user.sockets".to_owned(), what })
    }
}
