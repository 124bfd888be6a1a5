//! Workers with real sockets, queues and clients, all in this process.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use mio::{Events, Poll, Token};
use rnic_abi::abi::control::{DisconnectMode, DisconnectReason, Event, MAX_MESSAGE};
use rnic_abi::abi::queue::{
    ARM_NEXT, CHANNEL_RECORD_LEN, ChannelRecord, Cqe, PAGE, QueueKind, QueueShape, SendFlags,
    SendHeader, SendOpcode, Sge, doorbell_offset,
};
use rnic_abi::faults::FaultName;
use rnic_abi::faults::order::{MAX_HOLD, Order, OrderModel, OrderRule};
use rnic_abi::shm::Mapping;
use rnic_abi::shm::doorbell::{DoorbellRinger, DoorbellScanner};
use rnic_abi::shm::queue::{
    CompletionConsumer, CopyConsumer, CopyProducer, QueueMemory, ReceiveConsumer, ReceiveProducer,
    SendConsumer, SendProducer,
};
use rnic_abi::shm::wait::WaitPolicy;
use rnic_abi::types::{
    Access, AddressPair, CompletionStatus, CqId, MrId, PdId, QpState, Scope, Stag, TerminateOrigin,
    UserId,
};
use rnic_core::device::{Cq, Memory, QpShared, StagEntry};
use rnic_core::engine::{ConnectedEnd, EngineOptions, MulpduPolicy, QpConfig, Receives};
use rnic_core::stream::startup::{Negotiated, Role, Rtr, RtrKinds};

use super::*;
use crate::events::{ChannelSender, EventSender};
use crate::socket::Socket;

mod busy_cpu;

const PD: PdId = PdId(1);
const ARENA: usize = 1 << 20;
const BUFFER: usize = 4 << 20;
/// Timeout in real time.
const WATCHDOG: Duration = Duration::from_secs(180);

/// Yields until `done` returns true.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < WATCHDOG, "never: {what}");
        std::thread::yield_now();
    }
}

/// Workers and the control thread's handle to them.
struct Rig {
    workers: Workers,
    control: Poll,
}

impl Rig {
    fn start(count: u32) -> Self {
        let options = WorkerOptions {
            seccomp: crate::config::Seccomp::Enforce,
            engine: EngineOptions {
                worker: 0,
                terminate_deadline: Duration::from_secs(5),
                error_deadline: Duration::from_millis(500),
                copy_deadline: Duration::from_secs(5),
                close_deadline: Duration::from_secs(5),
                first_fpdu_deadline: Duration::from_secs(5),
                partial: Default::default(),
                unsent: Default::default(),
                mulpdu: MulpduPolicy::Emss,
                diagnoses: Default::default(),
            },
            wait: WaitPolicy::default(),
        };
        let control = Poll::new().expect("epoll");
        let waker = Arc::new(Waker::new(control.registry(), Token(0)).expect("eventfd"));
        let workers = Workers::start(count, &options, waker).expect("threads");
        Rig { workers, control }
    }

    fn install(&mut self, region: StagEntry) -> Ticket {
        self.workers.all_ticketed(|| EngineCommand::InstallStag(region.clone()))
    }

    fn revoke(&mut self, stag: Stag) -> Ticket {
        self.workers.all_ticketed(|| EngineCommand::RevokeStag(stag))
    }

    /// Connects two QPs by the direct path.
    fn connect(&mut self, worker: u32, a: Box<QpConfig>, b: Box<QpConfig>) {
        let ends = Box::new([end(a, INITIATOR), end(b, RESPONDER)]);
        self.workers.one(worker, EngineCommand::AttachDirect(ends));
    }

    /// Waits for a ticket like the control thread: polls, then sleeps until it is woken.
    fn done(&mut self, ticket: Ticket) {
        while self.workers.poll_done() != Some(ticket) {
            self.woken();
        }
    }

    fn woken(&mut self) {
        let mut events = Events::with_capacity(4);
        self.control.poll(&mut events, Some(WATCHDOG)).expect("epoll");
        assert!(!events.is_empty(), "the control thread was not woken");
    }

    fn is_parked(&self, worker: usize) -> bool {
        self.workers.workers[worker].shared.parker.is_parked()
    }

