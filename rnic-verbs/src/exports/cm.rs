//! The functions behind librdmacm.so.1. That library has no state and no code of its own: each of
//! its functions jumps to the function published here as `rnicd_cm_NAME`. The version node keeps
//! the pair together: with another libibverbs.so.1, the loader refuses our librdmacm.so.1.

use super::publish;
use crate::ffi::absent::*;
use crate::rdmacm::addrinfo::*;
use crate::rdmacm::channel::*;
use crate::rdmacm::connect::*;
use crate::rdmacm::devices::*;
use crate::rdmacm::endpoint::*;
use crate::rdmacm::events::*;
use crate::rdmacm::id::*;
use crate::rdmacm::listen::*;
use crate::rdmacm::option::*;
use crate::rdmacm::qp::*;
use crate::rdmacm::resolve::*;
use crate::rdmacm::srq::*;
use crate::strings::*;

publish! { "RNIC_1" as "rnicd_cm_":
    rdma_accept, rdma_ack_cm_event, rdma_bind_addr, rdma_connect, rdma_create_ep,
    rdma_create_event_channel, rdma_create_id, rdma_create_qp, rdma_create_qp_ex, rdma_create_srq,
    rdma_create_srq_ex, rdma_destroy_ep, rdma_destroy_event_channel, rdma_destroy_id,
    rdma_destroy_qp, rdma_destroy_srq, rdma_disconnect, rdma_establish, rdma_event_str,
    rdma_free_devices, rdma_freeaddrinfo, rdma_get_cm_event, rdma_get_devices, rdma_get_dst_port,
    rdma_get_remote_ece, rdma_get_request, rdma_get_src_port, rdma_getaddrinfo, rdma_init_qp_attr,
    rdma_join_multicast, rdma_join_multicast_ex, rdma_leave_multicast, rdma_listen,
    rdma_migrate_id, rdma_notify, rdma_query_addrinfo, rdma_reject, rdma_reject_ece,
    rdma_resolve_addr, rdma_resolve_addrinfo, rdma_resolve_route, rdma_set_local_ece,
    rdma_set_option, rdma_write_cm_event,
}

// rsocket(7).
publish! { "RNIC_1" as "rnicd_cm_":
    raccept, rbind, rclose, rconnect, rfcntl, rgetpeername, rgetsockname, rgetsockopt, riomap,
    riounmap, riowrite, rlisten, rpoll, rread, rreadv, rrecv, rrecvfrom, rrecvmsg, rselect, rsend,
    rsendmsg, rsendto, rsetsockopt, rshutdown, rsocket, rwrite, rwritev,
}
