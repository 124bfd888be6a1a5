//! Object tables of a session.
//!
//! An object holds its charges, its handle, its memory and its uses of other objects. All of them
//! are released when it is dropped, in the order of the fields: first the memory and the numbers,
//! then the charge for them.

mod close;
mod open;

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use rnic_abi::abi::control::{ClientRow, Event, Refusal};
use rnic_abi::types::*;

use crate::events::EventSender;
use crate::log::RateLimitedLog;
use crate::resource::domain::Pd;
use crate::resource::ledger::{Account, Charge, Kind};
use crate::resource::listener::Listener;
use crate::resource::memory::{Attached, MemoryWindow, Mr, SharedBuffer};
use crate::resource::numbers::{Doorbells, Handle};
use crate::resource::policy::{Identity, Rights};
use crate::resource::qp::Qp;
use crate::resource::queue::{Arenas, Channel, CqObject, SrqObject};
use crate::resource::refuse;
use crate::worker::Ticket;
pub use open::SessionOpened;

/// A client's session.
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
    /// The client's library copies data to and from its attached memory. Fixed at Hello, so a
    /// reload of `trusted` applies to later sessions.
    pub library_copies: bool,
    /// The client's attached address space.
    pub attached: Option<Attached>,
    pub mrs: BTreeMap<MrId, Mr>,
    pub channels: BTreeMap<ChannelId, Channel>,
    pub cqs: BTreeMap<CqId, CqObject>,
    pub srqs: BTreeMap<SrqId, SrqObject>,
    pub qps: BTreeMap<QpId, Qp>,
    pub listeners: BTreeMap<ListenerId, Listener>,
    /// Connection requests that the client has seen and neither accepted nor rejected.
    pub requests: BTreeMap<RequestId, Undecided>,
    /// Unsent events of connections, oldest first, with the tickets for which they wait.
    held_events: VecDeque<(Option<Ticket>, Event)>,
    pub windows: BTreeMap<MwId, MemoryWindow>,
    /// Rate limit of the session's recorded events.
    pub noted: RateLimitedLog,
    pub opening_noted: bool,
    /// Fault rules of users selected the session at the last update of its QPs.
    pub has_faults: bool,
    _handle: Handle,
    _charge: Charge,
}

/// Identity and rights of a client. The kernel recorded the identity at connect.
#[derive(Clone, Debug)]
pub struct Client {
    pub pid: i32,
    pub identity: Identity,
    pub command: String,
    pub rights: Arc<Rights>,
}

impl Client {
    /// Returns true if workers may access the client's attached memory. The client can stall such
    /// accesses, so it must be able to stop the daemon anyway, or be trusted by the administrator.
    pub fn is_trusted(&self) -> bool {
        self.rights.trusted || self.could_stop_the_daemon()
    }

    /// Returns true if the client may pass TCP sockets. Calls on such a socket can block threads
    /// that serve other clients.
    pub fn may_pass_sockets(&self) -> bool {
        self.rights.sockets || self.could_stop_the_daemon()
    }

    fn could_stop_the_daemon(&self) -> bool {
        self.identity.uid == 0 || self.rights.own
    }

    /// Returns the client's user ID, or `None` if the ID is not unique.
    pub fn account(&self) -> Option<u32> {
        self.rights.known.then_some(self.identity.uid)
    }
}

impl Session {
    pub fn new(
        id: SessionId,
        client: Client,
        account: Arc<Account>,
        arenas: Arenas,
        events: Arc<EventSender>,
        handle: Handle,
        charge: Charge,
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
            held_events: VecDeque::new(),
            windows: BTreeMap::new(),
            noted: super::records::log_limit(),
            opening_noted: false,
            has_faults: false,
            _handle: handle,
            _charge: charge,
        }
    }

    /// Leaves the named domains, even if their objects still exist: for other sessions, this
    /// session has ended.
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

    /// Sends an event. Unread events are kept, up to a limit, and flushed when the client reads.
    pub fn tell(&self, event: &Event) {
        let _ = self.events.send(event);
    }

    /// Sends an event of a connection after the held events. If more than [`MAX_HELD_EVENTS`] are
    /// held, sends all of them at once. The event channel limits unread events.
    pub fn tell_in_order(&mut self, event: Event) {
        self.held_events.push_back((None, event));
        self.send_unheld_events();
    }

    /// Holds an event of a connection, and all later events, until a ticket is done.
    pub fn hold_event(&mut self, ticket: Ticket, event: Event) {
        self.held_events.push_back((Some(ticket), event));
    }

    /// Sends the events that waited for a ticket.
    pub fn release_events(&mut self, ticket: Ticket) {
        for (waits, _) in &mut self.held_events {
            *waits = waits.filter(|waits| *waits != ticket);
        }
        self.send_unheld_events();
    }

    fn send_unheld_events(&mut self) {
        let too_many = self.held_events.len() > MAX_HELD_EVENTS;
        let next = |(waits, _): &mut (Option<Ticket>, Event)| too_many || waits.is_none();
        while let Some((_, event)) = self.held_events.pop_front_if(next) {
            self.tell(&event);
        }
    }

    /// Returns the listener of an undecided request.
    pub fn request(&self, id: RequestId) -> Result<ListenerId, Refusal> {
        let found = self.requests.get(&id).map(|request| request.listener);
        found.ok_or_else(|| refuse::no_such("connection request", id.0))
    }
}

/// A connection request that its session has neither accepted nor rejected.
#[derive(Clone, Copy, Debug)]
pub struct Undecided {
    pub listener: ListenerId,
    /// Address of the peer.
    pub peer: IpAddr,
}

/// Maximum number of events that wait for a worker.
const MAX_HELD_EVENTS: usize = 1024;

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
