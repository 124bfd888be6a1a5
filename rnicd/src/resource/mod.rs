//! The resource manager: decides who may have what, alone.
//!
//! It owns the sessions' object tables, counts against the limits, allocates handles, STags and
//! memory for queues, and commands workers and the connection manager, who therefore need not ask
//! again (RFC 5042's Privileged Resource Manager). Every handle is looked up among the asking
//! session's own objects. It refuses to know sockets of the control plane, bytes of messages and
//! the protocol. The control thread calls it: [`Manager::request`] for what a client asked,
//! [`Manager::settle`] when others have something to say, [`Manager::poll_answer`] and
//! [`Manager::poll_ended`] for what became of it.

mod addresses;
mod admin;
mod answer;
mod capacity;
mod dispatch;
mod domain;
mod gids;
mod ledger;
mod listener;
mod listing;
mod memory;
mod numbers;
pub mod options;
mod policy;
mod qp;
mod queue;
mod records;
mod refuse;
mod reload;
mod session;
mod uses;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rnic_core::abi::control::{GidRow, Refusal};
use rnic_core::device::StagAllocator;
use rnic_core::engine::DatagramPort;
use rnic_core::types::*;

use crate::cm::ConnectionManager;
use crate::config::{Config, Guid};
use crate::log::RateLimitedLogs;
use crate::privilege::Network;
use crate::rate::Buckets;
use crate::reaper::{Reaper, Receipt};
use crate::worker::{Ticket, Workers};
use answer::Outbox;
pub use answer::{Answer, Outcome, Refused, Response};
pub use capacity::Capacity;
use domain::NamedPds;
use ledger::{Kind, Ledger};
use memory::NextRegion;
use numbers::{Handles, Stags};
pub use policy::Policy;
pub use qp::PassedPort;
use qp::{Rendezvous, WiredPort};
use records::Records;
pub use reload::{Reload, Replaced};
use session::Session;
pub use session::SessionOpened;

/// The resource manager. See the module's documentation.
pub struct Manager {
    config: Arc<Config>,
    capacity: Capacity,
    policy: Policy,
    named_pds: NamedPds,
    /// How often users connect.
    connects: Buckets<u32>,
    /// Nothing new is taken.
    draining: bool,
    /// Where the daemon makes its sockets; clients of other namespaces are foreign.
    network: Option<Network>,
    generation: u64,
    /// The device's, which does not change with the host's name.
    guid: Guid,
    /// Addresses as verbs name them. Entries keep their index.
    gids: Vec<GidRow>,
    /// Why they could not be read; empty if they could.
    gids_problem: String,
    /// The same, as datagrams use it.
    datagram_port: Arc<DatagramPort>,
    wired_port: WiredPort,
    /// Where the devices are shown in files, if they are.
    tree: Option<PathBuf>,
    rendezvous: Rendezvous,
    started: Instant,
    ledger: Ledger,
    handles: AllHandles,
    stags: Stags,
    sessions: BTreeMap<SessionId, Session>,
    /// Sessions whose rights are those of an earlier configuration.
    outdated: BTreeSet<SessionId>,
    leaving: HashMap<SessionId, Session>,
    workers: Workers,
    cm: ConnectionManager,
    reaper: Reaper,
    pending: HashMap<Ticket, Pending>,
    /// Shared buffers that the reaper has yet to unmap, and sessions that wait for that.
    unmapping: HashMap<Receipt, SessionId>,
    outbox: Outbox,
    records: Records,
    /// All workers have answered the last question.
    alive: bool,
    said: RateLimitedLogs,
}

/// Handles of every kind.
#[derive(Default)]
struct AllHandles {
    sessions: Handles,
    pds: Handles,
    shared_buffers: Handles,
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
    ReregMr { session: SessionId, mr: MrId, next: Box<NextRegion> },
    DestroyQp { session: SessionId, qp: QpId },
    ResetQp { session: SessionId, qp: QpId },
    ModifyQp { session: SessionId },
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
        mut cm: ConnectionManager,
        reaper: Reaper,
        random: Random,
    ) -> Self {
        let policy = Policy::new(&config);
        policy.report_unknown();
        let diagnoses = workers.diagnoses().clone();
        diagnoses.keep_of_ended(config.limits.device.count(Kind::Diagnoses) as usize);
        let most_notes = config.limits.device.count(Kind::EventRecords) as usize;
        let found = if_addrs::get_if_addrs();
        let gids = gids::table(&config, found.as_deref().unwrap_or_default());
        let datagram_port = gids::datagram_port(&gids, config.wired.port, config.engine.loopback);
        cm.set_datagram_port(&datagram_port, config.device.addresses.is_empty());
        let mut manager = Manager {
            policy,
            named_pds: NamedPds::default(),
            connects: Buckets::new(USERS_REMEMBERED, BURST),
            draining: false,
            network: Network::own().ok(),
            generation: random.generation,
            guid: config.device.guid_here(),
            datagram_port,
            wired_port: WiredPort::default(),
            gids,
            gids_problem: String::new(),
            tree: None,
            rendezvous: Rendezvous::default(),
            started: Instant::now(),
            ledger: Ledger::new(&config.limits, &capacity),
            handles: AllHandles { qps: Handles::of_queue_pairs(), ..AllHandles::default() },
            stags: Stags::new(StagAllocator::new(random.stag_seed)),
            sessions: BTreeMap::new(),
            outdated: BTreeSet::new(),
            leaving: HashMap::new(),
            pending: HashMap::new(),
            unmapping: HashMap::new(),
            outbox: Outbox::default(),
            records: Records::new(diagnoses, most_notes),
            alive: false,
            said: RateLimitedLogs::new(10, Duration::from_secs(60)),
            config,
            capacity,
            workers,
            cm,
            reaper,
        };
        if let Err(error) = found {
            manager.gids_unknown(&error);
        }
        manager
    }

    /// Number of worker threads, which are numbered from 0.
    pub fn workers(&self) -> u32 {
        self.capacity.workers
    }

    /// Has workers wake the control thread when they are woken; whether all of them sleep.
    pub fn watch_workers(&self) -> bool {
        self.workers.watch()
    }

    /// Whether all workers that slept when they were watched have slept since.
    pub fn workers_still_sleep(&self) -> bool {
        self.workers.still_sleep()
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
    pub fn poll_answer(&mut self) -> Option<(SessionId, Response)> {
        self.outbox.poll_answer()
    }

    /// A session that a worker found misbehaving, and why; it is to be closed.
    pub fn poll_ended(&mut self) -> Option<(SessionId, String)> {
        self.outbox.poll_ended()
    }

    /// The connection manager, to hand it readiness and time. [`Manager::settle`] is due after.
    pub fn connections(&mut self) -> &mut ConnectionManager {
        &mut self.cm
    }
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
