//! MPA over TCP connections of the program.
//!
//! The daemon takes over a TCP connection of this program. The connection may be in a network
//! namespace other than the daemon's and may have carried other traffic before (RFC 5044 section
//! 7.1.2). If the connection request is rejected, the program gets the socket back, and no byte
//! after the MPA frames has been read from the socket.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rnic_abi::abi::control::{Event, ReplyBody, RequestBody};

use crate::connect::{Claim, ConnectOptions, Connected, check_private_data};
use crate::error::Error;
use crate::events::{Subject, settles_connection, settles_socket};
use crate::inbox::deadline;
use crate::listener::{AcceptOptions, ConnectionRequest, Listener};
use crate::qp::Qp;
use crate::session::{Session, unexpected};

/// Error of a connection over a socket, with the socket if it is still usable.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct SocketError {
    /// Cause of the failure.
    #[source]
    pub error: Error,
    /// The socket after the last byte of the negotiation, if the peer rejected the request
    /// ([`Error::Rejected`]) or the daemon did not take the socket (for example
    /// [`Error::Refused`]). `None` if the TCP connection has ended or the daemon may have taken the
    /// socket.
    pub stream: Option<TcpStream>,
}

impl SocketError {
    /// Creates the error of the request that passes the socket. Returns the socket with it unless
    /// the daemon may have taken it.
    fn not_taken(error: Error, stream: TcpStream) -> Self {
        let taken = matches!(error, Error::DaemonGone | Error::TimedOut { .. } | Error::Io { .. });
        SocketError { error, stream: (!taken).then_some(stream) }
    }
}

impl Qp {
    /// Connects an Idle QP as [`Qp::connect`] does, but over a TCP connection of this program. The
    /// peer must expect an MPA Request as the next data. [`ConnectOptions::local`] is ignored.
    ///
    /// If the peer rejects, the error contains the socket, and both ends may continue with plain
    /// TCP. There is no second attempt with MPA revision 1. For a peer that supports only that
    /// revision, select it with more than 508 bytes of private data.
    ///
    /// The program must not use other descriptors of the socket during this call, nor afterwards
    /// unless the request was rejected. Such use can only harm this connection.
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

/// A TCP connection of this program that waits for an MPA Request. Dropping it ends the connection.
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
        // The request may arrive at once. Holding the events here ensures that the subject is open
        // before another thread sorts it.
        let listener = session.events.with(|events| {
            match session.request_with(body, Some(stream.as_fd()))? {
                (ReplyBody::Listener { listener, address }, _) => {
                    events.open(Subject::Listener(listener));
                    Ok(Listener::for_socket(session, listener, address))
                }
                (other, _) => Err(unexpected(&other)),
            }
        });
        match listener {
            Ok(listener) => Ok(SocketListener { listener, stream }),
            Err(error) => Err(SocketError::not_taken(error, stream)),
        }
    }

    /// Waits for the peer's MPA Request, at most as long as the daemon's `mpa.startup_deadline`.
    ///
    /// # Errors
    ///
    /// Every error ends the connection: [`Error::Unreachable`] if the peer sent no request,
    /// [`Error::TimedOut`] after `timeout` (`None`: only the daemon's deadline applies).
    pub fn accept_request(self, timeout: Option<Duration>) -> Result<SocketRequest, Error> {
        let session = self.listener.session().clone();
        let subject = Subject::Listener(self.listener.id());
        let _claim = Claim::new(&session, subject, settles_socket);
        let event = session
            .await_event(deadline(timeout), |events| events.take(subject, settles_socket))?
            .ok_or(Error::TimedOut { what: "a connection request" })?;
        match ConnectionRequest::from_event(&session, event) {
            Ok(request) => Ok(SocketRequest { request, over: self }),
            Err(Event::RequestWithdrawn { reason, .. }) => Err(Error::Unreachable { reason }),
            Err(other) => Err(Error::protocol(format!("{other:?} is not a request"))),
        }
    }
}

/// A connection request on a TCP connection of this program. Dropping it rejects the request
/// without private data and ends the TCP connection.
#[derive(Debug)]
pub struct SocketRequest {
    // Must be dropped before `over`, because closing a listener rejects pending requests.
    request: ConnectionRequest,
    over: SocketListener,
}

impl SocketRequest {
    /// Returns the connection request.
    pub fn request(&self) -> &ConnectionRequest {
        &self.request
    }

    /// Accepts with an Idle QP as [`ConnectionRequest::accept`] does.
    pub fn accept(self, qp: &Qp, options: &AcceptOptions) -> Result<Connected, Error> {
        self.request.accept(qp, options)
    }

    /// Rejects the request with private data for the peer, at most 512 bytes, or 508 with RFC 6581.
    /// Returns the socket; both ends may continue with plain TCP. Fails with [`Error::Refused`] if
    /// the peer has abandoned the attempt.
    pub fn reject(self, private_data: &[u8]) -> Result<TcpStream, Error> {
        let SocketRequest { request, over } = self;
        request.reject(private_data)?;
        Ok(over.stream)
    }
}
