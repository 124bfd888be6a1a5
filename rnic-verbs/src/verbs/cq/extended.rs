//! The operations of `ibv_cq_ex`, with which programs read completions one by one
//! (`ibv_create_cq_ex(3)`).

use std::ffi::c_uint;
use std::sync::Arc;

use super::{CqBody, cq};
use crate::c::{ibv_cq_ex, ibv_poll_cq_attr, ibv_wc, ibv_wc_opcode};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::Live;
use crate::ffi::pointers::{In, set};

/// Returns the current completion of a queue.
fn current(of: *mut ibv_cq_ex) -> ibv_wc {
    cq(of.cast()).map(|cq| cq.current()).unwrap_or_default()
}

/// Advances to the next completion.
fn advance(cq: Live<Arc<CqBody>>) -> Result<(), Errno> {
    let wc = cq.next_completion()?;
    set!(cq.wr_id = wc.wr_id);
    set!(cq.status = wc.status);
    Ok(())
}

fn start(of: *mut ibv_cq_ex, wanted: In<ibv_poll_cq_attr>) -> Result<(), Errno> {
    let comp_mask = wanted.optional().map_or(0, |wanted| wanted.comp_mask);
    if comp_mask != 0 {
        return Err(invalid!("comp_mask {comp_mask:#x} of ibv_start_poll is not 0"));
    }
    let cq = cq(of.cast())?;
    cq.polling.enter();
    // No `ibv_end_poll` follows an error.
    advance(cq).inspect_err(|_| cq.polling.leave())
}

fn next(of: *mut ibv_cq_ex) -> Result<(), Errno> {
    advance(cq(of.cast())?)
}

fn end(of: *mut ibv_cq_ex) -> Result<(), Errno> {
    cq(of.cast())?.polling.leave();
    Ok(())
}

entry! {
    plain start_poll(of: *mut ibv_cq_ex, wanted: In<ibv_poll_cq_attr>) -> status = start;
    plain next_poll(of: *mut ibv_cq_ex) -> status = next;
    plain end_poll(of: *mut ibv_cq_ex) -> nothing = end;
    plain read_opcode(of: *mut ibv_cq_ex) -> value<ibv_wc_opcode> = |of| current(of).opcode;
    plain read_vendor_err(of: *mut ibv_cq_ex) -> value<u32> = |of| current(of).vendor_err;
    plain read_byte_len(of: *mut ibv_cq_ex) -> value<u32> = |of| current(of).byte_len;
    plain read_imm_data(of: *mut ibv_cq_ex) -> value<u32> = |of| current(of).imm_data;
    plain read_qp_num(of: *mut ibv_cq_ex) -> value<u32> = |of| current(of).qp_num;
    plain read_src_qp(of: *mut ibv_cq_ex) -> value<u32> = |of| current(of).src_qp;
    plain read_wc_flags(of: *mut ibv_cq_ex) -> value<c_uint> = |of| current(of).wc_flags;
    plain read_slid(of: *mut ibv_cq_ex) -> value<u32> = |of| current(of).slid.into();
    plain read_sl(of: *mut ibv_cq_ex) -> value<u8> = |of| current(of).sl;
    plain read_dlid_path_bits(of: *mut ibv_cq_ex) -> value<u8> = |of| current(of).dlid_path_bits;
}
