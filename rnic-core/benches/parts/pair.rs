//! Two connected QPs with their programs, and the workers that drive their engines.
//!
//! The engines are driven as a worker of the daemon drives them, through functions that the daemon
//! can call. Only success is supported: any other output of an engine fails the benchmark.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use rnic_abi::abi::queue::{
    Cqe, PAGE, QueueKind, QueueShape, SendFlags, SendHeader, SendOpcode, Sge,
};
use rnic_abi::shm::Mapping;
use rnic_abi::shm::doorbell::{DoorbellRinger, DoorbellScanner};
use rnic_abi::shm::io::Piece;
use rnic_abi::shm::queue::{
    CompletionConsumer, QueueMemory, ReceiveConsumer, ReceiveProducer, SendConsumer, SendProducer,
};
use rnic_abi::types::{
    Access, AddressPair, CompletionStatus, CqId, MrId, PdId, QpId, Scope, SessionId, Stag, Time,
    UserId,
};
use rnic_core::device::{Cq, Memory, QpShared, StagEntry, StagKind};
use rnic_core::engine::{
    ConnectedEnd, Engine, EngineCommand, EngineOptions, MulpduPolicy, Output, QpConfig, Receive,
    Receives, Work,
};
use rnic_core::stream::startup::{Negotiated, Role};

/// Connection of the two QPs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    /// Both QPs belong to one engine.
    Direct,
    /// Each QP belongs to its own engine. TCP has this segment size, and CRCs are on.
    Tcp {
        /// Effective MSS in bytes, which determines the length of FPDUs.
        emss: usize,
    },
}

/// Two connected ends. The first one sends.
pub(crate) struct Pair {
    pub(crate) ends: [End; 2],
    engines: Vec<Engine>,
    /// Bytes that one end has sent and the other has not received yet, by sender.
    under_way: [Stream; 2],
    emss: usize,
    now: Time,
}

/// A program with a QP and a region: one end of the connection.
pub(crate) struct End {
    /// Memory of its region.
    pub(crate) memory: Arc<Mapping>,
    stag: Stag,
    qp: QpId,
    session: SessionId,
    /// Index of its engine.
    engine: usize,
    sq: SendProducer,
    rq: ReceiveProducer,
    cq: CompletionConsumer,
    ringer: DoorbellRinger,
}

impl Pair {
    pub(crate) fn new(path: Path) -> Self {
        let now = Time(1);
        let (mut engines, emss) = match path {
            Path::Direct => (vec![Engine::new(options())], 0),
            Path::Tcp { emss } => (vec![Engine::new(options()), Engine::new(options())], emss),
        };
        let of_b = engines.len() - 1;
        let (a, config_a) = End::new(1, 0, &mut engines, now);
        let (b, config_b) = End::new(2, of_b, &mut engines, now);
        let end = |config, role| ConnectedEnd {
            config,
            negotiated: negotiated(role),
            addresses: addresses(),
        };
        let active = end(config_a, Role::Initiator { rtr: None });
        let passive = end(config_b, Role::Responder { await_rtr: None });
        match path {
            Path::Direct => {
                let command = EngineCommand::AttachDirect(Box::new([active, passive]));
                engines[0].handle_command(command, now);
            }
            Path::Tcp { .. } => {
                engines[0].attach_tcp(active, now);
                engines[1].attach_tcp(passive, now);
            }
        }
        Pair { ends: [a, b], engines, under_way: Default::default(), emss, now }
    }

    // --- Programs

    /// Returns a request of the first program. A Write has offset `at` in the second program's
    /// region as its destination.
    pub(crate) fn request(
        &self,
        opcode: SendOpcode,
        flags: SendFlags,
        wr_id: u64,
        at: usize,
    ) -> SendHeader {
        let (remote_addr, rkey) = match opcode {
            SendOpcode::Write => (IOVA + at as u64, self.ends[1].stag.0),
            _ => (0, 0),
        };
        SendHeader {
            opcode: opcode as u8,
            num_sge: 0,
            flags: flags.bits(),
            inline_len: 0,
            wr_id,
            remote_addr,
            rkey,
            inv_rkey: 0,
            params: [0; 4],
            reserved_is_zero: true,
        }
    }

    /// Writes a request of the first program into its queue. `data` is a range of its region.
    pub(crate) fn push(&mut self, header: &SendHeader, data: Range<usize>) {
        let a = &mut self.ends[0];
        a.sq.push(header, &[a.sge(data)], &[]).expect("there is room");
    }

    /// Publishes the requests of the first program and rings the doorbell.
    pub(crate) fn ring(&mut self) {
        let a = &mut self.ends[0];
        a.sq.publish();
        if a.sq.queue().worker().is_some() {
            self.ring_for(0, QP_BELL);
        }
    }

