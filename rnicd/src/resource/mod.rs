//! The resource manager: decides who may have what, alone.
//!
//! It owns the sessions' object tables, counts against the limits, allocates handles, STags and
//! memory for queues, and commands workers and the connection manager, who therefore need not ask
//! again (RFC 5042's Privileged Resource Manager). Every handle is looked up among the asking
//! session's own objects. It refuses to know sockets of the control plane, bytes of messages and
//! the protocol. The control thread calls it: [`Manager::request`] for what a client asked,
//! [`Manager::settle`] when others have something to say, [`Manager::poll_answer`] and
//! [`Manager::poll_ended`] for what became of it.

mod admin;
mod adopt;
mod arena;
mod attach;
mod capacity;
mod connect;
mod extents;
mod figures;
mod ledger;
mod list;
mod list_limits;
mod memory;
mod named_pd;
mod notes;
mod numbers;
pub mod options;
mod page;
mod policy;
mod queues;
mod reads;
mod refuse;
mod reload;
mod resize;
mod session;
mod srqs;
mod teardown;
mod uses;
mod why;
mod windows;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rnic_core::abi::ABI_VERSION;
use rnic_core::abi::control::{
    Features, HelloReply, HelloStatus, ObjectRef, Refusal, ReplyBody, RequestBody,
};
use rnic_core::device::{StagAllocator, WhyLog};
use rnic_core::shm::doorbell::DoorbellScanner;
use rnic_core::types::*;
use rustix::event::{EventfdFlags, eventfd};

use crate::cm::{AcceptParams, ConnectParams, ConnectionManager};
use crate::config::{Config, Loopback};
use crate::events::EventSender;
use crate::log::Dampers;
use crate::mover::Movers;
use crate::privilege::{Network, Peer};
use crate::rate::Buckets;
use crate::reaper::{Passed, Reaper, Receipt};
use crate::worker::{Ticket, WorkerReport, Workers};
use adopt::ConnectOver;
use arena::Arenas;
use attach::Moving;
pub use capacity::Capacity;
use figures::Past;
use ledger::{Account, Charge, Kind, Ledger};
use list::Terminates;
use memory::MrRequest;
use named_pd::NamedPds;
use notes::Notes;
use numbers::{Handles, Stags};
use policy::Identity;
pub use policy::Policy;
pub use reload::Reloaded;
use session::{Client, Session};
use teardown::Leaving;
use why::Asked;
pub use why::Refused;

/// What a request came to: something given, or a refusal by name.
pub type Answer = Result<Given, Refusal>;

/// An answer with the descriptors that go with it.
#[derive(Debug)]
pub struct Granted {
    /// What was done.
    pub body: ReplyBody,
    /// In the order in which the message names them.
    pub descriptors: Vec<OwnedFd>,
}

impl From<ReplyBody> for Granted {
    fn from(body: ReplyBody) -> Self {
        Granted { body, descriptors: Vec::new() }
    }
}

/// What a client gets, and when.
#[derive(Debug)]
pub enum Given {
    /// It, at once.
    Now(Box<Granted>),
    /// An answer when the workers are done, from [`Manager::poll_answer`].
    Later,
}

impl Given {
    fn now(body: ReplyBody) -> Answer {
        Given::with(body, Vec::new())
    }

    fn with(body: ReplyBody, descriptors: Vec<OwnedFd>) -> Answer {
        Ok(Given::Now(Box::new(Granted { body, descriptors })))
    }

    fn done() -> Answer {
        Given::now(ReplyBody::Done)
    }

    fn later() -> Answer {
        Ok(Given::Later)
    }
}

/// What a new session is told.
pub struct Welcome {
    /// The packet.
    pub reply: HelloReply,
    /// Descriptors that go with it.
    pub descriptors: Vec<OwnedFd>,
    /// Its event channel, to be flushed when the client has read.
    pub events: Arc<EventSender>,
}

