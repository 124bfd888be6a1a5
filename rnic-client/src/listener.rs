//! Bound addresses and their connection requests.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rnic_abi::abi::control::{Event, ObjectRef, RcPeer, ReplyBody, RequestBody};
use rnic_abi::types::{AddressPair, ListenerId, RequestId};

use crate::connect::{Claim, Connected, check_private_data};
use crate::error::Error;
use crate::events::{Subject, is_connection_request, settles_connection};
use crate::inbox::deadline;
use crate::qp::Qp;
use crate::session::{Session, unexpected};

/// Options for binding an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BindOptions {
    /// Binds the IPv6 wildcard `[::]` for IPv6 only (`RDMA_OPTION_ID_AFONLY`), so that `0.0.0.0`
    /// can be bound to the same port. If false, `[::]` accepts IPv4 as well.
    pub v6_only: bool,
}

/// A bound address, listening or not (`rdma_bind_addr(3)`, `rdma_listen(3)`).
///
/// Dropping it closes it and rejects pending requests.
pub struct Listener {
    session: Arc<Session>,
    id: ListenerId,
    address: SocketAddr,
}

impl Listener {
    pub(crate) fn bind(
        session: &Arc<Session>,
        address: SocketAddr,
        BindOptions { v6_only }: BindOptions,
    ) -> Result<Listener, Error> {
        Self::bind_as(session, RequestBody::Bind { address, context: 0, v6_only })
    }

