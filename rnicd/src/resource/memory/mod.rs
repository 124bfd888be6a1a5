//! Memory of clients: shared buffers, regions in shared buffers and attached memory, and windows.

mod attach;
mod attached;
mod regions;
mod shared_buffers;
mod windows;

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rnic_abi::abi::control::MrRow;
use rnic_abi::shm::Mapping;
use rnic_abi::types::*;
use rnic_core::device::window::WindowCount;
use rnic_core::device::{Memory, Window};

use crate::resource::domain::{Membership, UseOfPd};
use crate::resource::ledger::Charge;
use crate::resource::numbers::{Handle, IssuedStag};
use crate::resource::uses::{Use, Users};
pub use attached::Attached;
pub use windows::window_row;

/// A counted use of a shared buffer.
pub type UseOfBuffer = Use<AtomicU32>;

pub struct SharedBuffer {
    /// `None` while the buffer is only reserved.
    pub mapping: Option<Arc<Mapping>>,
    pub length: u64,
    pub mrs: Users,
    _handle: Handle,
    _charges: [Charge; 2],
}

pub struct Mr {
    pub stag: IssuedStag,
    pub region: Region,
    _handle: Handle,
    _charge: Charge,
}

/// Attributes of a region. Re-registration replaces them, and keeps the handle and the STag.
pub struct Region {
    pub pd: PdId,
    /// Shared buffer of the region, `None` in attached memory.
    pub buffer: Option<SharedBufferId>,
    pub iova: u64,
    pub length: u64,
    pub access: Access,
    pub scope: Scope,
    /// Bound windows, counted by the workers.
    pub windows: Arc<WindowCount>,
    /// Membership in a named domain.
    pub membership: Option<Membership>,
    _uses: (UseOfPd, Option<UseOfBuffer>),
}

/// New attributes and memory of a region.
pub struct NextRegion {
    region: Region,
    memory: Memory,
}

pub struct MemoryWindow {
    pub window: Arc<Window>,
    /// The window's initial STag.
    _issued: IssuedStag,
    _pd: UseOfPd,
    _handle: Handle,
    _charge: Charge,
}

pub fn mr_row(session: SessionId, mr: MrId, object: &Mr) -> MrRow {
    let Region { pd, buffer, iova, length, access, scope, .. } = object.region;
    MrRow { mr, session, pd, buffer, iova, length, access, scope }
}
