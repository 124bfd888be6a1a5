//! Connects over TCP: the states I-idle and I-wait of the MPA start-up state machine.
//!
//! A peer that closes without a reply may not support revision 2 (RFC 6581 section 9.2). The
//! manager tries once more with revision 1 on a new TCP connection.

use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::{AddressPair, Time};
use rnic_core::stream::startup::{EofAction, Initiator, InitiatorStep, Negotiated, Options};

use super::connect_failure::ConnectFailure;
use super::net::OutgoingBytes;
use super::{CmEvent, CmOptions, ConnectParams, ConnectionManager, Slot, net, too_long, with_code};
use crate::config::{Span, Tcp};
use crate::socket::Socket;
use crate::system;

/// A QP's attempt to connect.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) params: ConnectParams,
    options: Options,
    initiator: Initiator,
    stream: Socket,
    phase: ActivePhase,
    /// Deadline of the whole attempt, with the retry as revision 1.
    until: Time,
    /// Failure of the first attempt, if this is the second.
    first: Option<String>,
}

#[derive(Debug)]
enum ActivePhase {
    /// The TCP handshake is in progress.
    AwaitTcp,
    /// Sends our request and waits for the reply.
    AwaitReply(OutgoingBytes),
}

/// Result of driving an attempt.
pub(super) enum Step {
    /// Waits for readiness. `entered_reply` is true if TCP has just connected.
    Wait {
        entered_reply: bool,
    },
    Accepted(Box<Negotiated>),
    Rejected(Vec<u8>),
    /// The first attempt failed for this reason. The second attempt uses revision 1.
    Retry(String),
    Failed(ConnectFailure),
    /// As `Failed`, after sending these bytes to the peer.
    FailedWithReply(Vec<u8>, ConnectFailure),
}

impl Active {
    /// Starts an attempt on an established connection.
    pub(super) fn over(
        params: ConnectParams,
        options: Options,
        initiator: Initiator,
        stream: Socket,
        until: Time,
    ) -> Self {
        let phase = ActivePhase::AwaitReply(OutgoingBytes::new(initiator.request().to_vec()));
        Active { params, options, initiator, stream, phase, until, first: None }
    }

    pub(super) fn stream(&self) -> &Socket {
        &self.stream
    }

    /// Returns true if the peer has seen nothing of this attempt.
    pub(super) fn is_unseen_by_peer(&self) -> bool {
        matches!(self.phase, ActivePhase::AwaitTcp) && self.first.is_none()
    }

    /// Makes a later drop of the attempt close the connection.
    pub(super) fn end_on_drop(&mut self) {
        self.stream.end_on_drop();
    }

    /// Enables keepalive and timeouts on the connection.
    pub(super) fn watch(&mut self, tcp: &Tcp) -> io::Result<()> {
        self.stream.watch(tcp)
    }

