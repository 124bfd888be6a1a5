//! Requests of a client on the control socket.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::call::{CallObject, LibraryCall};
use super::cm::RcOffer;
use super::qp_attr::QpChange;
use crate::roce::PortSpace;
use crate::types::*;

/// A request. The client chooses the ID, and the reply repeats it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// ID, repeated in the reply.
    pub id: u32,
    /// Operation and its parameters.
    pub body: RequestBody,
}

/// Operation of a request. Handles refer to objects of the client's own session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RequestBody {
    /// Returns the device's identity and limits. Reply:
    /// [`ReplyBody::Device`](super::ReplyBody::Device).
    QueryDevice,
    /// Opens a protection domain, private or configured by the administrator. Reply: `Pd`.
    OpenPd {
        /// Name of a `[[pd]]` of the configuration; `None` for a private domain.
        name: Option<String>,
    },
    /// Closes an unused protection domain. Reply: `Done`.
    ClosePd {
        /// The domain, opened by this session.
        pd: PdId,
    },
    /// Shares existing memory. Descriptor: a populated memfd without `F_SEAL_SEAL`.
    /// Reply: `SharedBuffer`.
    AddSharedBuffer {
        /// Size in bytes; must equal the memfd's size and be a multiple of the page size.
        length: u64,
    },
    /// Removes a shared buffer that no region uses. Reply: `Done`.
    RemoveSharedBuffer {
        /// The shared buffer, of this session.
        buffer: SharedBufferId,
    },
    /// Registers a memory region. The reply follows after every worker has added the region.
    /// Reply: `Mr`.
    //= RDMAP-3.2-8
    RegMr(MrRequest),
    /// Deregisters a region. After the reply no access to it is possible. Reply: `Done`.
    DeregMr {
        /// The region, of this session.
        mr: MrId,
    },
    /// Creates a completion channel. Reply: `Channel`, with its descriptor.
    CreateChannel,
    /// Destroys a completion channel that no CQ uses. Reply: `Done`.
    DestroyChannel {
        /// The channel, of this session.
        channel: ChannelId,
    },
    /// Creates a completion queue. Reply: `Cq`.
    CreateCq {
        /// Minimum number of entries, at least 1; rounded up to a power of two.
        entries: u32,
        /// Channel for its completion events; `None` for no events.
        channel: Option<ChannelId>,
        /// The application's context, repeated in asynchronous events.
        context: u64,
    },
    /// Destroys a completion queue that no QP uses. Reply: `Done`.
    DestroyCq {
        /// The completion queue, of this session.
        cq: CqId,
    },
    /// Creates a queue pair in state Idle. Reply: `Qp`.
    CreateQp(QpRequest),
    /// Moves a QP to Error and flushes all its requests. Reply: `Done`.
    QpToError {
        /// The QP, of this session.
        qp: QpId,
    },
    /// Destroys a QP and ends its connection. Posted requests do not complete. Reply: `Done`.
    DestroyQp {
        /// The QP, of this session, in any state.
        qp: QpId,
    },
    /// Returns a QP's state and counters. Reply: `QpInfo`.
    QueryQp {
        /// The QP, of this session.
        qp: QpId,
    },
    /// Binds an address without listening. Reply: `Listener`.
    Bind {
        /// Address; port 0 lets the kernel choose.
        #[serde(with = "address")]
        address: SocketAddr,
        /// The application's context, repeated in events.
        context: u64,
        /// True to exclude IPv4 from an IPv6 wildcard; ignored for other addresses.
        v6_only: bool,
    },
    /// Listens on a bound address. Reply: `Done`.
    Listen {
        /// The bound address, from the reply to `Bind`.
        listener: ListenerId,
        /// Maximum number of pending connection requests.
        backlog: u32,
    },
    /// Closes a bound address and rejects its pending connection requests. Reply: `Done`.
    CloseListener {
        /// The bound address, listening or not.
        listener: ListenerId,
    },
    /// Accepts a connection request with an Idle QP. Reply: `Done`, then events.
    ///
    /// A request for a UD QP is accepted with a UD QP in Rtr or later, which may serve any number
    /// of requests. The peer receives its Q_Key. No event follows, and `ird` and `ord` are ignored.
    Accept {
        /// The request, from its event; not accepted or rejected yet.
        request: RequestId,
        /// The QP to connect.
        qp: QpId,
        /// Inbound reads to offer; `None` for the number that the peer requests, within the limits.
        ird: Option<u16>,
        /// Outbound reads to request; `None` for the number that the peer offers, within the
        /// limits.
        ord: Option<u16>,
        /// At most [`MAX_PRIVATE_DATA`](super::MAX_PRIVATE_DATA) bytes, 4 fewer with RFC 6581, 136
        /// for a UD QP.
        private_data: Vec<u8>,
    },
    /// Rejects a connection request. Reply: `Done`.
    Reject {
        /// The request, from its event; not accepted or rejected yet.
        request: RequestId,
        /// At most [`MAX_PRIVATE_DATA`](super::MAX_PRIVATE_DATA) bytes, 4 fewer with RFC 6581, 136
        /// for a UD QP.
        private_data: Vec<u8>,
    },
    /// Connects an Idle QP. Reply: `Done`, then events.
    ///
    /// A UD QP may be in any state and keeps it. The daemon asks the peer for the QP that serves
    /// the port, and `Resolved` reports it. Only the peer, the local address and the private data
    /// (at most 180 bytes) are used.
    Connect {
        /// The QP to connect.
        qp: QpId,
        /// Address and port of the peer.
        #[serde(with = "address")]
        peer: SocketAddr,
        /// Source address; `None` for any.
        #[serde(with = "address::optional")]
        local: Option<SocketAddr>,
        /// Inbound reads to offer; `None` for the device's default.
        ird: Option<u16>,
        /// Outbound reads to request; `None` for the device's default.
        ord: Option<u16>,
        /// At most [`MAX_PRIVATE_DATA`](super::MAX_PRIVATE_DATA) bytes; more than 508 selects MPA
        /// revision 1.
        private_data: Vec<u8>,
    },
    /// Ends a QP's connection. Reply: `Done`, then events. For the connection of an RC or UC QP
    /// (`ConnectRc`, `AcceptRc`), the daemons exchange DREQ and DREP, and the QP keeps its state.
    Disconnect {
        /// The connected QP.
        qp: QpId,
        /// Determines which transfers are completed first; ignored for RC and UC QPs.
        mode: DisconnectMode,
    },
    /// Changes the context of an object. Reply: `Done`.
    SetContext {
        /// The object.
        object: ObjectRef,
        /// Context in all later events of the object.
        context: u64,
    },
    /// Returns the status of the daemon. Reply: `Status`.
    Status,
    /// Returns a page of rows: the objects of this session, or of all sessions for an
    /// administrator. Reply: `Rows`.
    List {
        /// Kind of rows to list.
        what: ListKind,
        /// 0 for the first page, then [`next`](super::ReplyBody::Rows::next) of the previous page.
        from: u64,
    },
    /// Allocates a memory window, bound to no region. Reply: `Window`.
    AllocWindow {
        /// Domain of the window.
        pd: PdId,
        /// Window type.
        kind: WindowKind,
    },
    /// Deallocates a window. After the reply no access through it is possible. Reply: `Done`.
    DeallocWindow {
        /// The window, bound or not.
        window: MwId,
    },
    /// Creates a shared receive queue. Reply: `Srq`.
    CreateSrq(SrqRequest),
    /// Arms the limit event of a shared receive queue. The daemon sends it once, when fewer than
    /// `limit` receives are posted. Reply: `Done`.
    ArmSrq {
        /// The shared receive queue, of this session.
        srq: SrqId,
        /// Number of receives; 0 disarms.
        limit: u32,
    },
    /// Returns the SRQ's state and counters. Reply: `SrqInfo`.
    QuerySrq {
        /// The shared receive queue, of this session.
        srq: SrqId,
    },
    /// Destroys a shared receive queue that no QP uses. Reply: `Done`.
    DestroySrq {
        /// The shared receive queue, of this session.
        srq: SrqId,
    },
    /// Attaches the address space of a trusted client, so that regions can be in it. Descriptor:
    /// the client's `/proc/self/mem`, open for reading and writing. Once per session. Reply:
    /// `Done`.
    AttachMemory,
    /// Connects an Idle QP over an existing TCP connection. The peer must expect an MPA Request
    /// next. Descriptor: the socket. If the peer rejects the connection, the daemon closes this
    /// descriptor, having read nothing past the MPA Reply. Reply: `Done`, then events.
    ConnectOver {
        /// The QP to connect.
        qp: QpId,
        /// Inbound reads to offer; `None` for the device's default.
        ird: Option<u16>,
        /// Outbound reads to request; `None` for the device's default.
        ord: Option<u16>,
        /// At most [`MAX_PRIVATE_DATA`](super::MAX_PRIVATE_DATA) bytes; more than 508 selects MPA
        /// revision 1.
        private_data: Vec<u8>,
    },
    /// Waits for an MPA Request on an existing TCP connection. Descriptor: the socket. The reply
    /// contains a listener for this one connection, and the request arrives as its
    /// `ConnectionRequest`. If the client rejects it, the daemon sends the MPA Reply and closes
    /// the descriptor. Reply: `Listener`.
    ServeOver {
        /// The application's context, repeated in events.
        context: u64,
    },
    /// Administrators only: ends the connection of any QP with a Terminate or a reset.
    /// Reply: `Done`.
    AdminDisconnect {
        /// The QP, of any session.
        qp: QpId,
    },
    /// Administrators only: starts or stops refusing new sessions, objects and connections.
    /// Existing objects are not affected. Reply: `Done`.
    Drain {
        /// True to refuse, false to accept again.
        on: bool,
    },
    /// Returns one diagnosis. Reply: `Rows` with at most one row.
    Diagnosis {
        /// Number of the diagnosis, from a refusal, a completion or a list.
        id: u64,
    },
    /// Counts a shared buffer against the limits before it has memory, so that the client does not
    /// allocate more than it may share. No region can use it until it is filled.
    /// `RemoveSharedBuffer` releases it. Reply: `SharedBuffer`.
    ReserveSharedBuffer {
        /// Size in bytes, a multiple of the page size.
        length: u64,
    },
    /// Passes the memory of a reserved shared buffer, as `AddSharedBuffer` does for a new one.
    /// Descriptor: a populated memfd of the reserved size without `F_SEAL_SEAL`. After a refusal
    /// the buffer is still reserved. Reply: `Done`.
    FillSharedBuffer {
        /// The reserved shared buffer.
        buffer: SharedBufferId,
    },
    /// Resizes a completion queue by moving it with its unread entries to another location. The
    /// client must not access the queue between the request and the reply. Afterwards the old
    /// location belongs to the daemon. After a refusal the queue is unchanged. Reply: `Cq`.
    ResizeCq {
        /// The completion queue, of this session.
        cq: CqId,
        /// Minimum number of entries, at least the number of unread and reserved entries; rounded
        /// up to a power of two.
        entries: u32,
    },
    /// Modifies a QP of the RoCE device. Reply: `Done`.
    ModifyQp {
        /// The QP, of this session.
        qp: QpId,
        /// New state or attributes.
        change: QpChange,
    },
    /// Returns the GID table. Reply: `Gids`.
    QueryGids,
    /// Registers a region again with the same handle and STag. Until the reply, requests of the
    /// client and of peers that use it may fail. After the reply no access under the old
    /// registration is possible. After a refusal the region is unchanged. Reply: `Mr`.
    ReregMr {
        /// The region, of this session, with no window bound to it.
        mr: MrId,
        /// Its new registration.
        to: MrRequest,
    },
    /// Binds an address in the UDP port space (`RDMA_PS_UDP`) without listening. Its
    /// `ConnectionRequest`s ask for the UD QP that serves the port. Reply: `Listener`, for use with
    /// `Listen` and `CloseListener`.
    BindDatagrams {
        /// An address of the device's ports or a wildcard; port 0 lets the daemon choose.
        #[serde(with = "address")]
        address: SocketAddr,
        /// The application's context, repeated in events.
        context: u64,
        /// True to exclude IPv4 from an IPv6 wildcard; ignored for other addresses.
        v6_only: bool,
    },
    /// Creates a worker's copy queue, for a client whose library copies data to and from its memory
    /// ([`Features::LIBRARY_COPIES`](super::Features::LIBRARY_COPIES)). Once for each worker, in
    /// the order of their numbers. Afterwards regions can be in the client's own address space.
    /// Reply: `Copies`.
    ServeCopies {
        /// Number of the worker.
        worker: u32,
    },
    /// Binds an address in a port space of the RoCE device for RC and UC QPs, without listening.
    /// Its requests arrive as [`RcRequest`](super::Event::RcRequest). Reply: `Listener`, for use
    /// with `Listen` and `CloseListener`.
    BindRc {
        /// Port space other than that of UD QPs.
        space: PortSpace,
        /// An address of the device's ports or a wildcard; port 0 lets the daemon choose.
        #[serde(with = "address")]
        address: SocketAddr,
        /// The application's context, repeated in events.
        context: u64,
        /// True to exclude IPv4 from an IPv6 wildcard; ignored for other addresses.
        v6_only: bool,
    },
    /// Sends a connection request (REQ) for an RC, UC or UD QP, whose state does not change. A UD
    /// QP is a placeholder for a QP that the program connects itself. Reply: `Done`, then
    /// `RcReply`, `RcRejected` or `Unreachable`; after `RcReply` also `Disconnected`.
    ConnectRc {
        /// The QP to connect, without a connection.
        qp: QpId,
        /// Port space of the peer's port, other than that of UD QPs.
        space: PortSpace,
        /// Address and port of the peer.
        #[serde(with = "address")]
        peer: SocketAddr,
        /// Source address; `None` for any.
        #[serde(with = "address::optional")]
        local: Option<SocketAddr>,
        /// This end's parameters.
        offer: RcOffer,
        /// At most 56 bytes.
        private_data: Vec<u8>,
    },
    /// Accepts a request from `RcRequest` (REP) with an RC, UC or UD QP, whose state does not
    /// change. The peer may send at once. Reply: `Done`, then `Established`, `RcRejected`,
    /// `Unreachable` or `Disconnected`.
    AcceptRc {
        /// The request, not accepted or rejected yet.
        request: RequestId,
        /// The QP to connect, without a connection.
        qp: QpId,
        /// This end's parameters.
        offer: RcOffer,
        /// At most 196 bytes.
        private_data: Vec<u8>,
    },
    /// Confirms an `RcReply` (RTU) after the QP is ready to receive and to send. Reply: `Done`.
    EstablishRc {
        /// The QP of the `RcReply`.
        qp: QpId,
    },
    /// Adds a RoCE device. For administrators. Reply: `Done`.
    AddDevice {
        /// Name of the device, of at most 63 bytes.
        name: String,
        /// Interface whose addresses are its GIDs, or addresses separated by commas; empty for all
        /// interfaces.
        interface: String,
    },
    /// Removes a RoCE device from the list. Programs that use it are not affected. For
    /// administrators. Reply: `Done`.
    RemoveDevice {
        /// Name of the device.
        name: String,
    },
    /// Sets fault rules ([`FaultRule`](crate::faults::FaultRule)): all, or none on an error. Only
    /// administrators may set rules for other users. Reply: `Done`.
    SetFaults {
        /// Rules, separated by `;` or line breaks.
        rules: String,
        /// True if the rules apply only to this session and end with it.
        own: bool,
    },
    /// Clears a fault rule, or all fault rules, of the user; for an administrator, of all users.
    /// Reply: `Done`.
    ClearFaults {
        /// Name of the rule; `None` for all rules.
        name: Option<String>,
    },
    /// Asks whether a fault rule applies to a call that the library executes itself. Reply: `Done`
    /// if the library must execute it, `EventFollows` if an event replaces it, `Events` for
    /// `CmEvent`. A rule that fails the call refuses the request.
    Call(LibraryCall),
}

