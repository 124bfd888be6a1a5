//! A session's attached memory.

use std::sync::Arc;

use rnic_abi::abi::control::Refusal;
use rnic_abi::shm::AddressSpace;
use rnic_abi::shm::attached::USER_END;
use rnic_core::device::{Copier, Memory};

use crate::resource::numbers::Doorbell;
use crate::resource::queue::QueuePlace;
use crate::resource::refuse;

/// A session's attached address space.
pub struct Attached {
    pub(super) reach: Reach,
    /// The address space has ended, its regions are revoked and the client has been notified.
    pub(super) gone: bool,
}

/// Access to attached memory.
pub(super) enum Reach {
    /// Workers copy.
    Own(Arc<AddressSpace>),
    /// The client's library copies.
    Library {
        copier: Arc<Copier>,
        workers: u32,
        /// Queue of copy jobs and its doorbell, by worker.
        queues: Vec<(QueuePlace, Doorbell)>,
    },
}

impl Attached {
    /// Returns true if every worker has access.
    fn is_complete(&self) -> bool {
        match &self.reach {
            Reach::Own(_) => true,
            Reach::Library { queues, workers, .. } => queues.len() == *workers as usize,
        }
    }

    /// Returns the reason for a failed access, for the client.
    pub(super) fn reason(&self) -> &'static str {
        match self.reach {
            Reach::Own(_) => "the attached address space has ended (by exec, or with its process)",
            Reach::Library { .. } => "the client's library no longer copies",
        }
    }

    /// Returns the copier, if the client's library copies.
    pub fn copier(&self) -> Option<Arc<Copier>> {
        match &self.reach {
            Reach::Own(_) => None,
            Reach::Library { copier, .. } => Some(copier.clone()),
        }
    }
}

/// Returns the memory of a new region at an address of the client.
pub fn attached_memory(
    attached: Option<&Attached>,
    address: u64,
    length: u64,
) -> Result<Memory, Refusal> {
    let Some(Attached { reach, gone }) = attached.filter(|attached| attached.is_complete()) else {
        return Err(refuse::invalid("source", "this session has not attached its memory"));
    };
    if *gone {
        return Err(refuse::invalid("source", "the attached address space has ended"));
    }
    if address.checked_add(length).is_none_or(|end| end > USER_END) {
        let why = format!("{address:#x} plus {length} bytes exceeds the user address space");
        return Err(refuse::invalid("address", why));
    }
    Ok(match reach {
        Reach::Own(space) => Memory::Attached { space: space.clone(), address },
        Reach::Library { copier, .. } => Memory::ThroughCopier { copier: copier.clone(), address },
    })
}