    fn wait_parked(&self) {
        for worker in 0..self.workers.workers.len() {
            until("the worker sleeps", || self.is_parked(worker));
        }
    }

    fn carried_out(&self, worker: usize) -> u64 {
        self.workers.workers[worker].shared.carried_out.load(Ordering::Acquire)
    }

    fn waiting_orders(&self, worker: usize) -> usize {
        self.workers.workers[worker].orders.len()
    }
}

/// A client: its arena, its memory, and its ends of the descriptors.
struct Client {
    session: SessionId,
    arena: Arc<Mapping>,
    used: usize,
    ringers: Vec<DoorbellRinger>,
    bells: Vec<OwnedFd>,
    events: OwnedFd,
    memory: Arc<Mapping>,
    stag: Stag,
    indices: u32,
}

impl Client {
    fn attach(session: u32, rig: &mut Rig) -> Self {
        Client::of_user(session, UserId(session), rig)
    }

    fn of_user(session: u32, user: UserId, rig: &mut Rig) -> Self {
        let workers = rig.workers.count();
        let (arena, _fd) = Mapping::create_arena("rnic-test", ARENA).expect("memfd");
        let (memory, _fd) = Mapping::create_shared_buffer(BUFFER).expect("memfd");
        let scanner = |w| DoorbellScanner::new(Arc::clone(&arena), w).expect("a page of the arena");
        let ringer = |w| DoorbellRinger::new(Arc::clone(&arena), w).expect("a page of the arena");
        let bell = |_| {
            let flags = rustix::event::EventfdFlags::CLOEXEC;
            rustix::event::eventfd(0, flags).expect("eventfd")
        };
        let bells: Vec<OwnedFd> = (0..workers).map(bell).collect();
        let (sender, channel) = EventSender::pair(16).expect("socket pair");
        let sender = Arc::new(sender);
        let session = SessionId(session);
        for (worker, bell) in (0..).zip(&bells) {
            let eventfd = bell.try_clone().expect("dup");
            let scanner = scanner(worker);
            let events = sender.clone();
            let attach = Command::Attach { session, user, scanner, eventfd, events };
            rig.workers.one(worker, attach);
        }
        let mut client = Client {
            session,
            used: doorbell_offset(workers),
            ringers: (0..workers).map(ringer).collect(),
            bells,
            events: channel,
            memory,
            stag: Stag(session.0 << 8),
            arena,
            indices: 0,
        };
        client.used = client.used.next_multiple_of(PAGE);
        let ticket = rig.install(client.region());
        rig.done(ticket);
        client
    }

    /// Returns a region of all its memory that every QP of the PD may use.
    fn region(&self) -> StagEntry {
        StagEntry {
            stag: self.stag,
            kind: rnic_core::device::StagKind::region(),
            mr: MrId(1),
            session: self.session,
            pd: PD,
            scope: Scope::Pd,
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
            iova: 0,
            length: BUFFER as u64,
            memory: Memory::Shared { mapping: Arc::clone(&self.memory), offset: 0 },
        }
    }

    fn queue(&mut self, kind: QueueKind, shape: QueueShape, doorbell: u32) -> [QueueMemory; 2] {
        let at = self.used;
        self.used = (at + shape.bytes()).next_multiple_of(PAGE);
        let arena = || Arc::clone(&self.arena);
        let ours =
            QueueMemory::format(arena(), at, kind, shape, 0, doorbell).expect("in the arena");
        [ours, QueueMemory::open(arena(), at, kind, shape).expect("just formatted")]
    }

