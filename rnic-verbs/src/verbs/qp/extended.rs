//! Posting by `ibv_wr_start(3)`: requests are built call by call and posted together.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use rnic_client::Sge;

use crate::c::*;
use crate::errno::{Errno, status};
use crate::ffi::handles::live;
use crate::verbs::mw::{MwBody, WindowKey};
use crate::verbs::qp::work::{SendKind, SendWork, SgeList};

use crate::ffi::pointers::argument;
use crate::verbs::qp::chain::{Chain, bind_work, compare_swap, destination, fetch_add};
use crate::verbs::qp::entry::qp;

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

/// Sets the operations that `flags` (`send_ops_flags`) selects for a new QP, and the operations
/// common to all extended QPs. Sets none if `flags` is 0.
pub(crate) fn operations(head: &mut ibv_qp_ex, flags: u64) {
    if flags == 0 {
        return;
    }
    let has = |flag| flags & flag != 0;
    head.wr_atomic_cmp_swp =
        has(IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP).then_some(wr_atomic_cmp_swp as _);
    head.wr_atomic_fetch_add =
        has(IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD).then_some(wr_atomic_fetch_add as _);
    head.wr_bind_mw = has(IBV_QP_EX_WITH_BIND_MW).then_some(wr_bind_mw as _);
    head.wr_local_inv = has(IBV_QP_EX_WITH_LOCAL_INV).then_some(wr_local_inv as _);
    head.wr_rdma_read = has(IBV_QP_EX_WITH_RDMA_READ).then_some(wr_rdma_read as _);
    head.wr_rdma_write = has(IBV_QP_EX_WITH_RDMA_WRITE).then_some(wr_rdma_write as _);
    head.wr_rdma_write_imm =
        has(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM).then_some(wr_rdma_write_imm as _);
    head.wr_send = has(IBV_QP_EX_WITH_SEND).then_some(wr_send as _);
    head.wr_send_imm = has(IBV_QP_EX_WITH_SEND_WITH_IMM).then_some(wr_send_imm as _);
    head.wr_send_inv = has(IBV_QP_EX_WITH_SEND_WITH_INV).then_some(wr_send_inv as _);
    head.wr_set_ud_addr = Some(wr_set_ud_addr);
    head.wr_set_inline_data = Some(wr_set_inline_data);
    head.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    head.wr_set_sge = Some(wr_set_sge);
    head.wr_set_sge_list = Some(wr_set_sge_list);
    head.wr_start = Some(wr_start);
    head.wr_complete = Some(wr_complete);
    head.wr_abort = Some(wr_abort);
}

/// `ibv_qp_to_qp_ex(3)`. Returns null for a queue pair created without `send_ops_flags`.
pub(crate) unsafe extern "C" fn ibv_qp_to_qp_ex(of: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the caller does not destroy `of` during the call.
    match unsafe { qp(of) } {
        Ok(found) if found.is_extended() => of.cast(),
        Ok(_) => null_mut(),
        Err(errno) => {
            errno.log();
            null_mut()
        }
    }
}

/// Begins a request with the `wr_id` and flags of the C structure.
unsafe fn begin(of: *mut ibv_qp_ex, kind: SendKind) {
    // SAFETY: `begin_with` has the contract of this function.
    unsafe { begin_with(of, kind, None) };
}

