//! Posting with `ibv_wr_start(3)`: requests are built call by call and posted together.

use std::ffi::c_void;
use std::ptr::null_mut;

use rnic_client::Sge;

use super::chain::{Chain, bind_work, compare_swap, destination, fetch_add};
use super::qp;
use super::work::{SendKind, SendWork, SgeList};
use crate::c::*;
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{live, zeroed};
use crate::ffi::pointers::{Argument as _, In, get, set};
use crate::verbs::mw::{MwBody, WindowKey};

/// Returns the `send_ops_flags` that a QP type supports (`ibv_wr_post(3)`). Programs set more flags
/// than they use, so Send with immediate data is allowed on the iWARP device too. Posting such a
/// request fails, as with `ibv_post_send(3)`.
pub(crate) fn served(kind: ibv_qp_type) -> u64 {
    const UD: u64 = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    const UC: u64 = UD
        | IBV_QP_EX_WITH_RDMA_WRITE
        | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        | IBV_QP_EX_WITH_LOCAL_INV
        | IBV_QP_EX_WITH_BIND_MW;
    const RC: u64 = UC
        | IBV_QP_EX_WITH_SEND_WITH_INV
        | IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    match kind {
        IBV_QPT_UD => UD,
        IBV_QPT_UC => UC,
        _ => RC,
    }
}

/// Returns null for a queue pair created without `send_ops_flags`.
fn to_extended(of: *mut ibv_qp) -> *mut ibv_qp_ex {
    match qp(of) {
        Ok(found) if found.is_extended() => of.cast(),
        Ok(_) => null_mut(),
        Err(errno) => {
            errno.of("ibv_qp_to_qp_ex").log();
            null_mut()
        }
    }
}

/// Begins a request with the `wr_id` and flags of the C structure, and the key of the window for a
/// bind.
fn begin_with(of: *mut ibv_qp_ex, kind: SendKind, window: Option<WindowKey>) {
    if let Ok(qp) = qp(of.cast()) {
        let wr_id = get!(qp.wr_id);
        let flags = get!(qp.wr_flags);
        qp.started.lock().push(SendWork {
            wr_id,
            kind,
            flags,
            elements: SgeList::default(),
            to: None,
            copied: None,
            window,
        });
    }
}

/// Sets the data of the last request.
fn amend(of: *mut ibv_qp_ex, data: impl FnOnce(&mut SendWork) -> Result<(), Errno>) {
    if let Ok(qp) = qp(of.cast())
        && let Some(work) = qp.started.lock().last_mut()
        && let Err(errno) = data(work)
    {
        errno.log();
        // `ibv_wr_complete` returns the error.
        work.kind = SendKind::Unsupported(None);
    }
}

fn begin(of: *mut ibv_qp_ex, kind: SendKind) {
    begin_with(of, kind, None);
}

fn begin_bind(of: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: In<ibv_mw_bind_info>) {
    match info.read("bind_info").and_then(|info| bind_work(mw, rkey, &info)) {
        Ok((kind, window)) => begin_with(of, kind, Some(window)),
        Err(errno) => {
            errno.log();
            begin_with(of, SendKind::Unsupported(None), None);
        }
    }
}

fn set_ud_addr(of: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qp: u32, q_key: u32) {
    let domain = qp(of.cast()).map(|qp| qp.ud_pd());
    amend(of, |work| {
        if let Some(pd) = domain? {
            work.to = Some(destination(pd, ah, remote_qp, q_key)?);
        }
        Ok(())
    });
}

fn add_sge(of: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: the memory of the SGE stays accessible until the request has completed
    // (ibv_wr_post(3)).
    amend(of, |work| unsafe { work.elements.push(Sge { addr, length, lkey }) });
}

fn set_sge_list(of: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    amend(of, |work| {
        // A count that does not fit is above every limit.
        let count = i32::try_from(count).unwrap_or(i32::MAX);
        // SAFETY: `list` has `count` SGEs, whose memory stays accessible until the request has
        // completed (ibv_wr_post(3)).
        work.elements = unsafe { SgeList::copied(list, count)? };
        Ok(())
    });
}

fn set_inline_data(of: *mut ibv_qp_ex, from: *mut c_void, length: usize) {
    // SAFETY: `from` points to `length` bytes (ibv_wr_post(3)). The program may reuse them at once,
    // so they are copied now.
    amend(of, |work| unsafe { work.set_inline(&[(from.cast_const(), length)]) });
}

fn set_inline_data_list(of: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    // SAFETY: `list` has `count` buffers (ibv_wr_post(3)).
    let list = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(list, count) } };
    let pieces: Vec<_> = list.iter().map(|b| (b.addr.cast_const(), b.length)).collect();
    // SAFETY: each buffer is readable for its length (ibv_wr_post(3)).
    amend(of, |work| unsafe { work.set_inline(&pieces) });
}

