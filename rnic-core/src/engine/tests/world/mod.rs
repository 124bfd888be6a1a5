//! Engines and their environment: clients, workers, sockets, and a clock that the test advances.
//!
//! A client uses real shared memory: its rings, doorbells and completion queues are those of
//! `rnic_abi::shm`, in an arena of which both sides are in this process.

pub(super) mod network;
mod objects;
mod workers;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use network::Network;

use super::link::{End, Link};
use super::raw::Raw;
use super::requests::{Mr, Wr, completion, event};
use crate::device::copier::{Copier, CopyJob, Direction};
use crate::device::diagnoses::OwnerFilter;
use crate::device::window::WindowCount;
use crate::device::{
    ArmedFault, Cq, Memory, QpShared, Srq, StagAllocator, StagChange, StagEntry, StagKind, Window,
};
use crate::engine::{
    Broadcast, ConnectedEnd, DatagramConfig, EmulatedLink, Engine, EngineCommand, EngineOptions,
    MulpduPolicy, Notification, Output, PeerLimits, QpConfig, Receive, Receives, Transmit, Work,
};
use crate::stream::Negotiated;
use crate::stream::startup::{
    Initiator, InitiatorStep, Options, Responder, ResponderStep, RtrKinds,
};
use rnic_abi::abi::control::{self, Diagnosis, DisconnectMode, Event};
use rnic_abi::abi::queue::{Cqe, PAGE, QueueKind, QueueShape, Sge};
use rnic_abi::faults::link::LinkShape;
use rnic_abi::shm::doorbell::{DoorbellRinger, DoorbellScanner};
use rnic_abi::shm::io::Piece;
use rnic_abi::shm::queue::{
    CompletionConsumer, QueueMemory, ReceiveConsumer, ReceiveProducer, SendConsumer, SendProducer,
};
use rnic_abi::shm::{AddressSpace, Mapping};
use rnic_abi::types::{
    Access, AddressPair, CqId, MrId, MwId, PdId, QpId, QpState, Scope, SessionId, SrqId, Stag,
    Time, UserId, WindowKind,
};

/// The two ends of the connection in most tests.
pub(super) const A: usize = 0;
pub(super) const B: usize = 1;

/// Kind of memory of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryKind {
    Shared,
    Attached,
    /// Attached, and accessible only to a copier.
    ThroughCopier,
}

/// Connection of two QPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wiring {
    pub direct: bool,
    pub a: Options,
    pub b: Options,
    /// Both ends treat the peer as an RDMAC peer.
    pub rdmac: bool,
}

impl Wiring {
    pub fn direct() -> Self {
        Wiring { direct: true, ..Wiring::tcp() }
    }

    pub fn tcp() -> Self {
        let options = Options {
            revision: 2,
            crc: true,
            markers: false,
            rdmac: false,
            peer_to_peer: true,
            ird: 4,
            ord: 4,
            rtr: RtrKinds::WRITE,
        };
        Wiring { direct: false, a: options, b: options, rdmac: false }
    }

    /// Returns the direct path, and TCP with every framing.
    pub fn all() -> Vec<Wiring> {
        let mut all = vec![Wiring::direct()];
        for (crc, m_a, m_b) in [
            (true, false, false),
            (false, false, false),
            (true, true, false),
            (true, false, true),
            (false, true, true),
        ] {
            let mut w = Wiring::tcp();
            w.a.crc = crc;
            w.b.crc = crc;
            w.a.markers = m_a;
            w.b.markers = m_b;
            all.push(w);
        }
        all
    }

    pub fn both() -> [Wiring; 2] {
        [Wiring::direct(), Wiring::tcp()]
    }

    pub fn with(mut self, change: impl Fn(&mut Options)) -> Self {
        change(&mut self.a);
        change(&mut self.b);
        self
    }

