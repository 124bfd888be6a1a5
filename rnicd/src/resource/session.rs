//! What one session owns: tables of objects, and nothing that decides about them.
//!
//! An object holds what it was given: its charges, its handle, its places and its uses of other
//! objects. All of that is given back when it is dropped, in the order of the fields: first the memory
//! and the numbers, then the charge for them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rnic_core::abi::control::{Event, Refusal};
use rnic_core::device::window::WindowCount;
use rnic_core::device::{Cq, QpShared, Srq, Window};
use rnic_core::engine::QpConfig;
use rnic_core::shm::Mapping;
use rnic_core::types::*;

use super::arena::{Arenas, Place};
use super::attach::Attached;
use super::ledger::{Account, Charge};
use super::named_pd::{Membership, Opened};
use super::numbers::{Doorbell, Doorbells, Handle, IssuedStag};
use super::policy::Identity;
use super::reads::Reads;
use super::refuse;
use super::uses::{Use, Users};
use crate::events::{ChannelSender, EventSender};
use crate::log::Damper;

/// A client's lease on the device.
pub struct Session {
    pub id: SessionId,
    pub client: Client,
    pub account: Arc<Account>,
    pub refusals: u64,
    pub arenas: Arenas,
    pub doorbells: Doorbells,
    pub events: Arc<EventSender>,
    pub pds: BTreeMap<PdId, Pd>,
    pub segments: BTreeMap<SegmentId, Segment>,
    /// The client's own address space, once it has attached it.
    pub attached: Option<Attached>,
    pub mrs: BTreeMap<MrId, Mr>,
    pub channels: BTreeMap<ChannelId, Channel>,
    pub cqs: BTreeMap<CqId, CqObject>,
    pub srqs: BTreeMap<SrqId, SrqObject>,
    pub qps: BTreeMap<QpId, Qp>,
    pub listeners: BTreeMap<ListenerId, Listener>,
    /// Connection requests told to the client and not decided.
    pub requests: BTreeMap<RequestId, ListenerId>,
    pub windows: BTreeMap<MwId, MemoryWindow>,
    /// What it causes that is noted.
    pub noted: Damper,
    pub opening_noted: bool,
    _handle: Handle,
    _charge: Charge,
}

/// Who the client is, as the kernel said when it connected.
#[derive(Clone, Debug)]
pub struct Client {
    pub pid: i32,
    pub identity: Identity,
    pub command: String,
    /// Whether it may see everybody's objects, drain and disconnect.
    pub admin: bool,
    /// Whether the daemon itself may copy in its attached memory.
    pub trusted: bool,
    /// Whether the kernel could name its user here.
    pub known: bool,
    /// Whether that is the daemon's own.
    pub own: bool,
    /// Whether it may pass TCP sockets of its own.
    pub sockets: bool,
}

impl Client {
    /// Whether workers may touch its attached memory, which it can make wait: only who could stop the
    /// daemon anyway, or whom the administrator trusts as much.
    pub fn is_trusted(&self) -> bool {
        self.trusted || self.could_stop_the_daemon()
    }

    /// Whether threads that serve others may touch TCP sockets of its own, which it can make wait.
    pub fn may_pass_sockets(&self) -> bool {
        self.sockets || self.could_stop_the_daemon()
    }

    fn could_stop_the_daemon(&self) -> bool {
        self.identity.uid == 0 || self.own
    }

    /// Its user, unless the kernel cannot name him: then the number it has says nothing.
    pub fn account(&self) -> Option<u32> {
        self.known.then_some(self.identity.uid)
    }
}

/// Counted where the domain is.
pub type UseOfPd = Use<AtomicU32>;
/// Counted where the segment is.
pub type UseOfSegment = Use<AtomicU32>;
/// Counted where the channel is.
pub type UseOfChannel = Use<AtomicU32>;

/// A protection domain, as far as this session uses it.
#[derive(Debug)]
pub struct Pd {
    /// How often a named one was opened besides the first time.
    pub reopened: u32,
    pub mrs: Users,
    pub qps: Users,
    pub windows: Users,
    pub srqs: Users,
    /// The session's place in it, if others may have it open too.
    pub named: Option<Opened>,
    /// Its own, unless it is named.
    _handle: Option<Handle>,
    _charge: Charge,
}