impl RequestBody {
    /// Returns the properties of the operation.
    pub fn info(&self) -> RequestInfo {
        use DescriptorKind::*;
        use RequestBody as R;
        use RequestKind::*;
        match self {
            R::QueryDevice => Query.named("QueryDevice"),
            R::OpenPd { .. } => Create.named("OpenPd"),
            R::ClosePd { pd } => Use.named("ClosePd").pd(*pd),
            R::AddSharedBuffer { length } => {
                Create.named("AddSharedBuffer").length(*length).with(Memfd)
            }
            R::RemoveSharedBuffer { .. } => Use.named("RemoveSharedBuffer"),
            R::RegMr(to) => Create.named("RegMr").range(to),
            R::DeregMr { .. } => Use.named("DeregMr"),
            R::CreateChannel => Create.named("CreateChannel"),
            R::DestroyChannel { .. } => Use.named("DestroyChannel"),
            R::CreateCq { .. } => Create.named("CreateCq"),
            R::DestroyCq { cq } => Use.named("DestroyCq").cq(*cq),
            R::CreateQp(request) => Create.named("CreateQp").pd(request.pd),
            R::QpToError { qp } => Use.named("QpToError").qp(*qp),
            R::DestroyQp { qp } => Use.named("DestroyQp").qp(*qp),
            R::QueryQp { qp } => Use.named("QueryQp").qp(*qp),
            R::Bind { .. } => Create.named("Bind"),
            R::Listen { .. } => Create.named("Listen"),
            R::CloseListener { .. } => Use.named("CloseListener"),
            R::Accept { request, qp, .. } => {
                Create.named("Accept").qp(*qp).connection_request(*request)
            }
            R::Reject { request, .. } => Use.named("Reject").connection_request(*request),
            R::Connect { qp, peer, .. } => Create.named("Connect").qp(*qp).peer(*peer),
            R::Disconnect { qp, .. } => Use.named("Disconnect").qp(*qp),
            R::SetContext { .. } => Use.named("SetContext"),
            R::Status => Query.named("Status"),
            R::List { .. } => Query.named("List"),
            R::AllocWindow { pd, .. } => Create.named("AllocWindow").pd(*pd),
            R::DeallocWindow { .. } => Use.named("DeallocWindow"),
            R::CreateSrq(request) => Create.named("CreateSrq").pd(request.pd),
            R::ArmSrq { .. } => Use.named("ArmSrq"),
            R::QuerySrq { .. } => Use.named("QuerySrq"),
            R::DestroySrq { .. } => Use.named("DestroySrq"),
            R::AttachMemory => Create.named("AttachMemory").with(AddressSpace),
            R::ConnectOver { qp, .. } => Create.named("ConnectOver").qp(*qp).with(Socket),
            R::ServeOver { .. } => Create.named("ServeOver").with(Socket),
            R::AdminDisconnect { qp } => Query.named("AdminDisconnect").qp(*qp),
            R::Drain { .. } => Query.named("Drain"),
            R::Diagnosis { .. } => Query.named("Diagnosis"),
            R::ReserveSharedBuffer { length } => {
                Create.named("ReserveSharedBuffer").length(*length)
            }
            // The buffer was reserved earlier.
            R::FillSharedBuffer { .. } => Use.named("FillSharedBuffer").with(Memfd),
            R::ResizeCq { cq, .. } => Use.named("ResizeCq").cq(*cq),
            R::ModifyQp { qp, change } => {
                let kind = if change.starts_receiving() { Create } else { Use };
                kind.named("ModifyQp").qp(*qp)
            }
            R::QueryGids => Query.named("QueryGids"),
            R::ReregMr { to, .. } => Use.named("ReregMr").range(to),
            R::BindDatagrams { .. } => Create.named("BindDatagrams"),
            R::ServeCopies { .. } => Create.named("ServeCopies"),
            R::BindRc { .. } => Create.named("BindRc"),
            R::ConnectRc { qp, peer, .. } => Create.named("ConnectRc").qp(*qp).peer(*peer),
            R::AcceptRc { request, qp, .. } => {
                Create.named("AcceptRc").qp(*qp).connection_request(*request)
            }
            R::EstablishRc { qp } => Use.named("EstablishRc").qp(*qp),
            R::AddDevice { .. } => Query.named("AddDevice"),
            R::RemoveDevice { .. } => Query.named("RemoveDevice"),
            R::SetFaults { .. } => Query.named("SetFaults"),
            R::ClearFaults { .. } => Query.named("ClearFaults"),
            R::Call(call) => Use.named(call.name()).call(*call),
        }
    }
}