    fn make_qp(&mut self, id: u32) -> (Qp, Box<QpConfig>) {
        let cq_index = self.indices;
        let index = self.indices + 1;
        self.indices += 2;
        let [cq, cq_client] =
            self.queue(QueueKind::Completion, QueueShape::completion(64), cq_index);
        let [sq, sq_client] = self.queue(QueueKind::Send, QueueShape::send(16, 2, 64), index);
        let [rq, rq_client] = self.queue(QueueKind::Receive, QueueShape::receive(16, 2), index);
        let cq = Arc::new(Cq::new(CqId(id + 1000), self.session, 0, cq));
        let shared = Arc::new(QpShared::default());
        let config = QpConfig {
            qp: QpId(id),
            session: self.session,
            pd: PD,
            doorbell: index,
            sq: SendConsumer::new(sq),
            rq: Receives::Own(ReceiveConsumer::new(rq)),
            send_cq: Arc::clone(&cq),
            recv_cq: cq,
            signal_all: true,
            rnr_timeout: None,
            wiring: None,
            unreliable: false,
            datagrams: None,
            shared: Arc::clone(&shared),
            faults: Vec::new(),
            stopped: None,
        };
        let qp = Qp {
            id: QpId(id),
            index,
            sq: SendProducer::new(sq_client),
            rq: ReceiveProducer::new(rq_client),
            cq: CompletionConsumer::new(cq_client),
            shared,
        };
        (qp, Box::new(config))
    }

    fn sge(&self, at: u64, length: u32) -> Sge {
        Sge { addr: at, length, lkey: self.stag.0 }
    }

    fn post(&self, qp: &mut Qp, header: &SendHeader, sges: &[Sge]) {
        qp.sq.push(header, sges, &[]).expect("room");
        qp.sq.publish();
        let Some(worker) = qp.sq.queue().worker() else { return };
        self.ring(worker, qp.index);
    }

    fn ring(&self, worker: u32, index: u32) {
        if self.ringers[worker as usize].ring(index) {
            rustix::io::write(&self.bells[worker as usize], &1u64.to_ne_bytes()).expect("bell");
        }
    }

    fn post_receive(&self, qp: &mut Qp, wr_id: u64, at: u64, length: u32) {
        qp.rq.push(wr_id, &[self.sge(at, length)]).expect("room");
        qp.rq.publish();
    }

    /// Waits for the next event.
    fn event(&self) -> Event {
        let mut found = None;
        until("an event", || {
            let mut buffer = [0; MAX_MESSAGE];
            let flags = rustix::net::RecvFlags::DONTWAIT;
            if let Ok((n, _)) = rustix::net::recv(&self.events, &mut buffer, flags) {
                found = Some(postcard::from_bytes(&buffer[..n]).expect("an event"));
            }
            found.is_some()
        });
        found.expect("just found")
    }
}

struct Qp {
    id: QpId,
    index: u32,
    sq: SendProducer,
    rq: ReceiveProducer,
    cq: CompletionConsumer,
    shared: Arc<QpShared>,
}

impl Qp {
    fn completion(&mut self) -> Cqe {
        let mut found = None;
        until("a completion", || {
            found = self.cq.poll();
            found.is_some()
        });
        assert_eq!(self.cq.release(), 0, "64 entries are enough for 16 requests each way");
        found.expect("just found")
    }

    fn completes(&mut self, wr_id: u64) {
        let cqe = self.completion();
        assert_eq!((cqe.wr_id, cqe.status), (wr_id, CompletionStatus::Success as u8));
    }
}

fn header(opcode: SendOpcode, wr_id: u64) -> SendHeader {
    SendHeader {
        opcode: opcode as u8,
        num_sge: 0,
        flags: SendFlags::SIGNALED.bits(),
        inline_len: 0,
        wr_id,
        remote_addr: 0,
        rkey: 0,
        inv_rkey: 0,
        params: [0; 4],
        reserved_is_zero: true,
    }
}

fn write_to(client: &Client, wr_id: u64, at: u64) -> SendHeader {
    SendHeader { remote_addr: at, rkey: client.stag.0, ..header(SendOpcode::Write, wr_id) }
}

/// Result of a start-up negotiation in peer-to-peer mode.
fn negotiated(role: Role) -> Negotiated {
    Negotiated {
        role,
        revision: 2,
        version: 1,
        crc: true,
        tx_markers: false,
        rx_markers: false,
        ird: 8,
        ord: 8,
        peer_ird: Some(8),
        peer_ord: Some(8),
        peer_to_peer: true,
        private_data: b"hello".to_vec(),
        leftover: Vec::new(),
    }
}

