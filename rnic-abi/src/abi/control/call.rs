//! Calls that the library executes without the daemon, unless a fault rule applies to them.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::types::*;

/// A call of a program that needs no request to the daemon. While a fault rule for such a call is
/// in force, the daemon sets its bit in
/// [`RULED_CALLS`](crate::abi::queue::arena_header::RULED_CALLS), and the library sends
/// [`RequestBody::Call`](super::RequestBody::Call) before it executes the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LibraryCall {
    /// Posts one send request (`ibv_post_send(3)`).
    PostSend {
        /// The QP.
        qp: QpId,
        /// A [`SendOpcode`](crate::abi::queue::SendOpcode), not validated.
        opcode: u8,
    },
    /// Posts one receive (`ibv_post_recv(3)`).
    PostRecv {
        /// The QP.
        qp: QpId,
    },
    /// Posts one receive (`ibv_post_srq_recv(3)`).
    PostSrqRecv {
        /// The SRQ.
        srq: SrqId,
    },
    /// Polls for completions (`ibv_poll_cq(3)`).
    PollCq {
        /// The CQ.
        cq: CqId,
    },
    /// Arms a CQ (`ibv_req_notify_cq(3)`).
    ReqNotifyCq {
        /// The CQ.
        cq: CqId,
    },
    /// Creates an address handle (`ibv_create_ah(3)`).
    CreateAh {
        /// The protection domain.
        pd: PdId,
    },
    /// Queries a port (`ibv_query_port(3)`).
    QueryPort,
    /// Queries a P_Key (`ibv_query_pkey(3)`).
    QueryPkey,
    /// Resolves the address of a peer (`rdma_resolve_addr(3)`).
    ResolveAddr {
        /// Number in the event, if one follows.
        context: u64,
        /// Address and port of the peer.
        #[serde(with = "address")]
        peer: SocketAddr,
    },
    /// Resolves the route to a peer (`rdma_resolve_route(3)`).
    ResolveRoute {
        /// Number in the event, if one follows.
        context: u64,
        /// Address and port of the peer.
        #[serde(with = "address")]
        peer: SocketAddr,
    },
    /// Takes a completion event from a channel (`ibv_get_cq_event(3)`).
    GetCqEvent,
    /// Takes an rdma_cm event (`rdma_get_cm_event(3)`).
    GetCmEvent,
    /// Queues an rdma_cm event. Reply: `Done`, or [`Events`](super::ReplyBody::Events) if a rule
    /// repeats or loses it.
    CmEvent {
        /// A number of `rdma_cm_event_type`, not validated.
        kind: u32,
        /// Address and port of the peer, if known.
        #[serde(with = "address::optional")]
        peer: Option<SocketAddr>,
    },
    /// Calls another function, which may concern one object.
    Function(Function, CallObject),
}

/// The object of a call by which rules can select it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallObject {
    /// No object.
    None,
    /// A protection domain.
    Pd(PdId),
    /// A CQ.
    Cq(CqId),
    /// A QP.
    Qp(QpId),
    /// Address and port of the peer.
    Peer(#[serde(with = "address")] SocketAddr),
}

impl CallObject {
    /// Returns the peer, if it is known.
    pub fn of_peer(peer: Option<SocketAddr>) -> Self {
        peer.map_or(CallObject::None, CallObject::Peer)
    }
}

/// Declares [`Function`] with the C names of its values.
macro_rules! functions {
    ($($function:ident $name:literal,)*) => {
        /// A function of libibverbs or librdmacm that makes no request to the daemon, at least in
        /// some calls. The requests that destroy an object follow the call.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Function {
            $(#[doc = concat!("`", $name, "(3)`.")] $function,)*
        }

        impl Function {
            /// All functions, in the order of their bits.
            pub const ALL: &[Function] = &[$(Function::$function),*];

            /// Returns the name in C.
            pub fn name(self) -> &'static str {
                match self { $(Function::$function => $name,)* }
            }
        }
    };
}

