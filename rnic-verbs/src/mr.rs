//! Memory regions (`ibv_reg_mr(3)`): any range of the program's memory.

use std::sync::Arc;

use parking_lot::Mutex;
use rnic_client::{Access, MrOptions, ProgramMr, ProgramRange, Scope};

use crate::c;
use crate::errno::Errno;
use crate::memory::adopt::Adopted;
use crate::memory::maps;
use crate::memory::regions::Region;
use crate::object::Body;
use crate::pd::{PdBody, PdUser};

/// A memory region.
pub(crate) struct MrBody {
    /// Another one after `ibv_rereg_mr(3)`.
    registered: Mutex<Registered>,
}

struct Registered {
    mr: ProgramMr,
    /// The shared pages that it lies in, if it does; private again after the last region.
    _adopted: Option<Arc<Adopted>>,
    /// `IBV_ACCESS_...`, as asked for.
    access: u32,
    pd: PdUser,
}

impl Body for MrBody {
    type Head = c::ibv_mr;
}

/// A range of memory that a program wants registered.
pub(crate) struct MrWanted {
    pub(crate) range: ProgramRange,
    /// First address that elements and peers name it by; `None` for its own.
    pub(crate) iova: Option<u64>,
    /// `IBV_ACCESS_...`.
    pub(crate) access: u32,
}

/// Rights that mean something here.
const RIGHTS: u32 = c::IBV_ACCESS_LOCAL_WRITE
    | c::IBV_ACCESS_REMOTE_WRITE
    | c::IBV_ACCESS_REMOTE_READ
    | c::IBV_ACCESS_REMOTE_ATOMIC
    | c::IBV_ACCESS_MW_BIND
    | c::IBV_ACCESS_ZERO_BASED;

/// What may be asked for and makes no difference: pages are whatever they are; the upper ten are
/// hints by definition.
const HINTS: u32 = c::IBV_ACCESS_HUGETLB | c::IBV_ACCESS_OPTIONAL_RANGE;

impl MrBody {
    /// Registers a range.
    pub(crate) fn register(pd: &Arc<PdBody>, wanted: &MrWanted) -> Result<MrBody, Errno> {
        Ok(MrBody { registered: Mutex::new(Registered::new(pd, wanted)?) })
    }

    /// Registers another range in place of it, and then takes it back.
    pub(crate) fn replace(&self, pd: &Arc<PdBody>, wanted: &MrWanted) -> Result<(), Errno> {
        let mut registered = self.registered.lock();
        let new = Registered::new(pd, wanted)?;
        registered.mr.deregister()?;
        *registered = new;
        Ok(())
    }

    /// Its handle, and its local and remote key, which are one over iWARP.
    pub(crate) fn numbers(&self) -> (u32, u32) {
        let registered = self.registered.lock();
        (registered.mr.id().0, registered.mr.stag().0)
    }

    /// `IBV_ACCESS_...`, as asked for.
    pub(crate) fn access(&self) -> u32 {
        self.registered.lock().access
    }

    /// Takes it back (`ibv_dereg_mr(3)`): when this returns, nobody reads or writes it any more.
    pub(crate) fn deregister(&self) -> Result<(), Errno> {
        Ok(self.registered.lock().mr.deregister()?)
    }
}

impl Registered {
    fn new(pd: &Arc<PdBody>, wanted: &MrWanted) -> Result<Registered, Errno> {
        if wanted.access & !(RIGHTS | HINTS) != 0 {
            return Err(Errno::INVALID);
        }
        let access = Access::from_bits_truncate(wanted.access & RIGHTS);
        // The daemon's way to the memory asks for neither.
        let may = match access.intersects(Access::LOCAL_WRITE | Access::REMOTE_WRITE) {
            true => maps::is_writable,
            false => maps::is_readable,
        };
        if !may(wanted.range.address(), wanted.range.len())? {
            return Err(Errno(libc::EFAULT));
        }
        let iova = match access.contains(Access::ZERO_BASED) {
            true => Some(0),
            false => wanted.iova,
        };
        let options = MrOptions { access, iova, scope: Scope::Pd };
        let device = pd.device();
        let (address, length) = (wanted.range.address(), wanted.range.len());
        let adopted = device.adopted.of(&device.context, &device.regions, address, length);
        let mr = match &adopted {
            Some(adopted) => {
                let (buffer, offset) = adopted.place(address);
                pd.client().reg_program_buffer(buffer, offset, &wanted.range, &options)?
            }
            None => pd.client().reg_program_memory(&wanted.range, &options)?,
        };
        if adopted.is_none() {
            let pd = pd.client().id();
            let region = Region { pd, iova: mr.iova(), address, length };
            device.regions.insert(mr.stag().0, region);
        }
        Ok(Registered { mr, _adopted: adopted, access: wanted.access, pd: pd.user() })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.pd.device().regions.remove(self.mr.stag().0);
    }
}