fn end(config: Box<QpConfig>, role: Role) -> ConnectedEnd {
    let address = |port| std::net::SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let addresses = AddressPair { local: address(1), peer: address(2) };
    ConnectedEnd { config, negotiated: negotiated(role), addresses }
}

const INITIATOR: Role = Role::Initiator { rtr: Some(Rtr::Write) };
const RESPONDER: Role = Role::Responder { await_rtr: Some(RtrKinds::WRITE) };

/// Connects two QPs by TCP, on the first and the last worker.
fn connect_tcp(rig: &mut Rig, a: Box<QpConfig>, b: Box<QpConfig>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
    let active = TcpStream::connect(listener.local_addr().expect("bound")).expect("connect");
    let (passive, _) = listener.accept().expect("accept");
    let last = rig.workers.count() - 1;
    for (worker, end, stream) in
        [(0, end(a, INITIATOR), active), (last, end(b, RESPONDER), passive)]
    {
        rig.workers.one(worker, Command::AttachTcp { end, stream: Socket::own(stream) });
    }
}

fn expect_established(client: &Client, qp: QpId) {
    match client.event() {
        Event::Established { qp: q, .. } => assert_eq!(q, qp),
        other => panic!("not established but {other:?}"),
    }
}

#[test]
fn workers_start_and_stop() {
    for count in [1, 3] {
        let rig = Rig::start(count);
        assert_eq!(rig.workers.count(), count);
        rig.workers.stop();
    }
}

#[test]
fn sleeping_workers_are_answered_for() {
    let mut rig = Rig::start(3);
    let client = Client::attach(1, &mut rig);
    // The wake-up of an earlier command may still be on its way to a parked worker, so not every
    // round finds all workers asleep. One round that does is enough.
    until("workers are asleep and the region's ticket is done", || {
        rig.wait_parked();
        let ticket = rig.install(client.region());
        let at_once = rig.workers.poll_done() == Some(ticket);
        let asleep = (0..3).all(|worker| rig.carried_out(worker) < ticket.0);
        if !at_once {
            rig.done(ticket);
        }
        at_once && asleep
    });
    let ticket = rig.revoke(client.stag);
    rig.done(ticket);
    rig.workers.stop();
}

#[test]
fn sleeping_workers_release_revoked_memory() {
    let mut rig = Rig::start(2);
    let client = Client::attach(1, &mut rig);
    rig.wait_parked();
    let ticket = rig.revoke(client.stag);
    rig.done(ticket);
    until("only the client holds the memory", || Arc::strong_count(&client.memory) == 1);
    rig.workers.stop();
}

#[test]
fn revocation_waits_for_held_data() {
    let mut rig = Rig::start(2);
    let mut client = Client::attach(1, &mut rig);
    let (mut a, a_config) = client.make_qp(1);
    let (b, b_config) = client.make_qp(2);
    rig.connect(0, a_config, b_config);
    let order = OrderRule {
        fault: FaultName::parse("test").expect("valid"),
        order: Order::Worst { hold: MAX_HOLD },
        model: OrderModel::Iwarp,
        inversions: None,
    };
    rig.workers.one(0, EngineCommand::SetOrder(b.id, Some(Box::new(order))));
    // The worker is not asleep in every round.
    for round in 1..=100u64 {
        client.memory.write(0, &round.to_ne_bytes()).expect("in range");
        client.post(&mut a, &write_to(&client, round, 4096), &[client.sge(0, 8)]);
        a.completes(round);
        rig.wait_parked();
        let ticket = rig.revoke(client.stag);
        rig.done(ticket);
        let mut bytes = [0; 8];
        client.memory.read(4096, &mut bytes).expect("in range");
        assert_eq!(u64::from_ne_bytes(bytes), round);
        let ticket = rig.install(client.region());
        rig.done(ticket);
    }
    rig.workers.stop();
}

#[test]
fn commands_for_a_sleeper_are_bounded() {
    let mut rig = Rig::start(1);
    let client = Client::attach(1, &mut rig);
    for n in 0..10 * SLEEPER_BACKLOG as u32 {
        rig.wait_parked();
        let stag = Stag(0x1000_0000 + n);
        let ticket = rig.install(StagEntry { stag, ..client.region() });
        rig.done(ticket);
        until("few enough commands wait", || rig.waiting_orders(0) <= SLEEPER_BACKLOG);
    }
    rig.workers.stop();
}