    /// Returns the failure for a passed deadline.
    pub(super) fn awaited(&self, options: &CmOptions) -> ConnectFailure {
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
    fn with_first(&mut self, mut why: ConnectFailure) -> ConnectFailure {
        if let Some(first) = self.first.take() {
            why.reason = format!("{first}; as MPA revision 1: {}", why.reason);
        }
        why
    }

    pub(super) fn drive(&mut self, scratch: &mut [u8]) -> Step {
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
    fn start_over(&mut self, options: &CmOptions) -> io::Result<()> {
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
            // A socket that a client passed has no second connection to try.
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

impl ConnectionManager {
    pub(super) fn connect_tcp(&mut self, params: ConnectParams, now: Time) -> Result<(), Refusal> {
        let qp = params.qp;
        let active = match self.begin_connect(params, now)? {
            Ok(active) => active,
            Err(why) => {
                self.events.push_back(CmEvent::Unreachable { qp, why });
                return Ok(());
            }
        };
        let key = self.insert(Slot::Active(Box::new(active)));
        if let Slot::Active(active) = &self.slots[key].slot
            && let Err(e) = self.register(key, &active.stream)
        {
            let refusal = system::refusal(&format!("connect {}", active.params.peer), &e);
            self.remove(key);
            return Err(refusal);
        }
        self.qps.insert(qp, key);
        self.set_deadline(key, Some(now.after(self.options.connect_deadline)));
        Ok(())
    }

    /// Starts a TCP connection to the peer. The outer error is a failure of the local end; the
    /// inner error means that the peer is unreachable.
    pub(super) fn begin_connect(
        &self,
        params: ConnectParams,
        now: Time,
    ) -> Result<Result<Active, ConnectFailure>, Refusal> {
        let options = self.initiator_options(&params);
        let initiator = new_initiator(&options, &params.private_data)?;
        let what = || format!("connect {}", params.peer);
        let buffers = self.options.buffers;
        let mut stream = match net::start_connect(params.local, params.peer, buffers) {
            Ok(Ok(stream)) => Socket::own(stream),
            Ok(Err(e)) => return Ok(Err(ConnectFailure::system("connect", &e))),
            Err(e) => return Err(system::refusal(&what(), &e)),
        };
        stream.watch(&self.options.tcp).map_err(|e| system::refusal(&what(), &e))?;
        let until = now.after(self.options.connect_deadline + self.options.reply_deadline);
        let phase = ActivePhase::AwaitTcp;
        Ok(Ok(Active { params, options, initiator, stream, phase, until, first: None }))
    }

    /// Returns the device's options with the parameters of this connect.
    pub(super) fn initiator_options(&self, params: &ConnectParams) -> Options {
        let mut options = self.options.startup;
        options.ird = params.ird.unwrap_or(options.ird);
        options.ord = params.ord.unwrap_or(options.ord);
        options.peer_to_peer = params.peer_to_peer;
        options
    }

    pub(super) fn drive_active(&mut self, key: usize, now: Time) {
        let Slot::Active(active) = &mut self.slots[key].slot else { return };
        match active.drive(&mut self.scratch[..]) {
            Step::Wait { entered_reply: false } => {}
            Step::Wait { entered_reply: true } => {
                let at = now.after(self.options.reply_deadline).min(active.until);
                let qp = active.params.qp;
                self.set_deadline(key, Some(at));
                self.events.push_back(CmEvent::Reached { qp });
            }
            Step::Accepted(negotiated) => self.finish_active(key, negotiated),
            Step::Rejected(private_data) => {
                let qp = active.params.qp;
                if let Some(Slot::Active(active)) = self.remove(key) {
                    //= MPA-7.1.2-3b
                    active.stream.let_go();
                }
                self.events.push_back(CmEvent::Rejected { qp, private_data });
            }
            Step::Retry(first) => self.retry(key, first, now),
            //= MPA-7.1.1-4, MPA-7.1.2-3a, MPA-7.1.2-5, MPA-8-7
            Step::Failed(why) => self.fail_active(key, why),
            Step::FailedWithReply(final_bytes, why) => {
                if let Some(Slot::Active(mut active)) = self.remove(key) {
                    let qp = active.params.qp;
                    let why = active.with_first(why);
                    self.events.push_back(CmEvent::Unreachable { qp, why });
                    let session = active.params.session;
                    let peer = active.params.peer.ip();
                    self.close_after(active.stream, final_bytes, session, peer, now);
                }
            }
        }
    }

    pub(super) fn fail_active(&mut self, key: usize, why: ConnectFailure) {
        if let Some(Slot::Active(mut active)) = self.remove(key) {
            let qp = active.params.qp;
            let why = active.with_first(why);
            self.events.push_back(CmEvent::Unreachable { qp, why });
        }
    }

    fn finish_active(&mut self, key: usize, negotiated: Box<Negotiated>) {
        let Some(Slot::Active(active)) = self.remove(key) else { return };
        let Active { params, stream, .. } = *active;
        let local = match net::local_address(&stream) {
            Ok(local) => local,
            Err(e) => {
                let why = ConnectFailure::system("after the MPA reply", &e);
                self.events.push_back(CmEvent::Unreachable { qp: params.qp, why });
                return;
            }
        };
        self.deregister(&stream);
        // A client connected a passed socket itself, so its port is not mapped.
        let peer = net::canonical(params.peer);
        let peer = if stream.is_passed() { peer } else { self.options.ports.named(peer) };
        let addresses = AddressPair { local, peer };
        self.events.push_back(CmEvent::ConnectedTcp {
            qp: params.qp,
            stream,
            negotiated,
            addresses,
        });
    }

    /// Starts the second attempt, as revision 1. The slot and its token stay.
    fn retry(&mut self, key: usize, first: String, now: Time) {
        let Slot::Active(active) = &mut self.slots[key].slot else { return };
        active.first = Some(first);
        let at = now.after(self.options.connect_deadline).min(active.until);
        let result = active.start_over(&self.options);
        let result = result.and_then(|()| match &self.slots[key].slot {
            Slot::Active(active) => self.register(key, &active.stream),
            _ => Ok(()),
        });
        match result {
            Ok(()) => {
                self.set_deadline(key, Some(at));
            }
            // The peer closed the first connection, so the failure counts as a reset.
            Err(e) => self.fail_active(key, ConnectFailure::reset(format!("connect: {e}"))),
        }
    }
}

/// Returns the state machine of the initiator. Fails if the private data is too long.
pub(super) fn new_initiator(options: &Options, private_data: &[u8]) -> Result<Initiator, Refusal> {
    //= MPA-7.1-7
    Initiator::new(options, private_data).map_err(too_long)
}
