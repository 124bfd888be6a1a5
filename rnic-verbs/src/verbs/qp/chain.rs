//! Conversion of chains of C work requests.

use rnic_client::{AtomicOperation, DatagramAddress, PdId, QpId};

use crate::c::*;
use crate::errno::Errno;
use crate::ffi::handles::{live, live_or_null};
use crate::ffi::pointers::{Argument, Out};
use crate::verbs::ah::{AhBody, Route};
use crate::verbs::mr::MrBody;
use crate::verbs::mw::{MwBody, WindowKey};
use crate::verbs::qp::work::{BindWork, ReceiveWork, SendKind, SendWork, SgeList};

/// Iterator over the requests of a null-terminated chain. Copies each request when it is reached.
pub(crate) struct Chain<W> {
    next: *mut W,
    /// PD of a UD QP. Its requests contain a destination.
    datagrams: Option<PdId>,
}

/// The chain of a call, with its objects, stays valid during the call. Memory that a request refers
/// to stays accessible until the request has completed (ibv_post_send(3)).
impl<W> Argument for Chain<W> {
    type C = *mut W;

    unsafe fn from_c(first: *mut W) -> Self {
        Chain { next: first, datagrams: None }
    }
}

impl<W> Chain<W> {
    /// Sets the PD of a UD QP; `None` for other types.
    pub(crate) fn with_ud_pd(self, datagrams: Option<PdId>) -> Self {
        Chain { datagrams, ..self }
    }
}

/// Posts the requests of a chain with `post`, which returns the number of posted requests and the
/// result. On failure, writes the request that failed to `bad`.
pub(crate) fn post<W: Request>(
    requests: Chain<W>,
    bad: Out<*mut W>,
    post: impl FnOnce(Chain<W>) -> (usize, Result<(), Errno>),
) -> Result<(), Errno> {
    let first = requests.next;
    let (posted, result) = post(requests);
    if result.is_err() {
        let mut wr = first;
        for _ in 0..posted {
            // SAFETY: the chain has `posted` requests before the one that failed.
            wr = unsafe { W::next(wr) };
        }
        bad.write(wr);
    }
    result
}

/// A C work request.
pub(crate) trait Request {
    /// Returns the next request of the chain.
    ///
    /// # Safety
    ///
    /// `this` is part of a chain.
    unsafe fn next(this: *const Self) -> *mut Self;
}

impl Request for ibv_send_wr {
    unsafe fn next(this: *const Self) -> *mut Self {
        // SAFETY: the caller guarantees that the request can be read.
        unsafe { (*this).next }
    }
}

impl Request for ibv_recv_wr {
    unsafe fn next(this: *const Self) -> *mut Self {
        // SAFETY: the caller guarantees that the request can be read.
        unsafe { (*this).next }
    }
}

impl Iterator for Chain<ibv_send_wr> {
    type Item = Result<SendWork, Errno>;

    fn next(&mut self) -> Option<Self::Item> {
        let wr = self.next;
        if wr.is_null() {
            return None;
        }
        // SAFETY: `from_c` guarantees that each request can be read, with the memory that it points
        // to.
        unsafe {
            self.next = (*wr).next;
            Some(send_work(wr, self.datagrams))
        }
    }
}

impl Iterator for Chain<ibv_recv_wr> {
    type Item = Result<ReceiveWork, Errno>;

    fn next(&mut self) -> Option<Self::Item> {
        let wr = self.next;
        if wr.is_null() {
            return None;
        }
        // SAFETY: as above.
        unsafe {
            self.next = (*wr).next;
            let elements = SgeList::copied((*wr).sg_list, (*wr).num_sge);
            Some(elements.map(|elements| ReceiveWork { wr_id: (*wr).wr_id, elements }))
        }
    }
}