    /// Returns the parameters that start-up negotiates.
    pub fn negotiate(&self) -> (Negotiated, Negotiated) {
        let mut initiator = Initiator::new(&self.a, b"from a").unwrap();
        let mut responder = Responder::new(&self.b);
        let step = responder.handle_input(initiator.request()).unwrap();
        assert!(matches!(step, ResponderStep::Request(_)));
        let (reply, passive) =
            responder.accept(None, None, self.b.ird, self.b.ord, b"from b").unwrap();
        let InitiatorStep::Accepted(mut active) = initiator.handle_input(&reply).unwrap() else {
            panic!("not accepted")
        };
        let mut passive = passive;
        if self.rdmac {
            for n in [&mut active, &mut passive] {
                n.version = 0;
                n.crc = true;
                n.tx_markers = true;
                n.rx_markers = true;
            }
        }
        (active, passive)
    }
}

/// A session and its memory.
pub(super) struct App {
    pub session: SessionId,
    pub pd: PdId,
    pub host: usize,
    pub arena: Arc<Mapping>,
    next_offset: usize,
    pub next_doorbell: u32,
    /// A ringer for each worker of the host, with the index of the worker's engine.
    ringers: Vec<(usize, DoorbellRinger)>,
    pub cqs: Vec<CqEnd>,
    pub srqs: Vec<SrqEnd>,
    pub events: Vec<Event>,
    /// CQs that sent an event to their channel, in order.
    pub notified: Vec<CqId>,
}

impl App {
    /// Returns the arena offset of the next queue.
    pub fn next_offset(&self) -> usize {
        self.next_offset
    }
}

/// Both ends of a completion queue.
pub(super) struct CqEnd {
    pub cq: Arc<Cq>,
    pub consumer: CompletionConsumer,
}

/// Both ends of a shared receive queue.
pub(super) struct SrqEnd {
    pub srq: Arc<Srq>,
    pub producer: ReceiveProducer,
}

/// A QP as its client sees it.
pub(super) struct QpEnd {
    pub app: usize,
    pub id: QpId,
    pub sq: SendProducer,
    /// `None` if the QP uses an SRQ.
    pub rq: Option<ReceiveProducer>,
    pub send_cq: usize,
    pub recv_cq: usize,
    pub shared: Arc<QpShared>,
    pub doorbell: u32,
    /// Engine to which the QP is bound.
    pub engine: usize,
    config: Option<Box<QpConfig>>,
}

/// Parameters of a QP.
#[derive(Clone, Copy, Debug)]
pub(super) struct QpShape {
    pub sq: u32,
    pub rq: u32,
    pub sges: u8,
    pub inline: u16,
    pub signal_all: bool,
    /// Shared receive queue of its app.
    pub srq: Option<usize>,
    pub rnr_timeout: Option<Duration>,
    /// Selects UC for a QP of the RoCE device.
    pub unreliable: bool,
}

impl Default for QpShape {
    fn default() -> Self {
        QpShape {
            sq: 32,
            rq: 32,
            sges: 4,
            inline: 64,
            signal_all: false,
            srq: None,
            rnr_timeout: None,
            unreliable: false,
        }
    }
}

