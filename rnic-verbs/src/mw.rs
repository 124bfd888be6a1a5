//! Memory windows (`ibv_alloc_mw(3)`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rnic_client::{MemoryWindow, WindowKind};

use crate::c;
use crate::errno::Errno;
use crate::object::{Body, Kind};
use crate::pd::{PdBody, PdUser};

/// A memory window. Which STag it has is written in the program's structure.
pub(crate) struct MwBody {
    window: MemoryWindow,
    key: WindowKey,
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
        let key = WindowKey(Arc::new(AtomicU32::new(window.rkey().0)));
        Ok(MwBody { window, key, _pd: pd.user() })
    }

    /// Its handle, and its first remote key.
    pub(crate) fn numbers(&self) -> (u32, u32) {
        (self.window.id().0, self.key.present())
    }

    /// Its key, for a request that binds it.
    pub(crate) fn key(&self) -> WindowKey {
        self.key.clone()
    }
}

/// The remote key of the last bind of a window that was posted.
#[derive(Clone, Debug)]
pub(crate) struct WindowKey(Arc<AtomicU32>);

impl WindowKey {
    pub(crate) fn present(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// The key that a bind gives the window. Of the key that the program asks for only the low
    /// 8 bits count, as on adapters; the others are the window's.
    pub(crate) fn next(&self, wanted: u32) -> u32 {
        self.present() & !TAG | wanted & TAG
    }

    /// A bind was posted. One that was refused leaves the window its key.
    pub(crate) fn set(&self, key: u32) {
        self.0.store(key, Ordering::Relaxed);
    }
}

/// Bits of a remote key that its owner chooses.
const TAG: u32 = 0xff;
