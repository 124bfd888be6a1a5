//! Memory of clients: shared buffers, regions in them and in attached memory, windows.

mod attach;
mod attached;
mod regions;
mod shared_buffers;
mod windows;

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rnic_core::device::window::WindowCount;
use rnic_core::device::{Memory, Window};
use rnic_core::shm::Mapping;
use rnic_core::types::*;

use crate::resource::domain::{Membership, UseOfPd};
use crate::resource::ledger::Charge;
use crate::resource::numbers::{Handle, IssuedStag};
use crate::resource::uses::{Use, Users};
pub use attached::Attached;
pub use windows::window_row;

/// Counted where the shared buffer is.
pub type UseOfBuffer = Use<AtomicU32>;

pub struct SharedBuffer {
    /// None while it is only reserved.
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

/// What a region is of: it may become another one, and keep its handle and its STag.
pub struct Region {
    pub pd: PdId,
    /// Shared buffer it is in; none in attached memory.
    pub buffer: Option<SharedBufferId>,
    pub iova: u64,
    pub length: u64,
    pub access: Access,
    pub scope: Scope,
    /// Windows bound to it, counted by the workers.
    pub windows: Arc<WindowCount>,
    /// In a named domain.
    pub membership: Option<Membership>,
    _uses: (UseOfPd, Option<UseOfBuffer>),
}

/// What a region is to be, and where.
pub struct NextRegion {
    region: Region,
    memory: Memory,
}

pub struct MemoryWindow {
    pub window: Arc<Window>,
    /// Its STag before it was ever bound.
    _issued: IssuedStag,
    _pd: UseOfPd,
    _handle: Handle,
    _charge: Charge,
}
