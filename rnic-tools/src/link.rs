//! Connection errors for users, and the graceful close of a connection.
//!
//! A failed completion only shows that a request was not carried out; the event that ends the
//! connection contains the reason. [`LinkError::after`] combines both.

use std::net::SocketAddr;
use std::time::Duration;

use rnic_client::{CompletionStatus, DisconnectReason, Error, PostError, Qp, TerminateCode};
use rnic_client::{ConnectOptions, Connected, Context, Fault, Listener, TerminateOrigin};

use crate::cli::printable;
use crate::endpoint::{Endpoint, EndpointError};

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The peer closed the connection gracefully, but too early.
    #[error("{peer} closed the connection before the work was done")]
    Closed {
        /// Address of the peer.
        peer: SocketAddr,
    },
    /// TCP lost the connection: the peer, its daemon or the network is gone.
    #[error("the connection with {peer} was lost: {why}")]
    Lost {
        /// Address of the peer.
        peer: SocketAddr,
        /// Reason given by the daemon.
        why: String,
    },
    /// One side broke a rule of RDMA, and the side that noticed it sent a Terminate.
    #[error("the connection with {peer} was ended by Terminate {code} from {}", origin_name(*origin))]
    Terminated {
        /// Address of the peer.
        peer: SocketAddr,
        /// The broken rule, by layer, error type and error code.
        code: TerminateCode,
        /// The side that found the fault.
        origin: TerminateOrigin,
    },
    /// The peer stopped sending.
    #[error("nothing heard from {peer} for {} s", after.as_secs_f64())]
    Silent {
        /// Address of the peer.
        peer: SocketAddr,
        /// Time waited.
        after: Duration,
    },
    /// The connection attempt failed.
    #[error("cannot connect to {peer}: {source}")]
    NotConnected {
        /// Address of the peer.
        peer: SocketAddr,
        /// Cause of the failure.
        source: Error,
    },
    /// The peer rejected the connection.
    #[error("{peer} refused: {}", printable(&String::from_utf8_lossy(private_data)))]
    Rejected {
        /// Address of the peer that rejected.
        peer: SocketAddr,
        /// Reason given by the peer's program.
        private_data: Vec<u8>,
    },
    /// The device failed or refused a call.
    #[error(transparent)]
    Rnic(#[from] Error),
}

impl From<PostError> for LinkError {
    fn from(e: PostError) -> Self {
        LinkError::Rnic(e.into())
    }
}

impl LinkError {
    /// Returns the reason for a failed request on a connected QP. Ends the connection.
    pub fn after(error: Error, qp: &Qp, peer: SocketAddr) -> LinkError {
        let flushed = matches!(
            error,
            Error::Failed {
                status: CompletionStatus::WrFlush | CompletionStatus::TransportRetryExceeded,
                ..
            }
        );
        match end(qp) {
            Some(DisconnectReason::Terminate { origin, code, .. }) => {
                LinkError::Terminated { peer, code, origin }
            }
            Some(DisconnectReason::Lost { why }) => LinkError::Lost { peer, why },
            Some(DisconnectReason::Orderly) if flushed => LinkError::Closed { peer },
            _ => LinkError::Rnic(error),
        }
    }
}

impl LinkError {
    /// Returns true if the connection attempt failed and another address may succeed.
    pub fn is_unreachable(&self) -> bool {
        let LinkError::NotConnected { source, .. } = self else { return false };
        matches!(source.fault(), Fault::Peer | Fault::Refusal)
    }
}

/// Listens on the first usable address of an endpoint.
pub fn listen(
    context: &Context,
    endpoint: &Endpoint,
    backlog: u32,
) -> Result<Listener, EndpointError<Error>> {
    endpoint.try_each(
        |address| context.listen(address, backlog),
        // The error contains the address.
        |e| e.fault() == Fault::Refusal,
    )
}

/// Connects. Errors contain the peer's address.
pub fn connect(
    qp: &Qp,
    peer: SocketAddr,
    options: &ConnectOptions,
) -> Result<Connected, LinkError> {
    qp.connect(peer, options).map_err(|e| match e {
        Error::Rejected { private_data } => LinkError::Rejected { peer, private_data },
        source => LinkError::NotConnected { peer, source },
    })
}

/// Closes a connection gracefully: the daemon still sends the posted requests. Waits a few seconds
/// for the peer's FIN. Returns how the connection ended, or `None` after the timeout.
pub fn end(qp: &Qp) -> Option<DisconnectReason> {
    // Fails if the connection has already ended.
    let _ = qp.disconnect();
    qp.wait_disconnected(Some(PATIENCE)).ok()
}

/// Time limit for the peer's FIN.
const PATIENCE: Duration = Duration::from_secs(5);

fn origin_name(origin: TerminateOrigin) -> &'static str {
    match origin {
        TerminateOrigin::Local => "this side",
        TerminateOrigin::Peer => "the peer",
    }
}
