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
    /// Frees a protection domain (`ibv_dealloc_pd(3)`). The request of the daemon follows, as for
    /// the calls below.
    IbvDeallocPd {
        /// The protection domain.
        pd: PdId,
    },
    /// Frees a memory window (`ibv_dealloc_mw(3)`).
    IbvDeallocMw,
    /// Destroys a completion channel (`ibv_destroy_comp_channel(3)`).
    IbvDestroyCompChannel,
    /// Destroys a CQ (`ibv_destroy_cq(3)`).
    IbvDestroyCq {
        /// The CQ.
        cq: CqId,
    },
    /// Destroys an SRQ (`ibv_destroy_srq(3)`).
    IbvDestroySrq,
    /// Destroys a QP (`ibv_destroy_qp(3)`).
    IbvDestroyQp {
        /// The QP.
        qp: QpId,
    },
}

impl LibraryCall {
    /// Names of the calls, in the order of their bits.
    pub const NAMES: [&str; 19] = [
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
        "IbvDeallocPd",
        "IbvDeallocMw",
        "IbvDestroyCompChannel",
        "IbvDestroyCq",
        "IbvDestroySrq",
        "IbvDestroyQp",
    ];

    /// Returns the call's bit in [`RULED_CALLS`](crate::abi::queue::arena_header::RULED_CALLS).
    #[inline]
    pub fn bit(self) -> u64 {
        1 << self.number()
    }

    /// Returns the name of the call.
    pub fn name(self) -> &'static str {
        LibraryCall::NAMES[self.number()]
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
            LibraryCall::IbvDeallocPd { .. } => 13,
            LibraryCall::IbvDeallocMw => 14,
            LibraryCall::IbvDestroyCompChannel => 15,
            LibraryCall::IbvDestroyCq { .. } => 16,
            LibraryCall::IbvDestroySrq => 17,
            LibraryCall::IbvDestroyQp { .. } => 18,
        }
    }
}