/// Properties of a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestInfo {
    /// Name of the operation, for records and logs.
    pub name: &'static str,
    /// Effect of the operation.
    pub kind: RequestKind,
    /// Descriptor that the request must carry.
    pub descriptor: Option<DescriptorKind>,
    /// The QP concerned, for the diagnosis of a refusal, like the fields below.
    pub qp: Option<QpId>,
    /// The protection domain concerned.
    pub pd: Option<PdId>,
    /// Address of the first byte of the region.
    pub offset: Option<u64>,
    /// Length of the region or shared buffer in bytes.
    pub length: Option<u64>,
    /// The completion queue concerned, for fault rules, like the fields below.
    pub cq: Option<CqId>,
    /// Address of the peer of a connection.
    pub peer: Option<IpAddr>,
    /// The connection request concerned.
    pub connection_request: Option<RequestId>,
    /// The call of the library.
    pub call: Option<LibraryCall>,
}

/// Effect of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// Concerns no object of the session. A session that sends no other requests is not recorded as
    /// an event.
    Query,
    /// Creates an object or a connection. A draining daemon refuses it.
    Create,
    /// Uses, changes or destroys existing objects.
    Use,
}

/// Kind of descriptor that a request carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptorKind {
    /// Memory of a shared buffer.
    Memfd,
    /// The client's `/proc/self/mem`.
    AddressSpace,
    /// A socket.
    Socket,
}