/// Like [`begin`], with the key of the window for a bind.
unsafe fn begin_with(of: *mut ibv_qp_ex, kind: SendKind, window: Option<WindowKey>) {
    // SAFETY: `qp` finds `of`, which is not destroyed during the call (ibv_wr_post(3)).
    unsafe {
        if let Ok(qp) = qp(of.cast()) {
            let wr_id = (*of).wr_id;
            let flags = (*of).wr_flags;
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
}

/// Sets the data of the last request.
unsafe fn set(of: *mut ibv_qp_ex, data: impl FnOnce(&mut SendWork) -> Result<(), Errno>) {
    // SAFETY: the caller does not destroy `of` during the call (ibv_wr_post(3)).
    if let Ok(qp) = unsafe { qp(of.cast()) }
        && let Some(work) = qp.started.lock().last_mut()
        && let Err(errno) = data(work)
    {
        errno.log();
        // `ibv_wr_complete` returns the error.
        work.kind = SendKind::Unsupported;
    }
}

unsafe extern "C" fn wr_send(of: *mut ibv_qp_ex) {
    // SAFETY: `begin` has the contract of this function.
    unsafe { begin(of, SendKind::Send) };
}

unsafe extern "C" fn wr_send_inv(of: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: `begin` has the contract of this function.
    unsafe { begin(of, SendKind::SendInvalidate { rkey }) };
}

unsafe extern "C" fn wr_rdma_write(of: *mut ibv_qp_ex, rkey: u32, remote: u64) {
    // SAFETY: `begin` has the contract of this function.
    unsafe { begin(of, SendKind::Write { remote, rkey, immediate: None }) };
}

unsafe extern "C" fn wr_send_imm(of: *mut ibv_qp_ex, data: u32) {
    // SAFETY: `begin` has the contract of this function.
    unsafe { begin(of, SendKind::SendImmediate { data }) };
}

unsafe extern "C" fn wr_rdma_write_imm(of: *mut ibv_qp_ex, rkey: u32, remote: u64, data: u32) {
    // SAFETY: `begin` has the contract of this function.
    unsafe { begin(of, SendKind::Write { remote, rkey, immediate: Some(data) }) };
}

unsafe extern "C" fn wr_atomic_fetch_add(of: *mut ibv_qp_ex, rkey: u32, remote: u64, add: u64) {
    let operation = fetch_add(add);
    // SAFETY: `begin` has the contract of this function.
    unsafe { begin(of, SendKind::Atomic { remote, rkey, operation }) };
}

unsafe extern "C" fn wr_atomic_cmp_swp(
    of: *mut ibv_qp_ex,
    rkey: u32,
    remote: u64,
    compare: u64,
    swap: u64,
) {
    let operation = compare_swap(compare, swap);
    // SAFETY: `begin` has the contract of this function.
    unsafe { begin(of, SendKind::Atomic { remote, rkey, operation }) };
}

unsafe extern "C" fn wr_rdma_read(of: *mut ibv_qp_ex, rkey: u32, remote: u64) {
    // SAFETY: `begin` has the contract of this function.
    unsafe { begin(of, SendKind::Read { remote, rkey }) };
}

unsafe extern "C" fn wr_local_inv(of: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: `begin` has the contract of this function.
    unsafe { begin(of, SendKind::LocalInvalidate { rkey }) };
}

unsafe extern "C" fn wr_bind_mw(
    of: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: `info` is null or valid, and the caller destroys neither `of`, `mw` nor the region in
    // `info` during the call (ibv_wr_post(3)).
    unsafe {
        match argument(info, "bind_info").and_then(|info| bind_work(mw, rkey, info)) {
            Ok((kind, window)) => begin_with(of, kind, Some(window)),
            Err(errno) => {
                errno.log();
                begin(of, SendKind::Unsupported);
            }
        }
    }
}

unsafe extern "C" fn wr_set_ud_addr(of: *mut ibv_qp_ex, ah: *mut ibv_ah, qp: u32, q_key: u32) {
    // SAFETY: the caller destroys neither `of` nor `ah` during the call (ibv_wr_post(3)).
    unsafe {
        let domain = self::qp(of.cast()).map(|qp| qp.ud_pd());
        set(of, |work| {
            if let Some(pd) = domain? {
                work.to = Some(destination(pd, ah, qp, q_key)?);
            }
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_sge(of: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: the caller does not destroy `of` during the call, and the memory of the SGE stays
    // accessible until the request has completed (ibv_wr_post(3)).
    unsafe { set(of, |work| work.elements.push(Sge { addr, length, lkey })) };
}

unsafe extern "C" fn wr_set_sge_list(of: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: the caller does not destroy `of` during the call, and `list` has `count` SGEs, whose
    // memory stays accessible until the request has completed (ibv_wr_post(3)).
    unsafe {
        set(of, |work| {
            // A count that does not fit is above every limit.
            let count = i32::try_from(count).unwrap_or(i32::MAX);
            work.elements = SgeList::copied(list, count)?;
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_inline_data(of: *mut ibv_qp_ex, from: *mut c_void, length: usize) {
    // SAFETY: the caller does not destroy `of` during the call, and `from` points to `length` bytes
    // (ibv_wr_post(3)). It may reuse them at once, so they are copied now.
    unsafe { set(of, |work| work.set_inline(&[(from.cast_const(), length)])) };
}

unsafe extern "C" fn wr_set_inline_data_list(
    of: *mut ibv_qp_ex,
    count: usize,
    list: *const ibv_data_buf,
) {
    // SAFETY: the caller does not destroy `of` during the call, and `list` has `count` buffers,
    // each readable for its length (ibv_wr_post(3)).
    unsafe {
        let list = if count == 0 { &[] } else { std::slice::from_raw_parts(list, count) };
        let pieces: Vec<_> = list.iter().map(|b| (b.addr.cast_const(), b.length)).collect();
        set(of, |work| work.set_inline(&pieces));
    }
}

unsafe extern "C" fn wr_start(of: *mut ibv_qp_ex) {
    // SAFETY: the caller does not destroy `of` during the call (ibv_wr_post(3)).
    if let Ok(qp) = unsafe { qp(of.cast()) } {
        qp.building.enter();
    }
}

/// Posts all requests or none.
unsafe extern "C" fn wr_complete(of: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the caller does not destroy `of` during the call (ibv_wr_post(3)).
    status(unsafe { qp(of.cast()) }.and_then(|qp| {
        let posted = qp.post_started();
        qp.building.leave();
        posted
    }))
}

unsafe extern "C" fn wr_abort(of: *mut ibv_qp_ex) {
    // SAFETY: the caller does not destroy `of` during the call (ibv_wr_post(3)).
    if let Ok(qp) = unsafe { qp(of.cast()) } {
        qp.started.lock().clear();
        qp.building.leave();
    }
}

/// ibv_bind_mw(3), for type 1 windows: the library chooses the next key.
pub(crate) unsafe extern "C" fn bind_mw(
    of: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: `bind_type_1` has the contract of this function.
    status(unsafe { bind_type_1(of, mw, bind) })
}

unsafe fn bind_type_1(
    of: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> Result<(), Errno> {
    // SAFETY: `live` finds `mw` before it is followed, and the caller destroys no object during the
    // call. `bind` is null or valid (ibv_bind_mw(3)). Zeros are a valid `ibv_send_wr`.
    unsafe {
        let qp = qp(of)?;
        live::<MwBody>(mw)?;
        let bind = argument(bind, "mw_bind")?;
        if (*mw).type_ != IBV_MW_TYPE_1 {
            let reason = format_args!("ibv_bind_mw: bind type 2 windows with IBV_WR_BIND_MW");
            return Err(Errno::invalid(reason));
        }
        let present = (*mw).rkey;
        let new = present & !0xff | present.wrapping_add(1) & 0xff;
        let mut wr: ibv_send_wr = std::mem::zeroed();
        wr.wr_id = bind.wr_id;
        wr.send_flags = bind.send_flags;
        wr.opcode = IBV_WR_BIND_MW;
        wr.bind_mw = ibv_send_wr_bind_mw { mw, rkey: new, bind_info: bind.bind_info };
        qp.post_send(Chain::<ibv_send_wr>::new(&raw mut wr)).1?;
        (*mw).rkey = new;
    }
    Ok(())
}
