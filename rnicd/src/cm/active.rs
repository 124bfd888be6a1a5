//! Connecting over TCP: I-idle and I-wait of the start-up state machine.
//!
//! A peer that closes without a word may not know revision 2 (RFC 6581 section 9.2): it is tried
//! once more with revision 1 on a new TCP connection.

use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;

use rnic_core::abi::control::Refusal;
use rnic_core::stream::startup::{EofVerdict, Initiator, InitiatorStep, Negotiated, Options};
use rnic_core::types::{AddressPair, Time};

use super::net::OutgoingBytes;
use super::no_connection::NoConnection;
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
    /// When the attempt ends at the latest, the second one included.
    until: Time,
    /// What became of the first attempt, if this is the second.
    first: Option<String>,
}

#[derive(Debug)]
enum ActivePhase {
    /// TCP is on its way.
    AwaitTcp,
    /// Our request is on its way or with the peer.
    AwaitReply(OutgoingBytes),
}

/// What driving an attempt came to.
pub(super) enum Step {
    /// Nothing for now; the flag says that the phase has just changed.
    Wait {
        entered_reply: bool,
    },
    Accepted(Box<Negotiated>),
    Rejected(Vec<u8>),
    /// Try again as revision 1, since the first attempt came to this.
    Retry(String),
    Failed(NoConnection),
    /// As `Failed`, but the peer is to be told so first.
    Part(Vec<u8>, NoConnection),
}

impl Active {
    /// An attempt over a connection that exists.
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

    /// Whether the peer cannot know of it.
    pub(super) fn is_unheard(&self) -> bool {
        matches!(self.phase, ActivePhase::AwaitTcp) && self.first.is_none()
    }

    /// The connection is ours to end from now on.
    pub(super) fn engage(&mut self) {
        self.stream.engage();
    }

    /// A peer that is gone is to be noticed.
    pub(super) fn watch(&mut self, tcp: &Tcp) -> io::Result<()> {
        self.stream.watch(tcp)
    }

    /// What is missing, in words.
    pub(super) fn awaited(&self, options: &CmOptions) -> NoConnection {
        NoConnection::timed_out(match self.phase {
            ActivePhase::AwaitTcp => format!(
                "no TCP connection before the deadline (mpa.connect_deadline = {})",
                Span(options.connect_deadline)
            ),
            ActivePhase::AwaitReply(_) => format!(
                "TCP was accepted, but no MPA reply came before the deadline (mpa.reply_deadline = \
                 {}): does an iWARP device listen there?",
                Span(options.reply_deadline)
            ),
        })
    }

