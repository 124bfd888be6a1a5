//! Parts shared by the fuzz targets: a reader for the input, and an engine with clients.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rnic_abi::abi::queue::{
    PAGE, QueueKind, QueueShape, SendHeader, SendOpcode, Sge, WindowParams,
};
use rnic_abi::faults::order::{OrderModel, OrderRule};
use rnic_abi::faults::{Action, FaultName, FaultRule};
use rnic_abi::shm::Mapping;
use rnic_abi::shm::doorbell::{DoorbellRinger, DoorbellScanner};
use rnic_abi::shm::io::Piece;
use rnic_abi::shm::queue::{
    CompletionConsumer, QueueMemory, ReceiveConsumer, ReceiveProducer, SendConsumer, SendProducer,
};
use rnic_abi::types::{
    Access, AddressPair, CqId, MrId, MwId, PdId, QpId, Scope, SessionId, SrqId, Stag, Time, UserId,
    WindowKind,
};
use rnic_core::device::{
    ArmedFault, Cq, Memory, QpShared, Srq, StagChange, StagEntry, StagKind, Window,
};
use rnic_core::engine::{
    Broadcast, ConnectedEnd, EmulatedLink, Engine, EngineCommand, EngineOptions, MulpduPolicy,
    Notification, Output, QpConfig, Receives, Work,
};
use rnic_core::stream::startup::{Negotiated, Role};

