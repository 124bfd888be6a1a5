//! Memory regions (`ibv_reg_mr(3)`), which may be any range of the program's memory.

use std::sync::Arc;

use parking_lot::Mutex;
use rnic_client::{Access, MrOptions, ProgramMr, ProgramRange, Scope};

use crate::c;
use crate::errno::Errno;
use crate::ffi::handles::{Body, Kind};
use crate::memory::maps;
use crate::memory::regions::Region;
use crate::verbs::pd::{PdBody, PdUser};

/// A memory region.
pub(crate) struct MrBody {
    registered: Mutex<Registered>,
}

struct Registered {
    mr: ProgramMr,
    /// `IBV_ACCESS_...`, as requested.
    access: u32,
    pd: PdUser,
}

impl Body for MrBody {
    type Head = c::ibv_mr;
    const KIND: Kind = Kind::Mr;
}

/// Parameters of a registration.
pub(crate) struct MrParams {
    pub(crate) range: ProgramRange,
    /// First address of the region in SGEs and remote addresses; `None` for that of `range`.
    pub(crate) iova: Option<u64>,
    /// `IBV_ACCESS_...`.
    pub(crate) access: u32,
}

/// Access flags with an effect.
const RIGHTS: u32 = c::IBV_ACCESS_LOCAL_WRITE
    | c::IBV_ACCESS_REMOTE_WRITE
    | c::IBV_ACCESS_REMOTE_READ
    | c::IBV_ACCESS_REMOTE_ATOMIC
    | c::IBV_ACCESS_MW_BIND
    | c::IBV_ACCESS_ZERO_BASED;

/// Access flags that require writable pages, as in the kernel's `ib_access_writable`: a window may
/// be bound for writing.
const WRITABLE: u32 = c::IBV_ACCESS_LOCAL_WRITE
    | c::IBV_ACCESS_REMOTE_WRITE
    | c::IBV_ACCESS_REMOTE_ATOMIC
    | c::IBV_ACCESS_MW_BIND;

/// Access flags without an effect: the page size does not matter, and the upper ten flags are hints
/// by definition.
const HINTS: u32 = c::IBV_ACCESS_HUGETLB | c::IBV_ACCESS_OPTIONAL_RANGE;

impl MrBody {
    /// Registers a range.
    pub(crate) fn register(pd: &Arc<PdBody>, wanted: &MrParams) -> Result<MrBody, Errno> {
        Ok(MrBody { registered: Mutex::new(Registered::new(pd, wanted)?) })
    }

    /// Replaces the range, the PD or the rights. The key stays the same (`ibv_rereg_mr(3)`).
    pub(crate) fn replace(&self, pd: &Arc<PdBody>, wanted: &MrParams) -> Result<(), Errno> {
        self.registered.lock().replace(pd, wanted)
    }

    /// Returns the first address of the region in SGEs and remote addresses.
    pub(crate) fn iova(&self) -> u64 {
        self.registered.lock().mr.iova()
    }

    /// Returns the handle and the key, which is both L_Key and R_Key.
    pub(crate) fn numbers(&self) -> (u32, u32) {
        let registered = self.registered.lock();
        (registered.mr.id().0, registered.mr.stag().0)
    }

    /// Returns `IBV_ACCESS_...`, as requested.
    pub(crate) fn access(&self) -> u32 {
        self.registered.lock().access
    }

    /// Deregisters the region (`ibv_dereg_mr(3)`). When this returns, the daemon no longer accesses
    /// it.
    pub(crate) fn deregister(&self) -> Result<(), Errno> {
        match self.registered.lock().mr.deregister() {
            // The region has ended with the daemon.
            Ok(()) | Err(rnic_client::Error::DaemonGone) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Registered {
    fn new(pd: &Arc<PdBody>, wanted: &MrParams) -> Result<Registered, Errno> {
        let mr = pd.client().reg_program_memory(&wanted.range, &wanted.options()?)?;
        let new = Registered { mr, access: wanted.access, pd: pd.user() };
        new.note(pd, wanted);
        Ok(new)
    }

    fn replace(&mut self, pd: &Arc<PdBody>, wanted: &MrParams) -> Result<(), Errno> {
        self.mr.reregister(pd.client(), &wanted.range, &wanted.options()?)?;
        self.access = wanted.access;
        self.pd = pd.user();
        self.note(pd, wanted);
        Ok(())
    }

    /// Records the location of the region.
    fn note(&self, pd: &PdBody, wanted: &MrParams) {
        let region = Region {
            pd: pd.client().id(),
            iova: self.mr.iova(),
            address: wanted.range.address(),
            length: wanted.range.len(),
        };
        pd.device().regions.insert(self.mr.stag().0, region);
    }
}

impl MrParams {
    /// Checks access flags and page protection. Fails with `EFAULT` for a page that the program
    /// itself may not access as requested. This check is necessary: a daemon that may access the
    /// memory of this process writes through its `/proc/self/mem`, which ignores protection, as an
    /// adapter does with pinned pages.
    fn options(&self) -> Result<MrOptions, Errno> {
        let unknown = self.access & !(RIGHTS | HINTS);
        if unknown != 0 {
            let reason = format_args!("access {unknown:#x}: the device has no such access flag");
            return Err(Errno::invalid(reason));
        }
        let access = Access::from_bits_truncate(self.access & RIGHTS);
        let address = self.range.address();
        let length = self.range.len();
        let writes = self.access & WRITABLE != 0;
        let may = if writes { maps::is_writable } else { maps::is_readable };
        if !may(address, length)? {
            let kind = if writes { "writable" } else { "readable" };
            let reason = format_args!("{length} bytes at {address:#x} are not all mapped {kind}");
            return Err(Errno::new(libc::EFAULT, reason));
        }
        let iova = if access.contains(Access::ZERO_BASED) { Some(0) } else { self.iova };
        Ok(MrOptions { access, iova, scope: Scope::Pd })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.pd.device().regions.remove(self.mr.stag().0);
    }
}
