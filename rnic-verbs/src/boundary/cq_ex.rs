//! Extended completion queues (`ibv_create_cq_ex(3)`): completions are looked at one by one.

use std::ffi::{c_int, c_uint};

use crate::c::*;
use crate::cq::CqBody;
use crate::errno::{Errno, pointer, status};
use crate::system;

use super::cq::{cq, make_cq};

/// What of a completion can be asked for.
const READABLE: u64 = IBV_WC_EX_WITH_BYTE_LEN
    | IBV_WC_EX_WITH_IMM
    | IBV_WC_EX_WITH_QP_NUM
    | IBV_WC_EX_WITH_SRC_QP
    | IBV_WC_EX_WITH_SLID
    | IBV_WC_EX_WITH_SL
    | IBV_WC_EX_WITH_DLID_PATH_BITS;

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
        match wanted.as_ref() {
            Some(w) if w.wc_flags & !READABLE != 0 => Err(Errno::UNSUPPORTED),
            // Flags of how it is used; a parent domain is not to be had.
            Some(w) if w.comp_mask & !IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 => Err(Errno::UNSUPPORTED),
            Some(w) => make_cq(of, w.cqe, w.cq_context, w.channel, w.comp_vector),
            None => Err(Errno::INVALID),
        }
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
        Err(errno) => errno.0,
    }
}

unsafe extern "C" fn start_poll(of: *mut ibv_cq_ex, wanted: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let (Some(cq), false) =
            (cq(of.cast()), wanted.as_ref().is_some_and(|wanted| wanted.comp_mask != 0))
        else {
            return status(Err(Errno::INVALID));
        };
        cq.begin_looking();
        let done = advance(of, cq);
        if done != 0 {
            // There is no `ibv_end_poll` after this.
            cq.end_looking();
        }
        done
    }
}

unsafe extern "C" fn next_poll(of: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        match cq(of.cast()) {
            Some(cq) => advance(of, cq),
            None => libc::EINVAL,
        }
    }
}

unsafe extern "C" fn end_poll(of: *mut ibv_cq_ex) {
    // SAFETY: as the module says.
    if let Some(cq) = unsafe { cq(of.cast()) } {
        cq.end_looking();
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
