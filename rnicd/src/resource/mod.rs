//! The resource manager: all decisions about access and limits.
//!
//! It owns the sessions' object tables, enforces the limits, and allocates handles, STags and
//! memory for queues. Its commands to workers and to the connection manager are already authorised,
//! so these need no checks (RFC 5042's Privileged Resource Manager). Handles are looked up among
//! the session's own objects. The manager implements no protocol, and does not access control
//! sockets or message bytes.
//!
//! The control thread calls [`Manager::request`] for a client's request, [`Manager::settle`] after
//! other threads have reported, and [`Manager::poll_answer`] and [`Manager::poll_ended`] for the
//! results.

mod addresses;
mod admin;
mod answer;
mod capacity;
mod devices;
mod dispatch;
mod domain;
mod faults;
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

use rnic_abi::abi::control::{GidRow, Refusal};
use rnic_abi::types::*;
use rnic_core::device::StagAllocator;
use rnic_core::engine::DatagramPort;

use crate::cm::ConnectionManager;
use crate::config::{Config, Guid};
use crate::log::RateLimitedLogs;
use crate::privilege::Network;
use crate::rate::Buckets;
use crate::reaper::{Reaper, Receipt};
use crate::worker::{Command, Ticket, Workers};
use answer::Outbox;
pub use answer::{Answer, Outcome, Refused, Response, SessionEnd};
pub use capacity::Capacity;
pub use devices::DeviceError;
use devices::RoceDevices;
use domain::NamedPds;
use faults::FaultRules;
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
    /// Rate limit of connects per user.
    connects: Buckets<u32>,
    /// Requests for new objects are refused.
    draining: bool,
    /// Network namespace of the daemon's sockets. Clients in other namespaces are foreign.
    network: Option<Network>,
    generation: u64,
    /// GUID of the device. It does not change with the host's name.
    guid: Guid,
    /// GID table. Entries keep their index.
    gids: Vec<GidRow>,
    /// GIDs that are not addresses of the host, and are valid only within the daemon.
    internal_gids: Vec<Gid>,
    devices: RoceDevices,
    faults: FaultRules,
    /// Error of the last attempt to read the host's addresses. Empty if it succeeded.
    gids_problem: String,
    /// GIDs, MTU and UDP port of the device, for UD QPs.
    datagram_port: Arc<DatagramPort>,
    wired_port: WiredPort,
    /// Root of the device tree, if there is one.
    tree: Option<PathBuf>,
    rendezvous: Rendezvous,
    started: Instant,
    ledger: Ledger,
    handles: AllHandles,
    stags: Stags,
    sessions: BTreeMap<SessionId, Session>,
    /// Sessions that still have the rights of an earlier configuration.
    outdated: BTreeSet<SessionId>,
    leaving: HashMap<SessionId, Session>,
    workers: Workers,
    cm: ConnectionManager,
    reaper: Reaper,
    pending: HashMap<Ticket, Pending>,
    /// Shared buffers that the reaper has yet to unmap, with the sessions they count against.
    unmapping: HashMap<Receipt, SessionId>,
    outbox: Outbox,
    records: Records,
    /// All workers have answered since the last [`Manager::probe_workers`].
    alive: bool,
    log_limits: RateLimitedLogs,
}

/// Handles of all kinds.
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

/// An operation that waits for the workers.
enum Pending {
    RegMr { session: SessionId, mr: MrId, stag: Stag },
    DeregMr { session: SessionId, mr: MrId },
    ReregMr { session: SessionId, mr: MrId, next: Box<NextRegion> },
    DestroyQp { session: SessionId, qp: QpId },
    ResetQp { session: SessionId, qp: QpId },
    ModifyQp { session: SessionId },
    Disconnected { session: SessionId },
    AllocWindow { session: SessionId, window: MwId, stag: Stag },
    DeallocWindow { session: SessionId, window: MwId },
    Detach { session: SessionId },
    Alive,
}

