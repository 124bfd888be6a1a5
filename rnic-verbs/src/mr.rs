//! Memory regions (`ibv_reg_mr(3)`): any range of the program's memory.

use std::sync::Arc;

use parking_lot::Mutex;
use rnic_client::{Access, MrOptions, ProgramMemory, ProgramMr, ProgramRange, Scope};

use crate::c;
use crate::errno::Errno;
use crate::memory::adopt::Adopted;
use crate::memory::maps;
use crate::memory::regions::Region;
use crate::object::Body;
use crate::pd::{PdBody, PdUser};

/// A memory region.
pub(crate) struct MrBody {
    registered: Mutex<Registered>,
}

struct Registered {
    mr: ProgramMr,
    /// The shared pages that it lies in, if it does; private again after the last region.
    adopted: Option<Arc<Adopted>>,
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

    /// Registers another range in place of it, or with other rights, under its key
    /// (`ibv_rereg_mr(3)`).
    pub(crate) fn replace(&self, pd: &Arc<PdBody>, wanted: &MrWanted) -> Result<(), Errno> {
        self.registered.lock().replace(pd, wanted)
    }

    /// First address that elements and peers name it by.
    pub(crate) fn iova(&self) -> u64 {
        self.registered.lock().mr.iova()
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
        let (options, adopted) = wanted.look_at(pd)?;
        let mr = pd.client().reg_program_memory(&wanted.memory(adopted.as_deref()), &options)?;
        let new = Registered { mr, adopted, access: wanted.access, pd: pd.user() };
        new.note(pd, wanted);
        Ok(new)
    }

    fn replace(&mut self, pd: &Arc<PdBody>, wanted: &MrWanted) -> Result<(), Errno> {
        let (options, adopted) = wanted.look_at(pd)?;
        let memory = wanted.memory(adopted.as_deref());
        self.mr.reregister(pd.client(), &memory, &options)?;
        (self.adopted, self.access, self.pd) = (adopted, wanted.access, pd.user());
        self.note(pd, wanted);
        Ok(())
    }

    /// Notes where its bytes are, if the daemon reaches them by system calls.
    fn note(&self, pd: &PdBody, wanted: &MrWanted) {
        let (regions, key) = (&pd.device().regions, self.mr.stag().0);
        match self.adopted {
            Some(_) => regions.remove(key),
            None => {
                let (address, length) = (wanted.range.address(), wanted.range.len());
                let (pd, iova) = (pd.client().id(), self.mr.iova());
                regions.insert(key, Region { pd, iova, address, length });
            }
        }
    }
}

impl MrWanted {
    /// Whether it can be had, and with what; the shared pages that it lies in, if it does.
    fn look_at(&self, pd: &PdBody) -> Result<(MrOptions, Option<Arc<Adopted>>), Errno> {
        if self.access & !(RIGHTS | HINTS) != 0 {
            return Err(Errno::INVALID);
        }
        let access = Access::from_bits_truncate(self.access & RIGHTS);
        let (address, length) = (self.range.address(), self.range.len());
        // The daemon's way to the memory asks for neither.
        let may = match access.intersects(Access::LOCAL_WRITE | Access::REMOTE_WRITE) {
            true => maps::is_writable,
            false => maps::is_readable,
        };
        if !may(address, length)? {
            return Err(Errno(libc::EFAULT));
        }
        let iova = match access.contains(Access::ZERO_BASED) {
            true => Some(0),
            false => self.iova,
        };
        let device = pd.device();
        let adopted = device.adopted.of(&device.context, &device.regions, address, length);
        Ok((MrOptions { access, iova, scope: Scope::Pd }, adopted))
    }

    fn memory<'b>(&'b self, adopted: Option<&'b Adopted>) -> ProgramMemory<'b> {
        let part_of = adopted.map(|adopted| adopted.place(self.range.address()));
        ProgramMemory { range: &self.range, part_of }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.pd.device().regions.remove(self.mr.stag().0);
    }
}
