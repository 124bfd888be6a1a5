//! Shared buffers: shared memory that is charged from before its allocation until it is unmapped.

use std::os::fd::AsFd;

use rnic_abi::abi::control::{Refusal, ReplyBody};
use rnic_abi::shm::{AdoptError, Mapping};
use rnic_abi::types::*;

use super::SharedBuffer;
use crate::reaper::Passed;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::uses::Users;
use crate::resource::{Manager, find, refuse};
use crate::system;

impl Manager {
    /// Adds a shared buffer. `F_GET_SEALS` has succeeded on the descriptor, so it is safe to use.
    pub(in crate::resource) fn add_shared_buffer(
        &mut self,
        id: SessionId,
        length: u64,
        memfd: Passed,
    ) -> Answer {
        let (buffer, mut object) = self.new_shared_buffer(id, length)?;
        object.fill(memfd)?;
        find(&mut self.sessions, id)?.shared_buffers.insert(buffer, object);
        Outcome::now(ReplyBody::SharedBuffer { buffer })
    }

    /// Charges a shared buffer without memory, so that the client learns of a limit before it
    /// allocates the memory.
    pub(in crate::resource) fn reserve_shared_buffer(
        &mut self,
        id: SessionId,
        length: u64,
    ) -> Answer {
        let (buffer, object) = self.new_shared_buffer(id, length)?;
        find(&mut self.sessions, id)?.shared_buffers.insert(buffer, object);
        Outcome::now(ReplyBody::SharedBuffer { buffer })
    }

    /// Gives a reserved shared buffer its memory. `memfd` has been checked as for
    /// [`Manager::add_shared_buffer`].
    pub(in crate::resource) fn fill_shared_buffer(
        &mut self,
        id: SessionId,
        buffer: SharedBufferId,
        memfd: Passed,
    ) -> Answer {
        find(&mut self.sessions, id)?.shared_buffer(buffer)?.fill(memfd)?;
        Outcome::done()
    }

    /// Charges a shared buffer without memory.
    fn new_shared_buffer(
        &mut self,
        id: SessionId,
        length: u64,
    ) -> Result<(SharedBufferId, SharedBuffer), Refusal> {
        let session = find(&mut self.sessions, id)?;
        if length == 0 || !length.is_multiple_of(PAGE) {
            let why = format!("{length} is not a multiple of the page size, {PAGE}");
            return Err(refuse::invalid("length", why));
        }
        let charge = session.account.charge(Kind::SharedBuffers, 1)?;
        let bytes = session.account.charge(Kind::SharedBytes, length)?;
        let handle = self.handles.shared_buffers.allocate(id);
        let buffer = SharedBufferId(handle.number());
        let object = SharedBuffer {
            mapping: None,
            length,
            mrs: Users::default(),
            _handle: handle,
            _charges: [bytes, charge],
        };
        Ok((buffer, object))
    }

    pub(in crate::resource) fn remove_shared_buffer(
        &mut self,
        id: SessionId,
        buffer: SharedBufferId,
    ) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let SharedBuffer { mapping, mrs, .. } = session.shared_buffer(buffer)?;
        if mrs.count() > 0 {
            return Err(refuse::in_use("shared buffer", buffer.0, format!("{} MRs", mrs.count())));
        }
        let unmapping = mapping.is_some();
        let object = session.shared_buffers.remove(&buffer);
        if !unmapping {
            return Outcome::done();
        }
        // The buffer is charged until the reaper has unmapped it, and the answer waits for that.
        let receipt = self.reaper.drop_counted(session.client.identity.uid, object);
        self.unmapping.insert(receipt, id);
        Outcome::later()
    }

    /// Answers the removal of a shared buffer after the reaper has unmapped it.
    pub(in crate::resource) fn shared_buffer_gone(&mut self, id: SessionId) {
        if self.sessions.contains_key(&id) {
            self.outbox.answer(id, ReplyBody::Done);
        }
    }
}

impl SharedBuffer {
    /// Sets the memory. `F_GET_SEALS` has succeeded on the descriptor, so it is safe to use.
    fn fill(&mut self, memfd: Passed) -> Result<(), Refusal> {
        if self.mapping.is_some() {
            return Err(refuse::invalid("shared buffer", "already has memory"));
        }
        //= DDP-8.3-4, DDP-8.3.2-4, RDMAP-8.1.2-4
        let mapping = Mapping::adopt_shared_buffer(memfd.as_fd(), self.length);
        self.mapping = Some(mapping.map_err(|error| shared_buffer_refusal(&error))?);
        // This close frees no memory, because the mapping still refers to it.
        drop(memfd.into_inner());
        Ok(())
    }
}

fn shared_buffer_refusal(error: &AdoptError) -> Refusal {
    match error {
        AdoptError::Map(e) => system::refusal("cannot map the shared buffer", e),
        AdoptError::Seal(e) => system::refusal("cannot seal the shared buffer", e),
        AdoptError::Examine(e) => system::refusal("cannot examine the shared buffer", e),
        _ => refuse::invalid("shared buffer", error.to_string()),
    }
}

/// Page size in bytes on all supported machines.
const PAGE: u64 = rnic_abi::abi::queue::PAGE as u64;