fn start(of: *mut ibv_qp_ex) {
    if let Ok(qp) = qp(of.cast()) {
        qp.building.enter();
    }
}

/// Posts all requests or none.
fn complete(of: *mut ibv_qp_ex) -> Result<(), Errno> {
    let qp = qp(of.cast())?;
    let posted = qp.post_started();
    qp.building.leave();
    posted
}

fn abort(of: *mut ibv_qp_ex) {
    if let Ok(qp) = qp(of.cast()) {
        qp.started.lock().clear();
        qp.building.leave();
    }
}

/// Binds a type 1 window: the library chooses the next key.
fn bind(of: *mut ibv_qp, mw: *mut ibv_mw, bind: In<ibv_mw_bind>) -> Result<(), Errno> {
    let qp = qp(of)?;
    let window = live::<MwBody>(mw)?;
    let bind = bind.read("mw_bind")?;
    if get!(window.type_) != IBV_MW_TYPE_1 {
        return Err(invalid!("ibv_bind_mw: bind type 2 windows with IBV_WR_BIND_MW"));
    }
    let present = get!(window.rkey);
    let new = present & !0xff | present.wrapping_add(1) & 0xff;
    let mut wr: ibv_send_wr = zeroed();
    wr.wr_id = bind.wr_id;
    wr.send_flags = bind.send_flags;
    wr.opcode = IBV_WR_BIND_MW;
    wr.bind_mw = ibv_send_wr_bind_mw { mw, rkey: new, bind_info: bind.bind_info };
    // SAFETY: the chain is one request without SGEs.
    qp.post_send(unsafe { Chain::<ibv_send_wr>::from_c(&raw mut wr) }).1?;
    set!(window.rkey = new);
    Ok(())
}

entry! {
    plain ibv_qp_to_qp_ex(of: *mut ibv_qp) -> value<*mut ibv_qp_ex> = to_extended;
    plain bind_mw(of: *mut ibv_qp, mw: *mut ibv_mw, info: In<ibv_mw_bind>) -> status = bind;
}

// ibv_wr_post(3).
entry! {
    plain wr_send(of: *mut ibv_qp_ex) -> value<()> = |of| begin(of, SendKind::Send);
    plain wr_send_inv(of: *mut ibv_qp_ex, rkey: u32) -> value<()>
        = |of, rkey| begin(of, SendKind::SendInvalidate { rkey });
    plain wr_send_imm(of: *mut ibv_qp_ex, data: u32) -> value<()>
        = |of, data| begin(of, SendKind::SendImmediate { data });
    plain wr_rdma_write(of: *mut ibv_qp_ex, rkey: u32, remote: u64) -> value<()>
        = |of, rkey, remote| begin(of, SendKind::Write { remote, rkey, immediate: None });
    plain wr_rdma_write_imm(of: *mut ibv_qp_ex, rkey: u32, remote: u64, data: u32) -> value<()>
        = |of, rkey, remote, data| {
            begin(of, SendKind::Write { remote, rkey, immediate: Some(data) });
        };
    plain wr_rdma_read(of: *mut ibv_qp_ex, rkey: u32, remote: u64) -> value<()>
        = |of, rkey, remote| begin(of, SendKind::Read { remote, rkey });
    plain wr_atomic_fetch_add(of: *mut ibv_qp_ex, rkey: u32, remote: u64, add: u64) -> value<()>
        = |of, rkey, remote, add| {
            begin(of, SendKind::Atomic { remote, rkey, operation: fetch_add(add) });
        };
    plain wr_atomic_cmp_swp(
        of: *mut ibv_qp_ex, rkey: u32, remote: u64, compare: u64, swap: u64,
    ) -> value<()> = |of, rkey, remote, compare, swap| {
        begin(of, SendKind::Atomic { remote, rkey, operation: compare_swap(compare, swap) });
    };
    plain wr_local_inv(of: *mut ibv_qp_ex, rkey: u32) -> value<()>
        = |of, rkey| begin(of, SendKind::LocalInvalidate { rkey });
    plain wr_bind_mw(
        of: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: In<ibv_mw_bind_info>,
    ) -> value<()> = begin_bind;
    plain wr_set_ud_addr(
        of: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qp: u32, q_key: u32,
    ) -> value<()> = set_ud_addr;
    plain wr_set_sge(of: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) -> value<()> = add_sge;
    plain wr_set_sge_list(of: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) -> value<()>
        = set_sge_list;
    plain wr_set_inline_data(of: *mut ibv_qp_ex, from: *mut c_void, length: usize) -> value<()>
        = set_inline_data;
    plain wr_set_inline_data_list(
        of: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf,
    ) -> value<()> = set_inline_data_list;
    plain wr_start(of: *mut ibv_qp_ex) -> value<()> = start;
    plain wr_complete(of: *mut ibv_qp_ex) -> status = complete;
    plain wr_abort(of: *mut ibv_qp_ex) -> value<()> = abort;
}
