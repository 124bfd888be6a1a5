//! Connecting and disconnecting QPs, by blocking calls or by events.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use rnic_abi::abi::control::{
    DisconnectMode, DisconnectReason, Event, MAX_PRIVATE_DATA, RequestBody,
};
use rnic_abi::types::AddressPair;

use crate::addresses::try_each;
use crate::error::Error;
use crate::events::{Ending, EventFilter, Subject, concerns_end, settles_connection};
use crate::inbox::deadline;
use crate::qp::Qp;
use crate::session::Session;

/// Options for connecting (compare `struct rdma_conn_param` of `rdma_connect(3)`).
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Private data of the connection request, at most 512 bytes (RFC 5044 section 7.1). More than
    /// 508 bytes select MPA revision 1, which does not negotiate IRD and ORD (RFC 6581).
    pub private_data: Vec<u8>,
    /// Inbound RDMA Reads to offer (IRD); `None` for the device's default.
    pub ird: Option<u16>,
    /// Outbound RDMA Reads to request (ORD); `None` for the device's default.
    pub ord: Option<u16>,
    /// Source address; `None` lets the system choose.
    pub local: Option<SocketAddr>,
    /// Timeout of [`Qp::connect`]; default 40 s. With `None`, only the daemon's own deadlines apply
    /// (`mpa.connect_deadline`, `mpa.reply_deadline`), by default 30 s in total. If the timeout is
    /// longer than these, the error contains the daemon's reason.
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

/// An established connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connected {
    /// Private data of the peer's reply; empty on the accepting side.
    pub private_data: Vec<u8>,
    /// Inbound RDMA Reads (IRD) in force.
    pub ird: u16,
    /// Outbound RDMA Reads (ORD) in force.
    pub ord: u16,
    /// Address and port of this end and of the peer, as this end sees them.
    pub addresses: AddressPair,
    /// MPA revision of the exchange: 1 or 2, or 0 with a peer that uses the RDMA Consortium's
    /// protocols, if the administrator allows those (RFC 5044 appendix C).
    pub revision: u8,
}

impl Qp {
    /// Connects an Idle QP and waits until the connection is established (`rdma_connect(3)`).
    /// `peer` may be a name with a port, as in `"localhost:7471"`. Its addresses are tried in turn,
    /// each with the timeout of the options.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the name has no address; [`Error::Rejected`] with the peer's private data;
    /// [`Error::Unreachable`] with the reason. After the latter two, the QP is Idle and can be
    /// connected again. [`Error::TimedOut`] after the timeout; the attempt is aborted.
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

    /// Starts to connect an Idle QP. [`Qp::wait_connected`] or
    /// [`Context::next_event`](crate::Context::next_event) returns the outcome.
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

    /// Waits for the outcome of an attempt that [`Qp::start_connect`] or
    /// [`ConnectionRequest::start_accept`](crate::ConnectionRequest::start_accept) has started.
    /// Aborts it after `timeout` (`None`: only the daemon's deadlines apply).
    ///
    /// # Errors
    ///
    /// Same as [`Qp::connect`].
    pub fn wait_connected(&self, timeout: Option<Duration>) -> Result<Connected, Error> {
        let _claim = Claim::new(self.session(), Subject::Qp(self.id), settles_connection);
        self.settle(timeout)
    }

    /// Closes the connection gracefully (`rdma_disconnect(3)`): outstanding requests are sent, then
    /// FINs are exchanged. Returns immediately. [`Qp::wait_disconnected`] waits for the end, which
    /// occurs when the peer has disconnected too, but at the latest after 30 s.
    /// [`Qp::disconnect_within`] sets another limit.
    pub fn disconnect(&self) -> Result<(), Error> {
        self.disconnect_within(LAST_SENDS)
    }

    /// Closes the connection gracefully if the outstanding requests can be sent within `time`
    /// (whole milliseconds), otherwise with a reset. Does not wait longer than `time` for the peer
    /// to disconnect; data that the peer sends later are lost.
    pub fn disconnect_within(&self, time: Duration) -> Result<(), Error> {
        let ms = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        self.request_disconnect(DisconnectMode::OrderlyWithin { ms })
    }

    /// Ends the connection immediately with a reset; outstanding requests are flushed.
    pub fn abort(&self) -> Result<(), Error> {
        self.request_disconnect(DisconnectMode::Abort)
    }

    fn request_disconnect(&self, mode: DisconnectMode) -> Result<(), Error> {
        self.session().command(RequestBody::Disconnect { qp: self.id, mode })
    }

    /// Waits until the connection has ended, by either side, and returns the reason. All posted
    /// requests are then completed or flushed. May be called again.
    ///
    /// If the peer has finished sending ([`Event::PeerClosed`]), this disconnects as well, because
    /// the connection would otherwise never end; outstanding requests are still sent.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] after `timeout` (`None`: no timeout); the connection continues.
    pub fn wait_disconnected(&self, timeout: Option<Duration>) -> Result<DisconnectReason, Error> {
        let deadline = deadline(timeout);
        let _claim = Claim::new(self.session(), Subject::Qp(self.id), concerns_end);
        loop {
            match self.session().await_event(deadline, |events| events.ending(self.id))? {
                Some(Ending::Ended(reason)) => return Ok(reason),
                Some(Ending::PeerClosed) => self.finish_sending()?,
                None => return Err(Error::TimedOut { what: "the end of the connection" }),
            }
        }
    }

    /// Ends this direction after all outstanding requests are sent, without a time limit. The
    /// connection ends when the peer disconnects too.
    pub(crate) fn finish_sending(&self) -> Result<(), Error> {
        match self.request_disconnect(DisconnectMode::Orderly) {
            // Refused if the connection has ended. The event of its end follows.
            Ok(()) | Err(Error::Refused { .. }) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Drops the events of the last connection, including unread ones, so that a new attempt does
    /// not mistake them for its outcome.
    pub(crate) fn forget_last_connection(&self) -> Result<(), Error> {
        self.session().events.drain()?;
        self.session().events.with(|events| events.renew(self.id));
        Ok(())
    }

    /// Waits for the outcome of an attempt. The caller must hold the claim.
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

/// Time limit of [`Qp::disconnect`].
const LAST_SENDS: Duration = Duration::from_secs(30);

/// Converts the event that decides an attempt to its result.
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
        other => Err(Error::protocol(format!("{other:?} does not decide a connection attempt"))),
    }
}

/// A claim on events: while it exists, `take_any` skips them.
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