/// The simulated machine.
pub(super) struct World {
    pub now: Time,
    pub engines: Vec<Engine>,
    /// Engines by host: the workers of one daemon.
    hosts: Vec<Vec<usize>>,
    pub apps: Vec<App>,
    pub qps: Vec<QpEnd>,
    pub links: Vec<Link>,
    /// UD packets between hosts.
    pub network: Network,
    /// Kind of memory of new regions.
    pub kind: MemoryKind,
    /// Pending copy jobs, each with its engine.
    pub copy_jobs: VecDeque<(usize, CopyJob)>,
    pub answer_copies: bool,
    copiers: HashMap<usize, Arc<Copier>>,
    /// Sessions whose address space has gone.
    pub detached: Vec<SessionId>,
    /// RC and UC QPs that have lost their streams.
    pub unlinked: Vec<QpId>,
    /// QPs whose program waited until they were in Error or gone.
    pub in_error: Vec<QpId>,
    /// QPs that have received their first message.
    pub established: Vec<QpId>,
    /// Fault rules whose effect is the resource manager's, and the QPs that they selected.
    pub struck: Vec<(u64, QpId)>,
    pub misbehaved: Vec<(SessionId, String)>,
    /// Peers that used wrong STags.
    pub guesses: Vec<std::net::IpAddr>,
    pub notes: Vec<(SessionId, &'static str)>,
    pub failed_cqs: Vec<CqId>,
    /// STag changes without a reply.
    pub changes: Vec<(usize, QpId, StagChange)>,
    pub answer_changes: bool,
    pub failed_srqs: Vec<SrqId>,
    pub warnings: Vec<String>,
    /// Sockets that must not be read, by link and end.
    paused: Vec<(usize, usize)>,
    pub emss: usize,
    /// Bytes that sockets took directly from shared memory.
    pub shared_bytes: usize,
    /// Bytes after the next MPA Reply.
    pub leftover: Vec<u8>,
    /// Scripted peers are RDMAC peers: version 0, with Markers and CRCs in both directions.
    pub rdmac: bool,
    stags: StagAllocator,
    next_id: u32,
}

impl World {
    /// Creates a host with each of these numbers of workers.
    pub fn new(workers: &[u32]) -> Self {
        let mut engines = Vec::new();
        let mut hosts = Vec::new();
        for n in workers {
            let mut of_host = Vec::new();
            for worker in 0..*n {
                of_host.push(engines.len());
                engines.push(Engine::new(options(worker)));
            }
            hosts.push(of_host);
        }
        World {
            now: Time(1_000_000_000),
            engines,
            hosts,
            apps: Vec::new(),
            qps: Vec::new(),
            links: Vec::new(),
            network: Network::default(),
            kind: MemoryKind::Shared,
            copy_jobs: VecDeque::new(),
            answer_copies: true,
            copiers: HashMap::new(),
            detached: Vec::new(),
            unlinked: Vec::new(),
            in_error: Vec::new(),
            established: Vec::new(),
            struck: Vec::new(),
            misbehaved: Vec::new(),
            guesses: Vec::new(),
            notes: Vec::new(),
            failed_cqs: Vec::new(),
            changes: Vec::new(),
            answer_changes: true,
            failed_srqs: Vec::new(),
            warnings: Vec::new(),
            paused: Vec::new(),
            emss: 1460,
            shared_bytes: 0,
            leftover: Vec::new(),
            rdmac: false,
            stags: StagAllocator::new([9; 32]),
            next_id: 100,
        }
    }

    /// Connects two apps with one QP each: on one host by the direct path, or on two by TCP.
    pub fn pair(wiring: Wiring) -> Self {
        Self::pair_with(wiring, QpShape::default(), 128)
    }

    pub fn pair_with(wiring: Wiring, shape: QpShape, cq_entries: u32) -> Self {
        let users = [UserId(1), UserId(2)];
        Self::pair_of(users, wiring, shape, cq_entries)
    }

    /// Connects a pair by the direct path for a single user, which gets turns of maximum length.
    pub fn pair_alone(shape: QpShape, cq_entries: u32) -> Self {
        let mut w = Self::pair_of([UserId(1); 2], Wiring::direct(), shape, cq_entries);
        assert_eq!(w.engines[0].users(), 1);
        assert_eq!(w.events(A), ["established 4/4"]);
        assert_eq!(w.events(B), ["established 4/4"]);
        w
    }

    fn pair_of(users: [UserId; 2], wiring: Wiring, shape: QpShape, cq_entries: u32) -> Self {
        let mut w = if wiring.direct { World::new(&[1]) } else { World::new(&[1, 1]) };
        let hosts = [0, w.hosts.len() - 1];
        for (host, user) in hosts.into_iter().zip(users) {
            let app = w.app_of(host, user);
            let cq = w.cq(app, cq_entries);
            w.qp(app, cq, cq, shape);
        }
        w.connect(A, B, wiring);
        w.settle();
        w
    }

    /// Connects a pair and reads its start-up events.
    pub fn connected(wiring: Wiring) -> Self {
        let mut w = World::pair(wiring);
        assert_eq!(w.events(A), ["established 4/4"]);
        assert_eq!(w.events(B), ["established 4/4"]);
        w
    }

    /// Connects an initiator to a scripted peer that has sent nothing yet.
    pub fn raw() -> (Self, Raw) {
        World::raw_of_version(1)
    }