/// Reads an input from front to back. After its end, integers are 0.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Returns the next `n` bytes, fewer at the end of the input.
    pub fn take(&mut self, n: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(n.min(self.0.len()));
        self.0 = later;
        now
    }

    pub fn u8(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    pub fn u16(&mut self) -> u16 {
        u16::from(self.u8()) << 8 | u16::from(self.u8())
    }

    pub fn u64(&mut self) -> u64 {
        (0..8).fold(0, |n, _| n << 8 | u64::from(self.u8()))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Returns the STag of client `n`'s region with all rights. The next two STags refer to the same
/// memory, the first for its QP only, the second for local use only.
pub fn stag(n: u32) -> Stag {
    Stag(0x1000 * (n + 1))
}

/// Bit position of the window number in an STag. The number equals the window type, 1 or 2.
const WINDOWS: u32 = 8;

/// First address and size in bytes of every region.
pub const IOVA: u64 = 0x10_000;
pub const REGION: usize = 4096;
const ARENA: usize = 256 << 10;

/// Fault rules that the targets may set, each of them alone or with others.
const RULES: [&str; 21] = [
    "do=complete status=rem-op-err every=3",
    "do=complete status=loc-prot-err opcode=read nth=2",
    "do=delay-request by=50ms every=5",
    "do=refuse as=access-error every=4",
    "do=refuse as=invalid-request opcode=write nth=2",
    "do=terminate code=1/2/01 nth=3",
    "do=rnr times=3 every=2",
    "do=hold-completion by=100ms every=2",
    "do=hold-completion by=1s batch=3",
    "do=hold-completion by=200ms flushed=true",
    "do=lose-completion every=3",
    "do=hold-event by=100ms",
    "do=lose-event every=2",
    "do=extra-event",
    "do=corrupt-crc nth=2",
    "do=order order=worst hold=100ms",
    "do=order order=random seed=1 model=rc-relaxed hold=1s",
    "do=link delay=1ms jitter=3ms rate=1Mbit",
    "do=link stall=true",
    "do=cut-fpdu nth=2",
    "do=hold-completion gap=50ms every=2",
];

/// Receive queue of a client's QP. With `SharedAndHeld`, Sends wait until a receive is posted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Receiving {
    Own,
    Shared,
    SharedAndHeld,
}

/// A client with one QP.
pub struct Client {
    pub session: SessionId,
    pub qp: QpId,
    pub arena: Arc<Mapping>,
    pub memory: Arc<Mapping>,
    pub sq: SendProducer,
    pub rq: ReceiveProducer,
    pub cq: CompletionConsumer,
    pub shared_cq: Arc<Cq>,
    pub shared: Arc<QpShared>,
    pub ringer: DoorbellRinger,
    /// Number of bytes of the arena in use.
    pub used: usize,
    config: Option<Box<QpConfig>>,
}

/// Doorbell indices of a client's CQ, QP and SRQ.
pub const CQ_BELL: u32 = 1;
pub const QP_BELL: u32 = 2;
pub const SRQ_BELL: u32 = 3;

/// One engine and its clients.
pub struct World {
    pub engine: Engine,
    pub clients: Vec<Client>,
    pub now: Time,
    /// True once any socket has been closed.
    pub closed: bool,
    /// Bytes sent on all sockets.
    pub sent: u64,
}

impl World {
    pub fn new(clients: u32) -> Self {
        Self::receiving(clients, Receiving::Own)
    }

    /// Creates a world with this number of clients, all with the same kind of receive queue.
    pub fn receiving(clients: u32, how: Receiving) -> Self {
        let options = EngineOptions {
            worker: 0,
            terminate_deadline: Duration::from_secs(1),
            error_deadline: Duration::from_millis(500),
            copy_deadline: Duration::from_secs(1),
            close_deadline: Duration::from_secs(1),
            first_fpdu_deadline: Duration::from_secs(1),
            partial: Default::default(),
            unsent: Default::default(),
            mulpdu: MulpduPolicy::Emss,
            diagnoses: Arc::default(),
        };
        let mut engine = Engine::new(options);
        let now = Time(1);
        let clients = (0..clients).map(|n| Client::new(n, how, &mut engine, now)).collect();
        World { engine, clients, now, closed: false, sent: 0 }
    }

    /// Sets some of [`RULES`] for the QP of a client, stops the QP, or shapes its link.
    pub fn set_faults(&mut self, n: usize, input: &mut Input<'_>) {
        let qp = self.clients[n].qp;
        let chosen = input.u64();
        let name = FaultName::parse("fuzz").expect("a name");
        let texts = RULES.iter().enumerate().filter(|(bit, _)| chosen >> bit & 1 != 0);
        let mut rules = Vec::new();
        let (mut order, mut link) = (None, None);
        for (number, (_, text)) in (1..).zip(texts) {
            let rule = FaultRule::parse_all(text).expect("a rule").remove(0);
            let armed = Arc::new(ArmedFault::new(name, number, rule, self.now));
            match armed.rule.action {
                Action::Link(shape) => link = Some(Arc::new(EmulatedLink::new(armed, shape))),
                Action::Order { order: how, model, .. } => {
                    let model = model.unwrap_or(OrderModel::Iwarp);
                    let rule = OrderRule { fault: name, order: how, model, inversions: None };
                    order = Some(Box::new(rule));
                }
                _ => rules.push(armed),
            }
        }
        self.command(EngineCommand::SetFaults(qp, rules));
        self.command(EngineCommand::SetOrder(qp, order));
        self.command(EngineCommand::SetLink(qp, link));
        self.command(EngineCommand::SetStopped(qp, (chosen >> 63 != 0).then_some(name)));
    }

    /// Clears the fault rules of a client.
    pub fn clear_faults(&mut self, n: usize) {
        self.set_faults(n, &mut Input(&[]));
    }

    pub fn attach_tcp(&mut self, n: usize, negotiated: Negotiated) {
        let config = self.clients[n].config.take().expect("bound once");
        let end = ConnectedEnd { config, negotiated, addresses: addresses() };
        self.engine.attach_tcp(end, self.now);
        self.settle();
    }

    pub fn attach_direct(&mut self, a: usize, b: usize) {
        let end = |w: &mut World, n: usize, role| {
            let config = w.clients[n].config.take().expect("bound once");
            ConnectedEnd {
                config,
                negotiated: negotiated(role, false, false),
                addresses: addresses(),
            }
        };
        let active = end(self, a, Role::Initiator { rtr: None });
        let passive = end(self, b, Role::Responder { await_rtr: None });
        self.command(EngineCommand::AttachDirect(Box::new([active, passive])));
        self.settle();
    }

    pub fn command(&mut self, command: EngineCommand) {
        self.engine.handle_command(command, self.now);
    }

    /// Runs the engine until it is idle, for a bounded number of turns.
    pub fn settle(&mut self) {
        for _ in 0..200 {
            let mut worked = self.engine.poll_doorbells(self.now);
            worked |= self.engine.has_work();
            if let Some(Work::Transmit(qp)) = self.engine.poll_work(self.now) {
                self.transmit(qp, usize::MAX);
            }
            self.carry_out();
            if !worked {
                break;
            }
        }
    }

    /// Simulates one `sendmsg` that accepts at most `most` bytes.
    pub fn transmit(&mut self, qp: QpId, most: usize) {
        let sent = &mut self.sent;
        self.engine.transmit(qp, self.now, 1460, |batch| {
            let len = |p: &Piece<'_>| match p {
                Piece::Private(bytes) => bytes.len(),
                Piece::Shared { len, .. } => *len,
            };
            let n = batch.pieces().iter().map(len).sum::<usize>().min(most);
            *sent += n as u64;
            if n == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(n) }
        });
    }

    pub fn carry_out(&mut self) {
        while let Some(output) = self.engine.poll_output() {
            match output {
                Output::Close { .. } => self.closed = true,
                Output::Broadcast(Broadcast::ChangeStags { qp, change }) => {
                    self.command(EngineCommand::ChangeStags(StagChange::clone(&change)));
                    change.settle();
                    self.command(EngineCommand::StagsChanged(qp));
                }
                Output::Notification(Notification::Misbehaved { session, .. }) => {
                    self.engine.detach_session(session, self.now);
                }
                _ => {}
            }
        }
    }

    /// Passes bytes to a QP as its socket would.
    pub fn receive(&mut self, qp: QpId, bytes: &[u8]) {
        let mut left = bytes;
        while !left.is_empty() {
            let before = left.len();
            self.engine.receive(qp, self.now, |buffers| {
                let mut n = 0;
                for buffer in buffers {
                    let (now, later) = left.split_at(left.len().min(buffer.len()));
                    buffer[..now.len()].copy_from_slice(now);
                    left = later;
                    n += now.len();
                }
                Ok(n)
            });
            self.carry_out();
            if left.len() == before {
                break;
            }
        }
        self.settle();
    }

    pub fn ring(&mut self, n: usize, index: u32) {
        if self.clients[n].ringer.ring(index) {
            let session = self.clients[n].session;
            self.engine.handle_doorbell(session, self.now);
        }
    }

    pub fn advance(&mut self, by: Duration) {
        self.now = self.now.after(by);
        self.engine.handle_timeout(self.now);
        self.settle();
    }
}

