//! Memory windows (`ibv_alloc_mw(3)`).

use std::sync::Arc;

use parking_lot::Mutex;
use rnic_client::{MemoryWindow, WindowKind};

use crate::c;
use crate::errno::Errno;
use crate::object::{Body, Kind};
use crate::pd::{PdBody, PdUser};

/// A memory window. Which STag it has is written in the program's structure.
pub(crate) struct MwBody {
    window: MemoryWindow,
    /// The remote key of the last bind that was posted.
    key: Mutex<u32>,
    _pd: PdUser,
}

impl Body for MwBody {
    type Head = c::ibv_mw;
    const KIND: Kind = Kind::Mw;
}

impl MwBody {
    pub(crate) fn allocate(pd: &Arc<PdBody>, kind: c::ibv_mw_type) -> Result<MwBody, Errno> {
        let kind = match kind {
            c::IBV_MW_TYPE_1 => WindowKind::Type1,
            c::IBV_MW_TYPE_2 => WindowKind::Type2,
            _ => return Err(Errno::invalid(format_args!("{kind} is no type of memory window"))),
        };
        let window = pd.client().alloc_window(kind)?;
        let key = Mutex::new(window.rkey().0);
        Ok(MwBody { window, key, _pd: pd.user() })
    }

    /// Its handle, and its first remote key.
    pub(crate) fn numbers(&self) -> (u32, u32) {
        (self.window.id().0, *self.key.lock())
    }

    /// Binds it under a new key: returns the key until then and the new one. Of the key that the
    /// program asks for only the low 8 bits count, as on adapters; the others are the window's.
    pub(crate) fn take_key(&self, wanted: u32) -> (u32, u32) {
        let mut key = self.key.lock();
        let new = *key & !TAG | wanted & TAG;
        (std::mem::replace(&mut *key, new), new)
    }
}

/// Bits of a remote key that its owner chooses.
const TAG: u32 = 0xff;