    /// Sends a bind request.
    pub(crate) fn bind_as(session: &Arc<Session>, body: RequestBody) -> Result<Listener, Error> {
        match session.request(body)? {
            ReplyBody::Listener { listener: id, address } => {
                session.events.with(|events| events.open(Subject::Listener(id)));
                Ok(Listener { session: session.clone(), id, address })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Returns the listener of one connection that the program passed to the daemon.
    pub(crate) fn for_socket(session: &Arc<Session>, id: ListenerId, address: SocketAddr) -> Self {
        Listener { session: session.clone(), id, address }
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Returns the listener's handle in the daemon, which events contain.
    pub fn id(&self) -> ListenerId {
        self.id
    }

    /// Returns the bound address, including the port if the system chose it.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Starts listening. At most `backlog` requests may be pending; the daemon rejects further
    /// requests.
    pub fn listen(&self, backlog: u32) -> Result<(), Error> {
        self.session.command(RequestBody::Listen { listener: self.id, backlog })
    }

    /// Waits for a connection request (compare `rdma_get_request(3)`), at most for `timeout`
    /// (`None`: no timeout). Several threads may wait; each request goes to one of them.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] after `timeout`; the listener remains usable.
    pub fn accept_request(&self, timeout: Option<Duration>) -> Result<ConnectionRequest, Error> {
        let subject = Subject::Listener(self.id);
        let _claim = Claim::new(&self.session, subject, is_connection_request);
        let event = self
            .session
            .await_event(deadline(timeout), |events| events.take(subject, is_connection_request))?
            .ok_or(Error::TimedOut { what: "a connection request" })?;
        ConnectionRequest::from_event(&self.session, event)
            .map_err(|other| Error::protocol(format!("{other:?} is not a request")))
    }

    /// Sets the context that the listener's events carry.
    pub fn set_context(&self, context: u64) -> Result<(), Error> {
        let object = ObjectRef::Listener(self.id);
        self.session.command(RequestBody::SetContext { object, context })
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("id", &self.id)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // If the session has ended, the listener is closed already.
        let _ = self.session.command(RequestBody::CloseListener { listener: self.id });
        self.session.events.with(|events| events.close(Subject::Listener(self.id)));
    }
}

/// A connection request that waits to be accepted or rejected (`rdma_accept(3)`, `rdma_reject(3)`).
///
/// It needs no QP until it is accepted, so a program can decide from the private data which QP to
/// use. Dropping it undecided rejects it without private data. A request to
/// [`Context::bind_datagrams`] needs a UD QP; only
/// [`accept_datagrams`](ConnectionRequest::accept_datagrams) accepts it. A request to
/// [`Context::bind_rc`] needs an RC or UC QP, and [`accept_rc`](ConnectionRequest::accept_rc).
///
/// [`Context::bind_datagrams`]: crate::Context::bind_datagrams
/// [`Context::bind_rc`]: crate::Context::bind_rc
pub struct ConnectionRequest {
    session: Arc<Session>,
    id: RequestId,
    decided: bool,
    listener: ListenerId,
    addresses: AddressPair,
    peer_ird: Option<u16>,
    peer_ord: Option<u16>,
    revision: u8,
    peer_to_peer: bool,
    rc_peer: Option<RcPeer>,
    private_data: Vec<u8>,
}

/// Options for accepting a connection request (compare `struct rdma_conn_param` of
/// `rdma_accept(3)`).
#[derive(Clone, Debug)]
pub struct AcceptOptions {
    /// Private data for the peer, at most 512 bytes, or 508 with RFC 6581.
    pub private_data: Vec<u8>,
    /// Inbound RDMA Reads to offer (IRD); `None` for as many as the peer wants, within limits.
    pub ird: Option<u16>,
    /// Outbound RDMA Reads to request (ORD); `None` for as many as the peer offers, within limits.
    pub ord: Option<u16>,
    /// Time for which [`ConnectionRequest::accept`] waits for the peer's first message; default 30
    /// s. With `None`, only the daemon's own deadlines apply.
    pub timeout: Option<Duration>,
}

impl Default for AcceptOptions {
    fn default() -> Self {
        let timeout = Some(Duration::from_secs(30));
        AcceptOptions { private_data: Vec::new(), ird: None, ord: None, timeout }
    }
}

impl ConnectionRequest {
    /// Converts a connection request event. Returns other events unchanged as the error.
    #[expect(clippy::result_large_err, reason = "the caller gets its own event back")]
    pub(crate) fn from_event(session: &Arc<Session>, event: Event) -> Result<Self, Event> {
        let mut rc_peer = None;
        let event = match event {
            Event::RcRequest { listener, context, request, addresses, peer, private_data } => {
                rc_peer = Some(peer);
                Event::ConnectionRequest {
                    listener,
                    context,
                    request,
                    addresses,
                    peer_ird: Some(peer.responder_resources.into()),
                    peer_ord: Some(peer.initiator_depth.into()),
                    revision: 0,
                    peer_to_peer: false,
                    private_data,
                }
            }
            other => other,
        };
        match event {
            Event::ConnectionRequest {
                listener,
                context: _,
                request: id,
                addresses,
                peer_ird,
                peer_ord,
                revision,
                peer_to_peer,
                private_data,
            } => Ok(ConnectionRequest {
                session: session.clone(),
                id,
                decided: false,
                listener,
                addresses,
                peer_ird,
                peer_ord,
                revision,
                peer_to_peer,
                rc_peer,
                private_data,
            }),
            other => Err(other),
        }
    }

    /// Returns the request's handle in the daemon.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Returns the listener that received the request.
    pub fn listener(&self) -> ListenerId {
        self.listener
    }

    /// Returns the private data of the request.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Returns the addresses and ports of both ends, as this end sees them.
    pub fn addresses(&self) -> AddressPair {
        self.addresses
    }

    /// Returns the peer's address and port.
    pub fn peer(&self) -> SocketAddr {
        self.addresses.peer
    }

    /// Returns the inbound RDMA Reads that the peer offers, which limit this end's ORD; `None` if
    /// not negotiated (RFC 6581).
    pub fn peer_ird(&self) -> Option<u16> {
        self.peer_ird
    }

    /// Returns the outbound RDMA Reads that the peer wants; `None` if not negotiated (RFC 6581).
    pub fn peer_ord(&self) -> Option<u16> {
        self.peer_ord
    }

    /// Returns the MPA revision of the request.
    pub fn revision(&self) -> u8 {
        self.revision
    }

    /// Returns true if the peer requested the peer-to-peer model (RFC 6581), in which this end may
    /// send first.
    pub fn peer_to_peer(&self) -> bool {
        self.peer_to_peer
    }

    /// Returns the peer's RC or UC QP and its parameters, for a request to [`Context::bind_rc`].
    ///
    /// [`Context::bind_rc`]: crate::Context::bind_rc
    pub fn rc_peer(&self) -> Option<&RcPeer> {
        self.rc_peer.as_ref()
    }

    /// Accepts the request with an Idle QP and waits until the connection is established, which
    /// requires the peer's first message. Post receives before calling this.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the peer has abandoned the attempt: the QP is still Idle and can be
    /// used for the next request. [`Error::Unreachable`], [`Error::Disconnected`] or
    /// [`Error::TimedOut`] if the peer sends no first message: the QP is no longer usable.
    ///
    /// # Examples
    ///
    /// A server that checks the private data and posts a receive before the peer can send:
    ///
    /// ```no_run
    /// # use rnic_client::*;
    /// # fn serve(listener: &Listener, pd: &Pd, cq: &Cq, inbox: &Mr)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// loop {
    ///     let request = listener.accept_request(None)?;
    ///     if request.private_data() != b"password" {
    ///         request.reject(b"wrong password")?;
    ///         continue;
    ///     }
    ///     let qp = pd.create_qp(&QpOptions::new(cq))?;
    ///     qp.post_recv(&[RecvRequest::new(1, &[inbox.sge(0, 4096)])])?;
    ///     match request.accept(&qp, &AcceptOptions::default()) {
    ///         Ok(connected) => println!("connected to {}", connected.addresses.peer),
    ///         // This peer failed. Other peers may still connect.
    ///         Err(e) if e.fault() == Fault::Peer => eprintln!("{e}"),
    ///         Err(e) => return Err(e.into()),
    ///     }
    ///     # drop(qp);
    /// }
    /// # }
    /// ```
    pub fn accept(self, qp: &Qp, options: &AcceptOptions) -> Result<Connected, Error> {
        let _claim = Claim::new(qp.session(), Subject::Qp(qp.id), settles_connection);
        let timeout = options.timeout;
        self.start_accept(qp, options)?;
        qp.settle(timeout)
    }

    /// Accepts the request with an Idle QP, without waiting. [`Qp::wait_connected`] or
    /// [`Context::next_event`](crate::Context::next_event) returns the outcome.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the peer has abandoned the attempt; [`Error::PrivateDataTooLong`].
    pub fn start_accept(self, qp: &Qp, options: &AcceptOptions) -> Result<(), Error> {
        check_private_data(&options.private_data)?;
        self.check_session_of(qp)?;
        qp.forget_last_connection()?;
        self.decide_with(qp, options.ird, options.ord, &options.private_data)
    }

    /// Accepts the request with this QP.
    pub(crate) fn decide_with(
        self,
        qp: &Qp,
        ird: Option<u16>,
        ord: Option<u16>,
        private_data: &[u8],
    ) -> Result<(), Error> {
        let private_data = private_data.to_vec();
        let (request, id) = (self.id, qp.id);
        self.decide(qp, RequestBody::Accept { request, qp: id, ird, ord, private_data })
    }

    /// Sends the request that accepts with this QP.
    pub(crate) fn decide(mut self, qp: &Qp, accept: RequestBody) -> Result<(), Error> {
        self.check_session_of(qp)?;
        self.session.command(accept)?;
        self.decided = true;
        Ok(())
    }

    fn check_session_of(&self, qp: &Qp) -> Result<(), Error> {
        if Arc::ptr_eq(qp.session(), &self.session) {
            Ok(())
        } else {
            Err(Error::ForeignObject { what: "the QP" })
        }
    }

    /// Rejects the request with private data for the peer, at most 512 bytes, or 508 with RFC 6581.
    pub fn reject(mut self, private_data: &[u8]) -> Result<(), Error> {
        self.try_reject(private_data)
    }

    /// Same as [`reject`](Self::reject), but a request that could not be rejected stays undecided.
    pub fn try_reject(&mut self, private_data: &[u8]) -> Result<(), Error> {
        check_private_data(private_data)?;
        let private_data = private_data.to_vec();
        let answer = self.session.command(RequestBody::Reject { request: self.id, private_data });
        // A request that the peer has abandoned is decided too.
        self.decided = !answer.as_ref().is_err_and(Error::has_no_effect);
        answer
    }
}

impl fmt::Debug for ConnectionRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionRequest")
            .field("id", &self.id)
            .field("listener", &self.listener)
            .field("addresses", &self.addresses)
            .field("revision", &self.revision)
            .field("private_data", &self.private_data.len())
            .finish_non_exhaustive()
    }
}

impl Drop for ConnectionRequest {
    fn drop(&mut self) {
        if !self.decided {
            // Fails if the peer has abandoned the attempt or the session has ended.
            let body = RequestBody::Reject { request: self.id, private_data: Vec::new() };
            let _ = self.session.command(body);
        }
    }
}