functions! {
    GetDeviceList "ibv_get_device_list",
    OpenDevice "ibv_open_device",
    CloseDevice "ibv_close_device",
    QueryDevice "ibv_query_device",
    QueryGid "ibv_query_gid",
    QueryGidTable "ibv_query_gid_table",
    GetPkeyIndex "ibv_get_pkey_index",
    QueryRtValues "ibv_query_rt_values_ex",
    GetAsyncEvent "ibv_get_async_event",
    DeallocPd "ibv_dealloc_pd",
    AllocBuf "ibv_alloc_buf",
    InitAhFromWc "ibv_init_ah_from_wc",
    DestroyAh "ibv_destroy_ah",
    DeallocMw "ibv_dealloc_mw",
    DestroyCompChannel "ibv_destroy_comp_channel",
    DestroyCq "ibv_destroy_cq",
    ModifySrq "ibv_modify_srq",
    GetSrqNum "ibv_get_srq_num",
    DestroySrq "ibv_destroy_srq",
    ModifyQp "ibv_modify_qp",
    QueryQp "ibv_query_qp",
    DestroyQp "ibv_destroy_qp",
    GetDevices "rdma_get_devices",
    GetAddrInfo "rdma_getaddrinfo",
    CreateEventChannel "rdma_create_event_channel",
    CreateId "rdma_create_id",
    DestroyId "rdma_destroy_id",
    MigrateId "rdma_migrate_id",
    SetOption "rdma_set_option",
    CreateEp "rdma_create_ep",
    GetRequest "rdma_get_request",
    CreateIdQp "rdma_create_qp",
    CreateIdSrq "rdma_create_srq",
    InitQpAttr "rdma_init_qp_attr",
    Establish "rdma_establish",
    Notify "rdma_notify",
    Disconnect "rdma_disconnect",
    AckCmEvent "rdma_ack_cm_event",
}

impl Function {
    /// Returns a call that concerns no object.
    pub fn call(self) -> LibraryCall {
        self.of(CallObject::None)
    }

    /// Returns a call that concerns `object`.
    pub fn of(self, object: CallObject) -> LibraryCall {
        LibraryCall::Function(self, object)
    }
}

impl LibraryCall {
    /// Names of the calls but `Function`, in the order of their bits.
    const OWN_NAMES: [&str; 13] = [
        "PostSend",
        "PostRecv",
        "PostSrqRecv",
        "PollCq",
        "ReqNotifyCq",
        "CreateAh",
        "QueryPort",
        "QueryPkey",
        "ResolveAddr",
        "ResolveRoute",
        "GetCqEvent",
        "GetCmEvent",
        "CmEvent",
    ];

    /// Returns the names of the calls, in the order of their bits.
    pub fn names() -> impl Iterator<Item = &'static str> {
        LibraryCall::OWN_NAMES.into_iter().chain(Function::ALL.iter().map(|of| of.name()))
    }

    /// Returns the call's bit in [`RULED_CALLS`](crate::abi::queue::arena_header::RULED_CALLS).
    #[inline]
    pub fn bit(self) -> u64 {
        1 << self.number()
    }

    /// Returns the name of the call.
    pub fn name(self) -> &'static str {
        match self {
            LibraryCall::Function(function, _) => function.name(),
            own => LibraryCall::OWN_NAMES[own.number()],
        }
    }

    #[inline]
    fn number(self) -> usize {
        match self {
            LibraryCall::PostSend { .. } => 0,
            LibraryCall::PostRecv { .. } => 1,
            LibraryCall::PostSrqRecv { .. } => 2,
            LibraryCall::PollCq { .. } => 3,
            LibraryCall::ReqNotifyCq { .. } => 4,
            LibraryCall::CreateAh { .. } => 5,
            LibraryCall::QueryPort => 6,
            LibraryCall::QueryPkey => 7,
            LibraryCall::ResolveAddr { .. } => 8,
            LibraryCall::ResolveRoute { .. } => 9,
            LibraryCall::GetCqEvent => 10,
            LibraryCall::GetCmEvent => 11,
            LibraryCall::CmEvent { .. } => 12,
            LibraryCall::Function(function, _) => 13 + function as usize,
        }
    }
}
