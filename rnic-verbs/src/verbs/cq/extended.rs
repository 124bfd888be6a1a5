//! Extended completion queues (`ibv_create_cq_ex(3)`): programs read completions one by one.

use std::ffi::{c_int, c_uint};

use crate::c::*;
use crate::errno::{Errno, pointer};
use crate::system;
use crate::verbs::cq::CqBody;

use crate::ffi::pointers::argument;
use crate::verbs::cq::entry::{cq, make_cq};

/// Completion fields that a program can request.
const READABLE: u64 = IBV_WC_EX_WITH_BYTE_LEN
    | IBV_WC_EX_WITH_IMM
    | IBV_WC_EX_WITH_QP_NUM
    | IBV_WC_EX_WITH_SRC_QP
    | IBV_WC_EX_WITH_SLID
    | IBV_WC_EX_WITH_SL
    | IBV_WC_EX_WITH_DLID_PATH_BITS;

/// Hints about the use of a queue, which have no effect.
const FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;

/// Sets the operations of a new queue.
pub(crate) fn operations(head: &mut ibv_cq_ex) {
    head.start_poll = Some(start_poll);
    head.next_poll = Some(next_poll);
    head.end_poll = Some(end_poll);
    head.read_opcode = Some(read_opcode);
    head.read_vendor_err = Some(read_vendor_err);
    head.read_byte_len = Some(read_byte_len);
    head.read_imm_data = Some(read_imm_data);
    head.read_qp_num = Some(read_qp_num);
    head.read_src_qp = Some(read_src_qp);
    head.read_wc_flags = Some(read_wc_flags);
    head.read_slid = Some(read_slid);
    head.read_sl = Some(read_sl);
    head.read_dlid_path_bits = Some(read_dlid_path_bits);
}

/// ibv_create_cq_ex(3).
pub(crate) unsafe extern "C" fn create_cq_ex(
    of: *mut ibv_context,
    wanted: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    let _guard = system::uncancelled();
    // SAFETY: `wanted` is null or valid, and the caller destroys neither `of` nor the channel
    // during the call (ibv_create_cq_ex(3)).
    let made = unsafe {
        argument(wanted, "cq_attr").and_then(|w| {
            let fields = w.wc_flags & !READABLE;
            if fields != 0 {
                let reason = format_args!("wc_flags {fields:#x} are not supported");
                return Err(Errno::unsupported(reason));
            }
            // Without IBV_CQ_INIT_ATTR_MASK_FLAGS the field is not set.
            let has_flags = w.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0;
            let flags = if has_flags { w.flags & !FLAGS } else { 0 };
            if flags != 0 {
                let reason = format_args!("completion queue flags {flags:#x} are not supported");
                return Err(Errno::unsupported(reason));
            }
            // Parent domains (IBV_CQ_INIT_ATTR_MASK_PD) are not supported.
            let mask = w.comp_mask & !IBV_CQ_INIT_ATTR_MASK_FLAGS;
            if mask != 0 {
                let reason = format_args!("completion queue comp_mask {mask:#x} is not supported");
                return Err(Errno::unsupported(reason));
            }
            make_cq(of, w.cqe, w.cq_context, w.channel, w.comp_vector)
        })
    };
    pointer(made)
}

/// Reads a field of the current completion of a queue.
unsafe fn current<T>(of: *mut ibv_cq_ex, read: impl FnOnce(&ibv_wc) -> T) -> T {
    // SAFETY: the caller does not destroy `of` between `ibv_start_poll` and `ibv_end_poll`
    // (ibv_create_cq_ex(3)).
    let wc = unsafe { cq(of.cast()) }.map(|cq| cq.current()).unwrap_or_default();
    read(&wc)
}

/// Moves on to the next completion. Returns 0 or the error.
unsafe fn advance(of: *mut ibv_cq_ex, cq: &CqBody) -> c_int {
    match cq.next_completion() {
        Ok(wc) => {
            // SAFETY: callers have found `of` with `cq`, and it is not destroyed during the call.
            unsafe {
                (*of).wr_id = wc.wr_id;
                (*of).status = wc.status;
            }
            0
        }
        Err(errno) => errno.report(),
    }
}

unsafe extern "C" fn start_poll(of: *mut ibv_cq_ex, wanted: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: `wanted` is null or valid, and `cq` finds `of`, which the caller does not destroy
    // during the call (ibv_create_cq_ex(3)).
    unsafe {
        let comp_mask = wanted.as_ref().map_or(0, |wanted| wanted.comp_mask);
        if comp_mask != 0 {
            let reason = format_args!("comp_mask {comp_mask:#x} of ibv_start_poll is not 0");
            return Errno::invalid(reason).report();
        }
        let cq = match cq(of.cast()) {
            Ok(cq) => cq,
            Err(errno) => return errno.report(),
        };
        cq.polling.enter();
        let done = advance(of, cq);
        if done != 0 {
            // No `ibv_end_poll` follows an error.
            cq.polling.leave();
        }
        done
    }
}

unsafe extern "C" fn next_poll(of: *mut ibv_cq_ex) -> c_int {
    // SAFETY: `cq` finds `of`, which the caller does not destroy before `ibv_end_poll`
    // (ibv_create_cq_ex(3)).
    unsafe { cq(of.cast()).map_or_else(Errno::report, |cq| advance(of, cq)) }
}

unsafe extern "C" fn end_poll(of: *mut ibv_cq_ex) {
    // SAFETY: the caller does not destroy `of` during the call (ibv_create_cq_ex(3)).
    match unsafe { cq(of.cast()) } {
        Ok(cq) => cq.polling.leave(),
        Err(errno) => errno.log(),
    }
}

macro_rules! read {
    ($($name:ident: $type:ty = |$wc:ident| $value:expr;)*) => {
        $(
            unsafe extern "C" fn $name(of: *mut ibv_cq_ex) -> $type {
                // SAFETY: `current` has the contract of this function.
                unsafe { current(of, |$wc| $value) }
            }
        )*
    };
}

read! {
    read_opcode: ibv_wc_opcode = |wc| wc.opcode;
    read_vendor_err: u32 = |wc| wc.vendor_err;
    read_byte_len: u32 = |wc| wc.byte_len;
    read_imm_data: u32 = |wc| wc.imm_data;
    read_qp_num: u32 = |wc| wc.qp_num;
    read_src_qp: u32 = |wc| wc.src_qp;
    read_wc_flags: c_uint = |wc| wc.wc_flags;
    read_slid: u32 = |wc| u32::from(wc.slid);
    read_sl: u8 = |wc| wc.sl;
    read_dlid_path_bits: u8 = |wc| wc.dlid_path_bits;
}