/// The resource manager. See the module's documentation.
pub struct Manager {
    config: Arc<Config>,
    capacity: Capacity,
    policy: Policy,
    named_pds: NamedPds,
    /// How often users connect.
    connects: Buckets<u32>,
    /// How often users ask for movers.
    attachments: Buckets<u32>,
    /// Nothing new is taken.
    draining: bool,
    /// Where the daemon makes its sockets; clients of other namespaces are foreign.
    network: Option<Network>,
    generation: u64,
    started: Instant,
    ledger: Ledger,
    handles: AllHandles,
    stags: Stags,
    sessions: BTreeMap<SessionId, Session>,
    leaving: HashMap<SessionId, Leaving>,
    workers: Workers,
    cm: ConnectionManager,
    reaper: Reaper,
    pending: HashMap<Ticket, Pending>,
    /// Segments that the reaper has yet to unmap, and sessions that wait for that.
    unmapping: HashMap<Receipt, SessionId>,
    answers: VecDeque<(SessionId, Granted)>,
    /// Refusals that took their time.
    late_refusals: VecDeque<(SessionId, Refused)>,
    movers: Movers,
    moving: Moving,
    ended: VecDeque<(SessionId, String)>,
    refusals: u64,
    misbehaved: u64,
    terminates: Terminates,
    /// Shared with the workers.
    why: Arc<WhyLog>,
    notes: Notes,
    /// All workers have answered the last question.
    alive: bool,
    past: Past,
    said: Dampers,
}

/// Handles of every kind.
#[derive(Default)]
struct AllHandles {
    sessions: Handles,
    pds: Handles,
    segments: Handles,
    mrs: Handles,
    channels: Handles,
    cqs: Handles,
    qps: Handles,
    listeners: Handles,
    windows: Handles,
    srqs: Handles,
}

/// What waits for the workers.
enum Pending {
    RegMr { session: SessionId, mr: MrId, stag: Stag },
    DeregMr { session: SessionId, mr: MrId },
    DestroyQp { session: SessionId, qp: QpId },
    AllocWindow { session: SessionId, window: MwId, stag: Stag },
    DeallocWindow { session: SessionId, window: MwId },
    Detach { session: SessionId },
    Alive,
}

impl Manager {
    /// A manager without sessions.
    pub fn new(
        config: Arc<Config>,
        capacity: Capacity,
        workers: Workers,
        cm: ConnectionManager,
        reaper: Reaper,
        movers: Movers,
        random: Random,
    ) -> Self {
        let policy = Policy::new(&config);
        policy.report_unknown();
        let why = workers.why().clone();
        why.keep_of_ended(config.limits.device.count(Kind::WhyRecords) as usize);
        Manager {
            policy,
            named_pds: NamedPds::default(),
            connects: Buckets::new(USERS_REMEMBERED, BURST),
            attachments: Buckets::new(USERS_REMEMBERED, BURST),
            draining: false,
            network: Network::own().ok(),
            generation: random.generation,
            started: Instant::now(),
            ledger: Ledger::new(&config.limits, &capacity),
            handles: AllHandles::default(),
            stags: Stags::new(StagAllocator::new(random.stag_seed)),
            sessions: BTreeMap::new(),
            leaving: HashMap::new(),
            pending: HashMap::new(),
            unmapping: HashMap::new(),
            answers: VecDeque::new(),
            late_refusals: VecDeque::new(),
            movers,
            moving: Moving::default(),
            ended: VecDeque::new(),
            refusals: 0,
            misbehaved: 0,
            terminates: Terminates::default(),
            why,
            notes: Notes::new(config.limits.device.count(Kind::EventRecords) as usize),
            alive: false,
            past: Past::default(),
            said: Dampers::new(10, Duration::from_secs(60)),
            config,
            capacity,
            workers,
            cm,
            reaper,
        }
    }

    /// Starts a session for a client.
    pub fn open_session(&mut self, peer: &Peer) -> Result<(SessionId, Welcome), HelloStatus> {
        let foreign = self.network.is_none() || peer.network != self.network;
        let identity = Identity { uid: peer.uid, gids: peer.groups.clone(), foreign };
        let rights = self.policy.rights(&identity);
        // Administrators come in all the same: somebody must be able to end it.
        if self.draining && !rights.admin {
            return Err(HelloStatus::Draining);
        }
        let account = self.ledger.open(rights.clone());
        let (charge, arena) = charge_session(&account, self.capacity.workers)?;
        let handle = self.handles.sessions.allocate(SessionId(0));
        let id = SessionId(handle.number());
        match self.prepare_session(id, &account, arena) {
            Ok((arenas, welcome)) => {
                let client = Client {
                    pid: peer.pid,
                    identity,
                    command: peer.command.clone(),
                    admin: rights.admin,
                    trusted: rights.trusted,
                    known: rights.known,
                    own: rights.own,
                    sockets: rights.sockets,
                };
                let quota = self.capacity.quota(&rights);
                self.cm.set_quota(id, quota);
                let events = welcome.events.clone();
                self.why.open(
                    id,
                    client.account(),
                    rights.session_count(Kind::WhyRecords) as usize,
                );
                let session = Session::new(id, client, account, arenas, events, (handle, charge));
                self.sessions.insert(id, session);
                Ok((id, welcome))
            }
            Err(error) => {
                if let Some(suppressed) = self.said.count("no session", Instant::now()) {
                    let pid = peer.pid;
                    tracing::warn!(%error, pid, suppressed, "no resources for another session");
                }
                Err(HelloStatus::Resources)
            }
        }
    }

