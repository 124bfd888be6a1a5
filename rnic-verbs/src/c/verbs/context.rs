//! The open device as programs access it: the tables of operations through which the inline
//! functions of the headers call.

use libc::{c_int, c_uint, c_void, pthread_mutex_t, size_t};

use super::*;

/// The operations that existed before the API became extensible.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_context_ops {
    pub _compat_query_device: Unserved,
    pub _compat_query_port: Unserved,
    pub _compat_alloc_pd: Unserved,
    pub _compat_dealloc_pd: Unserved,
    pub _compat_reg_mr: Unserved,
    pub _compat_rereg_mr: Unserved,
    pub _compat_dereg_mr: Unserved,
    pub alloc_mw: Option<unsafe extern "C" fn(*mut ibv_pd, ibv_mw_type) -> *mut ibv_mw>,
    pub bind_mw:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_mw, *const ibv_mw_bind) -> c_int>,
    pub dealloc_mw: Option<unsafe extern "C" fn(*mut ibv_mw) -> c_int>,
    pub _compat_create_cq: Unserved,
    pub poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
    pub _compat_cq_event: Unserved,
    pub _compat_resize_cq: Unserved,
    pub _compat_destroy_cq: Unserved,
    pub _compat_create_srq: Unserved,
    pub _compat_modify_srq: Unserved,
    pub _compat_query_srq: Unserved,
    pub _compat_destroy_srq: Unserved,
    pub post_srq_recv: Option<
        unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    >,
    pub _compat_create_qp: Unserved,
    pub _compat_query_qp: Unserved,
    pub _compat_modify_qp: Unserved,
    pub _compat_destroy_qp: Unserved,
    pub post_send:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
    pub post_recv:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
    pub _compat_create_ah: Unserved,
    pub _compat_destroy_ah: Unserved,
    pub _compat_attach_mcast: Unserved,
    pub _compat_detach_mcast: Unserved,
    pub _compat_async_event: Unserved,
}

/// ibv_open_device(3). Always the last field of a [`verbs_context`].
#[repr(C)]
pub struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: pthread_mutex_t,
    /// [`VERBS_ABI_IS_EXTENDED`]: this structure is the last field of a [`verbs_context`].
    pub abi_compat: *mut c_void,
}

/// Value of `abi_compat` in an [`ibv_context`] inside a [`verbs_context`].
pub const VERBS_ABI_IS_EXTENDED: *mut c_void = usize::MAX as *mut c_void;

/// ibv_open_device(3), with the operations that came later. It grows at the front: programs find
/// an operation by its distance from `context`, after comparing that distance with `sz`.
#[repr(C)]
pub struct verbs_context {
    pub query_port:
        Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, size_t) -> c_int>,
    pub advise_mr:
        Option<unsafe extern "C" fn(*mut ibv_pd, c_uint, u32, *mut ibv_sge, u32) -> c_int>,
    pub alloc_null_mr: Option<extern "C" fn() -> *mut c_void>,
    pub read_counters: Unserved,
    pub attach_counters_point_flow: Unserved,
    pub create_counters: Option<extern "C" fn() -> *mut c_void>,
    pub destroy_counters: Unserved,
    pub reg_dm_mr: Unserved,
    pub alloc_dm: Option<extern "C" fn() -> *mut c_void>,
    pub free_dm: Unserved,
    pub modify_flow_action_esp: Unserved,
    pub destroy_flow_action: Unserved,
    pub create_flow_action_esp: Option<extern "C" fn() -> *mut c_void>,
    pub modify_qp_rate_limit: Option<extern "C" fn() -> c_int>,
    pub alloc_parent_domain: Option<extern "C" fn() -> *mut c_void>,
    pub dealloc_td: Unserved,
    pub alloc_td: Option<extern "C" fn() -> *mut c_void>,
    pub modify_cq: Option<extern "C" fn() -> c_int>,
    pub post_srq_ops: Option<extern "C" fn() -> c_int>,
    pub destroy_rwq_ind_table: Unserved,
    pub create_rwq_ind_table: Option<extern "C" fn() -> *mut c_void>,
    pub destroy_wq: Unserved,
    pub modify_wq: Unserved,
    pub create_wq: Option<extern "C" fn() -> *mut c_void>,
    pub query_rt_values:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_values_ex) -> c_int>,
    pub create_cq_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex>,
    /// State of rdma-core, which programs do not access.
    pub priv_: *mut c_void,
    pub query_device_ex: Option<
        unsafe extern "C" fn(
            *mut ibv_context,
            *const ibv_query_device_ex_input,
            *mut ibv_device_attr_ex,
            size_t,
        ) -> c_int,
    >,
    pub ibv_destroy_flow: Unserved,
    pub abi_placeholder2: Unserved,
    pub ibv_create_flow: Option<extern "C" fn() -> *mut c_void>,
    pub abi_placeholder1: Unserved,
    pub open_qp: Option<extern "C" fn() -> *mut c_void>,
    pub create_qp_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp>,
    pub get_srq_num: Option<unsafe extern "C" fn(*mut ibv_srq, *mut u32) -> c_int>,
    pub create_srq_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq>,
    pub open_xrcd: Option<extern "C" fn() -> *mut c_void>,
    pub close_xrcd: Unserved,
    pub _abi_placeholder3: u64,
    /// Size of the whole structure in bytes.
    pub sz: size_t,
    pub context: ibv_context,
}
