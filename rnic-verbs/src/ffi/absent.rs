//! Functions that the device does not support. Each reports an error if its API allows it.
//!
//! They declare no parameters. In the calling conventions of x86-64 and AArch64, the caller passes
//! and removes arguments, so a function that reads none can be called with any arguments, even as a
//! variadic one (`__verbs_log`), which Rust could not define otherwise.

use std::ptr;

use libc::{c_int, c_void};

/// Defines functions that only fail, by their result:
/// - `pointer`: null, with `errno`;
/// - `number`: the error number, as in most of libibverbs;
/// - `minus_one`: -1, with `errno`, as in all of librdmacm. The result has register width, because
///   some functions return `ssize_t` or `off_t`; a caller that expects `int` reads the lower half,
///   which is -1 too;
/// - `nothing`.
macro_rules! absent {
    ($($result:ident: $($name:ident),* ;)*) => {
        $($(absent! { @$result $name })*)*
    };
    (@pointer $name:ident) => {
        pub(crate) extern "C" fn $name() -> *mut c_void {
            pointer(stringify!($name))
        }
    };
    (@number $name:ident) => {
        pub(crate) extern "C" fn $name() -> c_int {
            number(stringify!($name))
        }
    };
    (@minus_one $name:ident) => {
        pub(crate) extern "C" fn $name() -> isize {
            minus_one(stringify!($name))
        }
    };
    (@nothing $name:ident) => {
        pub(crate) extern "C" fn $name() {}
    };
}

// Multicast, device memory, imported objects, and other functions of libibverbs.
absent! {
    pointer: ibv_import_device, ibv_import_dm, ibv_import_mr,
        ibv_import_pd, ibv_reg_dmabuf_mr, ibv_alloc_dmah, ibv_create_comp_cntr;
    number: ibv_attach_mcast, ibv_detach_mcast, ibv_resolve_eth_l2_from_gid, ibv_query_ece, ibv_set_ece, ibv_dealloc_dmah,
        ibv_query_port_speed, _ibv_query_comp_cntr_caps, ibv_destroy_comp_cntr, ibv_inc_comp_cntr,
        ibv_inc_err_comp_cntr, ibv_qp_attach_comp_cntr, ibv_read_comp_cntr, ibv_read_err_comp_cntr,
        ibv_set_comp_cntr, ibv_set_err_comp_cntr;
    minus_one: ibv_dm_export_dmabuf_fd, ibv_get_device_index, ibv_read_sysfs_file;
    nothing: ibv_unimport_dm, ibv_unimport_mr, ibv_unimport_pd;
}

// Operations of a context, which the inline functions of the C headers call.
absent! {
    pointer: ibv_alloc_null_mr, ibv_create_counters, ibv_alloc_dm, ibv_create_flow_action_esp,
        ibv_alloc_parent_domain, ibv_alloc_td, ibv_create_rwq_ind_table, ibv_create_wq,
        ibv_create_flow, ibv_open_qp, ibv_open_xrcd;
    number: ibv_modify_qp_rate_limit, ibv_modify_cq, ibv_post_srq_ops;
}

// Conversions of kernel structures, which only the real librdmacm uses. The result structure is
// left unchanged.
absent! {
    nothing: ibv_copy_ah_attr_from_kern, ibv_copy_path_rec_from_kern, ibv_copy_path_rec_to_kern,
        ibv_copy_qp_attr_from_kern;
}

// Multicast and enhanced connection establishment of librdmacm, and additions of version 1.4.
absent! {
    minus_one: rdma_join_multicast, rdma_join_multicast_ex, rdma_leave_multicast,
        rdma_set_local_ece, rdma_get_remote_ece, rdma_reject_ece, rdma_query_addrinfo,
        rdma_resolve_addrinfo, rdma_write_cm_event;
}

// rsocket(7): sockets over RDMA.
absent! {
    minus_one: raccept, rbind, rclose, rconnect, rfcntl, rgetpeername, rgetsockname, rgetsockopt,
        riomap, riounmap, riowrite, rlisten, rpoll, rread, rreadv, rrecv, rrecvfrom, rrecvmsg,
        rselect, rsend, rsendmsg, rsendto, rsetsockopt, rshutdown, rsocket, rwrite, rwritev;
}