impl Client {
    fn new(n: u32, how: Receiving, engine: &mut Engine, now: Time) -> Self {
        let (arena, _fd) = Mapping::create_arena("fuzz", ARENA).expect("memory for the arena");
        let (memory, _fd) = Mapping::create_arena("fuzz-region", REGION).expect("memory for it");
        let session = SessionId(n + 1);
        let qp = QpId(100 + n);
        let pd = PdId(n + 1);
        let scanner = DoorbellScanner::new(arena.clone(), 0).expect("inside the arena");
        engine.attach_session(session, UserId(n), scanner, now);
        let mut used = PAGE * 2;
        let mut queue = |kind, shape: QueueShape, bell| {
            let offset = used;
            used += shape.bytes().next_multiple_of(64);
            let make = |m: &Arc<Mapping>| {
                QueueMemory::format(m.clone(), offset, kind, shape, n, bell).expect("fits")
            };
            let queue = make(&arena);
            let open = QueueMemory::open(arena.clone(), offset, kind, shape).expect("just made");
            (queue, open)
        };
        let (cq, cq_end) = queue(QueueKind::Completion, QueueShape::completion(16), CQ_BELL);
        let (sq, sq_end) = queue(QueueKind::Send, QueueShape::send(8, 4, 64), QP_BELL);
        let (kind, bell) = match how {
            Receiving::Own => (QueueKind::Receive, QP_BELL),
            _ => (QueueKind::SharedReceive, SRQ_BELL),
        };
        let (rq, rq_end) = queue(kind, QueueShape::receive(8, 2), bell);
        let rq = match how {
            Receiving::Own => Receives::Own(ReceiveConsumer::new(rq)),
            _ => {
                let srq = Srq::new(SrqId(300 + n), session, 0, 2, rq);
                srq.qps.fetch_add(1, Relaxed);
                Receives::Shared(Arc::new(srq))
            }
        };
        let shared_cq = Arc::new(Cq::new(CqId(200 + n), session, 0, cq));
        for (k, scope, access) in [
            (0, Scope::Pd, Access::all() - Access::ZERO_BASED),
            (1, Scope::Qp(qp), Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ),
            (2, Scope::Pd, Access::LOCAL_WRITE),
        ] {
            let region = EngineCommand::InstallStag(StagEntry {
                stag: Stag(stag(n).0 + k),
                kind: StagKind::region(),
                mr: MrId(n),
                session,
                pd,
                scope,
                access,
                iova: IOVA,
                length: REGION as u64,
                memory: Memory::Shared { mapping: memory.clone(), offset: 0 },
            });
            engine.handle_command(region, now);
        }
        for (k, kind) in [(1, WindowKind::Type1), (2, WindowKind::Type2)] {
            let first = Stag(stag(n).0 | k << WINDOWS);
            let id = MwId(n * 2 + k);
            let window = Arc::new(Window::new(id, session, pd, kind, first));
            engine.handle_command(EngineCommand::AddWindow(window), now);
        }
        let shared = Arc::new(QpShared::default());
        let config = QpConfig {
            qp,
            session,
            pd,
            doorbell: QP_BELL,
            sq: SendConsumer::new(sq),
            rq,
            send_cq: shared_cq.clone(),
            faults: Vec::new(),
            stopped: None,
            recv_cq: shared_cq.clone(),
            signal_all: false,
            rnr_timeout: (how == Receiving::SharedAndHeld).then_some(Duration::from_secs(1)),
            wiring: None,
            unreliable: false,
            datagrams: None,
            shared: shared.clone(),
        };
        Client {
            session,
            qp,
            ringer: DoorbellRinger::new(arena.clone(), 0).expect("inside the arena"),
            arena,
            memory,
            sq: SendProducer::new(sq_end),
            rq: ReceiveProducer::new(rq_end),
            cq: CompletionConsumer::new(cq_end),
            shared_cq,
            shared,
            used,
            config: Some(Box::new(config)),
        }
    }