/// Shared memory.
pub struct Segment {
    /// None while it is only reserved.
    pub mapping: Option<Arc<Mapping>>,
    pub length: u64,
    pub mrs: Users,
    pub _handle: Handle,
    pub _charges: [Charge; 2],
}

/// A memory region.
pub struct Mr {
    pub pd: PdId,
    /// Segment it is in; none in attached memory.
    pub segment: Option<SegmentId>,
    pub stag: IssuedStag,
    pub iova: u64,
    pub length: u64,
    pub access: Access,
    pub scope: Scope,
    /// Windows bound to it, counted by the workers.
    pub windows: Arc<WindowCount>,
    /// In a named domain.
    pub membership: Option<Membership>,
    pub _uses: (UseOfPd, Option<UseOfSegment>),
    pub _handle: Handle,
    pub _charge: Charge,
}

/// A memory window.
pub struct MemoryWindow {
    pub window: Arc<Window>,
    /// Its STag before it was ever bound.
    pub _issued: IssuedStag,
    pub _pd: UseOfPd,
    pub _handle: Handle,
    pub _charge: Charge,
}

/// A completion channel.
pub struct Channel {
    pub sender: Arc<ChannelSender>,
    pub cqs: Users,
    pub _handle: Handle,
    pub _charge: Charge,
}

/// A completion queue.
pub struct CqObject {
    pub cq: Arc<Cq>,
    pub channel: Option<(ChannelId, UseOfChannel)>,
    pub place: Place,
    pub doorbell: Doorbell,
    pub _handle: Handle,
    pub entries: Charge,
    pub _charge: Charge,
}

/// A shared receive queue.
pub struct SrqObject {
    pub srq: Arc<Srq>,
    pub pd: PdId,
    pub _pd: UseOfPd,
    pub _place: (Place, Doorbell),
    pub _handle: Handle,
    pub _charge: Charge,
}

/// A queue pair.
pub struct Qp {
    pub pd: PdId,
    pub send_cq: CqId,
    pub recv_cq: CqId,
    /// Where its receives come from, if it has no receive queue of its own.
    pub srq: Option<SrqId>,
    pub shared: Arc<QpShared>,
    pub phase: Phase,
    /// Known once it has been connected.
    pub connection: Option<Connection>,
    /// What its connection was charged.
    pub reads: Option<Reads>,
    /// In a named domain.
    pub membership: Option<Membership>,
    pub _uses: QpUses,
    pub _places: (Place, Option<Place>, Doorbell),
    pub _handle: Handle,
    pub _charge: Charge,
}

/// What a queue pair uses. A CQ that it uses for both its queues has one user more all the same.
pub struct QpUses {
    pub _pd: UseOfPd,
    pub _send_cq: Use<Cq>,
    pub _recv_cq: Option<Use<Cq>>,
    pub _srq: Option<Use<Srq>>,
}

/// Who holds a QP.
pub enum Phase {
    /// Nobody: it may connect or accept.
    Idle(Box<QpConfig>),
    /// The connection manager, as the side that connects.
    Connecting(Box<QpConfig>),
    /// The connection manager, as the side that accepted.
    Accepting(Box<QpConfig>),
    /// A worker, for the rest of its life.
    Bound(u32),
    /// Nobody any more: it is being destroyed.
    Leaving,
}

impl Phase {
    pub fn name(&self) -> &'static str {
        match self {
            Phase::Idle(_) => "Idle",
            Phase::Connecting(_) => "connecting",
            Phase::Accepting(_) => "accepting",
            Phase::Bound(_) => "connected or ended",
            Phase::Leaving => "being destroyed",
        }
    }
}

/// What was agreed when a QP was connected.
#[derive(Clone, Copy)]
pub struct Connection {
    pub path: &'static str,
    pub addresses: AddressPair,
    pub ird: u16,
    pub ord: u16,
}

/// A bound address.
pub struct Listener {
    pub context: u64,
    pub address: SocketAddr,
    pub _handle: Handle,
    pub _charge: Charge,
}

