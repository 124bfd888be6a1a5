//! What a client asks.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::wired::QpChange;
use crate::types::*;

/// One request. Ids are the client's; the reply repeats them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Echoed in the reply.
    pub id: u32,
    /// What is asked, with its parameters.
    pub body: RequestBody,
}

/// What a client may ask. Every handle is looked up among that session's own objects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RequestBody {
    /// Identity and limits of the device. Answer: [`ReplyBody::Device`](super::ReplyBody::Device).
    QueryDevice,
    /// Opens a protection domain, private or named by the administrator. Answer: `Pd`.
    OpenPd {
        /// A `[[pd]]` of the configuration; `None` for a private one.
        name: Option<String>,
    },
    /// Closes a protection domain that nothing uses any more. Answer: `Done`.
    ClosePd {
        /// The domain, opened or made by this session.
        pd: PdId,
    },
    /// Shares memory that exists already. Descriptor: a populated memfd without `F_SEAL_SEAL`.
    /// Answer: `SharedBuffer`.
    AddSharedBuffer {
        /// Bytes; must equal the memfd's size and be a multiple of the page size.
        length: u64,
    },
    /// Withdraws shared memory that no region names any more. Answer: `Done`.
    RemoveSharedBuffer {
        /// The shared buffer, of this session.
        buffer: SharedBufferId,
    },
    /// Registers a memory region; answered when every worker knows it. Answer: `Mr`.
    //= RDMAP-3.2-8
    RegMr(MrRequest),
    /// Deregisters; when answered, nothing more will be read from or written to it. Answer: `Done`.
    DeregMr {
        /// The region, of this session.
        mr: MrId,
    },
    /// Makes a completion channel. Answer: `Channel`, with its descriptor.
    CreateChannel,
    /// Destroys a completion channel that no CQ uses. Answer: `Done`.
    DestroyChannel {
        /// The channel, of this session.
        channel: ChannelId,
    },
    /// Makes a completion queue. Answer: `Cq`.
    CreateCq {
        /// Entries wanted, at least 1; rounded up to a power of two.
        entries: u32,
        /// Channel its events go to.
        channel: Option<ChannelId>,
        /// The application's context, returned in asynchronous events.
        context: u64,
    },
    /// Destroys a completion queue that no QP uses. Answer: `Done`.
    DestroyCq {
        /// The completion queue, of this session.
        cq: CqId,
    },
    /// Makes a queue pair in state Idle. Answer: `Qp`.
    CreateQp(QpRequest),
    /// Moves a QP to Error: everything posted is flushed. Answer: `Done`.
    QpToError {
        /// The QP, of this session.
        qp: QpId,
    },
    /// Destroys a QP, ending its connection; nothing posted completes any more. Answer: `Done`.
    DestroyQp {
        /// The QP, of this session, in any state.
        qp: QpId,
    },
    /// State and counters of a QP. Answer: `QpInfo`.
    QueryQp {
        /// The QP, of this session.
        qp: QpId,
    },
    /// Binds an address without listening. Answer: `Listener`.
    Bind {
        /// Address; port 0 lets the kernel choose.
        #[serde(with = "address")]
        address: SocketAddr,
        /// The application's context, returned in events.
        context: u64,
        /// Of an IPv6 wildcard, not to take IPv4 as well; without a meaning for others.
        v6_only: bool,
    },
    /// Listens on a bound address. Answer: `Done`.
    Listen {
        /// The bound address, as `Bind` answered it.
        listener: ListenerId,
        /// Connection requests that may wait unread or undecided.
        backlog: u32,
    },
    /// Closes a bound address; undecided requests are rejected on the wire. Answer: `Done`.
    CloseListener {
        /// The bound address, listening or not.
        listener: ListenerId,
    },
    /// Accepts a connection request with an Idle QP. Answer: `Done`, then events. One that asks for
    /// a QP of datagrams is accepted with one in Rtr, Rts or Sqd, however often, whose Q_Key the
    /// peer is told; no event follows, and of the parameters there are only private data.
    Accept {
        /// The request, as its event named it; undecided so far.
        request: RequestId,
        /// The QP to connect.
        qp: QpId,
        /// Inbound reads to offer; `None` for as many as requested, within limits.
        ird: Option<u16>,
        /// Outbound reads wanted; `None` for as many as the peer offers, within limits.
        ord: Option<u16>,
        /// At most [`MAX_PRIVATE_DATA`](super::MAX_PRIVATE_DATA) bytes, 4 fewer with RFC 6581, 136
        /// with datagrams.
        private_data: Vec<u8>,
    },
    /// Rejects a connection request. Answer: `Done`.
    Reject {
        /// The request, as its event named it; undecided so far.
        request: RequestId,
        /// At most [`MAX_PRIVATE_DATA`](super::MAX_PRIVATE_DATA) bytes, 4 fewer with RFC 6581, 136
        /// with datagrams.
        private_data: Vec<u8>,
    },
    /// Connects an Idle QP. Answer: `Done`, then events. A QP of datagrams, in whatever state,
    /// stays as it is: the peer is asked which QP serves its port, and `Resolved` says which one
    /// does; of the parameters there are only private data, at most 180 bytes.
    Connect {
        /// The QP to connect.
        qp: QpId,
        /// Address and port of the peer.
        #[serde(with = "address")]
        peer: SocketAddr,
        /// Source address, if it matters.
        #[serde(with = "address::optional")]
        local: Option<SocketAddr>,
        /// Inbound reads to offer; `None` for the device's default.
        ird: Option<u16>,
        /// Outbound reads wanted; `None` for the device's default.
        ord: Option<u16>,
        /// At most [`MAX_PRIVATE_DATA`](super::MAX_PRIVATE_DATA) bytes; more than 508 selects MPA
        /// revision 1.
        private_data: Vec<u8>,
    },
    /// Ends a QP's connection. Answer: `Done`, then events.
    Disconnect {
        /// The QP whose connection is to end.
        qp: QpId,
        /// How much of what is under way is finished first.
        mode: DisconnectMode,
    },
    /// Changes the context that events of an object carry. Answer: `Done`.
    SetContext {
        /// The object whose events are to carry it.
        object: ObjectRef,
        /// The context that events carry from now on, in place of the one given when it was made.
        context: u64,
    },
    /// Whole-daemon figures. Answer: `Status`.
    Status,
    /// A page of objects, of this session or, for administrators, of all. Answer: `Rows`.
    List {
        /// Kind of rows to list.
        what: ListKind,
        /// 0 for the first page, then [`next`](super::ReplyBody::Rows::next) of the page before.
        from: u64,
    },
    /// Makes a memory window that is bound to nothing yet. Answer: `Window`.
    AllocWindow {
        /// Domain it belongs to.
        pd: PdId,
        /// Who may bind and use it.
        kind: WindowKind,
    },
    /// Takes a window back; when answered, nothing can be reached through it. Answer: `Done`.
    DeallocWindow {
        /// The window, bound or not.
        window: MwId,
    },
    /// Makes a shared receive queue. Answer: `Srq`.
    CreateSrq(SrqRequest),
    /// Arms the limit event of a shared receive queue: it is sent once, when fewer receives than
    /// this are posted; 0 disarms. Answer: `Done`.
    ArmSrq {
        /// The shared receive queue, of this session.
        srq: SrqId,
        /// Receives; the event comes when fewer are posted.
        limit: u32,
    },
    /// State and counters of a shared receive queue. Answer: `SrqInfo`.
    QuerySrq {
        /// The shared receive queue, of this session.
        srq: SrqId,
    },
    /// Destroys a shared receive queue that no QP uses. Answer: `Done`.
    DestroySrq {
        /// The shared receive queue, of this session.
        srq: SrqId,
    },
    /// Attaches the address space of a client that the daemon trusts, so that regions can name it.
    /// Descriptor: the client's `/proc/self/mem`, open for reading and writing. Once per session.
    /// Answer: `Done`.
    AttachMemory,
    /// Connects an Idle QP over a TCP connection that the client made, whose peer expects an MPA
    /// Request next. Descriptor: the socket. If the negotiation is rejected the daemon lets go of
    /// it, having read nothing beyond the MPA Reply. Answer: `Done`, then events.
    ConnectOver {
        /// The QP to connect.
        qp: QpId,
        /// Inbound reads to offer; `None` for the device's default.
        ird: Option<u16>,
        /// Outbound reads wanted; `None` for the device's default.
        ord: Option<u16>,
        /// At most [`MAX_PRIVATE_DATA`](super::MAX_PRIVATE_DATA) bytes; more than 508 selects MPA
        /// revision 1.
        private_data: Vec<u8>,
    },
    /// Waits for an MPA Request on a TCP connection that the client made. Descriptor: the socket.
    /// The request comes as `ConnectionRequest` of the listener in the answer, which serves this
    /// one connection. If it is rejected, the daemon sends the MPA Reply and lets go of the socket.
    /// Answer: `Listener`.
    ServeOver {
        /// The application's context, returned in events.
        context: u64,
    },
    /// Administrators: ends a QP's connection, whoever owns it, with a Terminate or a reset.
    /// Answer: `Done`.
    AdminDisconnect {
        /// The QP, of any session.
        qp: QpId,
    },
    /// Administrators: refuse new sessions, objects and connections, or take them again. What
    /// exists goes on. Answer: `Done`.
    Drain {
        /// True to refuse, false to take them again.
        on: bool,
    },
    /// One diagnosis. Answer: `Rows` with at most that one.
    Diagnosis {
        /// Its number, from a refusal, a completion or a list.
        id: u64,
    },
    /// Counts a shared buffer against the limits before it has memory, so that a client learns what
    /// it may not have before it takes it from the machine. Until it is filled no region can name
    /// it; `RemoveSharedBuffer` gives it back. Answer: `SharedBuffer`.
    ReserveSharedBuffer {
        /// Bytes; a multiple of the page size.
        length: u64,
    },
    /// Gives a reserved shared buffer its memory, as `AddSharedBuffer` does for a new one.
    /// Descriptor: a populated memfd without `F_SEAL_SEAL`, as long as was reserved. Answer:
    /// `Done`; after a refusal the shared buffer is still reserved.
    FillSharedBuffer {
        /// The shared buffer, as it was reserved.
        buffer: SharedBufferId,
    },
    /// Gives a completion queue another size, and another place with what is unread in it. From the
    /// request until its answer the client does not touch the queue; then the old place is no
    /// longer its own. After a refusal the queue is where it was. Answer: `Cq`.
    ResizeCq {
        /// The completion queue, of this session.
        cq: CqId,
        /// Entries wanted, at least as many as are unread or reserved; rounded up to a power of
        /// two.
        entries: u32,
    },
    /// Moves a QP that is wired by hand. Answer: `Done`.
    ModifyQp {
        /// The QP, of this session.
        qp: QpId,
        /// Where to, with what it has to know there.
        change: QpChange,
    },
    /// The table of GIDs. Answer: `Gids`.
    QueryGids,
    /// Registers a region anew under its own handle and STag. As long as no answer has come,
    /// requests and peers that name it may find nothing; when it has, nothing more will be read or
    /// written by what it was before. After a refusal it is what it was. Answer: `Mr`.
    ReregMr {
        /// The region, of this session, to which no window is bound.
        mr: MrId,
        /// What it is from now on.
        to: MrRequest,
    },
    /// Binds an address in the port space of datagrams (`RDMA_PS_UDP`), without listening. Answer:
    /// `Listener`, for `Listen` and `CloseListener` as any other. Its `ConnectionRequest`s ask
    /// which queue pair of datagrams serves the port.
    BindDatagrams {
        /// An address of the device's ports, or that of all; port 0 lets the daemon choose.
        #[serde(with = "address")]
        address: SocketAddr,
        /// The application's context, returned in events.
        context: u64,
        /// Of an IPv6 wildcard, not to take IPv4 as well; without a meaning for others.
        v6_only: bool,
    },
    /// Creates the queue of copy jobs of a worker, for a client whose library makes the copies
    /// ([`Features::LIBRARY_COPIES`](super::Features::LIBRARY_COPIES)). Once for each worker, in
    /// order. Regions can name the client's own address space after the last one. Answer: `Copies`.
    ServeCopies {
        /// Number of the worker.
        worker: u32,
    },
}