    /// Posts a request chosen by the input. Most STags in it exist.
    pub fn post(&mut self, input: &mut Input<'_>, peer: u32, own: u32) {
        let opcodes = [0, 1, 2, 4, 5, 6, 7, 8, 9, 32, input.u8()];
        let opcode = opcodes[usize::from(input.u8()) % opcodes.len()];
        // Selects a region, or a window of type 1 or 2.
        let name = input.u8();
        let key = u32::from(name) % 4 | (u32::from(name) >> 2) % 3 << WINDOWS;
        let binds = opcode == 8;
        let header = SendHeader {
            opcode,
            num_sge: 0,
            flags: u16::from(input.u8()) & 0x7 | 2,
            inline_len: 0,
            wr_id: 1,
            remote_addr: IOVA + u64::from(input.u16()) % (REGION as u64 + 64),
            rkey: stag(if binds { own } else { peer }).0 + key,
            inv_rkey: (stag(if opcode == 9 { peer } else { own }).0 + key) ^ u32::from(binds),
            params: if binds {
                let window = WindowParams {
                    address: IOVA + u64::from(input.u16()) % (REGION as u64),
                    length: u64::from(input.u8()),
                    lkey: stag(own).0 + u32::from(input.u8()) % 3,
                    access: u32::from(input.u8()) & 0x2E,
                };
                window.to_params()
            } else {
                let parameters = SendOpcode::from_u8(opcode).map_or(0, SendOpcode::parameters);
                let mut params = [0; 4];
                params[..parameters].fill_with(|| input.u8().into());
                params
            },
            reserved_is_zero: true,
        };
        let sges: Vec<Sge> = (0..input.u8() % 3)
            .map(|_| Sge {
                addr: IOVA + u64::from(input.u16()) % (REGION as u64),
                // Atomic operations return eight bytes.
                length: match opcode {
                    5 | 6 if input.u8() % 8 != 0 => 8,
                    _ => u32::from(input.u16()) % 3000,
                },
                lkey: stag(own).0 + u32::from(input.u8()) % 3,
            })
            .collect();
        // The queue may be full.
        let _ = self.sq.push(&header, &sges, &[]);
        self.sq.publish();
    }
}

fn addresses() -> AddressPair {
    let at = ([127, 0, 0, 1], 4791).into();
    AddressPair { local: at, peer: at }
}

/// Returns parameters that a start-up can negotiate.
pub fn negotiated(role: Role, crc: bool, markers: bool) -> Negotiated {
    Negotiated {
        role,
        revision: 2,
        version: 1,
        crc,
        tx_markers: markers,
        rx_markers: markers,
        ird: 2,
        ord: 2,
        peer_ird: None,
        peer_ord: None,
        peer_to_peer: false,
        private_data: Vec::new(),
        leftover: Vec::new(),
    }
}