    fn prepare_session(
        &mut self,
        id: SessionId,
        account: &Arc<Account>,
        arena: Charge,
    ) -> io::Result<(Arenas, Welcome)> {
        let workers = self.capacity.workers;
        let features =
            if self.is_direct() { Features::DIRECT_PATH } else { Features::empty() }.bits();
        let (arenas, arena) = Arenas::open(id, account, arena, workers, self.generation, features)?;
        let first = arenas.first().ok_or(io::ErrorKind::NotFound)?.clone();
        let (events, channel) =
            EventSender::pair(self.config.limits.device.count(Kind::Events) as usize)?;
        let events = Arc::new(events);
        let mut descriptors = vec![arena, channel];
        let (mut scanners, mut eventfds) = (Vec::new(), Vec::new());
        for worker in 0..workers {
            let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            eventfds.push(bell.as_fd().try_clone_to_owned()?);
            descriptors.push(bell);
            let scanner = DoorbellScanner::new(first.clone(), worker);
            scanners.push(scanner.map_err(io::Error::other)?);
        }
        let user = UserId(account.rights().uid);
        self.workers.attach_session(id, user, scanners, eventfds, &events);
        let reply = HelloReply {
            status: HelloStatus::Ok as u32,
            version: ABI_VERSION,
            // Configuration bounds workers to 64 and the first arena to well below 4 GiB.
            workers: workers as u16,
            session: id,
            arena_len: first.len() as u32,
            features,
        };
        Ok((arenas, Welcome { reply, descriptors, events }))
    }

    /// Carries out a request. `descriptor` is the one that came with it: that of a segment is known
    /// to be of a kind that is safe to use, that of attached memory is unknown.
    pub fn request(
        &mut self,
        id: SessionId,
        body: RequestBody,
        descriptor: Option<Passed>,
        now: Time,
    ) -> Result<Given, Refused> {
        let asked = Asked::of(&body);
        if !body.is_query() {
            self.note_opening(id);
        }
        let answer = self.dispatch(id, body, descriptor, now);
        let answer = answer.map_err(|refusal| self.refused(id, asked, refusal, now));
        self.settle();
        answer
    }

