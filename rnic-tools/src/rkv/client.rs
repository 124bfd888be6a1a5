//! The client: GETs by RDMA Read, everything else by asking.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rnic_client::{Access, ConnectOptions, Context, Mr, SendRequest};

use super::KvError;
use super::layout::{Geometry, Slot};
use super::wire::{self, Reply, Request, Table};
use crate::link;
use crate::messenger::{Messenger, MessengerEvent, MessengerSizes};

/// A connection to a server.
pub struct Client {
    messenger: Messenger,
    table: Table,
    peer: SocketAddr,
    /// Where a slot is read to, and behind it a request to send.
    region: Mr,
    /// A private copy of the slot, which no late Read can change.
    slot: Vec<u8>,
    torn: u64,
}

/// A value that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The value as it was stored.
    pub value: Vec<u8>,
    /// Version of its slot; grows with every change.
    pub version: u64,
}

impl Client {
    /// Connects to the server at `peer`, which may take `patience` for each answer.
    pub fn connect(
        context: &Context,
        peer: SocketAddr,
        patience: Duration,
    ) -> Result<Self, KvError> {
        let pd = context.open_pd(None)?;
        // Requests go out of a region of their own: how long they may be is not known yet.
        let sizes = MessengerSizes { length: REPLY, receives: 1, sends: 0, others: 2 };
        let messenger = Messenger::new(context, &pd, sizes, peer, patience)?;
        let options =
            ConnectOptions { private_data: wire::greeting(), ..ConnectOptions::default() };
        let connected = link::connect(messenger.qp(), peer, &options)?;
        let table =
            Table::parse(&connected.private_data).map_err(|why| KvError::Protocol { peer, why })?;
        if connected.ord == 0 {
            let why = "no RDMA Reads were granted".to_owned();
            return Err(KvError::Protocol { peer, why });
        }
        // Bounded by what a geometry may be.
        let slot = table.geometry.slot_size();
        let bytes = u64::from(slot) + u64::from(Request::max(table.geometry));
        let buffer = context.create_shared_buffer(bytes)?;
        let region = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE)?;
        Ok(Client { messenger, table, peer, region, slot: vec![0; slot as usize], torn: 0 })
    }

    /// Geometry of the server's table.
    pub fn geometry(&self) -> Geometry {
        self.table.geometry
    }

    /// Slots that were read while they changed, and read again, since the connection was made.
    pub fn torn(&self) -> u64 {
        self.torn
    }

    /// Reads the value of a key, without the server's process.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Found>, KvError> {
        self.check_key(key)?;
        let geometry = self.table.geometry;
        for slot in geometry.candidates(key) {
            self.read_whole(slot)?;
            match Slot::read(&self.slot) {
                Slot::Entry { version, key: there, value } if there == key => {
                    return Ok(Some(Found { value: value.to_vec(), version }));
                }
                Slot::Empty => return Ok(None),
                // `read_whole` has seen to it that it is not torn.
                Slot::Entry { .. } | Slot::Deleted { .. } | Slot::Torn => {}
            }
        }
        Ok(None)
    }

    /// Stores a value under a key and returns its version.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<u64, KvError> {
        self.check_key(key)?;
        let max = self.table.geometry.max_value;
        if value.len() > max as usize {
            return Err(KvError::ValueLength { bytes: value.len(), max });
        }
        match self.ask(Request::Put { key, value })? {
            Reply::Done { version } => Ok(version),
            Reply::Full => Err(KvError::Full { probes: self.table.geometry.probes }),
            other => Err(self.protocol(format!("{other:?} to a put"))),
        }
    }

    /// Deletes a key; says whether it was there.
    pub fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.check_key(key)?;
        match self.ask(Request::Delete { key })? {
            Reply::Done { .. } => Ok(true),
            Reply::Absent => Ok(false),
            other => Err(self.protocol(format!("{other:?} to a delete"))),
        }
    }

    /// Ends the connection in order.
    pub fn close(self) {
        self.messenger.finish();
    }

    /// Copies a slot, again and again until it is not torn.
    fn read_whole(&mut self, slot: u64) -> Result<(), KvError> {
        let geometry = self.table.geometry;
        let length = geometry.slot_size();
        let began = Instant::now();
        let mut reads = 0;
        while reads < LEAST_READS || began.elapsed() < PATIENCE {
            if reads >= READS_IN_A_ROW {
                // The server may need this CPU to finish what it writes.
                std::thread::yield_now();
            }
            let from = self.table.region.at(geometry.at(slot));
            let read = SendRequest::read(READ, self.region.sge(0, length), from).signaled();
            self.messenger.post(&[read])?;
            match self.messenger.next()? {
                MessengerEvent::Done(READ) => {}
                _ => return Err(self.protocol("a reply to no request".to_owned())),
            }
            self.region.read_at(0, &mut self.slot)?;
            if Slot::read(&self.slot) != Slot::Torn {
                return Ok(());
            }
            self.torn += 1;
            reads += 1;
        }
        Err(KvError::Torn { slot, reads })
    }

    /// Sends a request and waits for its reply.
    fn ask(&mut self, request: Request<'_>) -> Result<Reply, KvError> {
        let bytes = request.to_bytes();
        let at = self.table.geometry.slot_size().into();
        self.region.write_at(at, &bytes)?;
        // Not longer than the longest request, which fits 32 bits.
        let sge = [self.region.sge(at, bytes.len() as u32)];
        self.messenger.post(&[SendRequest::send(REQUEST, &sge).signaled()])?;
        let mut reply = None;
        let mut sent = false;
        // Their order is open: the Send completes when its bytes may be reused.
        while !sent || reply.is_none() {
            match self.messenger.next()? {
                MessengerEvent::Done(_) => sent = true,
                MessengerEvent::Message(bytes) => {
                    let parsed = Reply::parse(bytes);
                    if parsed.is_none() || reply.is_some() {
                        return Err(self.protocol("a malformed reply".to_owned()));
                    }
                    reply = parsed;
                }
            }
        }
        reply.ok_or_else(|| self.protocol("no reply".to_owned()))
    }

    fn check_key(&self, key: &[u8]) -> Result<(), KvError> {
        let max = self.table.geometry.max_key;
        match key.len() {
            n if (1..=usize::from(max)).contains(&n) => Ok(()),
            bytes => Err(KvError::KeyLength { bytes, max }),
        }
    }

    fn protocol(&self, why: String) -> KvError {
        KvError::Protocol { peer: self.peer, why }
    }
}

/// Names of the requests posted.
const READ: u64 = 1;
const REQUEST: u64 = 2;
/// Bytes of a place for replies.
const REPLY: u32 = 64;
/// Reads of a torn slot before the first yield.
const READS_IN_A_ROW: u32 = 16;
/// Reads of a torn slot before giving up, at least: some have to fall between two writes.
const LEAST_READS: u32 = 1000;
/// How long a slot is read before giving up, at least: its writer may have lost its CPU.
const PATIENCE: Duration = Duration::from_secs(3);
