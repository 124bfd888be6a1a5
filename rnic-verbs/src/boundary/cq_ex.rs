//! Extended completion queues (`ibv_create_cq_ex(3)`): completions are looked at one by one.

use std::ffi::{c_int, c_uint};

use crate::c::*;
use crate::cq::CqBody;
use crate::errno::{Errno, pointer};
use crate::system;

use super::argument;
use super::cq::{cq, make_cq};

/// What of a completion can be asked for.
const READABLE: u64 = IBV_WC_EX_WITH_BYTE_LEN
    | IBV_WC_EX_WITH_IMM
    | IBV_WC_EX_WITH_QP_NUM
    | IBV_WC_EX_WITH_SRC_QP
    | IBV_WC_EX_WITH_SLID
    | IBV_WC_EX_WITH_SL
    | IBV_WC_EX_WITH_DLID_PATH_BITS;

/// How a queue may be used, which makes no difference here.
const FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;

/// Puts the operations into a queue that is being made.
pub(super) fn operations(head: &mut ibv_cq_ex) {
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
pub(super) unsafe extern "C" fn create_cq_ex(
    of: *mut ibv_context,
    wanted: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    let made = unsafe {
        argument(wanted, "cq_attr").and_then(|w| {
            let fields = w.wc_flags & !READABLE;
            if fields != 0 {
                let reason = format_args!("wc_flags {fields:#x}: completions lack these fields");
                return Err(Errno::unsupported(reason));
            }
            // The flags say how the queue is used.
            let has_flags = w.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0;
            let flags = if has_flags { w.flags & !FLAGS } else { 0 };
            if flags != 0 {
                let reason = format_args!("flags {flags:#x} of the completion queue");
                return Err(Errno::unsupported(reason));
            }
            // There are no parent domains.
            let mask = w.comp_mask & !IBV_CQ_INIT_ATTR_MASK_FLAGS;
            if mask != 0 {
                let reason = format_args!("comp_mask {mask:#x} of the completion queue");
                return Err(Errno::unsupported(reason));
            }
            make_cq(of, w.cqe, w.cq_context, w.channel, w.comp_vector)
        })
    };
    pointer(made)
}

/// The queue, and the completion that is being looked at.
unsafe fn looked_at<T>(of: *mut ibv_cq_ex, read: impl FnOnce(&ibv_wc) -> T) -> T {
    // SAFETY: as the module says: between `ibv_start_poll` and `ibv_end_poll`.
    let wc = unsafe { cq(of.cast()) }.map(|cq| cq.looked_at()).unwrap_or_default();
    read(&wc)
}

/// Moves on to the next completion: 0, or the error.
unsafe fn advance(of: *mut ibv_cq_ex, cq: &CqBody) -> c_int {
    match cq.look_at_next() {
        Ok(wc) => {
            // SAFETY: as the module says.
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
    // SAFETY: as the module says.
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
            // There is no `ibv_end_poll` after this.
            cq.polling.leave();
        }
        done
    }
}

unsafe extern "C" fn next_poll(of: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as the module says.
    unsafe { cq(of.cast()).map_or_else(Errno::report, |cq| advance(of, cq)) }
}

unsafe extern "C" fn end_poll(of: *mut ibv_cq_ex) {
    // SAFETY: as the module says.
    match unsafe { cq(of.cast()) } {
        Ok(cq) => cq.polling.leave(),
        Err(errno) => errno.log(),
    }
}

macro_rules! read {
    ($($name:ident: $type:ty = |$wc:ident| $value:expr;)*) => {
        $(
            unsafe extern "C" fn $name(of: *mut ibv_cq_ex) -> $type {
                // SAFETY: as the module says.
                unsafe { looked_at(of, |$wc| $value) }
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
