//! Starts sessions. Creates all initial objects of a session, or none.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rnic_abi::abi::ABI_VERSION;
use rnic_abi::abi::control::{Features, HelloReply, HelloStatus, Refusal};
use rnic_abi::shm::doorbell::DoorbellScanner;
use rnic_abi::types::*;
use rustix::event::{EventfdFlags, eventfd};

use super::{Client, Session};
use crate::config::Loopback;
use crate::events::EventSender;
use crate::privilege::Peer;
use crate::resource::Manager;
use crate::resource::ledger::{Account, Charge, Kind};
use crate::resource::policy::Identity;
use crate::resource::queue::Arenas;
use crate::worker::Command;

/// The reply to Hello, and the event channel of the new session.
pub struct SessionOpened {
    /// The reply to Hello.
    pub reply: HelloReply,
    /// Descriptors for the reply.
    pub descriptors: Vec<OwnedFd>,
    /// The session's event channel. Must be flushed after the client has read from it.
    pub events: Arc<EventSender>,
}

impl Manager {
    /// Starts a session for a client.
    pub fn open_session(&mut self, peer: &Peer) -> Result<(SessionId, SessionOpened), HelloStatus> {
        let foreign = self.network.is_none() || peer.network != self.network;
        let identity = Identity { uid: peer.uid, gids: peer.groups.clone(), foreign };
        let rights = self.policy.rights(&identity);
        // Administrators can still connect, because one of them must end the draining.
        if self.draining && !rights.admin {
            return Err(HelloStatus::Draining);
        }
        let account = self.ledger.open(rights.clone());
        let (charge, arena) = charge_session(&account, self.capacity.workers)?;
        let handle = self.handles.sessions.allocate(SessionId(0));
        let id = SessionId(handle.number());
        let command = peer.command.clone();
        let client = Client { pid: peer.pid, identity, command, rights: rights.clone() };
        match self.prepare_session(id, &account, arena, client.is_trusted()) {
            Ok((arenas, welcome)) => {
                let quota = self.capacity.quota(&rights);
                self.cm.set_quota(id, quota);
                let events = welcome.events.clone();
                let most = rights.session_count(Kind::Diagnoses) as usize;
                self.records.diagnoses.open(id, client.account(), most);
                let session = Session::new(id, client, account, arenas, events, handle, charge);
                self.sessions.insert(id, session);
                self.publish_ruled_calls(id);
                Ok((id, welcome))
            }
            Err(error) => {
                if let Some(suppressed) = self.log_limits.count("no session", Instant::now()) {
                    let pid = peer.pid;
                    tracing::warn!(%error, pid, suppressed, "cannot create a session");
                }
                Err(HelloStatus::Resources)
            }
        }
    }

    fn prepare_session(
        &mut self,
        id: SessionId,
        account: &Arc<Account>,
        arena: Charge,
        is_trusted: bool,
    ) -> io::Result<(Arenas, SessionOpened)> {
        let workers = self.capacity.workers;
        let mut features = Features::empty();
        features.set(Features::DIRECT_PATH, self.is_direct());
        features.set(Features::LIBRARY_COPIES, !is_trusted);
        let features = features.bits();
        let (arenas, arena) = Arenas::open(id, account, arena, workers, self.generation, features)?;
        let first = arenas.first().ok_or(io::ErrorKind::NotFound)?.clone();
        let (events, channel) =
            EventSender::pair(self.config.limits.device.count(Kind::Events) as usize)?;
        let events = Arc::new(events);
        let mut descriptors = vec![arena, channel];
        let user = UserId(account.rights().uid);
        let mut commands = Vec::new();
        for worker in 0..workers {
            let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let eventfd = bell.as_fd().try_clone_to_owned()?;
            descriptors.push(bell);
            let scanner = DoorbellScanner::new(first.clone(), worker).map_err(io::Error::other)?;
            let events = events.clone();
            commands.push(Command::Attach { session: id, user, scanner, eventfd, events });
        }
        for (worker, command) in (0..).zip(commands) {
            self.workers.one(worker, command);
        }
        let reply = HelloReply {
            status: HelloStatus::Ok as u32,
            version: ABI_VERSION,
            // The configuration limits workers to 64 and the first arena to well below 4 GiB.
            workers: workers as u16,
            session: id,
            arena_len: first.len() as u32,
            features,
        };
        Ok((arenas, SessionOpened { reply, descriptors, events }))
    }

    fn is_direct(&self) -> bool {
        self.config.engine.loopback == Loopback::Direct
    }
}

/// Charges a session and its first arena. Sessions that are being closed still count, because they
/// hold memory and descriptors.
fn charge_session(account: &Arc<Account>, workers: u32) -> Result<(Charge, Charge), HelloStatus> {
    let rights = account.rights();
    let refused = |refusal: Refusal| {
        tracing::debug!(user = rights.uid, %refusal, "session refused");
        match refusal {
            Refusal::Limit { key, .. } if key == "limits.sessions" => HelloStatus::SessionLimit,
            Refusal::Limit { key, .. } if key == rights.user_key(Kind::Sessions) => {
                HelloStatus::UserSessions
            }
            _ => HelloStatus::Resources,
        }
    };
    let charge = account.charge(Kind::Sessions, 1).map_err(refused)?;
    let arena = Arenas::first_length(workers) as u64;
    Ok((charge, account.charge(Kind::ArenaBytes, arena).map_err(refused)?))
}
