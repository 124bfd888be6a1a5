//! Memory of recently destroyed objects.
//!
//! Inline functions of the C headers, such as `ibv_post_send(3)`, read the context from the object
//! before they call this library. While the memory of a destroyed object is kept, such a call
//! returns an error instead of crashing, and no new object gets the same address.

use std::alloc::{Layout, dealloc};
use std::collections::VecDeque;
use std::ptr::NonNull;

use parking_lot::Mutex;

/// Number of destroyed objects to keep in memory, each less than 1 KiB.
const KEPT: usize = 256;

static QUARANTINE: Mutex<VecDeque<Quarantined>> = Mutex::new(VecDeque::new());

struct Quarantined {
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: no thread uses the memory; it is only freed.
unsafe impl Send for Quarantined {}

impl Drop for Quarantined {
    fn drop(&mut self) {
        // SAFETY: the caller of `keep` handed over the memory, allocated with this layout.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}

/// Keeps the memory of a destroyed object, and frees the memory that was kept [`KEPT`] objects ago.
///
/// # Safety
///
/// The memory was allocated with this layout, and the caller neither frees nor uses it.
pub(super) unsafe fn keep(memory: NonNull<u8>, layout: Layout) {
    let mut quarantine = QUARANTINE.lock();
    quarantine.push_back(Quarantined { memory, layout });
    let oldest = if quarantine.len() > KEPT { quarantine.pop_front() } else { None };
    drop(quarantine);
    drop(oldest);
}
