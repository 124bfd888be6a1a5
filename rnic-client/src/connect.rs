//! Connecting and disconnecting queue pairs, blocking or by events.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use rnic_core::abi::control::{
    DisconnectMode, DisconnectReason, Event, MAX_PRIVATE_DATA, RequestBody,
};
use rnic_core::types::AddressPair;

use crate::addresses::try_each;
use crate::error::Error;
use crate::events::{Ending, EventFilter, Subject, concerns_end, settles_connection};
use crate::inbox::deadline;
use crate::qp::Qp;
use crate::session::Session;

/// How to connect (compare `struct rdma_conn_param` of `rdma_connect(3)`).
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Bytes for the peer's connection request, at most 512 (RFC 5044 section 7.1); more than 508
    /// select MPA revision 1, which negotiates no reads (RFC 6581).
    pub private_data: Vec<u8>,
    /// Inbound reads to offer; `None` for the device's default.
    pub ird: Option<u16>,
    /// Outbound reads wanted; `None` for the device's default.
    pub ord: Option<u16>,
    /// Source address, if it matters.
    pub local: Option<SocketAddr>,
    /// How long [`Qp::connect`] waits; default 40 s, `None` as long as the daemon's own deadlines
    /// let it. Those are 30 s together where the administrator has not changed them, and a program
    /// that lets the daemon give up first learns why (`mpa.connect_deadline`,
    /// `mpa.reply_deadline`).
    pub timeout: Option<Duration>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions {
            private_data: Vec::new(),
            ird: None,
            ord: None,
            local: None,
            timeout: Some(Duration::from_secs(40)),
        }
    }
}

/// A connection that stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connected {
    /// Private data of the peer's reply; empty on the accepting side.
    pub private_data: Vec<u8>,
    /// Inbound reads in force.
    pub ird: u16,
    /// Outbound reads in force.
    pub ord: u16,
    /// Address and port of this end and of the peer, as this end sees them.
    pub addresses: AddressPair,
    /// MPA revision of the exchange: 1 or 2, or 0 with a peer of the RDMA Consortium's protocols,
    /// where the administrator lets those be served (RFC 5044 appendix C).
    pub revision: u8,
}

impl Qp {
    /// Connects an Idle QP and waits until the connection stands (`rdma_connect(3)`). The peer is
    /// an address, or a name with a port as in `"localhost:7471"`: each address of a name is tried
    /// in turn, each for the time that the options say.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the name has no address; [`Error::Rejected`] has the peer's private data,
    /// [`Error::Unreachable`] says why there is no connection; both leave the QP Idle, to be
    /// connected again. After [`Error::TimedOut`] the attempt has been aborted.
    pub fn connect(
        &self,
        peer: impl ToSocketAddrs,
        options: &ConnectOptions,
    ) -> Result<Connected, Error> {
        let _claim = Claim::new(self.session(), Subject::Qp(self.id), settles_connection);
        try_each(peer, |peer| {
            self.start_connect(peer, options)?;
            self.settle(options.timeout)
        })
    }

    /// Begins to connect an Idle QP. What comes of it is told by [`Qp::wait_connected`] or, to a
    /// program that waits for events, by [`Context::next_event`](crate::Context::next_event).
    pub fn start_connect(&self, peer: SocketAddr, options: &ConnectOptions) -> Result<(), Error> {
        check_private_data(&options.private_data)?;
        self.forget_last_connection()?;
        self.session().command(RequestBody::Connect {
            qp: self.id,
            peer,
            local: options.local,
            ird: options.ird,
            ord: options.ord,
            private_data: options.private_data.clone(),
        })
    }

    /// Waits until a connection that was begun by [`Qp::start_connect`] or
    /// [`ConnectionRequest::start_accept`](crate::ConnectionRequest::start_accept) stands or has
    /// failed; aborts it when `timeout` is over (`None` leaves it to the daemon's deadlines).
    ///
    /// # Errors
    ///
    /// As of [`Qp::connect`].
    pub fn wait_connected(&self, timeout: Option<Duration>) -> Result<Connected, Error> {
        let _claim = Claim::new(self.session(), Subject::Qp(self.id), settles_connection);
        self.settle(timeout)
    }

    /// Ends the connection in order (`rdma_disconnect(3)`): what has been posted is sent, then FINs
    /// are exchanged. Returns at once; [`Qp::wait_disconnected`] waits for the end, which comes
    /// when the peer has disconnected as well, and after 30 s in any case. For another time use
    /// [`Qp::disconnect_within`].
    pub fn disconnect(&self) -> Result<(), Error> {
        self.disconnect_within(LAST_SENDS)
    }

