//! The memory of the objects that were destroyed last.
//!
//! Inline functions of the C headers, `ibv_post_send(3)` among them, read the context from the
//! object before they call this library. For a while after an object was destroyed they still find
//! it, so the call is refused instead of a crash; and no new object has the old address.

use std::alloc::{Layout, dealloc};
use std::collections::VecDeque;
use std::ptr::NonNull;

use parking_lot::Mutex;

/// Objects whose memory is kept, of less than 1 KiB each.
const KEPT: usize = 256;

static REMAINS: Mutex<VecDeque<Remains>> = Mutex::new(VecDeque::new());

struct Remains {
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to no thread; it is only freed.
unsafe impl Send for Remains {}

impl Drop for Remains {
    fn drop(&mut self) {
        // SAFETY: `keep` was promised that the memory is this function's to free, with this layout.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}

/// Keeps the memory of a destroyed object, and frees that of the object destroyed [`KEPT`] objects
/// ago.
///
/// # Safety
///
/// The memory was allocated with this layout, and the caller neither frees nor uses it.
pub(super) unsafe fn keep(memory: NonNull<u8>, layout: Layout) {
    let mut remains = REMAINS.lock();
    remains.push_back(Remains { memory, layout });
    let oldest = if remains.len() > KEPT { remains.pop_front() } else { None };
    drop(remains);
    drop(oldest);
}