impl RequestKind {
    fn named(self, name: &'static str) -> RequestInfo {
        let kind = self;
        RequestInfo {
            name,
            kind,
            descriptor: None,
            qp: None,
            pd: None,
            offset: None,
            length: None,
            cq: None,
            peer: None,
            connection_request: None,
            call: None,
        }
    }
}

impl RequestInfo {
    fn with(self, descriptor: DescriptorKind) -> Self {
        RequestInfo { descriptor: Some(descriptor), ..self }
    }

    fn qp(self, qp: QpId) -> Self {
        RequestInfo { qp: Some(qp), ..self }
    }

    fn pd(self, pd: PdId) -> Self {
        RequestInfo { pd: Some(pd), ..self }
    }

    fn cq(self, cq: CqId) -> Self {
        RequestInfo { cq: Some(cq), ..self }
    }

    fn peer(self, peer: SocketAddr) -> Self {
        RequestInfo { peer: Some(peer.ip()), ..self }
    }

    fn connection_request(self, request: RequestId) -> Self {
        RequestInfo { connection_request: Some(request), ..self }
    }

    fn call(self, call: LibraryCall) -> Self {
        let of_call = RequestInfo { call: Some(call), ..self };
        match call {
            LibraryCall::PostSend { qp, .. }
            | LibraryCall::PostRecv { qp }
            | LibraryCall::Function(_, CallObject::Qp(qp)) => of_call.qp(qp),
            LibraryCall::PollCq { cq }
            | LibraryCall::ReqNotifyCq { cq }
            | LibraryCall::Function(_, CallObject::Cq(cq)) => of_call.cq(cq),
            LibraryCall::CreateAh { pd } | LibraryCall::Function(_, CallObject::Pd(pd)) => {
                of_call.pd(pd)
            }
            LibraryCall::ResolveAddr { peer, .. }
            | LibraryCall::ResolveRoute { peer, .. }
            | LibraryCall::CmEvent { peer: Some(peer), .. }
            | LibraryCall::Function(_, CallObject::Peer(peer)) => of_call.peer(peer),
            LibraryCall::PostSrqRecv { .. }
            | LibraryCall::QueryPort
            | LibraryCall::QueryPkey
            | LibraryCall::GetCqEvent
            | LibraryCall::GetCmEvent
            | LibraryCall::Function(_, CallObject::None)
            | LibraryCall::CmEvent { peer: None, .. } => of_call,
        }
    }