    /// Why both attempts failed, the first one first: that is what the peer made of what was meant.
    fn with_first(&mut self, mut why: NoConnection) -> NoConnection {
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
                Err(e) => return Step::Failed(NoConnection::system("connect", &e)),
            }
            self.phase =
                ActivePhase::AwaitReply(OutgoingBytes::new(self.initiator.request().to_vec()));
            entered_reply = true;
        }
        if let ActivePhase::AwaitReply(request) = &mut self.phase
            && let Err(e) = request.send(&self.stream)
        {
            return Step::Failed(NoConnection::system("sending the MPA request", &e));
        }
        loop {
            // What follows a rejection belongs to whoever passed the socket (RFC 5044 section
            // 7.1.2).
            let most = match self.stream.is_passed() {
                true => self.initiator.missing().min(scratch.len()),
                false => scratch.len(),
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
                        let why = NoConnection::protocol(with_code(&e, e.code()));
                        return match e.last_frame() {
                            [] => Step::Failed(why),
                            words => Step::Part(words.to_vec(), why),
                        };
                    }
                },
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    return Step::Wait { entered_reply };
                }
                // A peer that closes before it has read all of our request resets.
                Err(e) => return self.closed(Some(e)),
            }
        }
    }

    /// Begins again as revision 1.
    fn start_over(&mut self, options: &CmOptions) -> io::Result<()> {
        self.options.revision = 1;
        // Revision 1 has room for more private data, so this does not fail.
        self.initiator =
            Initiator::new(&self.options, &self.params.private_data).map_err(io::Error::other)?;
        let (local, peer) = (self.params.local, self.params.peer);
        let next = net::outgoing(local, peer, options.buffers)?;
        let next = Socket::own(TcpStream::from(OwnedFd::from(next)));
        // Two ports have one connection, and those of an id stay: the first must be gone from the
        // kernel before the second begins.
        std::mem::replace(&mut self.stream, next).reset();
        net::begin(&self.stream, peer)?;
        self.stream.watch(&options.tcp)?;
        self.phase = ActivePhase::AwaitTcp;
        Ok(())
    }

    fn closed(&mut self, error: Option<io::Error>) -> Step {
        match (self.initiator.handle_eof(), error) {
            // There is no other connection to try it on.
            (EofVerdict::RetryRevision1, _) if self.stream.is_passed() => Step::Failed(
                NoConnection::reset("the peer closed the connection without an MPA reply"),
            ),
            (EofVerdict::RetryRevision1, error) => {
                let how = error.map(|e| format!(" ({e})")).unwrap_or_default();
                Step::Retry(format!(
                    "TCP was accepted, and closed without an MPA reply{how}: does an iWARP device \
                     listen there?"
                ))
            }
            (EofVerdict::Fail(e), None) => {
                Step::Failed(NoConnection::reset(with_code(&e, e.code())))
            }
            (EofVerdict::Fail(_), Some(e)) => {
                Step::Failed(NoConnection::system("before the MPA reply", &e))
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

    /// Starts a TCP connection to the peer. The outer error is about our end, the inner one says
    /// that the peer cannot be reached.
    pub(super) fn begin_connect(
        &self,
        params: ConnectParams,
        now: Time,
    ) -> Result<Result<Active, NoConnection>, Refusal> {
        let options = self.initiator_options(&params);
        let initiator = new_initiator(&options, &params.private_data)?;
        let what = || format!("connect {}", params.peer);
        let buffers = self.options.buffers;
        let mut stream = match net::start_connect(params.local, params.peer, buffers) {
            Ok(Ok(stream)) => Socket::own(stream),
            Ok(Err(e)) => return Ok(Err(NoConnection::system("connect", &e))),
            Err(e) => return Err(system::refusal(&what(), &e)),
        };
        stream.watch(&self.options.tcp).map_err(|e| system::refusal(&what(), &e))?;
        let until = now.after(self.options.connect_deadline + self.options.reply_deadline);
        let phase = ActivePhase::AwaitTcp;
        Ok(Ok(Active { params, options, initiator, stream, phase, until, first: None }))
    }

    /// The device's options with what this connection wants.
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
            Step::Part(words, why) => {
                if let Some(Slot::Active(mut active)) = self.remove(key) {
                    let (qp, why) = (active.params.qp, active.with_first(why));
                    self.events.push_back(CmEvent::Unreachable { qp, why });
                    let whose = (active.params.session, active.params.peer.ip());
                    self.close_after(active.stream, words, whose, now);
                }
            }
        }
    }

    pub(super) fn fail_active(&mut self, key: usize, why: NoConnection) {
        if let Some(Slot::Active(mut active)) = self.remove(key) {
            let (qp, why) = (active.params.qp, active.with_first(why));
            self.events.push_back(CmEvent::Unreachable { qp, why });
        }
    }

    fn finish_active(&mut self, key: usize, negotiated: Box<Negotiated>) {
        let Some(Slot::Active(active)) = self.remove(key) else { return };
        let Active { params, stream, .. } = *active;
        let local = match net::local_address(&stream) {
            Ok(local) => local,
            Err(e) => {
                let why = NoConnection::system("after the MPA reply", &e);
                self.events.push_back(CmEvent::Unreachable { qp: params.qp, why });
                return;
            }
        };
        self.deregister(&stream);
        // A socket that the program passed is connected to where it says.
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

    /// Starts over with revision 1; the slot, and with it the token, stays.
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
            // The peer has ended the first: that is the outcome.
            Err(e) => self.fail_active(key, NoConnection::reset(format!("connect: {e}"))),
        }
    }
}

/// The start-up machine of a connection, unless its private data cannot be carried.
pub(super) fn new_initiator(options: &Options, private_data: &[u8]) -> Result<Initiator, Refusal> {
    //= MPA-7.1-7
    Initiator::new(options, private_data).map_err(too_long)
}
