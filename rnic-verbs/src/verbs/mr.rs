//! Memory regions (`ibv_reg_mr(3)`), which may be any range of the program's memory.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_client::{Access, MrOptions, ProgramMr, ProgramRange, Scope};

use crate::c::{self, ibv_mr, ibv_pd, ibv_sge};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Kind, Live, OfContext, live, publish, withdraw};
use crate::ffi::pointers::{get, set};
use crate::memory::maps;
use crate::memory::regions::Region;
use crate::verbs::context::check_same;
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

// SAFETY: the head begins with its context.
unsafe impl OfContext for MrBody {}

/// Parameters of a registration.
pub(crate) struct MrParams {
    pub(crate) range: ProgramRange,
    /// First address of the region in SGEs and remote addresses; `None` for the address of `range`.
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
        pd.adapter().check()?;
        let mr = pd.client().reg_program_memory(&wanted.range, &wanted.options()?)?;
        let new = Registered { mr, access: wanted.access, pd: pd.user() };
        new.note(pd, wanted);
        Ok(new)
    }

    fn replace(&mut self, pd: &Arc<PdBody>, wanted: &MrParams) -> Result<(), Errno> {
        pd.adapter().check()?;
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
            return Err(invalid!("access {unknown:#x}: the device has no such access flag"));
        }
        let access = Access::from_bits_truncate(self.access & RIGHTS);
        let address = self.range.address();
        let length = self.range.len();
        let writes = self.access & WRITABLE != 0;
        let may = if writes { maps::is_writable } else { maps::is_readable };
        if !may(address, length)? {
            let kind = if writes { "writable" } else { "readable" };
            return Err(errno!(
                libc::EFAULT,
                "{length} bytes at {address:#x} are not all mapped {kind}"
            ));
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

/// Registers a memory range.
pub(crate) fn register(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: Option<u64>,
    access: c_uint,
) -> Result<*mut ibv_mr, Errno> {
    let found = live::<Arc<PdBody>>(pd)?;
    let mr = MrBody::register(&found, &MrParams { range: range(address, length)?, iova, access })?;
    let (handle, key) = mr.numbers();
    let context = get!(found.context);
    let head = ibv_mr { context, pd, addr: address, length, handle, lkey: key, rkey: key };
    Ok(publish(head, mr).as_ptr())
}

fn range(address: *mut c_void, length: usize) -> Result<ProgramRange, Errno> {
    // SAFETY: by registering the range, the program lets others write to it; the memory is the
    // program's, not this library's.
    unsafe { ProgramRange::new(address as u64, length as u64) }
        .ok_or_else(|| invalid!("{length} bytes at {address:p} are not a valid memory range"))
}

/// Changes a region, which keeps its keys. Returns `IBV_REREG_MR_ERR_INPUT` if `mr` is invalid or
/// [`check_change`] fails, and `IBV_REREG_MR_ERR_CMD` for all other errors. After either error,
/// the old region is unchanged.
fn rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let flags = flags.cast_unsigned();
    let checked = live::<MrBody>(mr).and_then(|old| {
        check_change(flags, address, length, access)?;
        Ok(old)
    });
    let old = match checked {
        Ok(old) => old,
        Err(errno) => {
            errno.of("ibv_rereg_mr").report();
            return c::IBV_REREG_MR_ERR_INPUT;
        }
    };
    match change(old, flags, pd, (address, length), access.cast_unsigned()) {
        Ok(()) => 0,
        Err(errno) => {
            errno.of("ibv_rereg_mr").report();
            c::IBV_REREG_MR_ERR_CMD
        }
    }
}

fn change(
    mr: Live<MrBody>,
    flags: c_uint,
    pd: *mut ibv_pd,
    moved: (*mut c_void, usize),
    access: c_uint,
) -> Result<(), Errno> {
    let pd = if flags & c::IBV_REREG_MR_CHANGE_PD != 0 { pd } else { get!(mr.pd) };
    let ((address, length), iova) = match flags & c::IBV_REREG_MR_CHANGE_TRANSLATION {
        0 => ((get!(mr.addr), get!(mr.length)), Some(mr.iova())),
        _ => (moved, None),
    };
    let access = match flags & c::IBV_REREG_MR_CHANGE_ACCESS {
        0 => mr.access(),
        _ => access,
    };
    let found = live::<Arc<PdBody>>(pd)?;
    check_same(Kind::Pd, get!(found.context), get!(mr.context))?;
    if flags == 0 {
        return Err(invalid!("ibv_rereg_mr flags are 0"));
    }
    mr.replace(&found, &MrParams { range: range(address, length)?, iova, access })?;
    set!(mr.pd = pd);
    set!(mr.addr = address);
    set!(mr.length = length);
    Ok(())
}

/// Performs the checks of rdma-core's libibverbs, which precede the call of the driver.
fn check_change(
    flags: c_uint,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> Result<(), Errno> {
    let unknown = flags & !c::IBV_REREG_MR_FLAGS_SUPPORTED;
    if unknown != 0 {
        return Err(invalid!("ibv_rereg_mr flags {flags:#x}: {unknown:#x} is unknown"));
    }
    if flags & c::IBV_REREG_MR_CHANGE_TRANSLATION != 0 && (address.is_null() || length == 0) {
        return Err(invalid!("CHANGE_TRANSLATION with {length} bytes at {address:p}"));
    }
    if flags & c::IBV_REREG_MR_CHANGE_ACCESS == 0 && access != 0 {
        return Err(invalid!("access {access:#x}, but flags lack IBV_REREG_MR_CHANGE_ACCESS"));
    }
    Ok(())
}

fn dereg(mr: *mut ibv_mr) -> Result<(), Errno> {
    live::<MrBody>(mr)?.deregister()?;
    // SAFETY: no thread uses `mr`, now or later (ibv_dereg_mr(3)).
    unsafe { withdraw::<MrBody>(mr) }.map(drop)
}

/// Fails: advice is only for on-demand paging.
fn advise(
    _pd: *mut ibv_pd,
    _advice: c_uint,
    _flags: c_uint,
    _list: *mut ibv_sge,
    _count: c_uint,
) -> Result<(), Errno> {
    Err(unsupported!("ibv_advise_mr: no on-demand paging"))
}

entry! {
    uncancelled ibv_reg_mr(
        pd: *mut ibv_pd, address: *mut c_void, length: usize, access: c_int,
    ) -> pointer<ibv_mr> = |pd, address, length, access: c_int| {
        register(pd, address, length, None, access.cast_unsigned())
    };
    uncancelled ibv_reg_mr_iova(
        pd: *mut ibv_pd, address: *mut c_void, length: usize, iova: u64, access: c_uint,
    ) -> pointer<ibv_mr> = |pd, address, length, iova, access| {
        register(pd, address, length, Some(iova), access)
    };
    /// The `ibv_reg_mr` macros call this if `access` may have optional flags.
    uncancelled ibv_reg_mr_iova2(
        pd: *mut ibv_pd, address: *mut c_void, length: usize, iova: u64, access: c_uint,
    ) -> pointer<ibv_mr> = |pd, address, length, iova, access| {
        register(pd, address, length, Some(iova), access)
    };
    uncancelled ibv_rereg_mr(
        mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, address: *mut c_void, length: usize,
        access: c_int,
    ) -> value<c_int> = rereg_mr;
    uncancelled ibv_dereg_mr(mr: *mut ibv_mr) -> status = dereg;
    plain advise_mr(
        pd: *mut ibv_pd, advice: c_uint, flags: c_uint, list: *mut ibv_sge, count: c_uint,
    ) -> status = advise;
}
