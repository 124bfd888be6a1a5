//! Free memory of the allocator.

/// Returns the unused pages of all threads' heaps to the kernel. Threads that allocate at the same
/// time wait for their heap.
pub fn return_free_memory() {
    // SAFETY: the allocator releases only pages that no allocation covers, under its own locks.
    // No allocation moves or changes.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}
