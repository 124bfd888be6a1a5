//! Operations of programs, by their names in verbs and librdmacm.

use super::object::Object;
use crate::abi::control::LibraryCall;

/// Operation of a program: a verb without `ibv_`, or a function of librdmacm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verb(&'static str);

/// Operations, each with the kind of object by which rules can select it, and with the names of its
/// requests to the daemon or of its library call.
pub(super) const VERBS: &[(&str, Object, &[&str])] = &[
    ("get_device_list", Object::None, &["ibv_get_device_list"]),
    ("open_device", Object::None, &["ibv_open_device"]),
    ("close_device", Object::None, &["ibv_close_device"]),
    ("query_device", Object::None, &["ibv_query_device"]),
    ("query_gid", Object::None, &["ibv_query_gid"]),
    ("query_gid_table", Object::None, &["ibv_query_gid_table"]),
    ("query_port", Object::None, &["QueryPort"]),
    ("query_pkey", Object::None, &["QueryPkey"]),
    ("get_pkey_index", Object::None, &["ibv_get_pkey_index"]),
    ("query_rt_values_ex", Object::None, &["ibv_query_rt_values_ex"]),
    ("get_async_event", Object::None, &["ibv_get_async_event"]),
    ("alloc_pd", Object::None, &["OpenPd"]),
    ("dealloc_pd", Object::Pd, &["ibv_dealloc_pd"]),
    ("alloc_buf", Object::Pd, &["ibv_alloc_buf"]),
    ("create_shared_buffer", Object::None, &["ReserveSharedBuffer", "AddSharedBuffer"]),
    ("reg_mr", Object::Pd, &["RegMr"]),
    ("rereg_mr", Object::Pd, &["ReregMr"]),
    ("dereg_mr", Object::None, &["DeregMr"]),
    ("alloc_mw", Object::Pd, &["AllocWindow"]),
    ("dealloc_mw", Object::Pd, &["ibv_dealloc_mw"]),
    ("create_comp_channel", Object::None, &["CreateChannel"]),
    ("destroy_comp_channel", Object::None, &["ibv_destroy_comp_channel"]),
    ("create_cq", Object::None, &["CreateCq"]),
    ("resize_cq", Object::Cq, &["ResizeCq"]),
    ("destroy_cq", Object::Cq, &["ibv_destroy_cq"]),
    ("create_srq", Object::Pd, &["CreateSrq"]),
    ("modify_srq", Object::None, &["ArmSrq", "ibv_modify_srq"]),
    ("query_srq", Object::None, &["QuerySrq"]),
    ("get_srq_num", Object::Pd, &["ibv_get_srq_num"]),
    ("destroy_srq", Object::Pd, &["ibv_destroy_srq"]),
    ("create_qp", Object::Pd, &["CreateQp"]),
    ("modify_qp", Object::Qp, &["ModifyQp", "QpToError", "ibv_modify_qp"]),
    ("query_qp", Object::Qp, &["ibv_query_qp"]),
    ("destroy_qp", Object::Qp, &["ibv_destroy_qp"]),
    ("rdma_get_devices", Object::None, &["rdma_get_devices"]),
    ("rdma_getaddrinfo", Object::None, &["rdma_getaddrinfo"]),
    ("rdma_create_event_channel", Object::None, &["rdma_create_event_channel"]),
    ("rdma_create_id", Object::None, &["rdma_create_id"]),
    ("rdma_destroy_id", Object::Peer, &["rdma_destroy_id"]),
    ("rdma_migrate_id", Object::Peer, &["rdma_migrate_id"]),
    ("rdma_set_option", Object::Peer, &["rdma_set_option"]),
    ("rdma_create_ep", Object::None, &["rdma_create_ep"]),
    ("rdma_get_request", Object::None, &["rdma_get_request"]),
    ("rdma_create_qp", Object::Peer, &["rdma_create_qp"]),
    ("rdma_create_srq", Object::Peer, &["rdma_create_srq"]),
    ("rdma_init_qp_attr", Object::Peer, &["rdma_init_qp_attr"]),
    ("rdma_bind_addr", Object::None, &["Bind", "BindDatagrams", "BindRc"]),
    ("rdma_listen", Object::None, &["Listen"]),
    ("rdma_connect", Object::Qp, &["Connect", "ConnectOver", "ConnectRc"]),
    ("rdma_accept", Object::Qp, &["Accept", "AcceptRc", "ServeOver"]),
    ("rdma_establish", Object::Qp, &["EstablishRc", "rdma_establish"]),
    ("rdma_notify", Object::Peer, &["rdma_notify"]),
    ("rdma_reject", Object::Peer, &["Reject"]),
    ("rdma_disconnect", Object::Qp, &["Disconnect", "rdma_disconnect"]),
    ("post_send", Object::Request, &["PostSend"]),
    ("post_recv", Object::Qp, &["PostRecv"]),
    ("post_srq_recv", Object::Pd, &["PostSrqRecv"]),
    ("poll_cq", Object::Cq, &["PollCq"]),
    ("req_notify_cq", Object::Cq, &["ReqNotifyCq"]),
    ("create_ah", Object::Pd, &["CreateAh"]),
    ("init_ah_from_wc", Object::None, &["ibv_init_ah_from_wc"]),
    ("destroy_ah", Object::Pd, &["ibv_destroy_ah"]),
    ("rdma_resolve_addr", Object::Peer, &["ResolveAddr"]),
    ("rdma_resolve_route", Object::Peer, &["ResolveRoute"]),
    ("get_cq_event", Object::None, &["GetCqEvent"]),
    ("rdma_get_cm_event", Object::None, &["GetCmEvent"]),
    ("rdma_ack_cm_event", Object::Peer, &["rdma_ack_cm_event"]),
    ("rdma_cm_event", Object::Peer, &["CmEvent"]),
];

