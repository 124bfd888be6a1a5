//! The doorbells of the daemon's workers.

use std::os::fd::OwnedFd;

use rnic_abi::shm::doorbell::DoorbellRinger;

/// Doorbell of a worker.
pub(crate) struct Doorbell {
    pub(crate) ringer: DoorbellRinger,
    pub(crate) eventfd: OwnedFd,
}

impl Doorbell {
    /// Rings the doorbell of a queue. Wakes the worker only if it sleeps.
    #[inline]
    pub(crate) fn ring(&self, index: u32) {
        if self.ringer.ring(index) {
            // The worker's epoll is edge-triggered, and no thread reads the eventfd. Its count
            // never fills up (2^64 - 2 wake-ups).
            let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        }
    }
}