#[test]
fn busy_workers_answer_while_traffic_runs() {
    let mut rig = Rig::start(3);
    let mut client = Client::attach(1, &mut rig);
    let (mut a, a_config) = client.make_qp(1);
    let (_b, b_config) = client.make_qp(2);
    rig.connect(1, a_config, b_config);
    expect_established(&client, QpId(1));
    let mut posted = 0;
    for n in 0..200 {
        // The worker takes requests in the meantime, but at most 16 are posted in a round.
        for _ in 0..a.sq.free() {
            let write = write_to(&client, posted, 2 << 20);
            client.post(&mut a, &write, &[client.sge(0, 1 << 20)]);
            posted += 1;
        }
        let stag = Stag(0x2000_0000 + n);
        let ticket = rig.install(StagEntry { stag, ..client.region() });
        rig.done(ticket);
        let ticket = rig.revoke(stag);
        rig.done(ticket);
        while let Some(cqe) = a.cq.poll() {
            assert_eq!(cqe.status, CompletionStatus::Success as u8);
        }
        assert_eq!(a.cq.release(), 0, "64 entries are enough for two rounds");
    }
    rig.workers.stop();
}

#[test]
fn direct_connection_carries_messages() {
    let mut rig = Rig::start(1);
    let mut client = Client::attach(1, &mut rig);
    let (mut a, a_config) = client.make_qp(1);
    let (mut b, b_config) = client.make_qp(2);
    let (channel, channel_client) = ChannelSender::pair().expect("socket pair");
    let b_cq = b_config.recv_cq.id();
    let session = client.session;
    let channel = Arc::new(channel);
    rig.workers.all(|| Command::RegisterCq { cq: b_cq, session, channel: channel.clone() });
    // This request is posted before a worker owns the QP. It rings no doorbell, and is found when
    // the worker binds the QP.
    client.post_receive(&mut b, 7, 4096, 100);
    assert_eq!(b.sq.queue().worker(), None);
    b.cq.arm(ARM_NEXT);
    rig.connect(0, a_config, b_config);
    expect_established(&client, a.id);
    expect_established(&client, b.id);
    client.memory.write(0, b"message").expect("in range");
    client.post(&mut a, &header(SendOpcode::Send, 1), &[client.sge(0, 7)]);
    a.completes(1);
    let received = b.completion();
    assert_eq!((received.wr_id, received.byte_len), (7, 7));
    let mut bytes = [0; 7];
    client.memory.read(4096, &mut bytes).expect("in range");
    assert_eq!(&bytes, b"message");
    let mut record = [0; CHANNEL_RECORD_LEN];
    let (n, _) = rustix::net::recv(&channel_client, &mut record, rustix::net::RecvFlags::empty())
        .expect("a record");
    let fired = ChannelRecord { cq: b_cq.0, sequence: 1 };
    assert_eq!(ChannelRecord::from_bytes(&record[..n]), Some(fired));
    rig.workers.stop();
}

#[test]
fn tcp_transfer_exceeds_the_socket_buffer() {
    let mut rig = Rig::start(2);
    let mut one = Client::attach(1, &mut rig);
    let mut two = Client::attach(2, &mut rig);
    let (mut a, a_config) = one.make_qp(1);
    let (mut b, b_config) = two.make_qp(2);
    connect_tcp(&mut rig, a_config, b_config);
    expect_established(&one, a.id);
    expect_established(&two, b.id);
    let pattern: Vec<u8> = (0..BUFFER).map(|n| (n / 7) as u8).collect();
    one.memory.write(0, &pattern).expect("in range");
    for round in 0..8 {
        one.post(&mut a, &write_to(&two, round, 0), &[one.sge(0, BUFFER as u32)]);
    }
    for round in 0..8 {
        a.completes(round);
    }
    // Once both workers sleep, doorbells wake them.
    rig.wait_parked();
    two.post_receive(&mut b, 5, 0, 64);
    one.post(&mut a, &header(SendOpcode::Send, 9), &[one.sge(0, 16)]);
    b.completes(5);
    a.completes(9);
    let mut arrived = vec![0; BUFFER];
    two.memory.read(0, &mut arrived).expect("in range");
    assert!(arrived == pattern);
    // The other direction, by Read.
    let read = SendHeader { rkey: one.stag.0, ..header(SendOpcode::Read, 6) };
    two.post(&mut b, &read, &[two.sge(1 << 20, 1 << 20)]);
    b.completes(6);
    two.memory.read(1 << 20, &mut arrived[..1 << 20]).expect("in range");
    assert!(arrived[..1 << 20] == pattern[..1 << 20]);
    rig.workers.stop();
}

