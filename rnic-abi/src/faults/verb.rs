//! Operations of programs, by their names in verbs and librdmacm.

use crate::abi::control::LibraryCall;

/// Operation of a program: a verb without `ibv_`, or a function of librdmacm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verb(&'static str);

/// Operations with the names of the requests that carry them out.
pub(super) const VERBS: &[(&str, &[&str])] = &[
    ("query_device", &["QueryDevice"]),
    ("query_gid", &["QueryGids"]),
    ("alloc_pd", &["OpenPd"]),
    ("dealloc_pd", &["ClosePd"]),
    ("create_shared_buffer", &["ReserveSharedBuffer", "AddSharedBuffer"]),
    ("reg_mr", &["RegMr"]),
    ("rereg_mr", &["ReregMr"]),
    ("dereg_mr", &["DeregMr"]),
    ("alloc_mw", &["AllocWindow"]),
    ("dealloc_mw", &["DeallocWindow"]),
    ("create_comp_channel", &["CreateChannel"]),
    ("destroy_comp_channel", &["DestroyChannel"]),
    ("create_cq", &["CreateCq"]),
    ("resize_cq", &["ResizeCq"]),
    ("destroy_cq", &["DestroyCq"]),
    ("create_srq", &["CreateSrq"]),
    ("modify_srq", &["ArmSrq"]),
    ("query_srq", &["QuerySrq"]),
    ("destroy_srq", &["DestroySrq"]),
    ("create_qp", &["CreateQp"]),
    ("modify_qp", &["ModifyQp", "QpToError"]),
    ("query_qp", &["QueryQp"]),
    ("destroy_qp", &["DestroyQp"]),
    ("rdma_bind_addr", &["Bind", "BindDatagrams", "BindRc"]),
    ("rdma_listen", &["Listen"]),
    ("rdma_connect", &["Connect", "ConnectOver", "ConnectRc"]),
    ("rdma_accept", &["Accept", "AcceptRc", "ServeOver"]),
    ("rdma_establish", &["EstablishRc"]),
    ("rdma_reject", &["Reject"]),
    ("rdma_disconnect", &["Disconnect"]),
    ("post_send", &["PostSend"]),
    ("post_recv", &["PostRecv"]),
    ("post_srq_recv", &["PostSrqRecv"]),
    ("poll_cq", &["PollCq"]),
    ("req_notify_cq", &["ReqNotifyCq"]),
    ("create_ah", &["CreateAh"]),
    ("query_port", &["QueryPort"]),
    ("query_pkey", &["QueryPkey"]),
    ("rdma_resolve_addr", &["ResolveAddr"]),
    ("rdma_resolve_route", &["ResolveRoute"]),
];

impl Verb {
    /// `rdma_connect`.
    pub const CONNECT: Verb = Verb("rdma_connect");
    /// `ibv_post_send`.
    pub const POST_SEND: Verb = Verb("post_send");
    /// `rdma_resolve_addr`.
    pub const RESOLVE_ADDR: Verb = Verb("rdma_resolve_addr");
    /// `rdma_resolve_route`.
    pub const RESOLVE_ROUTE: Verb = Verb("rdma_resolve_route");
    /// `rdma_accept`.
    pub const ACCEPT: Verb = Verb("rdma_accept");

    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let plain = text.strip_prefix("ibv_").unwrap_or(text);
        let found = VERBS.iter().find(|(name, _)| *name == plain);
        found.map(|(name, _)| Verb(name)).ok_or_else(|| {
            let names = VERBS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
            format!("needs one of {names}")
        })
    }

    /// Returns the operation that a request carries out, by the name of the request. `None` for
    /// requests that no verb makes.
    pub fn of_request(request: &str) -> Option<Self> {
        let found = VERBS.iter().find(|(_, requests)| requests.contains(&request));
        found.map(|(name, _)| Verb(name))
    }

    /// Returns the set of calls by which a library carries out the operation without the daemon:
    /// the bits of [`LibraryCall`]s. It is empty for an operation that makes requests.
    pub fn library_calls(self) -> u64 {
        let requests = VERBS.iter().find(|(name, _)| *name == self.0).map_or(&[][..], |(_, r)| r);
        let number = |request| LibraryCall::NAMES.iter().position(|name| name == request);
        requests.iter().filter_map(number).map(|number| 1 << number).sum()
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        self.0
    }
}