impl RequestBody {
    /// What is asked, in one word, for records and logs.
    pub fn name(&self) -> &'static str {
        use RequestBody as R;
        match self {
            R::QueryDevice => "QueryDevice",
            R::OpenPd { .. } => "OpenPd",
            R::ClosePd { .. } => "ClosePd",
            R::AddSharedBuffer { .. } => "AddSharedBuffer",
            R::RemoveSharedBuffer { .. } => "RemoveSharedBuffer",
            R::RegMr(_) => "RegMr",
            R::DeregMr { .. } => "DeregMr",
            R::CreateChannel => "CreateChannel",
            R::DestroyChannel { .. } => "DestroyChannel",
            R::CreateCq { .. } => "CreateCq",
            R::DestroyCq { .. } => "DestroyCq",
            R::CreateQp(_) => "CreateQp",
            R::QpToError { .. } => "QpToError",
            R::DestroyQp { .. } => "DestroyQp",
            R::QueryQp { .. } => "QueryQp",
            R::Bind { .. } => "Bind",
            R::Listen { .. } => "Listen",
            R::CloseListener { .. } => "CloseListener",
            R::Accept { .. } => "Accept",
            R::Reject { .. } => "Reject",
            R::Connect { .. } => "Connect",
            R::Disconnect { .. } => "Disconnect",
            R::SetContext { .. } => "SetContext",
            R::Status => "Status",
            R::List { .. } => "List",
            R::AllocWindow { .. } => "AllocWindow",
            R::DeallocWindow { .. } => "DeallocWindow",
            R::CreateSrq(_) => "CreateSrq",
            R::ArmSrq { .. } => "ArmSrq",
            R::QuerySrq { .. } => "QuerySrq",
            R::DestroySrq { .. } => "DestroySrq",
            R::AttachMemory => "AttachMemory",
            R::ServeCopies { .. } => "ServeCopies",
            R::ConnectOver { .. } => "ConnectOver",
            R::ServeOver { .. } => "ServeOver",
            R::AdminDisconnect { .. } => "AdminDisconnect",
            R::Drain { .. } => "Drain",
            R::Diagnosis { .. } => "Diagnosis",
            R::ReserveSharedBuffer { .. } => "ReserveSharedBuffer",
            R::FillSharedBuffer { .. } => "FillSharedBuffer",
            R::ResizeCq { .. } => "ResizeCq",
            R::ModifyQp { .. } => "ModifyQp",
            R::QueryGids => "QueryGids",
            R::ReregMr { .. } => "ReregMr",
            R::BindDatagrams { .. } => "BindDatagrams",
        }
    }

    /// Whether it only looks, or is an administrator's: whoever asks nothing else is no notable
    /// client.
    pub fn is_query(&self) -> bool {
        use RequestBody as R;
        matches!(
            self,
            R::QueryDevice
                | R::QueryGids
                | R::Status
                | R::List { .. }
                | R::Diagnosis { .. }
                | R::Drain { .. }
                | R::AdminDisconnect { .. }
        )
    }
}

