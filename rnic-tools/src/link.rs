//! Why a conversation over a connection stopped, and how to end one.
//!
//! A failed completion says only that a request did not happen; why is known from the event that
//! ends the connection. [`LinkError::after`] puts the two together for a person to read.

use std::net::SocketAddr;
use std::time::Duration;

use rnic_client::{CompletionStatus, DisconnectReason, Error, PostError, Qp, TerminateCode};
use rnic_client::{ConnectOptions, Connected, Context, Fault, Listener, TerminateOrigin};

use crate::cli::printable;
use crate::endpoint::{Endpoint, EndpointError};

/// Why a conversation stopped.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The peer closed it in order, but too early.
    #[error("{peer} closed the connection before the work was done")]
    Closed {
        /// Address of the peer.
        peer: SocketAddr,
    },
    /// TCP lost it: the peer, its daemon or the network is gone.
    #[error("the connection with {peer} was lost: {why}")]
    Lost {
        /// Address of the peer.
        peer: SocketAddr,
        /// In the daemon's words.
        why: String,
    },
    /// One side broke a rule of RDMA and was told by a Terminate.
    #[error("the connection with {peer} was ended by Terminate {code} from {}", who(*origin))]
    Terminated {
        /// Address of the peer.
        peer: SocketAddr,
        /// Rule that was broken, by layer, error type and error code.
        code: TerminateCode,
        /// Who found the fault.
        origin: TerminateOrigin,
    },
    /// The peer stopped talking.
    #[error("nothing heard from {peer} for {} s", after.as_secs_f64())]
    Silent {
        /// Address of the peer.
        peer: SocketAddr,
        /// How long was waited.
        after: Duration,
    },
    /// No connection came about.
    #[error("cannot connect to {peer}: {source}")]
    NotConnected {
        /// Address to which the connection was to go.
        peer: SocketAddr,
        /// What kept the connection from coming about.
        source: Error,
    },
    /// The peer does not want the connection.
    #[error("{peer} refused: {}", printable(&String::from_utf8_lossy(private_data)))]
    Rejected {
        /// Address of the peer that rejected.
        peer: SocketAddr,
        /// Why, in the terms of the program.
        private_data: Vec<u8>,
    },
    /// The device failed or refused something.
    #[error(transparent)]
    Rnic(#[from] Error),
}

impl From<PostError> for LinkError {
    fn from(e: PostError) -> Self {
        LinkError::Rnic(e.into())
    }
}

impl LinkError {
    /// The reason behind a failed request of a connected QP. Ends the connection if it stands.
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
    /// Whether no connection came about with this address, where another one may do.
    pub fn is_unreachable(&self) -> bool {
        let LinkError::NotConnected { source, .. } = self else { return false };
        matches!(source.fault(), Fault::Peer | Fault::Refusal)
    }
}

/// Listens at the first address of an endpoint that can be had.
pub fn listen(
    context: &Context,
    endpoint: &Endpoint,
    backlog: u32,
) -> Result<Listener, EndpointError<Error>> {
    endpoint.try_each(
        |address| context.listen(address, backlog),
        // It names the address.
        |e| e.fault() == Fault::Refusal,
    )
}

/// Connects, naming the peer in the error.
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

/// Ends a connection in order: what has been posted is still delivered. Waits a moment for the
/// peer's consent, and says how it ended if it did.
pub fn end(qp: &Qp) -> Option<DisconnectReason> {
    // Refused when it has ended already.
    let _ = qp.disconnect();
    qp.wait_disconnected(Some(PATIENCE)).ok()
}

/// How long to wait for the peer's FIN.
const PATIENCE: Duration = Duration::from_secs(5);

fn who(origin: TerminateOrigin) -> &'static str {
    match origin {
        TerminateOrigin::Local => "this side",
        TerminateOrigin::Peer => "the peer",
    }
}
