//! Chains of work requests, one at a time.

use std::marker::PhantomData;

use rnic_client::{AtomicOperation, DatagramAddress, PdId, QpId};

use super::address_handles::route;
use crate::address_handle::Route;
use crate::c::*;
use crate::errno::Errno;
use crate::mr::MrBody;
use crate::mw::{MwBody, WindowKey};
use crate::object::{live, live_or_null};
use crate::work::{BindWork, Elements, ReceiveWork, SendKind, SendWork};

/// The requests of a chain, copied out as they are asked for.
pub(super) struct Chain<W> {
    next: *mut W,
    /// Domain of the queue pair, if each names where it goes.
    datagrams: Option<PdId>,
    work: PhantomData<W>,
}

impl<W> Chain<W> {
    /// A chain that begins with this request.
    ///
    /// # Safety
    ///
    /// As the module says, for every request of the chain, until it has been walked.
    pub(super) unsafe fn new(first: *mut W) -> Self {
        Chain { next: first, datagrams: None, work: PhantomData }
    }

    /// The same of a queue pair of datagrams in this domain, or of another one.
    pub(super) fn with_datagrams(self, datagrams: Option<PdId>) -> Self {
        Chain { datagrams, ..self }
    }
}

impl Iterator for Chain<ibv_send_wr> {
    type Item = Result<SendWork, Errno>;

    fn next(&mut self) -> Option<Self::Item> {
        // SAFETY: `new` was promised that requests can be read, and null ends them.
        let wr = unsafe { self.next.as_ref() }?;
        self.next = wr.next;
        // SAFETY: as above, for what the request points to.
        Some(unsafe { send_work(wr, self.datagrams) })
    }
}

impl Iterator for Chain<ibv_recv_wr> {
    type Item = Result<ReceiveWork, Errno>;

    fn next(&mut self) -> Option<Self::Item> {
        // SAFETY: as above.
        let wr = unsafe { self.next.as_ref() }?;
        self.next = wr.next;
        // SAFETY: as above.
        let elements = unsafe { Elements::copied(wr.sg_list, wr.num_sge) };
        Some(elements.map(|elements| ReceiveWork { wr_id: wr.wr_id, elements }))
    }
}

/// The request of a chain that was not posted, after `posted` that were.
pub(super) unsafe fn nth_send(mut wr: *mut ibv_send_wr, posted: usize) -> *mut ibv_send_wr {
    for _ in 0..posted {
        // SAFETY: as the module says; so many requests of the chain have been walked.
        wr = unsafe { (*wr).next };
    }
    wr
}

/// As [`nth_send`], of receives.
pub(super) unsafe fn nth_receive(mut wr: *mut ibv_recv_wr, posted: usize) -> *mut ibv_recv_wr {
    for _ in 0..posted {
        // SAFETY: as above.
        wr = unsafe { (*wr).next };
    }
    wr
}

unsafe fn send_work(wr: &ibv_send_wr, datagram: Option<PdId>) -> Result<SendWork, Errno> {
    let mut window = None;
    // SAFETY: as the module says; which member of the union holds is said by the opcode.
    let (kind, elements) = unsafe {
        let remote = || (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey);
        let kind = match wr.opcode {
            IBV_WR_SEND => SendKind::Send,
            IBV_WR_SEND_WITH_IMM => SendKind::SendImmediate { data: wr.imm_data },
            IBV_WR_SEND_WITH_INV => SendKind::SendInvalidate { rkey: wr.imm_data },
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => {
                let (remote, rkey) = remote();
                let has_data = wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
                SendKind::Write { remote, rkey, immediate: has_data.then_some(wr.imm_data) }
            }
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                let atomic = wr.wr.atomic;
                let operation = match wr.opcode {
                    IBV_WR_ATOMIC_FETCH_AND_ADD => fetch_add(atomic.compare_add),
                    _ => compare_swap(atomic.compare_add, atomic.swap),
                };
                SendKind::Atomic { remote: atomic.remote_addr, rkey: atomic.rkey, operation }
            }
            IBV_WR_RDMA_READ => {
                let (remote, rkey) = remote();
                SendKind::Read { remote, rkey }
            }
            IBV_WR_LOCAL_INV => SendKind::LocalInvalidate { rkey: wr.imm_data },
            IBV_WR_BIND_MW => {
                let bind = wr.bind_mw;
                let (kind, key) = bind_work(bind.mw, bind.rkey, &bind.bind_info)?;
                window = Some(key);
                kind
            }
            _ => SendKind::Unsupported,
        };
        let elements = match wr.opcode {
            IBV_WR_LOCAL_INV | IBV_WR_BIND_MW => Elements::default(),
            _ => Elements::copied(wr.sg_list, wr.num_sge)?,
        };
        (kind, elements)
    };
    let sends = matches!(kind, SendKind::Send | SendKind::SendImmediate { .. });
    let to = match datagram.filter(|_| sends) {
        // SAFETY: as the module says: with such a queue pair and opcode this member of the union
        // holds.
        Some(pd) => unsafe {
            Some(destination(pd, wr.wr.ud.ah, wr.wr.ud.remote_qpn, wr.wr.ud.remote_qkey)?)
        },
        None => None,
    };
    let (wr_id, flags) = (wr.wr_id, wr.send_flags);
    Ok(SendWork { wr_id, kind, flags, elements, to, copied: None, window })
}

/// Where a datagram of a queue pair in this domain goes.
///
/// # Safety
///
/// As the module says.
pub(super) unsafe fn destination(
    pd: PdId,
    ah: *mut ibv_ah,
    qp: u32,
    q_key: u32,
) -> Result<DatagramAddress, Errno> {
    // SAFETY: as the module says.
    let Route { source, gid } = unsafe { route(ah, pd) }?;
    Ok(DatagramAddress { source, gid, qp: QpId(qp), q_key })
}

/// What a 64-bit fetch and add of verbs does.
pub(super) fn fetch_add(add: u64) -> AtomicOperation {
    AtomicOperation::FetchAdd { add, boundaries: 0 }
}

/// What a 64-bit compare and swap of verbs does.
pub(super) fn compare_swap(compare: u64, swap: u64) -> AtomicOperation {
    let (compare_mask, swap_mask) = (u64::MAX, u64::MAX);
    AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask }
}

/// A bind of a window under a new key, of which `wanted` has the low 8 bits, and the window's key.
/// The owner's right to write is the region's; programs ask for it again all the same, and adapters
/// let them.
///
/// # Safety
///
/// As the module says.
pub(super) unsafe fn bind_work(
    mw: *mut ibv_mw,
    wanted: u32,
    info: &ibv_mw_bind_info,
) -> Result<(SendKind, WindowKey), Errno> {
    // SAFETY: as the module says.
    let (mw, lkey) = unsafe {
        let mw = live::<MwBody>(mw)?;
        mw.check_access(info.mw_access_flags)?;
        (mw, live_or_null::<MrBody>(info.mr)?.map(|mr| mr.numbers().1))
    };
    let kind = SendKind::BindWindow(BindWork {
        wanted,
        lkey: lkey.unwrap_or(0),
        address: info.addr,
        length: if lkey.is_some() { info.length } else { 0 },
        access: info.mw_access_flags & !IBV_ACCESS_LOCAL_WRITE,
    });
    Ok((kind, mw.key()))
}
