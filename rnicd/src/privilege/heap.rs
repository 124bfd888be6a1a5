//! Memory that the allocator keeps.

/// Gives the pages back to the kernel that hold nothing allocated, of every thread's heap. Threads
/// that allocate meanwhile wait for their heap.
pub fn return_free_memory() {
    // SAFETY: the allocator gives up pages that no allocation covers, under its own locks; nothing
    // that is allocated moves or changes.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}
