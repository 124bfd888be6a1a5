//! Bound addresses and the connection requests that come to them.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rnic_core::abi::control::{Event, ObjectRef, ReplyBody, RequestBody};
use rnic_core::types::{AddressPair, ListenerId, RequestId};

use crate::connect::{Claim, Connected, check_private_data};
use crate::error::Error;
use crate::events::{Subject, asks_to_connect, settles_connection};
use crate::inbox::deadline;
use crate::qp::Qp;
use crate::session::{Session, unexpected};

/// How an address is bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BindOptions {
    /// Of the IPv6 wildcard `[::]`, to take IPv6 alone (`RDMA_OPTION_ID_AFONLY`), so that
    /// `0.0.0.0` can be bound with the same port. Otherwise it takes IPv4 as well.
    pub v6_only: bool,
}

/// A bound address, listening or not (`rdma_bind_addr(3)`, `rdma_listen(3)`).
///
/// Dropping it closes it; requests that wait undecided are then rejected on the wire.
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

    /// Binds what this request says.
    pub(crate) fn bind_as(session: &Arc<Session>, body: RequestBody) -> Result<Listener, Error> {
        match session.request(body)? {
            ReplyBody::Listener { listener: id, address } => {
                session.events.with(|events| events.open(Subject::Listener(id)));
                Ok(Listener { session: session.clone(), id, address })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// What serves one connection that was passed.
    pub(crate) fn of_socket(session: &Arc<Session>, id: ListenerId, address: SocketAddr) -> Self {
        Listener { session: session.clone(), id, address }
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Its handle in the daemon; what events name.
    pub fn id(&self) -> ListenerId {
        self.id
    }

    /// Its address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Listens. At most `backlog` requests wait unread or undecided; more are rejected on the wire.
    pub fn listen(&self, backlog: u32) -> Result<(), Error> {
        self.session.command(RequestBody::Listen { listener: self.id, backlog })
    }

    /// Waits for a peer that asks to connect (compare `rdma_get_request(3)`), at most for `timeout`
    /// (`None` waits as long as it takes). Several threads may wait; each request goes to one of
    /// them.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] when `timeout` is over, after which the listener goes on as before.
    pub fn accept_request(&self, timeout: Option<Duration>) -> Result<ConnectionRequest, Error> {
        let subject = Subject::Listener(self.id);
        let _claim = Claim::new(&self.session, subject, asks_to_connect);
        let event = self
            .session
            .await_event(deadline(timeout), |events| events.take(subject, asks_to_connect))?
            .ok_or(Error::TimedOut { what: "a connection request" })?;
        ConnectionRequest::from_event(&self.session, event)
            .map_err(|other| Error::protocol(format!("{other:?} asks for no connection")))
    }

    /// Changes the context that its events carry.
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
        // A session that has ended has closed it already.
        let _ = self.session.command(RequestBody::CloseListener { listener: self.id });
        self.session.events.with(|events| events.close(Subject::Listener(self.id)));
    }
}

/// A peer that waits to be accepted or rejected (`rdma_accept(3)`, `rdma_reject(3)`).
///
/// It exists before any QP does, so that the answer may depend on its private data. Dropping it
/// undecided rejects it without private data. Those of [`Context::bind_datagrams`] ask for a queue
/// pair of datagrams, and are accepted by
/// [`accept_datagrams`](ConnectionRequest::accept_datagrams) only.
///
/// [`Context::bind_datagrams`]: crate::Context::bind_datagrams
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
    private_data: Vec<u8>,
}

/// How to accept a connection request (compare `struct rdma_conn_param` of `rdma_accept(3)`).
#[derive(Clone, Debug)]
pub struct AcceptOptions {
    /// Bytes for the peer, at most 512, or 508 with RFC 6581.
    pub private_data: Vec<u8>,
    /// Inbound reads to offer; `None` for as many as the peer wants, within limits.
    pub ird: Option<u16>,
    /// Outbound reads wanted; `None` for as many as the peer offers, within limits.
    pub ord: Option<u16>,
    /// How long [`ConnectionRequest::accept`] waits for the peer to begin; default 30 s, `None` as
    /// long as the daemon's own deadlines let it.
    pub timeout: Option<Duration>,
}

impl Default for AcceptOptions {
    fn default() -> Self {
        let timeout = Some(Duration::from_secs(30));
        AcceptOptions { private_data: Vec::new(), ird: None, ord: None, timeout }
    }
}

impl ConnectionRequest {
    /// Makes a connection request event into an object; gives other events back.
    pub(crate) fn from_event(session: &Arc<Session>, event: Event) -> Result<Self, Event> {
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
                private_data,
            }),
            other => Err(other),
        }
    }

    /// Its handle in the daemon.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The listener it came to.
    pub fn listener(&self) -> ListenerId {
        self.listener
    }

    /// The private data of the peer's request.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Address and port of this end and of the peer, as this end sees them.
    pub fn addresses(&self) -> AddressPair {
        self.addresses
    }

    /// The peer's address.
    pub fn peer(&self) -> SocketAddr {
        self.addresses.peer
    }

    /// Inbound reads that the peer offers, the most our outbound ones may be; `None` if not
    /// negotiated (RFC 6581).
    pub fn peer_ird(&self) -> Option<u16> {
        self.peer_ird
    }

    /// Outbound reads that the peer wants; `None` if not negotiated (RFC 6581).
    pub fn peer_ord(&self) -> Option<u16> {
        self.peer_ord
    }

    /// MPA revision of the request.
    pub fn revision(&self) -> u8 {
        self.revision
    }

    /// Whether the peer asked for the peer-to-peer model (RFC 6581), in which we may send first.
    pub fn peer_to_peer(&self) -> bool {
        self.peer_to_peer
    }

    /// Accepts with an Idle QP and waits until the connection stands, which is when the peer's
    /// first message has arrived. Post receives before.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the peer has given up meanwhile: the QP is Idle still, and good for
    /// the next request. [`Error::Unreachable`], [`Error::Disconnected`] or [`Error::TimedOut`] if
    /// the peer does not begin: the QP is of no more use.
    ///
    /// # Examples
    ///
    /// A server that takes who says the right word, with a QP that has room before the peer sends:
    ///
    /// ```no_run
    /// # use rnic_client::*;
    /// # fn serve(listener: &Listener, pd: &Pd, cq: &Cq, inbox: &Mr)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// loop {
    ///     let request = listener.accept_request(None)?;
    ///     if request.private_data() != b"open sesame" {
    ///         request.reject(b"who are you?")?;
    ///         continue;
    ///     }
    ///     let qp = pd.create_qp(&QpOptions::new(cq))?;
    ///     qp.post_recv(&[RecvRequest::new(1, &[inbox.sge(0, 4096)])])?;
    ///     match request.accept(&qp, &AcceptOptions::default()) {
    ///         Ok(connected) => println!("{} may send", connected.addresses.peer),
    ///         // This peer's trouble: others may come.
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

    /// Accepts with an Idle QP. What comes of it is told by [`Qp::wait_connected`] or
    /// [`Context::next_event`](crate::Context::next_event).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the peer has given up meanwhile; [`Error::PrivateDataTooLong`].
    pub fn start_accept(self, qp: &Qp, options: &AcceptOptions) -> Result<(), Error> {
        check_private_data(&options.private_data)?;
        self.check_session_of(qp)?;
        qp.forget_last_connection()?;
        self.decide_with(qp, (options.ird, options.ord), &options.private_data)
    }

    /// Accepts with this queue pair.
    pub(crate) fn decide_with(
        mut self,
        qp: &Qp,
        (ird, ord): (Option<u16>, Option<u16>),
        private_data: &[u8],
    ) -> Result<(), Error> {
        self.check_session_of(qp)?;
        let private_data = private_data.to_vec();
        self.session.command(RequestBody::Accept {
            request: self.id,
            qp: qp.id,
            ird,
            ord,
            private_data,
        })?;
        self.decided = true;
        Ok(())
    }

    fn check_session_of(&self, qp: &Qp) -> Result<(), Error> {
        match Arc::ptr_eq(qp.session(), &self.session) {
            true => Ok(()),
            false => Err(Error::ForeignObject { what: "the QP" }),
        }
    }

    /// Rejects it with these bytes for the peer, at most 512, or 508 with RFC 6581.
    pub fn reject(mut self, private_data: &[u8]) -> Result<(), Error> {
        check_private_data(private_data)?;
        self.decided = true;
        self.session
            .command(RequestBody::Reject { request: self.id, private_data: private_data.to_vec() })
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
            // The peer may have given up, or the session ended: then there is nobody to reject.
            let body = RequestBody::Reject { request: self.id, private_data: Vec::new() };
            let _ = self.session.command(body);
        }
    }
}
