//! A QP's attempt to connect over TCP: the states I-idle and I-wait of the MPA start-up state
//! machine.

use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::Time;
use rnic_core::stream::startup::{EofAction, Initiator, InitiatorStep, Negotiated, Options};

use crate::cm::connect_failure::{ConnectFailure, too_long, with_code};
use crate::cm::net::OutgoingBytes;
use crate::cm::{CmOptions, ConnectParams, net};
use crate::config::{Span, Tcp};
use crate::socket::Socket;

/// A QP's attempt to connect.
#[derive(Debug)]
pub(in crate::cm) struct Active {
    pub(in crate::cm) params: ConnectParams,
    options: Options,
    initiator: Initiator,
    pub(super) stream: Socket,
    phase: ActivePhase,
    /// Deadline of the whole attempt, including the retry.
    pub(super) until: Time,
    /// Failure of the first attempt, if this is the second.
    pub(super) first: Option<String>,
}

#[derive(Debug)]
enum ActivePhase {
    /// The TCP handshake is in progress.
    AwaitTcp,
    /// Sends our request and waits for the reply.
    AwaitReply(OutgoingBytes),
}

/// Result of driving an attempt.
pub(in crate::cm) enum Step {
    /// Waits for readiness. `entered_reply` is true if TCP has just connected.
    Wait {
        entered_reply: bool,
    },
    Accepted(Box<Negotiated>),
    Rejected(Vec<u8>),
    /// The first attempt failed for this reason. The second attempt uses revision 1.
    Retry(String),
    Failed(ConnectFailure),
    /// Like `Failed`, after sending these bytes to the peer.
    FailedWithReply(Vec<u8>, ConnectFailure),
}

impl Active {
    /// Starts an attempt on a connection whose TCP handshake is in progress.
    pub(super) fn new(
        params: ConnectParams,
        options: Options,
        initiator: Initiator,
        stream: Socket,
        until: Time,
    ) -> Self {
        let phase = ActivePhase::AwaitTcp;
        Active { params, options, initiator, stream, phase, until, first: None }
    }

    /// Starts an attempt on an established connection.
    pub(in crate::cm) fn over(
        params: ConnectParams,
        options: Options,
        initiator: Initiator,
        stream: Socket,
        until: Time,
    ) -> Self {
        let phase = ActivePhase::AwaitReply(OutgoingBytes::new(initiator.request().to_vec()));
        Active { params, options, initiator, stream, phase, until, first: None }
    }

    pub(in crate::cm) fn stream(&self) -> &Socket {
        &self.stream
    }

    /// Returns true if the peer has seen nothing of this attempt.
    pub(in crate::cm) fn is_unseen_by_peer(&self) -> bool {
        matches!(self.phase, ActivePhase::AwaitTcp) && self.first.is_none()
    }

    /// Makes a later drop of the attempt close the connection.
    pub(in crate::cm) fn end_on_drop(&mut self) {
        self.stream.end_on_drop();
    }

    /// Enables keepalive and timeouts on the connection.
    pub(in crate::cm) fn watch(&mut self, tcp: &Tcp) -> io::Result<()> {
        self.stream.watch(tcp)
    }

    /// Returns the failure for an expired deadline.
    pub(in crate::cm) fn awaited(&self, options: &CmOptions) -> ConnectFailure {
        ConnectFailure::timed_out(match self.phase {
            ActivePhase::AwaitTcp => format!(
                "no TCP connection before the deadline (mpa.connect_deadline = {})",
                Span(options.connect_deadline)
            ),
            ActivePhase::AwaitReply(_) => format!(
                "the peer accepted TCP, but sent no MPA reply before the deadline \
                 (mpa.reply_deadline = {}): does an iWARP device listen there?",
                Span(options.reply_deadline)
            ),
        })
    }

    /// Prepends the failure of the first attempt, which used the requested revision.
    pub(super) fn with_first(&mut self, mut why: ConnectFailure) -> ConnectFailure {
        if let Some(first) = self.first.take() {
            why.reason = format!("{first}; as MPA revision 1: {}", why.reason);
        }
        why
    }

