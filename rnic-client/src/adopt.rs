//! Connections over TCP sockets that the program made itself.
//!
//! The daemon takes over a TCP connection of this program, which may come from another network
//! namespace than the daemon's and may have carried traffic of the program's own before (RFC 5044
//! section 7.1.2). If the connection is rejected it is the program's again, with not a byte of
//! what follows the MPA frames taken from it.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rnic_core::abi::control::{Event, ReplyBody, RequestBody};

use crate::connect::{Claim, ConnectOptions, Connected, check_private_data};
use crate::error::Error;
use crate::events::{Subject, answers_passed, settles_connection};
use crate::inbox::deadline;
use crate::listener::{AcceptOptions, ConnectionRequest, Listener};
use crate::qp::Qp;
use crate::session::{Session, unexpected};

/// Why no connection came about over a socket, and the socket if it can still be used.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct SocketError {
    /// What kept the connection from coming about.
    #[source]
    pub error: Error,
    /// The socket, as it was after the last byte of the negotiation: there if the peer rejected
    /// ([`Error::Rejected`]), or if the daemon did not take it ([`Error::Refused`]). Otherwise the
    /// TCP connection has ended.
    pub stream: Option<TcpStream>,
}

impl SocketError {
    /// Before the daemon had it for certain.
    fn not_taken(error: Error, stream: TcpStream) -> Self {
        let taken = matches!(error, Error::DaemonGone | Error::TimedOut { .. } | Error::Io { .. });
        SocketError { error, stream: (!taken).then_some(stream) }
    }
}

impl Qp {
    /// Connects an Idle QP as [`Qp::connect`] does, but over a TCP connection of this program whose
    /// peer expects an MPA Request next. [`ConnectOptions::local`] does not matter.
    ///
    /// If the peer rejects, the error brings the socket back, and both ends may go on in plain TCP.
    /// There is no second attempt with MPA revision 1: for a peer that knows only that one, private
    /// data of more than 508 bytes selects it.
    ///
    /// The program must not use other descriptors of the socket meanwhile, nor afterwards unless
    /// it was rejected; it would only harm this connection.
    pub fn connect_over(
        &self,
        stream: TcpStream,
        options: &ConnectOptions,
    ) -> Result<Connected, SocketError> {
        let _claim = Claim::new(self.session(), Subject::Qp(self.id), settles_connection);
        if let Err(error) = self.start_over(&stream, options) {
            return Err(SocketError::not_taken(error, stream));
        }
        self.settle(options.timeout).map_err(|error| {
            let stream = matches!(error, Error::Rejected { .. }).then_some(stream);
            SocketError { error, stream }
        })
    }

    fn start_over(&self, stream: &TcpStream, options: &ConnectOptions) -> Result<(), Error> {
        check_private_data(&options.private_data)?;
        self.forget_last_connection()?;
        let body = RequestBody::ConnectOver {
            qp: self.id,
            ird: options.ird,
            ord: options.ord,
            private_data: options.private_data.clone(),
        };
        match self.session().request_with(body, Some(stream.as_fd()))? {
            (ReplyBody::Done, _) => Ok(()),
            (other, _) => Err(unexpected(&other)),
        }
    }
}

/// A TCP connection of this program on which an MPA Request is awaited. Dropping it ends the
/// connection.
#[derive(Debug)]
pub struct SocketListener {
    listener: Listener,
    stream: TcpStream,
}

impl SocketListener {
    pub(crate) fn serve(
        session: &Arc<Session>,
        stream: TcpStream,
    ) -> Result<SocketListener, SocketError> {
        let body = RequestBody::ServeOver { context: 0 };
        // The request may follow at once, and is to find a place to go to: no other thread sorts
        // events before there is one.
        let listener = session.events.with(|events| {
            match session.request_with(body, Some(stream.as_fd()))? {
                (ReplyBody::Listener { listener, address }, _) => {
                    events.open(Subject::Listener(listener));
                    Ok(Listener::of_socket(session, listener, address))
                }
                (other, _) => Err(unexpected(&other)),
            }
        });
        match listener {
            Ok(listener) => Ok(SocketListener { listener, stream }),
            Err(error) => Err(SocketError::not_taken(error, stream)),
        }
    }

    /// Waits for the peer's MPA Request, for which the daemon gives it `mpa.startup_deadline`.
    ///
    /// # Errors
    ///
    /// Any ends the connection: [`Error::Unreachable`] if the peer sent no request,
    /// [`Error::TimedOut`] when `timeout` is over (`None` leaves it to the daemon's deadline).
    pub fn accept_request(self, timeout: Option<Duration>) -> Result<SocketRequest, Error> {
        let session = self.listener.session().clone();
        let subject = Subject::Listener(self.listener.id());
        let _claim = Claim::new(&session, subject, answers_passed);
        let event = session
            .await_event(deadline(timeout), |events| events.take(subject, answers_passed))?
            .ok_or(Error::TimedOut { what: "a connection request" })?;
        match ConnectionRequest::from_event(&session, event) {
            Ok(request) => Ok(SocketRequest { request, over: self }),
            Err(Event::RequestWithdrawn { reason, .. }) => Err(Error::Unreachable { reason }),
            Err(other) => Err(Error::protocol(format!("{other:?} asks for no connection"))),
        }
    }
}

/// A peer that asks to connect over a TCP connection of this program. Dropping it rejects it
/// without private data and ends the TCP connection.
#[derive(Debug)]
pub struct SocketRequest {
    // In this order: a listener that closes rejects what is undecided.
    request: ConnectionRequest,
    over: SocketListener,
}

impl SocketRequest {
    /// What the peer asks for.
    pub fn request(&self) -> &ConnectionRequest {
        &self.request
    }

    /// Accepts with an Idle QP, as [`ConnectionRequest::accept`] does.
    pub fn accept(self, qp: &Qp, options: &AcceptOptions) -> Result<Connected, Error> {
        self.request.accept(qp, options)
    }

    /// Rejects it with these bytes for the peer, at most 512, or 508 with RFC 6581. The peer may
    /// go on in plain TCP, and so may this program: the result is its socket. Fails with
    /// [`Error::Refused`] if the peer has given up meanwhile.
    pub fn reject(self, private_data: &[u8]) -> Result<TcpStream, Error> {
        let SocketRequest { request, over } = self;
        request.reject(private_data)?;
        Ok(over.stream)
    }
}