    /// Like `raw`, with a peer that uses this version of DDP and RDMAP: 1, or 0 like RDMAC peers.
    pub fn raw_of_version(version: u8) -> (Self, Raw) {
        let options = Wiring::tcp().with(|o| o.peer_to_peer = false).a;
        let mut w = World::new(&[1]);
        w.rdmac = version == 0;
        let app = w.app(0);
        let cq = w.cq(app, 128);
        let qp = w.qp(app, cq, cq, QpShape::default());
        let raw = w.connect_raw(qp, true, options, options);
        assert_eq!((w.events(A), raw.version), (vec!["established 4/4".to_owned()], version));
        (w, raw)
    }

    /// Connects a QP in this role to a scripted peer. `ours` are the options of the QP's end.
    pub fn against_raw(initiator: bool, ours: Options, theirs: Options) -> (Self, Raw) {
        let mut w = World::new(&[1]);
        let app = w.app(0);
        let cq = w.cq(app, 128);
        let qp = w.qp(app, cq, cq, QpShape::default());
        let raw = w.connect_raw(qp, initiator, ours, theirs);
        (w, raw)
    }

    pub fn connect_raw(
        &mut self,
        qp: usize,
        initiator: bool,
        ours: Options,
        theirs: Options,
    ) -> Raw {
        let wiring = Wiring { rdmac: self.rdmac, ..Wiring::tcp() };
        let (n, peer) = if initiator {
            Wiring { a: ours, b: theirs, ..wiring }.negotiate()
        } else {
            let wiring = Wiring { a: theirs, b: ours, ..wiring };
            let (active, passive) = wiring.negotiate();
            (passive, active)
        };
        self.connect_negotiated(qp, n, &peer)
    }

    /// Attaches a QP to a scripted peer, after a start-up by the test.
    pub fn connect_negotiated(&mut self, qp: usize, mut n: Negotiated, peer: &Negotiated) -> Raw {
        let engine = self.hosts[self.apps[self.qps[qp].app].host][0];
        let id = self.qps[qp].id;
        let link = self.links.len();
        self.links.push(Link::new(End::Qp { engine, qp: id }, End::Raw));
        let config = self.take_config(qp, engine);
        n.leftover = std::mem::take(&mut self.leftover);
        let end = ConnectedEnd { config, negotiated: n, addresses: addresses(false) };
        self.engines[engine].attach_tcp(end, self.now);
        self.settle();
        Raw::new(link, peer)
    }

    // --- Connecting --------------------------------------------------------------------------

    /// Changes the configuration of a QP that is not connected yet.
    pub fn set_config(&mut self, qp: usize, change: impl FnOnce(&mut QpConfig)) {
        change(self.qps[qp].config.as_mut().unwrap());
    }

    fn take_config(&mut self, qp: usize, engine: usize) -> Box<QpConfig> {
        self.qps[qp].engine = engine;
        self.qps[qp].config.take().unwrap()
    }

    /// Connects two QPs, each on the first worker of its host.
    pub fn connect(&mut self, a: usize, b: usize, wiring: Wiring) {
        self.connect_on(a, 0, b, 0, wiring);
    }

    /// Connects two QPs on these workers.
    pub fn connect_on(&mut self, a: usize, a_on: usize, b: usize, b_on: usize, wiring: Wiring) {
        let (active, passive) = wiring.negotiate();
        let engine_of = |w: &World, qp: usize, on: usize| w.hosts[w.apps[w.qps[qp].app].host][on];
        let on_a = engine_of(self, a, a_on);
        let on_b = engine_of(self, b, b_on);
        let config = self.take_config(a, on_a);
        let active = ConnectedEnd { config, negotiated: active, addresses: addresses(false) };
        let config = self.take_config(b, on_b);
        let passive = ConnectedEnd { config, negotiated: passive, addresses: addresses(true) };
        let now = self.now;
        if wiring.direct {
            assert_eq!(on_a, on_b, "the direct path is within one worker");
            let command = EngineCommand::AttachDirect(Box::new([active, passive]));
            return self.engines[on_a].handle_command(command, now);
        }
        let end = |engine, qp: usize, w: &World| End::Qp { engine, qp: w.qps[qp].id };
        self.links.push(Link::new(end(on_a, a, self), end(on_b, b, self)));
        self.engines[on_b].attach_tcp(passive, now);
        self.engines[on_a].attach_tcp(active, now);
    }