    fn length(self, length: u64) -> Self {
        RequestInfo { length: Some(length), ..self }
    }

    fn range(self, region: &MrRequest) -> Self {
        RequestInfo { offset: Some(region.iova), ..self.pd(region.pd).length(region.length) }
    }
}

/// Parameters of a queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpRequest {
    /// Protection domain of the QP.
    pub pd: PdId,
    /// Completion queue of the send queue.
    pub send_cq: CqId,
    /// Completion queue of the receive queue.
    pub recv_cq: CqId,
    /// Shared receive queue to take receives from. If set, `rq_depth` is ignored.
    pub srq: Option<SrqId>,
    /// Maximum outstanding send requests, rounded up to a power of two.
    pub sq_depth: u32,
    /// Maximum outstanding receives, rounded up to a power of two.
    pub rq_depth: u32,
    /// Maximum SGEs per send request.
    pub max_send_sge: u8,
    /// Maximum SGEs per receive.
    pub max_recv_sge: u8,
    /// Maximum bytes of inline data per send request.
    pub max_inline: u16,
    /// Signals every send request.
    pub signal_all: bool,
    /// Handling of a Send for which no receive is posted. Ignored for QPs of the RoCE device.
    pub rnr_policy: RnrPolicy,
    /// The application's context, repeated in events.
    pub context: u64,
    /// Type of the QP.
    pub kind: QpType,
    /// Name of the device that the program uses, for fault rules that select a device. Empty if
    /// unknown.
    pub device: String,
}

