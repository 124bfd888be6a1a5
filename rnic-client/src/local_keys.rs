//! The keys of leased memory, which only leases may use.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;
use rnic_abi::abi::queue::Sge;
use rnic_abi::shm::lease;
use rnic_abi::types::Stag;

use crate::error::Error;

/// STags that only the SGEs of leases may contain.
#[derive(Default)]
pub(crate) struct LocalKeys {
    /// Set once a region has been added. Programs without leases pay only this load per request.
    any: AtomicBool,
    keys: RwLock<Vec<u32>>,
}

impl LocalKeys {
    pub(crate) fn add(&self, stag: Stag) {
        self.keys.write().push(stag.0);
        self.any.store(true, Ordering::Release);
    }

    pub(crate) fn remove(&self, stag: Stag) {
        self.keys.write().retain(|key| *key != stag.0);
    }

    /// Refuses a request that is not from a lease if it contains the lkey of leased memory or has a
    /// reserved `wr_id`. A completion with a reserved `wr_id` would be mistaken for that of a
    /// lease.
    #[inline]
    pub(crate) fn check(&self, wr_id: u64, elements: &[Sge]) -> Result<(), Error> {
        if !lease::is_loan(wr_id) && !self.any.load(Ordering::Acquire) {
            return Ok(());
        }
        self.check_slow(wr_id, elements)
    }

    #[cold]
    fn check_slow(&self, wr_id: u64, elements: &[Sge]) -> Result<(), Error> {
        if lease::is_loan(wr_id) {
            return Err(Error::ReservedWrId { wr_id });
        }
        let keys = self.keys.read();
        match elements.iter().find(|sge| keys.contains(&sge.lkey)) {
            None => Ok(()),
            Some(sge) => Err(Error::LeasedMemory { lkey: sge.lkey }),
        }
    }
}