    /// Attaches a QP that was moved to Error before it was connected.
    pub fn attach_in_error(&mut self, qp: usize) {
        let engine = self.hosts[self.apps[self.qps[qp].app].host][0];
        let config = self.take_config(qp, engine);
        self.engines[engine].handle_command(EngineCommand::AttachInError(config), self.now);
        self.settle();
    }

    /// Attaches an RC or UC QP in RTR.
    pub fn attach_roce(&mut self, qp: usize, wiring: control::Wiring) {
        let engine = self.hosts[self.apps[self.qps[qp].app].host][0];
        let mut config = self.take_config(qp, engine);
        config.wiring = Some(wiring);
        self.engines[engine].handle_command(EngineCommand::AttachRoce(config), self.now);
    }

    /// Attaches a UD QP in RTR.
    pub fn attach_datagrams(&mut self, qp: usize, datagrams: DatagramConfig) {
        let engine = self.hosts[self.apps[self.qps[qp].app].host][0];
        let mut config = self.take_config(qp, engine);
        config.datagrams = Some(datagrams);
        self.engines[engine].handle_command(EngineCommand::AttachRoce(config), self.now);
    }

    /// Sends a command to the engine of a QP.
    pub fn command(&mut self, qp: usize, command: impl FnOnce(QpId) -> EngineCommand) {
        let QpEnd { engine, id, .. } = self.qps[qp];
        self.engines[engine].handle_command(command(id), self.now);
    }

    /// Emulates a link with this shape for all that a QP sends.
    pub fn set_link(&mut self, qp: usize, shape: LinkShape) -> Arc<EmulatedLink> {
        shape.check().unwrap();
        let link = Arc::new(EmulatedLink::new(Arc::new(ArmedFault::of_test("do=link")), shape));
        self.command(qp, |id| EngineCommand::SetLink(id, Some(link.clone())));
        self.settle();
        link
    }

    /// Ends the emulation of a QP's link.
    pub fn unset_link(&mut self, qp: usize) {
        self.command(qp, |id| EngineCommand::SetLink(id, None));
        self.settle();
    }

    /// Sends a command to every engine of a QP's host.
    pub fn command_host(&mut self, qp: usize, command: impl Fn() -> EngineCommand) {
        for engine in &self.hosts[self.apps[self.qps[qp].app].host] {
            self.engines[*engine].handle_command(command(), self.now);
        }
    }

    /// Modifies an RC, UC or UD QP.
    pub fn change(&mut self, qp: usize, change: control::QpChange) {
        self.command(qp, |id| EngineCommand::Change(id, change));
    }

    /// Moves an RC or UC QP to RTS.
    pub fn move_to_rts(&mut self, qp: usize, sending: control::Sending) {
        self.change(qp, control::QpChange::ReadyToSend(sending));
    }

    /// Links two RC or UC QPs by the direct path or by a new connection.
    pub fn link(&mut self, ends: [usize; 2], wiring: Wiring, limits: PeerLimits) {
        let [a, b] = ends.map(|qp| (self.qps[qp].engine, self.qps[qp].id));
        let now = self.now;
        if wiring.direct {
            let command = EngineCommand::LinkDirect([(a.1, limits), (b.1, limits)]);
            self.engines[a.0].handle_command(command, now);
            return self.settle();
        }
        // Close the previous connections.
        self.links.clear();
        let end = |(engine, qp)| End::Qp { engine, qp };
        self.links.push(Link::new(end(a), end(b)));
        let (active, passive) = wiring.negotiate();
        self.engines[b.0].link_tcp(b.1, passive, limits, now);
        self.engines[a.0].link_tcp(a.1, active, limits, now);
        self.settle();
    }

    /// Takes the stream from an RC or UC QP.
    pub fn unlink(&mut self, qp: usize) {
        self.command(qp, |id| EngineCommand::Unlink(id, "of the test".to_owned()));
        self.settle();
    }

    /// Limits each call to a socket to one segment, so that messages are seen in flight.
    pub fn one_segment_at_a_time(&mut self) {
        for qp in self.engines.iter_mut().flat_map(|e| &mut e.qps).flatten() {
            if let Some(tcp) = qp.link.tcp_mut() {
                tcp.send_one_by_one();
            }
        }
    }