    /// Ends the connection in order if what has been posted can be sent within this time (whole
    /// milliseconds), and with a reset otherwise. The peer need not have disconnected by then; what
    /// it sends later is lost.
    pub fn disconnect_within(&self, time: Duration) -> Result<(), Error> {
        let ms = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        self.ask_to_disconnect(DisconnectMode::OrderlyWithin { ms })
    }

    /// Ends the connection at once with a reset; what has been posted is flushed.
    pub fn abort(&self) -> Result<(), Error> {
        self.ask_to_disconnect(DisconnectMode::Abort)
    }

    fn ask_to_disconnect(&self, mode: DisconnectMode) -> Result<(), Error> {
        self.session().command(RequestBody::Disconnect { qp: self.id, mode })
    }

    /// Waits until the connection has ended, whoever ended it, and says how. Everything posted has
    /// then been completed or flushed. May be asked again.
    ///
    /// When the peer has finished sending ([`Event::PeerClosed`]), this disconnects as well, since
    /// the connection would never end otherwise; what has been posted until then is still sent.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] when `timeout` is over (`None` waits as long as it takes); the
    /// connection goes on.
    pub fn wait_disconnected(&self, timeout: Option<Duration>) -> Result<DisconnectReason, Error> {
        let deadline = deadline(timeout);
        let _claim = Claim::new(self.session(), Subject::Qp(self.id), concerns_end);
        loop {
            match self.session().await_event(deadline, |events| events.ending(self.id))? {
                Some(Ending::Ended(reason)) => return Ok(reason),
                Some(Ending::PeerClosed) => self.finish_as_well()?,
                None => return Err(Error::TimedOut { what: "the end of the connection" }),
            }
        }
    }

    /// Finishes sending, however long that takes: the end depends on the peer, which has its own
    /// time.
    pub(crate) fn finish_as_well(&self) -> Result<(), Error> {
        match self.ask_to_disconnect(DisconnectMode::Orderly) {
            // Refused if it has ended meanwhile: then that is what comes next.
            Ok(()) | Err(Error::Refused { .. }) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Before a new attempt: drops what the last one left behind, also what has not been read yet,
    /// so that it is not taken for the outcome of this one.
    pub(crate) fn forget_last_connection(&self) -> Result<(), Error> {
        self.session().events.drain()?;
        self.session().events.with(|events| events.renew(self.id));
        Ok(())
    }

    /// Waits for the decision about an attempt; the caller has claimed it.
    pub(crate) fn settle(&self, timeout: Option<Duration>) -> Result<Connected, Error> {
        let decision = self
            .session()
            .await_event(deadline(timeout), |e| e.take(Subject::Qp(self.id), settles_connection))?;
        match decision {
            Some(event) => outcome(event),
            None => {
                self.abort()?;
                Err(Error::TimedOut { what: "the connection; it has been aborted" })
            }
        }
    }
}

/// Time that [`Qp::disconnect`] has.
const LAST_SENDS: Duration = Duration::from_secs(30);

/// What a decision about an attempt says.
pub(crate) fn outcome(decision: Event) -> Result<Connected, Error> {
    match decision {
        Event::Established { addresses, ird, ord, private_data, revision, .. } => {
            Ok(Connected { private_data, ird, ord, addresses, revision })
        }
        Event::Rejected { private_data, .. } => Err(Error::Rejected { private_data }),
        Event::Unreachable { reason, .. } | Event::QpFatal { reason, .. } => {
            Err(Error::Unreachable { reason })
        }
        Event::Disconnected { reason, .. } => Err(Error::Disconnected(reason)),
        other => Err(Error::protocol(format!("{other:?} settles no connection"))),
    }
}

/// Events that the calling thread awaits and nobody else shall get.
pub(crate) struct Claim<'a> {
    session: &'a Session,
    subject: Subject,
    kind: EventFilter,
}

impl<'a> Claim<'a> {
    pub(crate) fn new(session: &'a Session, subject: Subject, kind: EventFilter) -> Self {
        session.events.with(|events| events.claim(subject, kind));
        Claim { session, subject, kind }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.session.events.with(|events| events.unclaim(self.subject, self.kind));
    }
}

pub(crate) fn check_private_data(bytes: &[u8]) -> Result<(), Error> {
    match bytes.len() {
        given if given > MAX_PRIVATE_DATA => {
            Err(Error::PrivateDataTooLong { given, max: MAX_PRIVATE_DATA })
        }
        _ => Ok(()),
    }
}