    pub(in crate::cm) fn drive(&mut self, scratch: &mut [u8]) -> Step {
        let mut entered_reply = false;
        if let ActivePhase::AwaitTcp = self.phase {
            match net::connected(&self.stream) {
                Ok(false) => return Step::Wait { entered_reply },
                Ok(true) => {}
                Err(e) => return Step::Failed(ConnectFailure::system("connect", &e)),
            }
            self.phase =
                ActivePhase::AwaitReply(OutgoingBytes::new(self.initiator.request().to_vec()));
            entered_reply = true;
        }
        if let ActivePhase::AwaitReply(request) = &mut self.phase
            && let Err(e) = request.send(&self.stream)
        {
            return Step::Failed(ConnectFailure::system("sending the MPA request", &e));
        }
        loop {
            // Bytes after a rejection belong to the program that passed the socket (RFC 5044
            // section 7.1.2).
            let most = if self.stream.is_passed() {
                self.initiator.missing().min(scratch.len())
            } else {
                scratch.len()
            };
            match net::receive(&self.stream, &mut scratch[..most]) {
                Ok(0) => return self.closed(None),
                Ok(n) => match self.initiator.handle_input(&scratch[..n]) {
                    Ok(InitiatorStep::NeedMore) => {}
                    Ok(InitiatorStep::Accepted(negotiated)) => {
                        return Step::Accepted(Box::new(negotiated));
                    }
                    Ok(InitiatorStep::Rejected { private_data }) => {
                        return Step::Rejected(private_data);
                    }
                    Err(e) => {
                        let why = ConnectFailure::protocol(with_code(&e, e.code()));
                        return match e.last_frame() {
                            [] => Step::Failed(why),
                            final_bytes => Step::FailedWithReply(final_bytes.to_vec(), why),
                        };
                    }
                },
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    return Step::Wait { entered_reply };
                }
                // A peer that closes before it has read all of our request sends a reset.
                Err(e) => return self.closed(Some(e)),
            }
        }
    }

    /// Starts the second attempt, as revision 1.
    pub(super) fn start_over(&mut self, options: &CmOptions) -> io::Result<()> {
        self.options.revision = 1;
        // Revision 1 has room for more private data, so this does not fail.
        self.initiator =
            Initiator::new(&self.options, &self.params.private_data).map_err(io::Error::other)?;
        let local = self.params.local;
        let peer = self.params.peer;
        let next = net::outgoing(local, peer, options.buffers)?;
        let next = Socket::own(TcpStream::from(OwnedFd::from(next)));
        // The first socket must be closed before the second connects: TCP allows one connection for
        // each pair of addresses and ports, and an rdma_cm id keeps its ports.
        std::mem::replace(&mut self.stream, next).reset();
        net::begin(&self.stream, peer)?;
        self.stream.watch(&options.tcp)?;
        self.phase = ActivePhase::AwaitTcp;
        Ok(())
    }

    fn closed(&mut self, error: Option<io::Error>) -> Step {
        match (self.initiator.handle_eof(), error) {
            // A passed socket allows no second connection.
            (EofAction::RetryRevision1, _) if self.stream.is_passed() => Step::Failed(
                ConnectFailure::reset("the peer closed the connection without an MPA reply"),
            ),
            (EofAction::RetryRevision1, error) => {
                let how = error.map(|e| format!(" ({e})")).unwrap_or_default();
                Step::Retry(format!(
                    "the peer accepted TCP, and closed it without an MPA reply{how}: does an iWARP \
                     device listen there?"
                ))
            }
            (EofAction::Fail(e), None) => {
                Step::Failed(ConnectFailure::reset(with_code(&e, e.code())))
            }
            (EofAction::Fail(_), Some(e)) => {
                Step::Failed(ConnectFailure::system("before the MPA reply", &e))
            }
        }
    }
}

/// Returns the state machine of the initiator. Fails if the private data is too long.
pub(in crate::cm) fn new_initiator(
    options: &Options,
    private_data: &[u8],
) -> Result<Initiator, Refusal> {
    //= MPA-7.1-7
    Initiator::new(options, private_data).map_err(too_long)
}