/// Way to end a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DisconnectMode {
    /// Completes all posted sends, then exchanges FINs.
    Orderly,
    /// Like `Orderly`, with a time limit. When it expires, the daemon no longer waits for the
    /// peer's FIN, and sends a reset if any data are still unsent.
    OrderlyWithin {
        /// Time limit in milliseconds.
        ms: u32,
    },
    /// Sends a reset at once.
    Abort,
}

/// Parameters of a memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MrRequest {
    /// Protection domain of the region.
    pub pd: PdId,
    /// Memory of the region.
    pub source: MrSource,
    /// Length in bytes; may be 0.
    pub length: u64,
    /// Address of the first byte in SGEs and remote offsets; 0 if zero-based.
    pub iova: u64,
    /// Access rights of local requests and of peers.
    pub access: Access,
    /// QPs that may use it, for themselves and for their peers.
    //= DDP-8.3-3
    pub scope: Scope,
}

/// Parameters of a shared receive queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SrqRequest {
    /// Domain of its regions and QPs.
    pub pd: PdId,
    /// Maximum outstanding receives, rounded up to a power of two.
    pub depth: u32,
    /// Maximum SGEs per receive.
    pub max_sge: u8,
    /// Initial limit for the limit event, as in `ArmSrq`; 0 for none.
    pub limit: u32,
    /// The application's context, repeated in events.
    pub context: u64,
}

/// Memory of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MrSource {
    /// A range of a shared buffer.
    Shared {
        /// The shared buffer, of this session and filled.
        buffer: SharedBufferId,
        /// Offset in the buffer, in bytes.
        offset: u64,
    },
    /// The client's own address space, after `AttachMemory` or `ServeCopies`.
    Attached {
        /// Address in the client's address space.
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

/// Kind of rows that `List` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ListKind {
    /// Sessions with their numbers of objects.
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
    /// Limits with their current use.
    Limits,
    /// Diagnoses, newest first.
    Diagnoses,
    /// Notable events, newest first.
    Events,
    /// Fault rules, in the order in which they were set.
    Faults,
}