#[test]
fn disconnecting_is_orderly_on_both_sides() {
    let mut rig = Rig::start(2);
    let mut one = Client::attach(1, &mut rig);
    let mut two = Client::attach(2, &mut rig);
    let (a, a_config) = one.make_qp(1);
    let (b, b_config) = two.make_qp(2);
    connect_tcp(&mut rig, a_config, b_config);
    expect_established(&one, a.id);
    expect_established(&two, b.id);
    rig.workers.one(0, EngineCommand::Disconnect(a.id, DisconnectMode::Orderly));
    assert!(matches!(two.event(), Event::PeerClosed { qp, .. } if qp == b.id));
    rig.workers.one(1, EngineCommand::Disconnect(b.id, DisconnectMode::Orderly));
    for client in [&one, &two] {
        match client.event() {
            Event::Disconnected { reason, .. } => assert_eq!(reason, DisconnectReason::Orderly),
            other => panic!("not disconnected but {other:?}"),
        }
    }
    for (worker, qp) in [(0, a.id), (1, b.id)] {
        let ticket = rig.workers.one_ticketed(worker, Command::Destroy(qp));
        rig.done(ticket);
    }
    assert!(rig.workers.workers.iter().all(|w| w.shared.load.load(Ordering::Relaxed) == 0));
    rig.workers.stop();
}

#[test]
fn write_with_unknown_stag_terminates_both_ends() {
    let mut rig = Rig::start(2);
    let mut one = Client::attach(1, &mut rig);
    let mut two = Client::attach(2, &mut rig);
    let (mut a, a_config) = one.make_qp(1);
    let (b, b_config) = two.make_qp(2);
    connect_tcp(&mut rig, a_config, b_config);
    expect_established(&one, a.id);
    expect_established(&two, b.id);
    let stray = SendHeader { rkey: 0x7777_7700, ..header(SendOpcode::Write, 1) };
    one.post(&mut a, &stray, &[one.sge(0, 8)]);
    let refused = two.event();
    assert!(matches!(refused, Event::AccessError { qp, .. } if qp == b.id), "{refused:?}");
    for (client, of) in [(&one, TerminateOrigin::Peer), (&two, TerminateOrigin::Local)] {
        match client.event() {
            Event::Disconnected { reason: DisconnectReason::Terminate { origin, .. }, .. } => {
                assert_eq!(origin, of);
            }
            other => panic!("no Terminate but {other:?}"),
        }
    }
    until("both are dead", || {
        [&a, &b].iter().all(|q| matches!(q.shared.state(), QpState::Error | QpState::Terminate))
    });
    rig.workers.stop();
}

#[test]
fn detached_session_is_released() {
    let mut rig = Rig::start(3);
    let mut one = Client::attach(1, &mut rig);
    let mut two = Client::attach(2, &mut rig);
    let (a, a_config) = one.make_qp(1);
    let (b, b_config) = two.make_qp(2);
    connect_tcp(&mut rig, a_config, b_config);
    expect_established(&one, a.id);
    expect_established(&two, b.id);
    assert_eq!(rig.workers.least_loaded(), 1);
    drop(a);
    let ticket = rig.workers.detach_session(one.session);
    rig.done(ticket);
    one.ringers.clear();
    // Only this test still holds the session's memory.
    assert_eq!((Arc::strong_count(&one.arena), Arc::strong_count(&one.memory)), (1, 1));
    match two.event() {
        Event::Disconnected { qp, .. } => assert_eq!(qp, b.id),
        other => panic!("not disconnected but {other:?}"),
    }
    rig.workers.stop();
}