    /// Posts a receive of the second program. `sink` is a range of its region.
    pub(crate) fn post_receive(&mut self, wr_id: u64, sink: Range<usize>) {
        let b = &mut self.ends[1];
        b.rq.push(wr_id, &[b.sge(sink)]).expect("there is room");
        b.rq.publish();
        if b.rq.waits() != 0 {
            self.ring_for(1, QP_BELL);
        }
    }

    /// Runs the workers until this program has its next completion, which must be a success with
    /// this `wr_id` and length.
    pub(crate) fn turn_until_completed(&mut self, end: usize, wr_id: u64, len: u32) {
        let mut completed = None;
        self.turn_until(|pair| {
            completed = pair.poll_cq(end);
            completed.is_some()
        });
        let found = completed.map(|cqe| (cqe.wr_id, cqe.status, cqe.byte_len));
        assert_eq!(found, Some((wr_id, CompletionStatus::Success as u8, len)));
    }

    fn poll_cq(&mut self, end: usize) -> Option<Cqe> {
        let cq = &mut self.ends[end].cq;
        let cqe = cq.poll()?;
        if cq.release() != 0 {
            self.ring_for(end, CQ_BELL);
        }
        Some(cqe)
    }

    fn ring_for(&mut self, end: usize, index: u32) {
        let End { ringer, session, engine, .. } = &self.ends[end];
        if ringer.ring(index) {
            self.engines[*engine].handle_doorbell(*session, self.now);
        }
    }

    // --- Workers

    /// Runs rounds of all workers until `is_done` returns true.
    pub(crate) fn turn_until(&mut self, mut is_done: impl FnMut(&mut Pair) -> bool) {
        for _ in 0..MANY {
            if is_done(self) {
                return;
            }
            self.now = self.now.after(ROUND);
            for engine in 0..self.engines.len() {
                self.round(engine);
            }
        }
        panic!("the expected result did not occur in {MANY} rounds");
    }

    fn round(&mut self, at: usize) {
        let now = self.now;
        self.engines[at].poll_doorbells(now);
        while let Some(work) = self.engines[at].poll_work(now) {
            match work {
                Work::Transmit(qp) => self.transmit(at, qp),
                Work::Receive(qp) => self.receive(at, qp),
                Work::TurnTaken => {}
            }
            self.engines[at].turn_over(now, now);
        }
        if self.engines[at].poll_timeout().is_some_and(|due| due <= now) {
            self.engines[at].handle_timeout(now);
        }
        while let Some(output) = self.engines[at].poll_output() {
            assert!(matches!(output, Output::Event { .. }), "only `Established`");
        }
    }

    /// Simulates a `sendmsg` that accepts all bytes.
    fn transmit(&mut self, at: usize, qp: QpId) {
        let Pair { engines, under_way, emss, now, ends } = self;
        let sender = usize::from(qp == ends[1].qp);
        let stream = &mut under_way[sender];
        engines[at].transmit(qp, *now, *emss, |batch| {
            let mut taken = 0;
            for piece in batch.pieces() {
                let Piece::Private(bytes) = piece else {
                    return Err(io::Error::other("with CRCs everything is copied"));
                };
                stream.bytes.extend_from_slice(bytes);
                taken += bytes.len();
            }
            Ok(taken)
        });
        let peer = &ends[1 - sender];
        if stream.is_readable() {
            engines[peer.engine].handle_readable(peer.qp);
        }
    }

    /// Simulates a `recvmsg`.
    fn receive(&mut self, at: usize, qp: QpId) {
        let Pair { engines, under_way, now, ends, .. } = self;
        let stream = &mut under_way[usize::from(qp == ends[0].qp)];
        let received = engines[at].receive(qp, *now, |buffers| {
            if !stream.is_readable() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let mut received = 0;
            for buffer in buffers {
                received += stream.read(buffer);
            }
            Ok(received)
        });
        match received {
            Receive::Progress => engines[at].handle_readable(qp),
            Receive::Emptied | Receive::WouldBlock => {}
            Receive::Closed | Receive::Blocked => panic!("the stream has ended: {received:?}"),
        }
    }
}

