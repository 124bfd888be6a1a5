//! Attached memory as a session has it: how it is reached, and the copiers that reach it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use rnic_core::abi::control::Refusal;
use rnic_core::device::{Copier, Memory};
use rnic_core::shm::AddressSpace;
use rnic_core::shm::attached::USER_END;
use rnic_core::types::*;

use crate::copier::CopierHandle;
use crate::resource::ledger::Charge;
use crate::resource::refuse;

/// A session's attached address space.
pub struct Attached {
    pub(super) reach: Reach,
    /// It has been found gone, its regions are revoked and the client has been told.
    pub(super) gone: bool,
}

/// How it is reached.
pub(super) enum Reach {
    /// By the workers themselves.
    Own(Arc<AddressSpace>),
    /// By a copier, which is a process of its own.
    Copier(CopierHandle),
}

impl Attached {
    /// Ends the copier that reaches it, if one does: the reaper, which closes what is left, may
    /// not.
    pub fn end_copier(&mut self) {
        if let Reach::Copier(copier) = &mut self.reach {
            copier.end();
        }
    }

    /// The copier that reaches it, if one does.
    pub fn copier(&self) -> Option<Arc<Copier>> {
        match &self.reach {
            Reach::Own(_) => None,
            Reach::Copier(copier) => Some(copier.shared.clone()),
        }
    }
}

/// Copiers that have not ended, by session, as they were charged. One that is stuck outlives its
/// session, and a session that asks again has another beside it.
#[derive(Debug, Default)]
pub struct Copying(HashMap<SessionId, Vec<Charge>>);

impl Copying {
    pub(super) fn add(&mut self, id: SessionId, charge: Charge) {
        self.0.entry(id).or_default().push(charge);
    }

    /// Whose copier it is.
    pub(super) fn user(&self, id: SessionId) -> Option<u32> {
        self.0.get(&id)?.first().map(Charge::user)
    }

    /// One of a session's has ended.
    pub(super) fn remove(&mut self, id: SessionId) {
        if let Entry::Occupied(mut copiers) = self.0.entry(id) {
            copiers.get_mut().pop();
            if copiers.get().is_empty() {
                copiers.remove();
            }
        }
    }
}

/// The memory of a new region at this address of the client.
pub fn attached_memory(
    attached: Option<&Attached>,
    address: u64,
    length: u64,
) -> Result<Memory, Refusal> {
    let Some(Attached { reach, gone }) = attached else {
        return Err(refuse::invalid("source", "this session has not attached its memory"));
    };
    if *gone {
        return Err(refuse::invalid("source", "the attached address space is gone"));
    }
    if address.checked_add(length).is_none_or(|end| end > USER_END) {
        let why = format!("{address:#x} plus {length} bytes is no range of a program's addresses");
        return Err(refuse::invalid("address", why));
    }
    Ok(match reach {
        Reach::Own(space) => Memory::Attached { space: space.clone(), address },
        Reach::Copier(copier) => Memory::ThroughCopier { copier: copier.shared.clone(), address },
    })
}