    pub fn disconnect(&mut self, qp: usize) {
        self.disconnect_by(qp, DisconnectMode::Orderly);
    }

    /// Reports the peer's FIN, as the kernel does.
    pub fn peer_closing(&mut self, qp: usize) {
        let engine = self.qps[qp].engine;
        let id = self.qps[qp].id;
        self.engines[engine].handle_peer_closing(id, self.now);
        self.settle();
    }

    pub fn disconnect_within(&mut self, qp: usize, time: Duration) {
        let mode = DisconnectMode::OrderlyWithin { ms: time.as_millis() as u32 };
        self.disconnect_by(qp, mode);
    }

    pub fn abort(&mut self, qp: usize) {
        self.disconnect_by(qp, DisconnectMode::Abort);
    }

    fn disconnect_by(&mut self, qp: usize, mode: DisconnectMode) {
        self.command(qp, |id| EngineCommand::Disconnect(id, mode));
        self.settle();
    }

    pub fn admin_disconnect(&mut self, qp: usize) {
        self.command(qp, EngineCommand::AdminDisconnect);
        self.settle();
    }

    pub fn destroy(&mut self, qp: usize) {
        let (engine, id) = self.take_turn_now(qp);
        self.engines[engine].destroy(id, self.now);
        self.settle();
    }

    /// Moves a RoCE QP to Error for its program.
    pub fn move_to_error(&mut self, qp: usize, expects_stream: bool) {
        let (engine, id) = self.take_turn_now(qp);
        self.engines[engine].move_to_error(id, expects_stream, self.now);
        self.settle();
    }

    /// Takes a turn of the QP. Returns its engine and ID.
    fn take_turn_now(&mut self, qp: usize) -> (usize, QpId) {
        let engine = self.qps[qp].engine;
        let id = self.qps[qp].id;
        if let Some(Work::Transmit(id)) = self.engines[engine].take_turn_now(id, self.now) {
            self.transmit(engine, id);
        }
        (engine, id)
    }

    pub fn state(&self, qp: usize) -> QpState {
        self.qps[qp].shared.state()
    }

    // --- Clients -----------------------------------------------------------------------------

    /// Posts requests with one doorbell, and settles.
    pub fn post(&mut self, qp: usize, requests: &[Wr]) {
        self.push(qp, requests);
        self.settle();
    }

    /// Posts requests with one doorbell.
    pub fn push(&mut self, qp: usize, requests: &[Wr]) {
        let q = &mut self.qps[qp];
        for wr in requests {
            q.sq.push(&wr.header, &wr.sges, &wr.inline).unwrap();
        }
        q.sq.publish();
        if let Some(worker) = q.sq.queue().worker() {
            let app = q.app;
            let index = q.doorbell;
            self.ring(app, worker, index);
        }
    }

    pub fn ring(&mut self, app: usize, worker: u32, index: u32) {
        let (engine, ringer) = &self.apps[app].ringers[worker as usize];
        if ringer.ring(index) {
            let session = self.apps[app].session;
            self.engines[*engine].handle_doorbell(session, self.now);
        }
    }

    /// Posts a receive, and rings if a message waits for it.
    pub fn recv(&mut self, qp: usize, wr_id: u64, sges: &[Sge]) {
        let q = &mut self.qps[qp];
        let rq = q.rq.as_mut().unwrap();
        rq.push(wr_id, sges).unwrap();
        rq.publish();
        let app = q.app;
        let index = q.doorbell;
        let waiting = rq.waits();
        for worker in (0..64).filter(|w| waiting >> w & 1 == 1) {
            self.ring(app, worker, index);
        }
    }

    /// Reads a completion queue and frees its slots.
    pub fn poll_cq(&mut self, app: usize, cq: usize, most: usize) -> Vec<String> {
        let end = &mut self.apps[app].cqs[cq];
        let mut found = Vec::new();
        let mut cqes = Vec::new();
        while found.len() < most
            && let Some(cqe) = end.consumer.poll()
        {
            found.push(completion(&cqe));
            cqes.push(cqe);
        }
        let waiting = end.consumer.release();
        let index = end.cq.doorbell();
        for cqe in &cqes {
            self.check_diagnosis(app, cqe);
        }
        for worker in (0..64).filter(|w| waiting >> w & 1 == 1) {
            self.ring(app, worker, index);
        }
        found
    }