impl Verb {
    /// `rdma_connect`.
    pub const CONNECT: Verb = Verb("rdma_connect");
    /// `rdma_resolve_addr`.
    pub const RESOLVE_ADDR: Verb = Verb("rdma_resolve_addr");
    /// `rdma_resolve_route`.
    pub const RESOLVE_ROUTE: Verb = Verb("rdma_resolve_route");
    /// `rdma_accept`.
    pub const ACCEPT: Verb = Verb("rdma_accept");
    /// An rdma_cm event that is about to be queued.
    pub const CM_EVENT: Verb = Verb("rdma_cm_event");

    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let plain = text.strip_prefix("ibv_").unwrap_or(text);
        let found = VERBS.iter().find(|(name, ..)| *name == plain);
        found.map(|(name, ..)| Verb(name)).ok_or_else(|| {
            let names: Vec<_> = Verb::names().collect();
            format!("needs one of {}", names.join(", "))
        })
    }

    /// Returns the names of all operations.
    pub fn names() -> impl Iterator<Item = &'static str> {
        VERBS.iter().map(|(name, ..)| *name)
    }

    /// Returns the operation of a request, by the name of the request. `None` for requests that no
    /// verb sends.
    pub fn of_request(request: &str) -> Option<Self> {
        let found = VERBS.iter().find(|(.., requests)| requests.contains(&request));
        found.map(|(name, ..)| Verb(name))
    }

    /// Returns the bits of the [`LibraryCall`]s of the operation; 0 for an operation that sends
    /// requests to the daemon.
    pub fn library_calls(self) -> u64 {
        let requests =
            VERBS.iter().find(|(name, ..)| *name == self.0).map_or(&[][..], |(.., r)| *r);
        let number = |request: &&str| LibraryCall::names().position(|name| name == *request);
        requests.iter().filter_map(number).map(|number| 1 << number).sum()
    }

    /// Returns the kind of object by which rules can select the operation.
    pub fn object(self) -> Object {
        VERBS
            .iter()
            .find(|(name, ..)| *name == self.0)
            .map_or(Object::None, |(_, object, _)| *object)
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        self.0
    }
}
