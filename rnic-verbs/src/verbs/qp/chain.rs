//! Conversion of chains of C work requests.

use std::marker::PhantomData;

use rnic_client::{AtomicOperation, DatagramAddress, PdId, QpId};

use crate::c::*;
use crate::errno::Errno;
use crate::ffi::handles::{live, live_or_null};
use crate::verbs::ah::Route;
use crate::verbs::ah::entry::route;
use crate::verbs::mr::MrBody;
use crate::verbs::mw::{MwBody, WindowKey};
use crate::verbs::qp::work::{BindWork, ReceiveWork, SendKind, SendWork, SgeList};

/// Iterator over the requests of a chain. Copies each request when it is reached.
pub(crate) struct Chain<W> {
    next: *mut W,
    /// PD of a UD QP. Its requests contain a destination.
    datagrams: Option<PdId>,
    work: PhantomData<W>,
}

impl<W> Chain<W> {
    /// Creates a chain that starts with this request.
    ///
    /// # Safety
    ///
    /// `first` is null or starts a chain of valid requests, which null ends (`ibv_post_send(3)`).
    /// The chain, and the objects in it, remain until the iteration ends; memory that a request
    /// refers to stays accessible until the request has completed.
    pub(crate) unsafe fn new(first: *mut W) -> Self {
        Chain { next: first, datagrams: None, work: PhantomData }
    }

    /// Sets the PD of a UD QP; `None` for other types.
    pub(crate) fn with_ud_pd(self, datagrams: Option<PdId>) -> Self {
        Chain { datagrams, ..self }
    }
}

impl Iterator for Chain<ibv_send_wr> {
    type Item = Result<SendWork, Errno>;

    fn next(&mut self) -> Option<Self::Item> {
        // SAFETY: the caller of `new` guarantees that each request can be read, and null ends them.
        let wr = unsafe { self.next.as_ref() }?;
        self.next = wr.next;
        // SAFETY: as above, for the memory that the request points to.
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
        let elements = unsafe { SgeList::copied(wr.sg_list, wr.num_sge) };
        Some(elements.map(|elements| ReceiveWork { wr_id: wr.wr_id, elements }))
    }
}

/// Returns the request at which posting failed, after `posted` successful ones.
pub(crate) unsafe fn nth_send(mut wr: *mut ibv_send_wr, posted: usize) -> *mut ibv_send_wr {
    for _ in 0..posted {
        // SAFETY: `Chain` has read the first `posted` requests, of which `wr` is one.
        wr = unsafe { (*wr).next };
    }
    wr
}

/// Like [`nth_send`], for receives.
pub(crate) unsafe fn nth_receive(mut wr: *mut ibv_recv_wr, posted: usize) -> *mut ibv_recv_wr {
    for _ in 0..posted {
        // SAFETY: as above.
        wr = unsafe { (*wr).next };
    }
    wr
}

unsafe fn send_work(wr: &ibv_send_wr, datagram: Option<PdId>) -> Result<SendWork, Errno> {
    let mut window = None;
    // SAFETY: the opcode determines the valid member of the union, and `Chain::new` requires that
    // the SGEs and objects of `wr` are valid.
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
            IBV_WR_LOCAL_INV | IBV_WR_BIND_MW => SgeList::default(),
            _ => SgeList::copied(wr.sg_list, wr.num_sge)?,
        };
        (kind, elements)
    };
    let sends = matches!(kind, SendKind::Send | SendKind::SendImmediate { .. });
    let to = match datagram.filter(|_| sends) {
        // SAFETY: with a UD QP and this opcode, `ud` is the valid member of the union
        // (ibv_post_send(3)). The program does not destroy the address handle during the call.
        Some(pd) => unsafe {
            Some(destination(pd, wr.wr.ud.ah, wr.wr.ud.remote_qpn, wr.wr.ud.remote_qkey)?)
        },
        None => None,
    };
    let wr_id = wr.wr_id;
    let flags = wr.send_flags;
    Ok(SendWork { wr_id, kind, flags, elements, to, copied: None, window })
}

/// Returns the destination of a datagram from a UD QP in this PD.
///
/// # Safety
///
/// No thread destroys `ah` during the call.
pub(crate) unsafe fn destination(
    pd: PdId,
    ah: *mut ibv_ah,
    qp: u32,
    q_key: u32,
) -> Result<DatagramAddress, Errno> {
    // SAFETY: the caller guarantees that no thread destroys `ah` during the call.
    let Route { source, gid } = unsafe { route(ah, pd) }?;
    Ok(DatagramAddress { source, gid, qp: QpId(qp), q_key })
}

/// Returns the 64-bit fetch and add of verbs.
pub(crate) fn fetch_add(add: u64) -> AtomicOperation {
    AtomicOperation::FetchAdd { add, boundaries: 0 }
}

/// Returns the 64-bit compare and swap of verbs.
pub(crate) fn compare_swap(compare: u64, swap: u64) -> AtomicOperation {
    let compare_mask = u64::MAX;
    let swap_mask = u64::MAX;
    AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask }
}

/// Returns a bind of a window to a new key, with `wanted` as the low 8 bits, and the window's key.
/// Removes `IBV_ACCESS_LOCAL_WRITE`, which has no effect on windows: programs request it
/// nevertheless, and adapters allow that.
///
/// # Safety
///
/// No thread destroys `mw`, or the region in `info`, during the call.
pub(crate) unsafe fn bind_work(
    mw: *mut ibv_mw,
    wanted: u32,
    info: &ibv_mw_bind_info,
) -> Result<(SendKind, WindowKey), Errno> {
    // SAFETY: the caller guarantees that no thread destroys `mw` or the region during the call.
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