    /// Checks that a failed completion has a diagnosis of its QP, and a successful one has none.
    fn check_diagnosis(&self, app: usize, cqe: &Cqe) {
        if cqe.status == 0 {
            assert_eq!(cqe.diagnosis_id, 0);
            return;
        }
        let qp = self.qps.iter().find(|qp| qp.id.0 == cqe.qp).unwrap();
        let log = &self.engines[qp.engine].state.options.diagnoses;
        let kept = log.find(cqe.diagnosis_id).unwrap_or_else(|| panic!("no record of {cqe:?}"));
        let record = &kept.record;
        assert_eq!((record.session, record.qp), (self.apps[app].session, Some(qp.id)));
        assert!(!record.rule.is_empty() && !record.text.is_empty());
    }

    /// Returns the diagnoses of a QP, oldest first.
    pub fn diagnoses(&self, qp: usize) -> Vec<Diagnosis> {
        let QpEnd { engine, id, .. } = self.qps[qp];
        let log = &self.engines[engine].state.options.diagnoses;
        let all = log.newest(OwnerFilter::All, u64::MAX, usize::MAX);
        all.iter()
            .rev()
            .filter(|kept| kept.record.qp == Some(id))
            .map(|kept| kept.record.clone())
            .collect()
    }

    /// Returns the only diagnosis of a QP.
    pub fn diagnosis(&self, qp: usize) -> Diagnosis {
        let mut all = self.diagnoses(qp);
        assert_eq!(all.len(), 1, "{all:#?}");
        all.remove(0)
    }

    /// Returns the completions of a QP's queues, those of the send queue's CQ first.
    pub fn completions(&mut self, qp: usize) -> Vec<String> {
        let QpEnd { app, send_cq, recv_cq, .. } = self.qps[qp];
        let mut found = self.poll_cq(app, send_cq, usize::MAX);
        if recv_cq != send_cq {
            found.extend(self.poll_cq(app, recv_cq, usize::MAX));
        }
        found
    }

    /// Returns the events of a QP's session since the last call, without the
    /// [errors of responders](Self::responder_errors).
    pub fn events(&mut self, qp: usize) -> Vec<String> {
        self.take_events(qp, |e| !is_responder_error(e))
    }

    /// Returns the asynchronous errors of responders in a QP's session since the last call.
    pub fn responder_errors(&mut self, qp: usize) -> Vec<String> {
        self.take_events(qp, is_responder_error)
    }

    fn take_events(&mut self, qp: usize, wanted: impl Fn(&Event) -> bool) -> Vec<String> {
        let events = &mut self.apps[self.qps[qp].app].events;
        events.extract_if(.., |e| wanted(e)).map(|e| event(&e)).collect()
    }
}

fn is_responder_error(event: &Event) -> bool {
    matches!(event, Event::AccessError { .. } | Event::RequestError { .. })
}

/// Returns this process's memory, as a client would attach it.
pub(super) fn own_address_space() -> Arc<AddressSpace> {
    let file = std::fs::File::options().read(true).write(true).open("/proc/self/mem").unwrap();
    AddressSpace::adopt(file.into(), std::process::id() as i32).unwrap()
}

pub(super) fn options(worker: u32) -> EngineOptions {
    EngineOptions {
        worker,
        terminate_deadline: Duration::from_secs(5),
        close_deadline: Duration::from_secs(10),
        first_fpdu_deadline: Duration::from_secs(3),
        partial: Default::default(),
        unsent: Default::default(),
        error_deadline: Duration::from_millis(500),
        copy_deadline: Duration::from_secs(5),
        mulpdu: MulpduPolicy::Emss,
        diagnoses: Arc::default(),
    }
}

fn addresses(passive: bool) -> AddressPair {
    let a = "192.0.2.1:1000".parse().unwrap();
    let b = "192.0.2.2:4791".parse().unwrap();
    if passive { AddressPair { local: b, peer: a } } else { AddressPair { local: a, peer: b } }
}
