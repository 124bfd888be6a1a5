//! What one session owns: tables of objects, and nothing that decides about them.
//!
//! An object holds what it was given: its charges, its handle, its places and its uses of other
//! objects. All of that is given back when it is dropped, in the order of the fields: first the
//! memory and the numbers, then the charge for them.

mod close;
mod open;

use std::collections::BTreeMap;
use std::sync::Arc;

use rnic_core::abi::control::{ClientRow, Event, Refusal};
use rnic_core::types::*;

use crate::events::EventSender;
use crate::log::RateLimitedLog;
use crate::resource::domain::Pd;
use crate::resource::ledger::{Account, Charge, Kind};
use crate::resource::listener::Listener;
use crate::resource::memory::{Attached, MemoryWindow, Mr, SharedBuffer};
use crate::resource::numbers::{Doorbells, Handle};
use crate::resource::policy::Identity;
use crate::resource::qp::Qp;
use crate::resource::queue::{Arenas, Channel, CqObject, SrqObject};
use crate::resource::refuse;
pub use open::SessionOpened;

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
    pub shared_buffers: BTreeMap<SharedBufferId, SharedBuffer>,
    /// The client's library copies its attached memory. Fixed in Hello, so a reload of `trusted`
    /// applies to later sessions.
    pub library_copies: bool,
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
    pub noted: RateLimitedLog,
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
    /// Whether workers may touch its attached memory, which it can make wait: only who could stop
    /// the daemon anyway, or whom the administrator trusts as much.
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
            library_copies: !client.is_trusted(),
            client,
            account,
            refusals: 0,
            arenas,
            doorbells: Doorbells::default(),
            events,
            pds: BTreeMap::new(),
            shared_buffers: BTreeMap::new(),
            attached: None,
            mrs: BTreeMap::new(),
            channels: BTreeMap::new(),
            cqs: BTreeMap::new(),
            srqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            listeners: BTreeMap::new(),
            requests: BTreeMap::new(),
            windows: BTreeMap::new(),
            noted: super::records::log_limit(),
            opening_noted: false,
            _handle: handle,
            _charge: charge,
        }
    }

    /// Leaves the domains that it shares with other sessions, whatever it has in them: for them it
    /// is over before all of that is gone.
    pub fn leave_named_pds(&mut self) {
        for pd in self.pds.values_mut() {
            pd.named = None;
        }
        self.mrs.values_mut().for_each(|mr| mr.region.membership = None);
        self.qps.values_mut().for_each(|qp| qp.membership = None);
    }

    pub fn pd(&mut self, id: PdId) -> Result<&mut Pd, Refusal> {
        self.pds.get_mut(&id).ok_or_else(|| refuse::no_such("PD", id.0))
    }

    pub fn shared_buffer(&mut self, id: SharedBufferId) -> Result<&mut SharedBuffer, Refusal> {
        self.shared_buffers.get_mut(&id).ok_or_else(|| refuse::no_such("shared buffer", id.0))
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

pub fn client_row(s: &Session) -> ClientRow {
    let used = s.account.amounts();
    let count = |kind| u32::try_from(used.of(kind)).unwrap_or(u32::MAX);
    ClientRow {
        session: s.id,
        pid: s.client.pid,
        uid: s.client.identity.uid,
        command: s.client.command.clone(),
        qps: count(Kind::Qps),
        cqs: count(Kind::Cqs),
        mrs: count(Kind::Mrs),
        shared_bytes: used.of(Kind::SharedBytes),
        arena_bytes: used.of(Kind::ArenaBytes),
        refusals: s.refusals,
    }
}
