//! Attached memory: who may have regions in his own address space, and what becomes of them when it
//! is gone.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rnic_core::abi::control::{Event, Refusal};
use rnic_core::device::Memory;
use rnic_core::shm::AddressSpace;
use rnic_core::shm::attached::USER_END;
use rnic_core::types::*;

use super::session::{Client, Session};
use super::{Answer, Given, Manager, find, refuse};

/// A session's attached address space.
pub struct Attached {
    space: Arc<AddressSpace>,
    /// It has been found gone, its regions are revoked and the client has been told.
    gone: bool,
}

/// Whether workers may copy from and to this client's address space themselves. Such a copy waits
/// for whoever serves the client's pages, so only a user who could stop the daemon anyway may.
pub fn may_attach(client: &Client) -> bool {
    client.trusted || client.identity.uid == crate::privilege::own_user()
}

/// The memory of a new region at this address of the client.
pub fn attached_memory(session: &Session, address: u64, length: u64) -> Result<Memory, Refusal> {
    let Some(Attached { space, gone }) = &session.attached else {
        return Err(refuse::invalid("source", "this session has not attached its memory"));
    };
    if *gone {
        return Err(refuse::invalid("source", "the attached address space is gone"));
    }
    if address.checked_add(length).is_none_or(|end| end > USER_END) {
        let why = format!("{address:#x} plus {length} octets is no range of a program's addresses");
        return Err(refuse::invalid("address", why));
    }
    Ok(Memory::Attached { space: space.clone(), address })
}

impl Manager {
    /// `descriptor` may be anything: it is touched only if its owner may keep the daemon waiting,
    /// and if it is not wanted it is closed where that may take its time.
    pub(super) fn attach_memory(&mut self, id: SessionId, descriptor: OwnedFd) -> Answer {
        match self.examine_memory(id, descriptor) {
            Ok(()) => Given::done(),
            Err((refusal, descriptor)) => {
                self.reaper.close_suspect(descriptor);
                Err(refusal)
            }
        }
    }

    fn examine_memory(
        &mut self,
        id: SessionId,
        descriptor: OwnedFd,
    ) -> Result<(), (Refusal, OwnedFd)> {
        let session = match find(&mut self.sessions, id) {
            Ok(session) => session,
            Err(refusal) => return Err((refusal, descriptor)),
        };
        if !may_attach(&session.client) {
            let refusal = Refusal::NotAllowed {
                rule: "attached memory of other users needs a mover".to_owned(),
                what: format!("attaching memory of user {}", session.client.identity.uid),
            };
            return Err((refusal, descriptor));
        }
        if session.attached.is_some() {
            let by = "the address space attached before";
            return Err((refuse::in_use("session", id.0, by), descriptor));
        }
        match AddressSpace::adopt(descriptor, session.client.pid) {
            Ok(space) => {
                session.attached = Some(Attached { space, gone: false });
                Ok(())
            }
            Err((error, descriptor)) => {
                Err((refuse::invalid("memory", error.to_string()), descriptor))
            }
        }
    }

    /// A worker has found a session's address space gone: its regions there go as well. Every QP
    /// that meets it reports it; the first report counts.
    pub(super) fn memory_gone(&mut self, id: SessionId) {
        let Ok(session) = find(&mut self.sessions, id) else { return };
        match &mut session.attached {
            Some(attached) if !attached.gone => attached.gone = true,
            _ => return,
        }
        let mut revoked = 0;
        for mr in session.mrs.values().filter(|mr| mr.segment.is_none()) {
            // Nobody waits for it: whoever uses such an STag meanwhile meets the same end.
            self.workers.revoke_stag(mr.stag);
            revoked += 1;
        }
        let reason = "the attached address space has ended (by exec, or with its process)";
        tracing::info!(session = %id, pid = session.client.pid, revoked, reason, "memory detached");
        session.tell(&Event::Detached { reason: reason.to_owned() });
    }
}