    /// Notes a session when it first asks for something: those that only look are not notable.
    fn note_opening(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id)
            && !std::mem::replace(&mut session.opening_noted, true)
        {
            let Client { pid, identity, command, .. } = &session.client;
            let text = format!("{command} (pid {pid}, uid {})", identity.uid);
            self.note("session_opened", Some(id), text);
        }
    }

    /// Notes why a session ends whose beginning was noted.
    pub fn note_end(&mut self, id: SessionId, why: &str) {
        let Some(session) = self.sessions.get(&id).filter(|session| session.opening_noted) else {
            return;
        };
        let Client { pid, identity, command, .. } = &session.client;
        let text = format!("{command} (pid {pid}, uid {}): {why}", identity.uid);
        self.note("session_ended", Some(id), text);
    }

    fn dispatch(
        &mut self,
        id: SessionId,
        body: RequestBody,
        descriptor: Option<Passed>,
        now: Time,
    ) -> Answer {
        use RequestBody as R;
        self.check_draining(&body)?;
        match body {
            R::QueryDevice => self.device(id),
            R::OpenPd { name } => self.open_pd(id, name.as_deref()),
            R::ClosePd { pd } => self.close_pd(id, pd),
            R::AddSegment { length, client_address: _ } => match descriptor {
                Some(memfd) => self.add_segment(id, length, memfd),
                None => Err(refuse::lost_descriptor()),
            },
            R::RemoveSegment { segment } => self.remove_segment(id, segment),
            R::RegMr { pd, source, length, iova, access, scope } => {
                self.reg_mr(id, MrRequest { pd, source, length, iova, access, scope })
            }
            R::DeregMr { mr } => self.dereg_mr(id, mr),
            R::CreateChannel => self.create_channel(id),
            R::DestroyChannel { channel } => self.destroy_channel(id, channel),
            R::CreateCq { entries, channel, context } => {
                self.create_cq(id, entries, channel, context)
            }
            R::DestroyCq { cq } => self.destroy_cq(id, cq),
            R::CreateQp(request) => self.create_qp(id, &request),
            R::QpToError { qp } => self.qp_to_error(id, qp),
            R::DestroyQp { qp } => self.destroy_qp(id, qp),
            R::QueryQp { qp } => self.query_qp(id, qp),
            R::Bind { address, context } => self.bind(id, address, context, now),
            R::Listen { listener, backlog } => self.listen(id, listener, backlog),
            R::CloseListener { listener } => self.close_listener(id, listener, now),
            R::Accept { request, qp, ird, ord, private_data } => {
                self.accept(id, AcceptParams { request, qp, ird, ord, private_data }, now)
            }
            R::Reject { request, private_data } => self.reject(id, request, &private_data, now),
            R::Connect { qp, peer, local, ird, ord, private_data } => {
                let session = id;
                let params = ConnectParams { session, qp, peer, local, ird, ord, private_data };
                self.connect(id, params, now)
            }
            R::Disconnect { qp, abort } => self.disconnect(id, qp, abort),
            R::SetContext { object, context } => self.set_context(id, object, context),
            R::Status => self.status(id),
            R::List { what, from } => self.list(id, what, from),
            R::AllocWindow { pd, kind } => self.alloc_window(id, pd, kind),
            R::DeallocWindow { window } => self.dealloc_window(id, window),
            R::CreateSrq(request) => self.create_srq(id, &request),
            R::ArmSrq { srq, limit } => self.arm_srq(id, srq, limit),
            R::QuerySrq { srq } => self.query_srq(id, srq),
            R::DestroySrq { srq } => self.destroy_srq(id, srq),
            R::AttachMemory => match descriptor {
                Some(memory) => self.attach_memory(id, memory, now),
                None => Err(refuse::lost_descriptor()),
            },
            R::ConnectOver { qp, ird, ord, private_data } => {
                self.connect_over(id, ConnectOver { qp, ird, ord, private_data }, descriptor, now)
            }
            R::ServeOver { context } => self.serve_over(id, context, descriptor, now),
            R::AdminDisconnect { qp } => self.admin_disconnect(id, qp),
            R::Drain { on } => self.drain(id, on),
            R::Why { id: number } => self.why(id, number),
            R::ReserveSegment { length } => self.reserve_segment(id, length),
            R::FillSegment { segment, client_address: _ } => match descriptor {
                Some(memfd) => self.fill_segment(id, segment, memfd),
                None => Err(refuse::lost_descriptor()),
            },
            R::ResizeCq { cq, entries } => self.resize_cq(id, cq, entries),
        }
    }

    fn set_context(&mut self, id: SessionId, object: ObjectRef, context: u64) -> Answer {
        let session = find(&mut self.sessions, id)?;
        match object {
            ObjectRef::Qp(qp) => session.qp(qp)?.shared.context.store(context, Relaxed),
            ObjectRef::Cq(cq) => session.cq(cq)?.cq.context.store(context, Relaxed),
            ObjectRef::Listener(listener) => session.listener(listener)?.context = context,
            ObjectRef::Srq(srq) => session.srq(srq)?.srq.context.store(context, Relaxed),
        }
        Given::done()
    }

    /// Takes in what workers and the connection manager have to say.
    pub fn settle(&mut self) {
        while let Some(event) = self.cm.poll_event() {
            self.handle_cm_event(event);
        }
        while let Some(report) = self.workers.poll_report() {
            match report {
                WorkerReport::Misbehaved { session, why } => self.ended.push_back((session, why)),
                WorkerReport::StagGuessed { session, peer, at } => {
                    self.cm.stag_guessed(session, peer, at);
                }
                WorkerReport::CqFailed { cq } => {
                    let owner = self.handles.cqs.owner(cq.0);
                    self.note("cq_failed", owner, format!("completion queue {cq} is dead"));
                    self.cq_failed(cq);
                }
                WorkerReport::Note { session, kind, text } => {
                    self.note(kind, Some(session), text);
                }
                WorkerReport::SrqFailed { srq } => {
                    let owner = self.handles.srqs.owner(srq.0);
                    self.note("srq_failed", owner, format!("shared receive queue {srq} is dead"));
                    self.srq_failed(srq);
                }
                WorkerReport::Detached { session } => self.memory_gone(session),
            }
        }
        while let Some(ticket) = self.workers.poll_done() {
            match self.pending.remove(&ticket) {
                Some(Pending::RegMr { session, mr, stag }) => {
                    self.answers.push_back((session, ReplyBody::Mr { mr, stag }.into()));
                }
                Some(Pending::DeregMr { session, mr }) => self.mr_revoked(session, mr),
                Some(Pending::DestroyQp { session, qp }) => {
                    self.qp_gone(session, qp);
                    self.answers.push_back((session, ReplyBody::Done.into()));
                }
                Some(Pending::AllocWindow { session, window, stag }) => {
                    self.answers.push_back((session, ReplyBody::Window { window, stag }.into()));
                }
                Some(Pending::DeallocWindow { session, window }) => {
                    self.window_gone(session, window);
                }
                Some(Pending::Detach { session }) => self.detached(session),
                Some(Pending::Alive) => self.alive = true,
                None => {}
            }
        }
        while let Some(report) = self.movers.poll_report() {
            self.mover_reported(report);
        }
        while let Some(receipt) = self.reaper.poll_gone() {
            if let Some(session) = self.unmapping.remove(&receipt) {
                self.segment_gone(session);
            }
        }
    }

    /// Worker threads.
    pub fn workers(&self) -> u32 {
        self.capacity.workers
    }

    /// Asks all workers whether they take commands; [`Manager::poll_alive`] says when they have.
    pub fn ask_workers(&mut self) {
        let ticket = self.workers.ask();
        self.pending.insert(ticket, Pending::Alive);
    }

    /// Whether all workers have answered since this was last asked.
    pub fn poll_alive(&mut self) -> bool {
        std::mem::take(&mut self.alive)
    }

    /// An answer that was promised for later.
    pub fn poll_answer(&mut self) -> Option<(SessionId, Granted)> {
        self.answers.pop_front()
    }

    /// A refusal that took its time.
    pub fn poll_refused(&mut self) -> Option<(SessionId, Refused)> {
        self.late_refusals.pop_front()
    }

    /// A session that a worker found misbehaving, and why; it is to be closed.
    pub fn poll_ended(&mut self) -> Option<(SessionId, String)> {
        self.ended.pop_front()
    }

    /// The connection manager, to hand it readiness and time. [`Manager::settle`] is due after.
    pub fn connections(&mut self) -> &mut ConnectionManager {
        &mut self.cm
    }

    fn is_direct(&self) -> bool {
        self.config.engine.loopback == Loopback::Direct
    }
}

