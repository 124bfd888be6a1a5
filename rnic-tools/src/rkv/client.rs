//! The client: GETs by RDMA Read, everything else by requests.

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
    /// Buffer for Reads of a slot, followed by a buffer for a request.
    region: Mr,
    /// A private copy of the slot, which a late Read cannot change.
    slot: Vec<u8>,
    torn: u64,
}

/// The result of a successful GET.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The stored value.
    pub value: Vec<u8>,
    /// Version of the slot; increases with every change.
    pub version: u64,
}

impl Client {
    /// Connects to the server at `peer`; `patience` is the time limit for each reply.
    pub fn connect(
        context: &Context,
        peer: SocketAddr,
        patience: Duration,
    ) -> Result<Self, KvError> {
        let pd = context.open_pd(None)?;
        // Requests have a separate buffer, because their maximum length is not known yet.
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
        // Bounded by the limits of a geometry.
        let slot = table.geometry.slot_size();
        let bytes = u64::from(slot) + u64::from(Request::max(table.geometry));
        let buffer = context.create_shared_buffer(bytes)?;
        let region = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE)?;
        Ok(Client { messenger, table, peer, region, slot: vec![0; slot as usize], torn: 0 })
    }

    /// Returns the geometry of the server's table.
    pub fn geometry(&self) -> Geometry {
        self.table.geometry
    }

    /// Returns the number of torn Reads, which were repeated, on this connection.
    pub fn torn(&self) -> u64 {
        self.torn
    }

    /// Reads the value of a key by RDMA Read, without the server process.
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
                // `read_whole` has excluded torn slots.
                Slot::Entry { .. } | Slot::Deleted { .. } | Slot::Torn => {}
            }
        }
        Ok(None)
    }

    /// Stores a value under a key. Returns its version.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<u64, KvError> {
        self.check_key(key)?;
        let max = self.table.geometry.max_value;
        if value.len() > max as usize {
            return Err(KvError::ValueLength { bytes: value.len(), max });
        }
        match self.ask(Request::Put { key, value })? {
            Reply::Done { version } => Ok(version),
            Reply::Full => Err(KvError::Full { probes: self.table.geometry.probes }),
            other => Err(self.protocol(format!("reply {other:?} to a PUT"))),
        }
    }

    /// Deletes a key. Returns true if it existed.
    pub fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.check_key(key)?;
        match self.ask(Request::Delete { key })? {
            Reply::Done { .. } => Ok(true),
            Reply::Absent => Ok(false),
            other => Err(self.protocol(format!("reply {other:?} to a DELETE"))),
        }
    }

    /// Closes the connection gracefully.
    pub fn close(self) {
        self.messenger.finish();
    }

    /// Copies a slot repeatedly until the copy is not torn.
    fn read_whole(&mut self, slot: u64) -> Result<(), KvError> {
        let geometry = self.table.geometry;
        let length = geometry.slot_size();
        let began = Instant::now();
        let mut reads = 0;
        while reads < LEAST_READS || began.elapsed() < PATIENCE {
            if reads >= READS_IN_A_ROW {
                // The server may need this CPU to finish its write.
                std::thread::yield_now();
            }
            let from = self.table.region.at(geometry.at(slot));
            let read = SendRequest::read(READ, self.region.sge(0, length), from).signaled();
            self.messenger.post(&[read])?;
            match self.messenger.next()? {
                MessengerEvent::Done(READ) => {}
                _ => return Err(self.protocol("a reply without a request".to_owned())),
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

    /// Sends a request and waits for the reply.
    fn ask(&mut self, request: Request<'_>) -> Result<Reply, KvError> {
        let bytes = request.to_bytes();
        let at = self.table.geometry.slot_size().into();
        self.region.write_at(at, &bytes)?;
        // At most the maximum length of a request, which fits 32 bits.
        let sge = [self.region.sge(at, bytes.len() as u32)];
        self.messenger.post(&[SendRequest::send(REQUEST, &sge).signaled()])?;
        let mut reply = None;
        let mut sent = false;
        // The order is not fixed: the Send completes when its buffer may be reused.
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

/// `wr_id`s of the posted requests.
const READ: u64 = 1;
const REQUEST: u64 = 2;
/// Size of the buffer for a reply, in bytes.
const REPLY: u32 = 64;
/// Reads of a torn slot before the first yield.
const READS_IN_A_ROW: u32 = 16;
/// Minimum Reads of a torn slot before giving up: some must fall between two writes.
const LEAST_READS: u32 = 1000;
/// Minimum time for Reads of a torn slot before giving up: the writer may have lost its CPU.
const PATIENCE: Duration = Duration::from_secs(3);