/// Reads only the fields that the opcode uses: the program may have left others uninitialised.
///
/// # Safety
///
/// `wr` is a request whose SGEs and objects are valid (ibv_post_send(3)).
unsafe fn send_work(wr: *const ibv_send_wr, datagram: Option<PdId>) -> Result<SendWork, Errno> {
    let mut window = None;
    // SAFETY: the opcode determines the valid member of the union, and the caller guarantees that
    // the SGEs of `wr` are valid.
    let (kind, elements) = unsafe {
        let remote = || ((*wr).wr.rdma.remote_addr, (*wr).wr.rdma.rkey);
        let kind = match (*wr).opcode {
            IBV_WR_SEND => SendKind::Send,
            IBV_WR_SEND_WITH_IMM => SendKind::SendImmediate { data: (*wr).imm_data },
            IBV_WR_SEND_WITH_INV => SendKind::SendInvalidate { rkey: (*wr).imm_data },
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => {
                let (remote, rkey) = remote();
                let has_data = (*wr).opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
                SendKind::Write { remote, rkey, immediate: has_data.then_some((*wr).imm_data) }
            }
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                let atomic = (*wr).wr.atomic;
                let operation = match (*wr).opcode {
                    IBV_WR_ATOMIC_FETCH_AND_ADD => fetch_add(atomic.compare_add),
                    _ => compare_swap(atomic.compare_add, atomic.swap),
                };
                SendKind::Atomic { remote: atomic.remote_addr, rkey: atomic.rkey, operation }
            }
            IBV_WR_RDMA_READ => {
                let (remote, rkey) = remote();
                SendKind::Read { remote, rkey }
            }
            IBV_WR_LOCAL_INV => SendKind::LocalInvalidate { rkey: (*wr).imm_data },
            IBV_WR_BIND_MW => {
                let bind = (*wr).bind_mw;
                let (kind, key) = bind_work(bind.mw, bind.rkey, &bind.bind_info)?;
                window = Some(key);
                kind
            }
            opcode => SendKind::Unsupported(Some(opcode)),
        };
        let elements = match (*wr).opcode {
            IBV_WR_LOCAL_INV | IBV_WR_BIND_MW => SgeList::default(),
            _ => SgeList::copied((*wr).sg_list, (*wr).num_sge)?,
        };
        (kind, elements)
    };
    let sends = matches!(kind, SendKind::Send | SendKind::SendImmediate { .. });
    let to = match datagram.filter(|_| sends) {
        Some(pd) => {
            // SAFETY: with a UD QP and this opcode, `ud` is the valid member (ibv_post_send(3)).
            let to = unsafe { (*wr).wr.ud };
            Some(destination(pd, to.ah, to.remote_qpn, to.remote_qkey)?)
        }
        None => None,
    };
    // SAFETY: the caller guarantees that the request can be read.
    let (wr_id, flags) = unsafe { ((*wr).wr_id, (*wr).send_flags) };
    Ok(SendWork { wr_id, kind, flags, elements, to, copied: None, window })
}

/// Returns the destination of a datagram from a UD QP in this PD.
pub(crate) fn destination(
    pd: PdId,
    ah: *mut ibv_ah,
    qp: u32,
    q_key: u32,
) -> Result<DatagramAddress, Errno> {
    let Route { source, gid } = live::<AhBody>(ah)?.route(pd)?;
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
pub(crate) fn bind_work(
    mw: *mut ibv_mw,
    wanted: u32,
    info: &ibv_mw_bind_info,
) -> Result<(SendKind, WindowKey), Errno> {
    let mw = live::<MwBody>(mw)?;
    mw.check_access(info.mw_access_flags)?;
    let lkey = live_or_null::<MrBody>(info.mr)?.map(|mr| mr.numbers().1);
    let kind = SendKind::BindWindow(BindWork {
        wanted,
        lkey: lkey.unwrap_or(0),
        address: info.addr,
        length: if lkey.is_some() { info.length } else { 0 },
        access: info.mw_access_flags & !IBV_ACCESS_LOCAL_WRITE,
    });
    Ok((kind, mw.key()))
}