/// Charges what every session has, itself and its first arena. Those that are being taken down still
/// count: they hold memory and descriptors.
fn charge_session(account: &Arc<Account>, workers: u32) -> Result<(Charge, Charge), HelloStatus> {
    let rights = account.rights();
    let refused = |refusal: Refusal| {
        tracing::debug!(user = rights.uid, %refusal, "no session");
        match refusal {
            Refusal::Limit { key, .. } if key == "limits.sessions" => HelloStatus::SessionLimit,
            Refusal::Limit { key, .. } if key == rights.user_key(Kind::Sessions) => {
                HelloStatus::UserSessions
            }
            _ => HelloStatus::Resources,
        }
    };
    let charge = account.charge(Kind::Sessions, 1).map_err(refused)?;
    let arena = Arenas::first_length(workers) as u64;
    Ok((charge, account.charge(Kind::ArenaBytes, arena).map_err(refused)?))
}

/// Randomness of one start of the daemon.
pub struct Random {
    /// Told to clients in the arena header.
    pub generation: u64,
    /// Decides which STags are issued.
    pub stag_seed: [u8; 32],
}

impl Random {
    /// From the kernel, once it has gathered enough; `/dev/urandom` would not wait for that.
    pub fn from_system() -> io::Result<Self> {
        use rustix::rand::{GetRandomFlags, getrandom};
        let mut bytes = [0u8; 40];
        // So few come at once or not at all.
        rustix::io::retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))?;
        let (generation, seed) = bytes.split_at(8);
        let mut random = Random { generation: 0, stag_seed: [0; 32] };
        random.generation = generation.iter().fold(0, |n, byte| n << 8 | u64::from(*byte));
        random.stag_seed.copy_from_slice(seed);
        Ok(random)
    }
}

/// Users whose rate of connecting is remembered.
const USERS_REMEMBERED: usize = 1024;
/// For so long what users may do in vain is saved up.
const BURST: Duration = Duration::from_secs(1);

/// A session that is not being taken down.
fn find(
    sessions: &mut BTreeMap<SessionId, Session>,
    id: SessionId,
) -> Result<&mut Session, Refusal> {
    sessions.get_mut(&id).ok_or_else(|| refuse::no_such("session", id.0))
}
