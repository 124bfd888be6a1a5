//! The function pointers in the C structures of objects: supported operations, and unsupported
//! operations that fail with a reason. All other pointers stay null. For a null pointer of a
//! context, the inline functions of the C headers return `EOPNOTSUPP`. They call the pointers of a
//! CQ or QP unchecked, so flags that select unsupported operations are refused at creation.

use crate::c::*;
use crate::ffi::absent;
use crate::verbs::context::Operations;
use crate::verbs::context::query::*;
use crate::verbs::cq::entry::*;
use crate::verbs::cq::extended::*;
use crate::verbs::mr::advise_mr;
use crate::verbs::mw::{alloc_mw, dealloc_mw};
use crate::verbs::qp::entry::*;
use crate::verbs::qp::extended::*;
use crate::verbs::srq::{create_srq_ex, get_srq_num, post_srq_recv};

/// The operations of all objects.
pub(crate) static SERVED: Operations = Operations { context, cq, qp };

/// Sets function pointers of a structure: all, or those whose flag is in a mask.
macro_rules! serve {
    ($head:expr, $($slot:ident: $function:expr),* $(,)?) => {
        $($head.$slot = Some($function);)*
    };
    ($head:expr, $mask:ident, $($slot:ident $flag:ident: $function:expr),* $(,)?) => {
        $($head.$slot = ($mask & $flag != 0).then_some($function as _);)*
    };
}

fn context(head: &mut verbs_context) {
    serve! { head,
        query_port: query_port,
        advise_mr: advise_mr,
        query_rt_values: query_rt_values,
        create_cq_ex: create_cq_ex,
        query_device_ex: query_device_ex,
        create_qp_ex: create_qp_ex,
        get_srq_num: get_srq_num,
        create_srq_ex: create_srq_ex,
    }
    serve! { head.context.ops,
        alloc_mw: alloc_mw,
        bind_mw: bind_mw,
        dealloc_mw: dealloc_mw,
        poll_cq: poll_cq,
        req_notify_cq: req_notify_cq,
        post_srq_recv: post_srq_recv,
        post_send: post_send,
        post_recv: post_recv,
    }
    set_unsupported(head);
}

/// Sets the unsupported operations, except those that take an object which cannot exist. With null
/// pointers, the inline functions of the C headers would return `EOPNOTSUPP` without a reason.
fn set_unsupported(head: &mut verbs_context) {
    serve! { head,
        alloc_null_mr: absent::ibv_alloc_null_mr,
        create_counters: absent::ibv_create_counters,
        alloc_dm: absent::ibv_alloc_dm,
        create_flow_action_esp: absent::ibv_create_flow_action_esp,
        modify_qp_rate_limit: absent::ibv_modify_qp_rate_limit,
        alloc_parent_domain: absent::ibv_alloc_parent_domain,
        alloc_td: absent::ibv_alloc_td,
        modify_cq: absent::ibv_modify_cq,
        post_srq_ops: absent::ibv_post_srq_ops,
        create_rwq_ind_table: absent::ibv_create_rwq_ind_table,
        create_wq: absent::ibv_create_wq,
        ibv_create_flow: absent::ibv_create_flow,
        open_qp: absent::ibv_open_qp,
        open_xrcd: absent::ibv_open_xrcd,
    }
}

fn cq(head: &mut ibv_cq_ex) {
    serve! { head,
        start_poll: start_poll,
        next_poll: next_poll,
        end_poll: end_poll,
        read_opcode: read_opcode,
        read_vendor_err: read_vendor_err,
        read_byte_len: read_byte_len,
        read_imm_data: read_imm_data,
        read_qp_num: read_qp_num,
        read_src_qp: read_src_qp,
        read_wc_flags: read_wc_flags,
        read_slid: read_slid,
        read_sl: read_sl,
        read_dlid_path_bits: read_dlid_path_bits,
    }
}

/// Sets the operations that `flags` (`send_ops_flags`) selects for a new QP, and the operations
/// common to all extended QPs. Sets none if `flags` is 0.
fn qp(head: &mut ibv_qp_ex, flags: u64) {
    if flags == 0 {
        return;
    }
    serve! { head, flags,
        wr_atomic_cmp_swp IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP: wr_atomic_cmp_swp,
        wr_atomic_fetch_add IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD: wr_atomic_fetch_add,
        wr_bind_mw IBV_QP_EX_WITH_BIND_MW: wr_bind_mw,
        wr_local_inv IBV_QP_EX_WITH_LOCAL_INV: wr_local_inv,
        wr_rdma_read IBV_QP_EX_WITH_RDMA_READ: wr_rdma_read,
        wr_rdma_write IBV_QP_EX_WITH_RDMA_WRITE: wr_rdma_write,
        wr_rdma_write_imm IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM: wr_rdma_write_imm,
        wr_send IBV_QP_EX_WITH_SEND: wr_send,
        wr_send_imm IBV_QP_EX_WITH_SEND_WITH_IMM: wr_send_imm,
        wr_send_inv IBV_QP_EX_WITH_SEND_WITH_INV: wr_send_inv,
    }
    serve! { head,
        wr_set_ud_addr: wr_set_ud_addr,
        wr_set_inline_data: wr_set_inline_data,
        wr_set_inline_data_list: wr_set_inline_data_list,
        wr_set_sge: wr_set_sge,
        wr_set_sge_list: wr_set_sge_list,
        wr_start: wr_start,
        wr_complete: wr_complete,
        wr_abort: wr_abort,
    }
}