/// Parameters of a queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpRequest {
    /// Domain whose regions it may use.
    pub pd: PdId,
    /// Where send queue completions go.
    pub send_cq: CqId,
    /// Where receive completions go.
    pub recv_cq: CqId,
    /// Shared receive queue to take receives from; `rq_depth` is of no account then.
    pub srq: Option<SrqId>,
    /// Send requests outstanding, rounded up to a power of two.
    pub sq_depth: u32,
    /// Receives outstanding, rounded up to a power of two.
    pub rq_depth: u32,
    /// Elements per send request.
    pub max_send_sge: u8,
    /// Scatter elements per receive, at most.
    pub max_recv_sge: u8,
    /// Bytes of inline data per send request.
    pub max_inline: u16,
    /// Signal every send request.
    pub signal_all: bool,
    /// What becomes of a Send that finds no receive.
    pub rnr_policy: RnrPolicy,
    /// The application's context, returned in events.
    pub context: u64,
    /// How it comes by its peer. Of a QP that is wired by hand `rnr_policy` is of no account.
    pub kind: QpType,
}

/// How a program ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DisconnectMode {
    /// What was posted is sent first, then FINs are exchanged.
    Orderly,
    /// Likewise, but within this time: then the peer's FIN is not waited for any longer, and a
    /// reset ends what cannot be sent.
    OrderlyWithin {
        /// The time, in milliseconds.
        ms: u32,
    },
    /// A reset at once.
    Abort,
}