#[test]
fn an_invalidation_waits_for_all_workers() {
    let mut rig = Rig::start(3);
    let mut client = Client::attach(1, &mut rig);
    let (mut a, a_config) = client.make_qp(1);
    let (_b, b_config) = client.make_qp(2);
    rig.connect(2, a_config, b_config);
    expect_established(&client, a.id);
    let stag = Stag(0x3000_0000);
    let ticket = rig.install(StagEntry { stag, ..client.region() });
    rig.done(ticket);
    let invalidate = SendHeader { inv_rkey: stag.0, ..header(SendOpcode::LocalInvalidate, 3) };
    client.post(&mut a, &invalidate, &[]);
    let begun = Instant::now();
    let completed = loop {
        // The control thread does the same whenever it is woken.
        assert_eq!(rig.workers.poll_done(), None);
        assert!(rig.workers.poll_notification().is_none());
        if let Some(cqe) = a.cq.poll() {
            break cqe;
        }
        assert!(begun.elapsed() < WATCHDOG, "never invalidated");
        std::thread::yield_now();
    };
    assert_eq!((completed.wr_id, completed.status), (3, CompletionStatus::Success as u8));
    rig.workers.stop();
}

/// Creates the library's ends of a client's copy queues, one per worker.
fn serve_copies(rig: &mut Rig, copier: &Arc<Copier>, workers: u32) -> Vec<CopyQueue> {
    let shape = QueueShape::copies();
    let make = |worker| {
        let (arena, _) =
            Mapping::create_arena("copies", shape.bytes()).expect("memory for the arena");
        let queue = QueueMemory::format(arena.clone(), 0, QueueKind::Copies, shape, worker, COPIES);
        let queue = queue.expect("fits");
        let copier = copier.clone();
        let producer = CopyProducer::new(queue.clone());
        rig.workers.one(worker, Command::AddCopyQueue { copier, queue: producer });
        CopyQueue { arena, consumer: CopyConsumer::new(queue, Arc::default()) }
    };
    (0..workers).map(make).collect()
}

/// The library's end of a copy queue.
struct CopyQueue {
    arena: Arc<Mapping>,
    consumer: CopyConsumer,
}

/// Doorbell index of the copy queues.
const COPIES: u32 = 900;

/// A library's copy job counts as a use of the region: a revocation is done after the job.
#[test]
fn a_revocation_waits_for_the_library() {
    for workers in [1, 3] {
        let mut rig = Rig::start(workers);
        let mut client = Client::attach(1, &mut rig);
        let copier = Copier::new(client.session, workers);
        let queues = serve_copies(&mut rig, &copier, workers);
        let program = *b"of the program's";
        let address = program.as_ptr().expose_provenance() as u64;
        let stag = Stag(0x3000_0000);
        let memory = Memory::ThroughCopier { copier: copier.clone(), address };
        let ticket = rig.install(StagEntry { stag, memory, ..client.region() });
        rig.done(ticket);
        let (mut a, a_config) = client.make_qp(1);
        let (b, b_config) = client.make_qp(2);
        let (mut c, c_config) = client.make_qp(3);
        let (_d, d_config) = client.make_qp(4);
        let last = workers - 1;
        rig.connect(last, a_config, b_config);
        expect_established(&client, a.id);
        expect_established(&client, b.id);
        rig.connect(last, c_config, d_config);
        expect_established(&client, c.id);
        let sge = Sge { addr: 0, length: 6, lkey: stag.0 };
        client.post(&mut a, &write_to(&client, 1, 500), &[sge]);
        let library = &queues[last as usize].consumer;
        until("a job arrives", || library.is_wanted());

        let ticket = rig.revoke(stag);
        rig.workers.await_copies(ticket, Some(copier.clone()));
        let other = rig.revoke(Stag(0x4000_0000));
        // Other commands and QPs continue. If the worker has polled the queue again, the Write has
        // failed and its connection has ended.
        rig.done(other);
        client.post(&mut c, &write_to(&client, 2, 600), &[client.sge(0, 4)]);
        c.completes(2);
        assert_eq!(rig.workers.poll_done(), None);
        assert!(library.serve());
        client.ring(last, COPIES);
        rig.done(ticket);
        // The bytes belong to a region that no longer exists.
        let cqe = a.completion();
        assert_eq!((cqe.wr_id, cqe.status), (1, CompletionStatus::LocalProtection as u8));
        assert!(!copier.is_watched());
        rig.workers.stop();
    }
}

