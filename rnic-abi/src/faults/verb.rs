//! Operations of programs, by their names in verbs and librdmacm.

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
];

impl Verb {
    /// `rdma_connect`.
    pub const CONNECT: Verb = Verb("rdma_connect");

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

    /// Returns the name.
    pub fn name(self) -> &'static str {
        self.0
    }
}