/// Parameters of a memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MrRequest {
    /// Domain the region belongs to.
    pub pd: PdId,
    /// Memory the region names.
    pub source: MrSource,
    /// Bytes, at least 1.
    pub length: u64,
    /// Address that local elements and remote offsets count from; 0 if zero-based.
    pub iova: u64,
    /// Rights of local requests and of peers.
    pub access: Access,
    /// Who may use its STag from the wire.
    //= DDP-8.3-3
    pub scope: Scope,
}

/// Parameters of a shared receive queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SrqRequest {
    /// Domain whose regions and QPs it serves.
    pub pd: PdId,
    /// Receives outstanding, rounded up to a power of two.
    pub depth: u32,
    /// Scatter elements per receive, at most.
    pub max_sge: u8,
    /// Limit event, as of `ArmSrq`; 0 for none.
    pub limit: u32,
    /// The application's context, returned in events.
    pub context: u64,
}

/// Memory a region names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MrSource {
    /// A range of a shared buffer.
    Shared {
        /// The shared buffer, of this session and filled.
        buffer: SharedBufferId,
        /// Bytes from its start.
        offset: u64,
    },
    /// The client's own address space, after `AttachMemory`.
    Attached {
        /// Address in the client.
        address: u64,
    },
}

/// An object with a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectRef {
    /// A queue pair, for its connection and asynchronous events.
    Qp(QpId),
    /// A completion queue, for `CqError`.
    Cq(CqId),
    /// A bound address, for its connection requests.
    Listener(ListenerId),
    /// A shared receive queue.
    Srq(SrqId),
}

/// What `List` lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ListKind {
    /// Sessions, each with what it owns.
    Clients,
    /// Queue pairs.
    Qps,
    /// Completion queues.
    Cqs,
    /// Memory regions.
    Mrs,
    /// Bound addresses, listening or not.
    Listeners,
    /// Shared receive queues.
    Srqs,
    /// Memory windows.
    Windows,
    /// Protection domains.
    Pds,
    /// Limits and how much of each is in use.
    Limits,
    /// Diagnoses, newest first.
    Diagnoses,
    /// Notable happenings, newest first.
    Events,
}