#[test]
fn invalid_copy_queue_index_is_reported() {
    let mut rig = Rig::start(1);
    let mut client = Client::attach(1, &mut rig);
    let copier = Copier::new(client.session, 1);
    let queues = serve_copies(&mut rig, &copier, 1);
    let stag = Stag(0x3000_0000);
    let memory = Memory::ThroughCopier { copier, address: 4096 };
    let ticket = rig.install(StagEntry { stag, memory, ..client.region() });
    rig.done(ticket);
    let (mut a, a_config) = client.make_qp(1);
    let (_b, b_config) = client.make_qp(2);
    rig.connect(0, a_config, b_config);
    expect_established(&client, a.id);
    client.post(&mut a, &write_to(&client, 1, 500), &[Sge { addr: 0, length: 6, lkey: stag.0 }]);
    until("a job arrives", || queues[0].consumer.is_wanted());
    let index = rnic_abi::abi::queue::queue_header::CONSUMER;
    queues[0].arena.write(index, &77u32.to_le_bytes()).expect("in range");
    client.ring(0, COPIES);
    let (session, why) = loop {
        match rig.workers.poll_notification() {
            Some(Notification::Misbehaved { session, why }) => break (session, why),
            Some(_) => {}
            None => rig.woken(),
        }
    };
    assert_eq!(session, client.session);
    assert!(why.starts_with("its copy queue: "), "{why}");
    rig.workers.stop();
}

#[test]
fn invalid_send_queue_index_is_reported() {
    let mut rig = Rig::start(1);
    let mut client = Client::attach(1, &mut rig);
    let (a, a_config) = client.make_qp(1);
    let (_b, b_config) = client.make_qp(2);
    let producer = a_config.sq.queue().clone();
    rig.connect(0, a_config, b_config);
    expect_established(&client, a.id);
    // The queue is the second one in the arena, after the CQ, so its producer index is known.
    let cq = QueueShape::completion(64).bytes().next_multiple_of(PAGE);
    let at = doorbell_offset(1).next_multiple_of(PAGE) + cq;
    assert_eq!(producer.kind(), QueueKind::Send);
    let index = at + rnic_abi::abi::queue::queue_header::PRODUCER;
    client.arena.write(index, &0x7FFF_FFFFu32.to_le_bytes()).expect("in range");
    client.ring(0, a.index);
    let report = loop {
        if let Some(report) = rig.workers.poll_notification() {
            break report;
        }
        rig.woken();
    };
    assert!(
        matches!(report, Notification::Misbehaved { session, .. } if session == client.session)
    );
    rig.workers.stop();
}

#[test]
fn detaching_many_qps_does_not_delay_commands() {
    let mut rig = Rig::start(1);
    let mut many = Client::attach(1, &mut rig);
    let other = Client::attach(2, &mut rig);
    let mut qps = Vec::new();
    for n in 0..20 {
        let (a, a_config) = many.make_qp(2 * n + 1);
        let (b, b_config) = many.make_qp(2 * n + 2);
        rig.connect(0, a_config, b_config);
        qps.extend([a, b]);
    }
    until("all are bound", || qps.iter().all(|qp| qp.shared.state() == QpState::Rts));
    let detach = rig.workers.detach_session(many.session);
    let after = rig.install(StagEntry { stag: Stag(0x5000), ..other.region() });
    // Each ticket has its own answer, in any order.
    let mut done = Vec::new();
    while done.len() < 2 {
        match rig.workers.poll_done() {
            Some(ticket) => done.push(ticket),
            None => rig.woken(),
        }
    }
    assert!(done.contains(&detach) && done.contains(&after));
    assert_eq!(rig.workers.workers[0].shared.load.load(Ordering::Relaxed), 0);
    drop(qps);
    many.ringers.clear();
    assert_eq!(Arc::strong_count(&many.arena), 1);
    rig.workers.stop();
}
