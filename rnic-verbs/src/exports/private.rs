//! The names that provider drivers use. Their version node is renamed whenever one of them changes,
//! so a driver works only with its own release. One list serves all releases, because only
//! `ibv_query_gid_type`, which tools call, has an effect.

use super::publish;
use crate::ffi::absent::*;
use crate::verbs::context::query::ibv_query_gid_type;

/// Publishes names in the nodes of rdma-core 33, 34 to 56, 57, 59, 64 and 65.
macro_rules! publish_private {
    ($($name:ident),* $(,)?) => {
        publish! { "IBVERBS_PRIVATE_34": $($name),* }
        publish! { "IBVERBS_PRIVATE_33" also: $($name),* }
        publish! { "IBVERBS_PRIVATE_57" also: $($name),* }
        publish! { "IBVERBS_PRIVATE_59" also: $($name),* }
        publish! { "IBVERBS_PRIVATE_64" also: $($name),* }
        publish! { "IBVERBS_PRIVATE_65" also: $($name),* }
    };
}

publish_private! {
    __ioctl_final_num_attrs, __verbs_log, _verbs_init_and_alloc_context, execute_ioctl,
    ibv_cmd_advise_mr, ibv_cmd_alloc_dm, ibv_cmd_alloc_mw, ibv_cmd_alloc_pd, ibv_cmd_attach_mcast,
    ibv_cmd_close_xrcd, ibv_cmd_create_ah, ibv_cmd_create_counters, ibv_cmd_create_cq,
    ibv_cmd_create_cq_ex, ibv_cmd_create_flow, ibv_cmd_create_flow_action_esp, ibv_cmd_create_qp,
    ibv_cmd_create_qp_ex, ibv_cmd_create_qp_ex2, ibv_cmd_create_rwq_ind_table, ibv_cmd_create_srq,
    ibv_cmd_create_srq_ex, ibv_cmd_create_wq, ibv_cmd_dealloc_mw, ibv_cmd_dealloc_pd,
    ibv_cmd_dereg_mr, ibv_cmd_destroy_ah, ibv_cmd_destroy_counters, ibv_cmd_destroy_cq,
    ibv_cmd_destroy_flow, ibv_cmd_destroy_flow_action, ibv_cmd_destroy_qp,
    ibv_cmd_destroy_rwq_ind_table, ibv_cmd_destroy_srq, ibv_cmd_destroy_wq, ibv_cmd_detach_mcast,
    ibv_cmd_free_dm, ibv_cmd_get_context, ibv_cmd_modify_cq, ibv_cmd_modify_flow_action_esp,
    ibv_cmd_modify_qp, ibv_cmd_modify_qp_ex, ibv_cmd_modify_srq, ibv_cmd_modify_wq, ibv_cmd_open_qp,
    ibv_cmd_open_xrcd, ibv_cmd_poll_cq, ibv_cmd_post_recv, ibv_cmd_post_send,
    ibv_cmd_post_srq_recv, ibv_cmd_query_context, ibv_cmd_query_device_any, ibv_cmd_query_mr,
    ibv_cmd_query_port, ibv_cmd_query_qp, ibv_cmd_query_srq, ibv_cmd_read_counters,
    ibv_cmd_reg_dm_mr, ibv_cmd_reg_dmabuf_mr, ibv_cmd_reg_mr, ibv_cmd_req_notify_cq,
    ibv_cmd_rereg_mr, ibv_cmd_resize_cq, ibv_query_gid_type, ibv_read_ibdev_sysfs_file,
    verbs_init_cq, verbs_open_device, verbs_set_ops, verbs_uninit_context,
}

publish! { "IBVERBS_PRIVATE_33": verbs_register_driver_33 }
publish! { "IBVERBS_PRIVATE_34": verbs_register_driver_34 }
publish! { "IBVERBS_PRIVATE_57": verbs_register_driver_57, ibv_cmd_create_cq_ex2 }
publish! { "IBVERBS_PRIVATE_59":
    verbs_register_driver_59, ibv_cmd_alloc_dmah, ibv_cmd_export_dmabuf_fd, ibv_cmd_free_dmah,
    ibv_cmd_query_port_speed, ibv_cmd_reg_mr_ex, ibv_wr_opcode_str,
}
publish! { "IBVERBS_PRIVATE_59" also: ibv_cmd_create_cq_ex2 }
publish! { "IBVERBS_PRIVATE_64":
    verbs_register_driver_64, ibv_dmabuf_heap_alloc, ibv_dmabuf_heap_cc_shared_init,
    ibv_dmabuf_heap_destroy, ibv_dmabuf_heap_free,
}
publish! { "IBVERBS_PRIVATE_64" also:
    ibv_cmd_create_cq_ex2, ibv_cmd_alloc_dmah, ibv_cmd_export_dmabuf_fd, ibv_cmd_free_dmah,
    ibv_cmd_query_port_speed, ibv_cmd_reg_mr_ex, ibv_wr_opcode_str,
}
publish! { "IBVERBS_PRIVATE_65":
    verbs_register_driver_65, ibv_cmd_create_comp_cntr, ibv_cmd_destroy_comp_cntr,
    ibv_cmd_inc_comp_cntr, ibv_cmd_inc_err_comp_cntr, ibv_cmd_qp_attach_comp_cntr,
    ibv_cmd_query_comp_cntr_caps, ibv_cmd_read_comp_cntr, ibv_cmd_read_err_comp_cntr,
    ibv_cmd_set_comp_cntr, ibv_cmd_set_err_comp_cntr,
}
publish! { "IBVERBS_PRIVATE_65" also:
    ibv_cmd_create_cq_ex2, ibv_cmd_alloc_dmah, ibv_cmd_export_dmabuf_fd, ibv_cmd_free_dmah,
    ibv_cmd_query_port_speed, ibv_cmd_reg_mr_ex, ibv_dmabuf_heap_alloc,
    ibv_dmabuf_heap_cc_shared_init, ibv_dmabuf_heap_destroy, ibv_dmabuf_heap_free,
    ibv_wr_opcode_str,
}

// The only variable, a C `bool` that drivers set: objects may be destroyed after the device is
// gone.
#[cfg(not(test))]
std::arch::global_asm!(
    ".pushsection .bss.verbs_allow_disassociate_destroy,\"aw\",@nobits",
    ".globl datum.33, datum.34, datum.57, datum.59, datum.64, datum.65",
    ".type datum.33,@object; .type datum.34,@object; .type datum.57,@object",
    ".type datum.59,@object; .type datum.64,@object; .type datum.65,@object",
    "datum.33: datum.34: datum.57: datum.59: datum.64: datum.65:",
    ".zero 1",
    ".size datum.33, 1; .size datum.34, 1; .size datum.57, 1",
    ".size datum.59, 1; .size datum.64, 1; .size datum.65, 1",
    ".symver datum.33, verbs_allow_disassociate_destroy@IBVERBS_PRIVATE_33, remove",
    ".symver datum.34, verbs_allow_disassociate_destroy@@IBVERBS_PRIVATE_34, remove",
    ".symver datum.57, verbs_allow_disassociate_destroy@IBVERBS_PRIVATE_57, remove",
    ".symver datum.59, verbs_allow_disassociate_destroy@IBVERBS_PRIVATE_59, remove",
    ".symver datum.64, verbs_allow_disassociate_destroy@IBVERBS_PRIVATE_64, remove",
    ".symver datum.65, verbs_allow_disassociate_destroy@IBVERBS_PRIVATE_65, remove",
    ".popsection",
);
