//! Memory windows (`ibv_alloc_mw(3)`).

use std::sync::Arc;

use parking_lot::Mutex;
use rnic_client::{DeviceKind, Function, MemoryWindow, WindowKind};

use crate::c::{self, ibv_mw, ibv_mw_type, ibv_pd};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Kind, OfContext, live, publish, withdraw};
use crate::ffi::pointers::get;
use crate::verbs::pd::{PdBody, PdUser};

/// A memory window. The program's structure holds its current R_Key.
pub(crate) struct MwBody {
    window: MemoryWindow,
    key: WindowKey,
    kind: WindowKind,
    pd: PdUser,
}

impl Body for MwBody {
    type Head = ibv_mw;
    const KIND: Kind = Kind::Mw;
}

// SAFETY: the head begins with its context.
unsafe impl OfContext for MwBody {}

impl MwBody {
    pub(crate) fn allocate(pd: &Arc<PdBody>, kind: ibv_mw_type) -> Result<MwBody, Errno> {
        let kind = match kind {
            c::IBV_MW_TYPE_1 => WindowKind::Type1,
            c::IBV_MW_TYPE_2 => WindowKind::Type2,
            _ => return Err(invalid!("{kind} is not a memory window type")),
        };
        pd.adapter().check()?;
        let window = pd.client().alloc_window(kind)?;
        let key = WindowKey::new(window.rkey().0);
        Ok(MwBody { window, key, kind, pd: pd.user() })
    }

    /// Returns the handle and the first R_Key.
    pub(crate) fn numbers(&self) -> (u32, u32) {
        (self.window.id().0, self.key.present())
    }

    /// Checks the access flags of a bind as the kernel's `rxe_check_bind_mw` does. The daemon
    /// checks the rights.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an unknown flag, and for a zero-based type 1 window on the RoCE device
    /// (IBTA specification, volume 1, section 10.6.7.2.3).
    pub(crate) fn check_access(&self, access: u32) -> Result<(), Errno> {
        let unknown = access & !(ACCESS | c::IBV_ACCESS_OPTIONAL_RANGE);
        if unknown != 0 {
            return Err(invalid!("mw_access_flags {unknown:#x}: not valid for a window"));
        }
        let zero_based = access & c::IBV_ACCESS_ZERO_BASED != 0;
        if zero_based && self.kind == WindowKind::Type1 && self.pd.kind() == DeviceKind::Roce {
            return Err(invalid!("IBV_ACCESS_ZERO_BASED: only valid for type 2 windows"));
        }
        Ok(())
    }

    /// Returns the key state, for a request that binds the window.
    pub(crate) fn key(&self) -> WindowKey {
        self.key.clone()
    }
}

/// The R_Key of a window after all posted binds. The window shares it with the requests that bind
/// it.
#[derive(Clone, Debug)]
pub(crate) struct WindowKey(Arc<Mutex<KeyState>>);

#[derive(Debug)]
struct KeyState {
    key: u32,
    /// Number of binds posted.
    posted: u64,
    /// Binds with a lower number have failed, or were flushed after a failed bind.
    failed_before: u64,
}

impl WindowKey {
    fn new(key: u32) -> Self {
        WindowKey(Arc::new(Mutex::new(KeyState { key, posted: 0, failed_before: 0 })))
    }

    pub(crate) fn present(&self) -> u32 {
        self.0.lock().key
    }

    /// Returns the key after a bind. Only the low 8 bits of `wanted` are used, as on adapters; the
    /// window determines the other bits.
    pub(crate) fn next(&self, wanted: u32) -> u32 {
        self.present() & !TAG | wanted & TAG
    }

    /// Records that a bind to this key was posted.
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
    /// Key of the window before the bind.
    before: u32,
}

impl PostedBind {
    /// Restores the previous key after the bind has failed. Binds posted later are flushed and no
    /// longer change the key.
    pub(crate) fn failed(&self) {
        let mut state = self.key.0.lock();
        if self.number >= state.failed_before {
            state.key = self.before;
            state.failed_before = state.posted;
        }
    }
}

/// Access flags of a bind.
const ACCESS: u32 = c::IBV_ACCESS_LOCAL_WRITE
    | c::IBV_ACCESS_REMOTE_WRITE
    | c::IBV_ACCESS_REMOTE_READ
    | c::IBV_ACCESS_REMOTE_ATOMIC
    | c::IBV_ACCESS_MW_BIND
    | c::IBV_ACCESS_ZERO_BASED;

/// Bits of an R_Key that the program chooses.
const TAG: u32 = 0xff;

fn alloc(pd: *mut ibv_pd, kind: ibv_mw_type) -> Result<*mut ibv_mw, Errno> {
    let found = live::<Arc<PdBody>>(pd)?;
    let mw = MwBody::allocate(&found, kind)?;
    let (handle, rkey) = mw.numbers();
    let head = ibv_mw { context: get!(found.context), pd, rkey, handle, type_: kind };
    Ok(publish(head, mw).as_ptr())
}

fn dealloc(mw: *mut ibv_mw) -> Result<(), Errno> {
    live::<MwBody>(mw)?.pd.admit(Function::DeallocMw)?;
    // SAFETY: no thread uses `mw`, now or later (ibv_dealloc_mw(3)).
    unsafe { withdraw::<MwBody>(mw) }.map(drop)
}

entry! {
    uncancelled alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> pointer<ibv_mw> = alloc;
    uncancelled dealloc_mw(mw: *mut ibv_mw) -> status = dealloc;
}

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