impl End {
    /// Creates a program of session `n`, and its QP, which is attached to its engine later.
    fn new(n: u32, engine: usize, engines: &mut [Engine], now: Time) -> (Self, Box<QpConfig>) {
        let (arena, _fd) = Mapping::create_arena("bench", ARENA).expect("memory for the arena");
        let (memory, _fd) = Mapping::create_arena("bench", REGION).expect("memory for the region");
        let session = SessionId(n);
        let qp = QpId(n);
        let pd = PdId(n);
        let stag = Stag(n << 8);
        let scanner = DoorbellScanner::new(arena.clone(), 0).expect("a doorbell page");
        // The same user runs both programs.
        engines[engine].attach_session(session, UserId(1), scanner, now);
        let region = EngineCommand::InstallStag(StagEntry {
            stag,
            kind: StagKind::region(),
            mr: MrId(n),
            session,
            pd,
            scope: Scope::Pd,
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            iova: IOVA,
            length: REGION as u64,
            memory: Memory::Shared { mapping: memory.clone(), offset: 0 },
        });
        engines[engine].handle_command(region, now);
        // After the header and one doorbell page.
        let mut next = 2 * PAGE;
        let mut queue = |kind, shape: QueueShape, bell| {
            let offset = next;
            next += shape.bytes().next_multiple_of(64);
            let daemons = QueueMemory::format(arena.clone(), offset, kind, shape, n, bell);
            let clients = QueueMemory::open(arena.clone(), offset, kind, shape);
            (daemons.expect("it fits"), clients.expect("it was just made"))
        };
        let (sq, sq_end) = queue(QueueKind::Send, QueueShape::send(DEPTH, 1, 0), QP_BELL);
        let (rq, rq_end) = queue(QueueKind::Receive, QueueShape::receive(DEPTH, 1), QP_BELL);
        let (cq, cq_end) = queue(QueueKind::Completion, QueueShape::completion(2 * DEPTH), CQ_BELL);
        let cq = Arc::new(Cq::new(CqId(n), session, 0, cq));
        let config = QpConfig {
            qp,
            session,
            pd,
            doorbell: QP_BELL,
            sq: SendConsumer::new(sq),
            rq: Receives::Own(ReceiveConsumer::new(rq)),
            send_cq: cq.clone(),
            recv_cq: cq,
            signal_all: false,
            rnr_timeout: None,
            wiring: None,
            unreliable: false,
            datagrams: None,
            shared: Arc::new(QpShared::default()),
            faults: Vec::new(),
            stopped: None,
        };
        let end = End {
            memory,
            stag,
            qp,
            session,
            engine,
            sq: SendProducer::new(sq_end),
            rq: ReceiveProducer::new(rq_end),
            cq: CompletionConsumer::new(cq_end),
            ringer: DoorbellRinger::new(arena, 0).expect("a doorbell page"),
        };
        (end, Box::new(config))
    }

    fn sge(&self, part: Range<usize>) -> Sge {
        Sge { addr: IOVA + part.start as u64, length: part.len() as u32, lkey: self.stag.0 }
    }
}

/// Bytes in the order in which they were sent.
#[derive(Default)]
struct Stream {
    bytes: Vec<u8>,
    read: usize,
}

impl Stream {
    fn is_readable(&self) -> bool {
        self.read < self.bytes.len()
    }

    fn read(&mut self, into: &mut [u8]) -> usize {
        let left = &self.bytes[self.read..];
        let n = left.len().min(into.len());
        into[..n].copy_from_slice(&left[..n]);
        self.read += n;
        if !self.is_readable() {
            self.bytes.clear();
            self.read = 0;
        }
        n
    }
}

fn options() -> EngineOptions {
    EngineOptions {
        worker: 0,
        terminate_deadline: Duration::from_secs(5),
        close_deadline: Duration::from_secs(10),
        error_deadline: Duration::from_millis(500),
        copy_deadline: Duration::from_secs(5),
        first_fpdu_deadline: Duration::from_secs(60),
        mulpdu: MulpduPolicy::Emss,
        partial: Default::default(),
        unsent: Default::default(),
        diagnoses: Arc::default(),
    }
}

/// Returns the start-up parameters that two daemons with default settings negotiate.
fn negotiated(role: Role) -> Negotiated {
    Negotiated {
        role,
        revision: 2,
        version: 1,
        crc: true,
        tx_markers: false,
        rx_markers: false,
        ird: 16,
        ord: 16,
        peer_ird: None,
        peer_ord: None,
        peer_to_peer: false,
        private_data: Vec::new(),
        leftover: Vec::new(),
    }
}

fn addresses() -> AddressPair {
    let at = ([127, 0, 0, 1], 4791).into();
    AddressPair { local: at, peer: at }
}

const CQ_BELL: u32 = 1;
const QP_BELL: u32 = 2;
/// Capacity of the send and the receive queue.
const DEPTH: u32 = 64;
const ARENA: usize = 64 << 10;
const REGION: usize = 64 << 10;
/// First address of every region.
const IOVA: u64 = 0x10_0000;
/// Simulated time between two rounds.
const ROUND: Duration = Duration::from_micros(1);
/// Maximum number of rounds until a result.
const MANY: usize = 1000;
