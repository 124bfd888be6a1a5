//! Memory windows (`ibv_alloc_mw(3)`).

use std::sync::Arc;

use parking_lot::Mutex;
use rnic_client::{MemoryWindow, WindowKind};

use crate::c;
use crate::device::DeviceKind;
use crate::errno::Errno;
use crate::object::{Body, Kind};
use crate::pd::{PdBody, PdUser};

/// A memory window. Which STag it has is written in the program's structure.
pub(crate) struct MwBody {
    window: MemoryWindow,
    key: WindowKey,
    kind: WindowKind,
    pd: PdUser,
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
        let key = WindowKey::new(window.rkey().0);
        Ok(MwBody { window, key, kind, pd: pd.user() })
    }

    /// Its handle, and its first remote key.
    pub(crate) fn numbers(&self) -> (u32, u32) {
        (self.window.id().0, self.key.present())
    }

    /// Checks what a bind asks for, as the kernel's `rxe_check_bind_mw` does. The device checks the
    /// rights.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an unknown access flag, and for a window of type 1 on the RoCE device that is
    /// to be zero-based (IBTA specification, volume 1, section 10.6.7.2.3).
    pub(crate) fn check_access(&self, access: u32) -> Result<(), Errno> {
        let unknown = access & !(ACCESS | c::IBV_ACCESS_OPTIONAL_RANGE);
        if unknown != 0 {
            let reason = format_args!("mw_access_flags {unknown:#x}: no such flag of a window");
            return Err(Errno::invalid(reason));
        }
        let zero_based = access & c::IBV_ACCESS_ZERO_BASED != 0;
        if zero_based && self.kind == WindowKind::Type1 && self.pd.kind() == DeviceKind::Roce {
            let reason = format_args!("IBV_ACCESS_ZERO_BASED: only a window of type 2 is so bound");
            return Err(Errno::invalid(reason));
        }
        Ok(())
    }

    /// Its key, for a request that binds it.
    pub(crate) fn key(&self) -> WindowKey {
        self.key.clone()
    }
}

/// The remote key that a window will have after the binds that were posted. The requests that bind
/// it share it.
#[derive(Clone, Debug)]
pub(crate) struct WindowKey(Arc<Mutex<KeyState>>);

#[derive(Debug)]
struct KeyState {
    key: u32,
    /// Binds posted.
    posted: u64,
    /// Those posted before this one have failed, or were flushed behind one that has.
    failed_before: u64,
}

impl WindowKey {
    fn new(key: u32) -> Self {
        WindowKey(Arc::new(Mutex::new(KeyState { key, posted: 0, failed_before: 0 })))
    }

    pub(crate) fn present(&self) -> u32 {
        self.0.lock().key
    }

    /// The key that a bind gives the window. Of the key that the program asks for only the low
    /// 8 bits count, as on adapters; the others are the window's.
    pub(crate) fn next(&self, wanted: u32) -> u32 {
        self.present() & !TAG | wanted & TAG
    }

    /// A bind that gives the window this key was posted.
    pub(crate) fn posted(&self, key: u32) -> PostedBind {
        let mut state = self.0.lock();
        let number = state.posted;
        state.posted += 1;
        let before = std::mem::replace(&mut state.key, key);
        PostedBind { key: self.clone(), number, before }
    }
}

/// A bind that has not completed.
#[derive(Debug)]
pub(crate) struct PostedBind {
    key: WindowKey,
    number: u64,
    /// The window's key before it.
    before: u32,
}

impl PostedBind {
    /// The bind has failed: the window keeps the key that it had before. The binds posted after it
    /// are flushed, which changes nothing more.
    pub(crate) fn failed(&self) {
        let mut state = self.key.0.lock();
        if self.number >= state.failed_before {
            state.key = self.before;
            state.failed_before = state.posted;
        }
    }
}

/// Access flags that a program may name in a bind.
const ACCESS: u32 = c::IBV_ACCESS_LOCAL_WRITE
    | c::IBV_ACCESS_REMOTE_WRITE
    | c::IBV_ACCESS_REMOTE_READ
    | c::IBV_ACCESS_REMOTE_ATOMIC
    | c::IBV_ACCESS_MW_BIND
    | c::IBV_ACCESS_ZERO_BASED;

/// Bits of a remote key that its owner chooses.
const TAG: u32 = 0xff;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bind_that_fails_restores_the_key() {
        let key = WindowKey::new(0x100);
        let done = key.posted(0x101);
        let failed = key.posted(0x102);
        let flushed = key.posted(0x103);
        assert_eq!(key.present(), 0x103);
        drop(done);
        failed.failed();
        assert_eq!(key.present(), 0x101);
        flushed.failed();
        assert_eq!(key.present(), 0x101);
        let again = key.posted(0x104);
        again.failed();
        assert_eq!(key.present(), 0x101);
    }
}