impl Manager {
    /// Creates a manager without sessions.
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
        diagnoses.set_ended_capacity(config.limits.device.count(Kind::Diagnoses) as usize);
        let most_notes = config.limits.device.count(Kind::EventRecords) as usize;
        let found = if_addrs::get_if_addrs();
        let interfaces = found.as_ref().cloned().unwrap_or_default();
        let named = config.wired.roce_devices();
        let named = named.iter().flat_map(|(_, netdev)| netdev.addresses()).copied().collect();
        let devices = RoceDevices::new(&config, interfaces, named);
        let gids = devices.addresses.clone();
        let internal_gids = gids::internal(&gids, &devices.interfaces);
        let datagram_port =
            gids::datagram_port(&gids, &internal_gids, config.wired.port, config.engine.loopback);
        cm.set_datagram_port(
            &datagram_port,
            config.device.addresses.is_empty(),
            crate::clock::now(),
        );
        let mut manager = Manager {
            policy,
            named_pds: NamedPds::default(),
            connects: Buckets::new(USERS_REMEMBERED, BURST),
            draining: false,
            network: Network::own().ok(),
            generation: random.generation,
            guid: config.device.effective_guid(),
            datagram_port,
            wired_port: WiredPort::default(),
            devices,
            faults: FaultRules::of_profile(&config.wired.profile),
            internal_gids,
            gids,
            gids_problem: String::new(),
            tree: None,
            rendezvous: Rendezvous::default(),
            started: Instant::now(),
            ledger: Ledger::new(&config, &capacity),
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
            log_limits: RateLimitedLogs::new(10, Duration::from_secs(60)),
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

    /// Returns the number of worker threads, which are numbered from 0.
    pub fn workers(&self) -> u32 {
        self.capacity.workers
    }

    /// Requests a wake-up from each worker. Returns true if all are asleep.
    pub fn watch_workers(&self) -> bool {
        self.workers.watch()
    }

    /// Returns true if no worker has woken up since [`Manager::watch_workers`] returned true.
    pub fn workers_still_sleep(&self) -> bool {
        self.workers.still_sleep()
    }

    /// Checks that all workers still run commands. [`Manager::poll_alive`] returns the result.
    pub fn probe_workers(&mut self) {
        let ticket = self.workers.all_ticketed(|| Command::Answer);
        self.pending.insert(ticket, Pending::Alive);
    }

    /// Returns true once all workers have answered [`Manager::probe_workers`].
    pub fn poll_alive(&mut self) -> bool {
        std::mem::take(&mut self.alive)
    }

    /// Takes a deferred answer.
    pub fn poll_answer(&mut self) -> Option<(SessionId, Response)> {
        self.outbox.answers.pop_front()
    }

    /// Takes a session to be closed, and the reason. The caller must close it.
    pub fn poll_ended(&mut self) -> Option<(SessionId, SessionEnd)> {
        self.outbox.ended.pop_front()
    }

    /// Returns the connection manager, for readiness and timeouts. Call [`Manager::settle`] after.
    pub fn connections(&mut self) -> &mut ConnectionManager {
        &mut self.cm
    }
}

/// Random numbers for one run of the daemon.
pub struct Random {
    /// Number of this run, in the header of each session's first arena.
    pub generation: u64,
    /// Seed of the STags.
    pub stag_seed: [u8; 32],
}

impl Random {
    /// Reads random bytes from the kernel. Waits until its generator is initialised, which
    /// `/dev/urandom` would not do.
    pub fn from_system() -> io::Result<Self> {
        use rustix::rand::{GetRandomFlags, getrandom};
        let mut bytes = [0u8; 40];
        // `getrandom` returns up to 256 bytes in full.
        rustix::io::retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))?;
        let (generation, seed) = bytes.split_at(8);
        let mut random = Random { generation: 0, stag_seed: [0; 32] };
        random.generation = generation.iter().fold(0, |n, byte| n << 8 | u64::from(*byte));
        random.stag_seed.copy_from_slice(seed);
        Ok(random)
    }
}

/// Number of users that the rate limit of connects tracks.
const USERS_REMEMBERED: usize = 1024;

/// Time over which a user's unused rate accumulates.
const BURST: Duration = Duration::from_secs(1);

/// Returns a session that is not being closed.
fn find(
    sessions: &mut BTreeMap<SessionId, Session>,
    id: SessionId,
) -> Result<&mut Session, Refusal> {
    sessions.get_mut(&id).ok_or_else(|| refuse::no_such("session", id.0))
}