// Functions of libibverbs for provider drivers. Some programs are linked to such drivers, which
// register themselves when they are loaded; none of them ever finds a device.
absent! {
    pointer: _verbs_init_and_alloc_context, ibv_dmabuf_heap_alloc, ibv_dmabuf_heap_cc_shared_init,
        ibv_wr_opcode_str, verbs_open_device;
    number: __ioctl_final_num_attrs, execute_ioctl, ibv_cmd_advise_mr, ibv_cmd_alloc_dm,
        ibv_cmd_alloc_dmah, ibv_cmd_alloc_mw, ibv_cmd_alloc_pd, ibv_cmd_attach_mcast,
        ibv_cmd_close_xrcd, ibv_cmd_create_ah, ibv_cmd_create_counters, ibv_cmd_create_cq,
        ibv_cmd_create_cq_ex, ibv_cmd_create_cq_ex2, ibv_cmd_create_flow,
        ibv_cmd_create_flow_action_esp, ibv_cmd_create_qp, ibv_cmd_create_qp_ex,
        ibv_cmd_create_qp_ex2, ibv_cmd_create_rwq_ind_table, ibv_cmd_create_srq,
        ibv_cmd_create_srq_ex, ibv_cmd_create_wq, ibv_cmd_dealloc_mw, ibv_cmd_dealloc_pd,
        ibv_cmd_dereg_mr, ibv_cmd_destroy_ah, ibv_cmd_destroy_counters, ibv_cmd_destroy_cq,
        ibv_cmd_destroy_flow, ibv_cmd_destroy_flow_action, ibv_cmd_destroy_qp,
        ibv_cmd_destroy_rwq_ind_table, ibv_cmd_destroy_srq, ibv_cmd_destroy_wq,
        ibv_cmd_detach_mcast, ibv_cmd_free_dm, ibv_cmd_free_dmah, ibv_cmd_get_context,
        ibv_cmd_modify_cq, ibv_cmd_modify_flow_action_esp, ibv_cmd_modify_qp, ibv_cmd_modify_qp_ex,
        ibv_cmd_modify_srq, ibv_cmd_modify_wq, ibv_cmd_open_qp, ibv_cmd_open_xrcd, ibv_cmd_poll_cq,
        ibv_cmd_post_recv, ibv_cmd_post_send, ibv_cmd_post_srq_recv, ibv_cmd_query_context,
        ibv_cmd_query_device_any, ibv_cmd_query_mr, ibv_cmd_query_port, ibv_cmd_query_qp,
        ibv_cmd_query_srq, ibv_cmd_read_counters, ibv_cmd_reg_dm_mr, ibv_cmd_reg_dmabuf_mr,
        ibv_cmd_reg_mr, ibv_cmd_reg_mr_ex, ibv_cmd_req_notify_cq, ibv_cmd_rereg_mr,
        ibv_cmd_resize_cq, ibv_cmd_create_comp_cntr, ibv_cmd_destroy_comp_cntr,
        ibv_cmd_inc_comp_cntr, ibv_cmd_inc_err_comp_cntr, ibv_cmd_qp_attach_comp_cntr,
        ibv_cmd_query_comp_cntr_caps, ibv_cmd_read_comp_cntr, ibv_cmd_read_err_comp_cntr,
        ibv_cmd_set_comp_cntr, ibv_cmd_set_err_comp_cntr, ibv_cmd_query_port_speed,
        verbs_init_cq;
    minus_one: ibv_cmd_export_dmabuf_fd, ibv_read_ibdev_sysfs_file;
    nothing: __verbs_log, ibv_dmabuf_heap_destroy, ibv_dmabuf_heap_free, verbs_register_driver_33,
        verbs_register_driver_34, verbs_register_driver_57, verbs_register_driver_59,
        verbs_register_driver_64, verbs_register_driver_65, verbs_set_ops, verbs_uninit_context;
}

fn pointer(name: &str) -> *mut c_void {
    number(name);
    ptr::null_mut()
}

fn minus_one(name: &str) -> isize {
    number(name);
    -1
}

fn number(name: &str) -> c_int {
    unsupported!("{name}: {}", way_out(name)).report()
}

/// Returns what rnicd lacks, and what programs can do instead.
fn way_out(name: &str) -> &'static str {
    match name {
        "ibv_open_xrcd" | "ibv_open_qp" => "rnicd has no XRC; use RC QPs with a common SRQ",
        "ibv_alloc_dm" => "rnicd has no device memory; register memory of the program",
        "ibv_alloc_td" | "ibv_alloc_parent_domain" => {
            "rnicd has no thread domains; use the protection domain itself"
        }
        "ibv_create_wq" | "ibv_create_rwq_ind_table" | "ibv_create_flow" => {
            "rnicd has no raw packets; use UD QPs"
        }
        "ibv_modify_cq" => "rnicd does not moderate events; poll the queue less often",
        "ibv_alloc_null_mr" => "rnicd has no null region; register memory for unwanted data",
        "ibv_reg_dmabuf_mr" => "rnicd cannot access memory of devices; copy it to memory",
        _ if name.contains("mcast") || name.contains("multicast") => {
            "rnicd has no multicast; send a datagram to each receiver"
        }
        _ if !["ibv_", "rdma_", "verbs_", "_"].iter().any(|start| name.starts_with(start)) => {
            "rnicd has no rsockets; use sockets or rdma_cm"
        }
        _ => "no device of rnicd supports it",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_features_have_a_way_out() {
        for (name, feature) in [
            ("rsocket", "rsockets"),
            ("riomap", "rsockets"),
            ("ibv_attach_mcast", "multicast"),
            ("rdma_join_multicast_ex", "multicast"),
            ("ibv_open_xrcd", "XRC"),
            ("ibv_create_flow", "raw packets"),
        ] {
            let text = way_out(name);
            assert!(text.starts_with(&format!("rnicd has no {feature}; ")), "{name}: {text}");
        }
        for name in ["ibv_cmd_create_qp", "verbs_open_device", "__ioctl_final_num_attrs"] {
            assert_eq!(way_out(name), "no device of rnicd supports it", "{name}");
        }
    }
}