impl Session {
    pub fn new(
        id: SessionId,
        client: Client,
        account: Arc<Account>,
        arenas: Arenas,
        events: Arc<EventSender>,
        (handle, charge): (Handle, Charge),
    ) -> Self {
        Session {
            id,
            client,
            account,
            refusals: 0,
            arenas,
            doorbells: Doorbells::default(),
            events,
            pds: BTreeMap::new(),
            segments: BTreeMap::new(),
            attached: None,
            mrs: BTreeMap::new(),
            channels: BTreeMap::new(),
            cqs: BTreeMap::new(),
            srqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            listeners: BTreeMap::new(),
            requests: BTreeMap::new(),
            windows: BTreeMap::new(),
            noted: super::notes::damper(),
            opening_noted: false,
            _handle: handle,
            _charge: charge,
        }
    }

    /// Leaves the domains that it shares with other sessions, whatever it has in them: for them it is
    /// over before all of that is gone.
    pub fn leave_named_pds(&mut self) {
        for pd in self.pds.values_mut() {
            pd.named = None;
        }
        self.mrs.values_mut().for_each(|mr| mr.membership = None);
        self.qps.values_mut().for_each(|qp| qp.membership = None);
    }

    pub fn pd(&mut self, id: PdId) -> Result<&mut Pd, Refusal> {
        self.pds.get_mut(&id).ok_or_else(|| refuse::no_such("PD", id.0))
    }

    pub fn segment(&mut self, id: SegmentId) -> Result<&mut Segment, Refusal> {
        self.segments.get_mut(&id).ok_or_else(|| refuse::no_such("segment", id.0))
    }

    pub fn channel(&mut self, id: ChannelId) -> Result<&mut Channel, Refusal> {
        self.channels.get_mut(&id).ok_or_else(|| refuse::no_such("completion channel", id.0))
    }

    pub fn cq(&self, id: CqId) -> Result<&CqObject, Refusal> {
        self.cqs.get(&id).ok_or_else(|| refuse::no_such("CQ", id.0))
    }

    pub fn srq(&self, id: SrqId) -> Result<&SrqObject, Refusal> {
        self.srqs.get(&id).ok_or_else(|| refuse::no_such("SRQ", id.0))
    }

    pub fn qp(&mut self, id: QpId) -> Result<&mut Qp, Refusal> {
        self.qps.get_mut(&id).ok_or_else(|| refuse::no_such("QP", id.0))
    }

    pub fn listener(&mut self, id: ListenerId) -> Result<&mut Listener, Refusal> {
        self.listeners.get_mut(&id).ok_or_else(|| refuse::no_such("listener", id.0))
    }

    /// Sends an event. What the client does not read is kept and bounded there; whoever watches
    /// the channel flushes it.
    pub fn tell(&self, event: &Event) {
        let _ = self.events.send(event);
    }

    /// The listener of an undecided request.
    pub fn request(&self, id: RequestId) -> Result<ListenerId, Refusal> {
        let found = self.requests.get(&id).copied();
        found.ok_or_else(|| refuse::no_such("connection request", id.0))
    }
}

impl Pd {
    /// One of the session's own.
    pub fn private(handle: Handle, charge: Charge) -> Self {
        Pd::new(None, Some(handle), charge)
    }

    /// One that other sessions may have open too.
    pub fn named(opened: Opened, charge: Charge) -> Self {
        Pd::new(Some(opened), None, charge)
    }

    fn new(named: Option<Opened>, handle: Option<Handle>, charge: Charge) -> Self {
        Pd {
            reopened: 0,
            mrs: Users::default(),
            qps: Users::default(),
            windows: Users::default(),
            srqs: Users::default(),
            named,
            _handle: handle,
            _charge: charge,
        }
    }
}

impl Qp {
    /// Refuses a QP that has left Idle, naming its state.
    pub fn refuse_unless_idle(&self, id: QpId) -> Result<(), Refusal> {
        match self.phase {
            Phase::Idle(_) => Ok(()),
            _ => Err(wrong_state(id, self.phase.name(), "Idle")),
        }
    }
}

/// A QP is in the wrong state for what was asked.
pub fn wrong_state(qp: QpId, state: &str, needs: &str) -> Refusal {
    Refusal::WrongState {
        kind: "QP".to_owned(),
        handle: qp.0,
        state: state.to_owned(),
        needs: needs.to_owned(),
    }
}
