//! An end of the RDMA connections: memory, queues, and the roles of driver and peer.
//!
//! The driver posts the messages and measures the time; the peer answers. A stream ends when the
//! peer has all of it. The peer acknowledges the end of a stream of Writes. For Sends it returns
//! credits, which also keep the driver from sending more than the peer has receives for.

use std::net::SocketAddr;
use std::slice::from_ref;
use std::time::{Duration, Instant};

use rnic_client::{
    AcceptOptions, Access, CompletionOpcode, ConnectOptions, Context, Listener, Mr, Pd, Qp,
    QpOptions, QpType, RecvRequest, RemoteMr, SendRequest, Sending, Sge, Wiring,
};

use super::completions::{Completions, await_word};
use super::error::PerfError;
use super::protocol::QpAddress;
use super::spec::{Flow, INLINE, Op, SMALL_RECEIVES, Spec};
use super::stats::Times;

/// The process of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The process that measures the time and sends commands to the peer.
    Driver,
    /// The process that follows the driver.
    Peer,
}

/// Memory of the other end.
#[derive(Clone, Copy, Debug)]
pub struct RemoteMemory {
    /// Region to read from; `None` in the peer, which reads nothing.
    pub source: Option<RemoteMr>,
    /// Region to write to.
    pub sink: RemoteMr,
}

/// An end of all connections of a measurement.
pub struct End {
    role: Role,
    spec: Spec,
    /// All QPs, with and without traffic.
    qps: Vec<Qp>,
    /// Indices of the QPs with traffic.
    active: Vec<usize>,
    completions: Completions,
    /// Source of messages.
    source: Mr,
    /// Destination of messages: written by the other end, or by receives.
    sink: Mr,
    /// Buffers for credits and acknowledgements, 8 bytes each.
    notes: Mr,
    /// Number of receives posted. They use the slots of the sink in rotation.
    posted: u64,
    /// Number of ping-pong messages sent by Writes.
    ping_pongs: u64,
    /// Unused regions.
    _idle: Vec<Mr>,
}

impl End {
    /// Creates memory and QPs, and posts receives. Connects nothing.
    pub fn new(context: &Context, role: Role, spec: &Spec) -> Result<Self, PerfError> {
        let pd = context.open_pd(None)?;
        let memory = |used: bool, access: Access| -> Result<Mr, PerfError> {
            let len = if used { spec.working_set() } else { 0 };
            let buffer = context.create_shared_buffer(len.max(MEMORY))?;
            Ok(pd.reg_mr(&buffer, .., access)?)
        };
        let both = spec.flow == Flow::PingPong;
        let sends = (role == Role::Driver) != spec.op.is_answered();
        let lent = match spec.op {
            Op::FetchAdd => Access::LOCAL_WRITE | Access::REMOTE_ATOMIC,
            _ => Access::REMOTE_READ,
        };
        let source = memory(both || sends, lent)?;
        let sink = memory(both || !sends, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let notes = memory(false, Access::LOCAL_WRITE)?;
        let idle = match role {
            Role::Peer => many_regions(context, &pd, spec.regions)?,
            Role::Driver => Vec::new(),
        };
        let entries = u32::try_from(spec.cq_entries()).unwrap_or(u32::MAX);
        let completions = Completions::new(context, entries, spec.wait)?;
        let options = QpOptions {
            sq_depth: spec.sq_depth(),
            rq_depth: receives(role, spec),
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: INLINE as u16,
            kind: if spec.rc { QpType::Rc } else { QpType::Iwarp },
            ..QpOptions::new(completions.cq())
        };
        let qps = (0..spec.qps).map(|_| pd.create_qp(&options)).collect::<Result<Vec<_>, _>>()?;
        let mut end = End {
            role,
            spec: spec.clone(),
            qps,
            active: spec.active_positions().collect(),
            completions,
            source,
            sink,
            notes,
            posted: 0,
            ping_pongs: 0,
            _idle: idle,
        };
        for at in 0..end.active.len() {
            for _ in 0..receives(role, spec) {
                end.post_receive(at)?;
            }
        }
        Ok(end)
    }

    /// Returns the region that the other end may read or change.
    pub fn source(&self) -> RemoteMr {
        self.source.remote()
    }

    /// Returns the region that the other end may write.
    pub fn sink(&self) -> RemoteMr {
        self.sink.remote()
    }

    /// Connects all QPs sequentially.
    pub fn connect(&self, peer: SocketAddr) -> Result<(), PerfError> {
        let options = ConnectOptions::default();
        self.qps.iter().try_for_each(|qp| qp.connect(peer, &options).map(drop))?;
        Ok(())
    }

    /// Accepts connections for all QPs sequentially.
    pub fn accept(&self, listener: &Listener) -> Result<(), PerfError> {
        let options = AcceptOptions::default();
        for qp in &self.qps {
            listener.accept_request(options.timeout)?.accept(qp, &options)?;
        }
        Ok(())
    }

    /// Returns the GID and number of each QP, for the other end to connect to.
    pub fn places(&self, context: &Context) -> Result<Vec<QpAddress>, PerfError> {
        let gids = context.gids()?;
        let row = gids.first().ok_or_else(|| PerfError::Daemon("has no GID".to_owned()))?;
        Ok(self.qps.iter().map(|qp| QpAddress { gid: row.gid, qp: qp.id() }).collect())
    }

    /// Connects all RC QPs, each to the peer's QP with the same index.
    pub fn wire(&self, context: &Context, peers: &[QpAddress]) -> Result<(), PerfError> {
        let device = context.device()?;
        let ird = device.max_ird.min(WIRED_READS);
        let ord = device.max_ord.min(WIRED_READS);
        let sending = Sending { sq_psn: 0, timeout: 20, retry_count: 7, rnr_retry: 7, ord };
        for ((qp, own), peer) in self.qps.iter().zip(self.places(context)?).zip(peers) {
            qp.to_rtr(&Wiring {
                local: own.gid,
                remote: peer.gid,
                remote_qp: peer.qp,
                rq_psn: 0,
                path_mtu: 1024,
                min_rnr_timer: 12,
                ird,
                rights: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            })?;
            qp.to_rts(&sending)?;
        }
        Ok(())
    }

    /// Returns the first QP with traffic, and its completions.
    pub fn parts(&mut self) -> (&Qp, &mut Completions) {
        (&self.qps[self.active[0]], &mut self.completions)
    }

    /// Returns the path of the connections, as the daemon names it.
    pub fn path(&self) -> Result<String, PerfError> {
        Ok(self.active_qp(0).query()?.path)
    }

    /// Runs the driver's part of `count` messages or round trips. Records times of round trips.
    pub fn drive(
        &mut self,
        remote: &RemoteMemory,
        count: u64,
        times: &mut Times,
    ) -> Result<Duration, PerfError> {
        let start = Instant::now();
        match (self.spec.flow, self.spec.op) {
            (Flow::Stream, _) => return self.stream(remote, count),
            (Flow::PingPong, Op::Read | Op::FetchAdd) => {
                self.drive_answered(remote, count, times)?
            }
            (Flow::PingPong, Op::Send) => self.drive_ping_pong(count, times)?,
            (Flow::PingPong, Op::Write) => self.drive_write_ping_pong(remote, count, times)?,
        }
        Ok(start.elapsed())
    }

    /// Runs the peer's part.
    pub fn follow(&mut self, remote: &RemoteMemory, count: u64) -> Result<(), PerfError> {
        match (self.spec.flow, self.spec.op) {
            (_, Op::Read | Op::FetchAdd) => Ok(()),
            (Flow::Stream, Op::Send) => self.take_sends(count),
            (Flow::Stream, Op::Write) => self.acknowledge_end(),
            (Flow::PingPong, Op::Send) => self.follow_ping_pong(count),
            (Flow::PingPong, Op::Write) => self.follow_write_ping_pong(remote, count),
        }
    }

    // Streams.

    /// Posts `count` messages, rounded up to whole batches, as slots become free.
    fn stream(&mut self, remote: &RemoteMemory, count: u64) -> Result<Duration, PerfError> {
        let Spec { op, size, slots, batch, depth, .. } = self.spec;
        let local = if op.is_answered() { &self.sink } else { &self.source };
        let place = |slot| local.sge(u64::from(slot) * u64::from(size), size);
        let places: Vec<Sge> = (0..slots).map(place).collect();
        let inline = vec![0x5A; if self.spec.inline() { size as usize } else { 0 }];
        // All batches are built in advance, so that only posting is measured.
        let batches = make_batches(&self.spec, remote, &places, &inline)?;
        let window = u64::from(receives(Role::Peer, &self.spec));
        let mut flows = vec![StreamState::default(); self.active.len()];
        let mut turn = 0;
        let mut outstanding = 0;
        let mut sent = 0;
        let mut credited = 0;
        let count = self.whole_batches(count);

        let start = Instant::now();
        while sent < count || outstanding > 0 {
            // Fills all queues before waiting, so that a batch is in flight during each wait.
            let mut full = 0;
            while full < flows.len() {
                let flow = &mut flows[turn];
                let room = flow.outstanding + batch <= depth
                    && (op != Op::Send || sent + u64::from(batch) <= credited + window);
                if sent < count && room {
                    self.active_qp(turn).post_send(&batches[flow.next])?;
                    flow.next = (flow.next + 1) % batches.len();
                    flow.outstanding += batch;
                    outstanding += batch;
                    sent += u64::from(batch);
                    full = 0;
                } else {
                    full += 1;
                }
                turn = (turn + 1) % flows.len();
            }
            let arrived = self.progress(|at| {
                flows[at].outstanding -= batch;
                outstanding -= batch;
            })?;
            credited = credited.max(arrived.note);
        }
        match op {
            // The peer sends credit for the last message when it has arrived.
            Op::Send => {
                while credited < count {
                    credited = credited.max(self.progress(|_| ())?.note);
                }
            }
            Op::Write => self.end_stream()?,
            Op::Read | Op::FetchAdd => {}
        }
        Ok(start.elapsed())
    }

    /// Rounds `count` up to whole batches.
    fn whole_batches(&self, count: u64) -> u64 {
        count.next_multiple_of(self.spec.batch.into())
    }

    /// Sends a note on every QP after the last message, and waits until the peer has received them.
    fn end_stream(&mut self) -> Result<(), PerfError> {
        for at in 0..self.active.len() {
            self.send_note(at, 0)?;
        }
        self.progress(|_| ()).map(drop)
    }

    /// The peer's part of `end_stream`.
    fn acknowledge_end(&mut self) -> Result<(), PerfError> {
        let mut ends = 0;
        while ends < self.active.len() as u64 {
            ends += self.progress(|_| ())?.messages;
        }
        self.send_note(0, 0)
    }

    /// Receives the Sends of a stream, and returns credits after each quarter of the receives.
    fn take_sends(&mut self, count: u64) -> Result<(), PerfError> {
        let count = self.whole_batches(count);
        let quarter = u64::from(receives(self.role, &self.spec)) / 4;
        let mut taken = 0;
        let mut credited = 0;
        while taken < count {
            taken += self.progress(|_| ())?.messages;
            if taken - credited >= quarter || taken == count {
                self.send_note(0, taken)?;
                credited = taken;
            }
        }
        Ok(())
    }

    // Ping-pong.

    fn drive_ping_pong(&mut self, count: u64, times: &mut Times) -> Result<(), PerfError> {
        let mut then = Instant::now();
        for _ in 0..count {
            self.send_message()?;
            self.progress(|_| ())?;
            let now = Instant::now();
            times.record(now - then);
            then = now;
        }
        Ok(())
    }

    fn follow_ping_pong(&mut self, count: u64) -> Result<(), PerfError> {
        for _ in 0..count {
            self.progress(|_| ())?;
            self.send_message()?;
        }
        Ok(())
    }

    fn send_message(&self) -> Result<(), PerfError> {
        let size = self.spec.size;
        let place = self.source.sge(0, size);
        let request = if self.spec.inline() {
            SendRequest::send_inline(0, &[0x5A; INLINE as usize][..size as usize])
        } else {
            SendRequest::send(0, from_ref(&place))
        };
        Ok(self.active_qp(0).post_send(&[request])?)
    }

    fn drive_write_ping_pong(
        &mut self,
        remote: &RemoteMemory,
        count: u64,
        times: &mut Times,
    ) -> Result<(), PerfError> {
        let mut then = Instant::now();
        for _ in 0..count {
            self.ping_pongs += 1;
            self.write_message(remote)?;
            await_word(&self.sink, u64::from(self.spec.size) - 8, self.ping_pongs)?;
            let now = Instant::now();
            times.record(now - then);
            then = now;
        }
        Ok(())
    }

    fn follow_write_ping_pong(
        &mut self,
        remote: &RemoteMemory,
        count: u64,
    ) -> Result<(), PerfError> {
        for _ in 0..count {
            self.ping_pongs += 1;
            await_word(&self.sink, u64::from(self.spec.size) - 8, self.ping_pongs)?;
            self.write_message(remote)?;
        }
        Ok(())
    }

    /// Writes a message with its number as the last word. The source buffer is free, because the
    /// previous message has been answered.
    fn write_message(&self, remote: &RemoteMemory) -> Result<(), PerfError> {
        let size = self.spec.size as usize;
        let number = self.ping_pongs.to_ne_bytes();
        let mut inline = [0x5A; INLINE as usize];
        let place = self.source.sge(0, self.spec.size);
        let to = remote.sink.at(0);
        let request = if self.spec.inline() {
            inline[size - 8..size].copy_from_slice(&number);
            SendRequest::write_inline(0, &inline[..size], to)
        } else {
            self.source.write_at(size as u64 - 8, &number)?;
            SendRequest::write(0, from_ref(&place), to)
        };
        Ok(self.active_qp(0).post_send(&[request])?)
    }

    fn drive_answered(
        &mut self,
        remote: &RemoteMemory,
        count: u64,
        times: &mut Times,
    ) -> Result<(), PerfError> {
        let place = self.sink.sge(0, self.spec.size);
        let from = readable(remote)?.at(0);
        let mut then = Instant::now();
        let request = match self.spec.op {
            Op::FetchAdd => SendRequest::fetch_add(0, place, from, 1),
            _ => SendRequest::read(0, place, from),
        };
        for _ in 0..count {
            self.active_qp(0).post_send(&[request.signaled()])?;
            self.completions.wait()?;
            let now = Instant::now();
            times.record(now - then);
            then = now;
        }
        Ok(())
    }

    // Receives.

    /// Waits for completions. Calls `completed` for each send request with the index of its QP, and
    /// posts a receive for each completed one. Returns the messages and notes that have arrived.
    fn progress(&mut self, mut completed: impl FnMut(usize)) -> Result<Arrived, PerfError> {
        let mut arrived = Arrived::default();
        let mut used = Vec::new();
        for completion in self.completions.wait()? {
            let of = |at: &usize| self.qps[*at].id() == completion.qp;
            let Some(at) = self.active.iter().position(of) else { continue };
            if completion.opcode != CompletionOpcode::Receive {
                completed(at);
                continue;
            }
            arrived.messages += 1;
            if !receives_messages(self.role, &self.spec) {
                let mut bytes = [0; 8];
                self.notes.read_at(note_place(completion.wr_id), &mut bytes)?;
                arrived.note = arrived.note.max(u64::from_le_bytes(bytes));
            }
            used.push(at);
        }
        used.into_iter().try_for_each(|at| self.post_receive(at))?;
        Ok(arrived)
    }

    /// Sends an 8-byte note.
    fn send_note(&self, at: usize, number: u64) -> Result<(), PerfError> {
        let bytes = number.to_le_bytes();
        Ok(self.active_qp(at).post_send(&[SendRequest::send_inline(0, &bytes)])?)
    }

    /// Posts a receive on the active QP with index `at`.
    fn post_receive(&mut self, at: usize) -> Result<(), PerfError> {
        let n = self.posted;
        self.posted += 1;
        let size = u64::from(self.spec.size);
        let place = if receives_messages(self.role, &self.spec) {
            self.sink.sge(n % u64::from(self.spec.slots) * size, self.spec.size)
        } else {
            self.notes.sge(note_place(n), 8)
        };
        Ok(self.active_qp(at).post_recv(&[RecvRequest::new(n, from_ref(&place))])?)
    }

    fn active_qp(&self, at: usize) -> &Qp {
        &self.qps[self.active[at]]
    }
}

/// State of a QP with traffic during a stream.
#[derive(Clone, Copy, Default)]
struct StreamState {
    /// Requests posted and not completed.
    outstanding: u32,
    /// Index of its next batch.
    next: usize,
}

/// Messages and notes that have arrived.
#[derive(Clone, Copy, Default)]
struct Arrived {
    /// Messages received.
    messages: u64,
    /// The highest note received.
    note: u64,
}

/// Registers `count` regions of one byte each, side by side in one buffer.
pub fn many_regions(context: &Context, pd: &Pd, count: u32) -> Result<Vec<Mr>, PerfError> {
    let buffer = context.create_shared_buffer(u64::from(count).max(1))?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let region = |n| Ok(pd.reg_mr(&buffer, n..n + 1, access)?);
    (0..u64::from(count)).map(region).collect()
}

/// Builds requests for the slots in rotation, in batches whose last request is signaled.
fn make_batches<'a>(
    spec: &Spec,
    remote: &RemoteMemory,
    places: &'a [Sge],
    inline: &'a [u8],
) -> Result<Vec<Vec<SendRequest<'a>>>, PerfError> {
    let Spec { op, size, slots, batch, .. } = *spec;
    let far = |at: u64, memory: RemoteMr| memory.at(at * u64::from(size));
    let request = |n: u64, signaled: bool| {
        let slot = n % u64::from(slots);
        let place = from_ref(&places[slot as usize]);
        let request = match op {
            Op::Send if spec.inline() => SendRequest::send_inline(n, inline),
            Op::Send => SendRequest::send(n, place),
            Op::Write if spec.inline() => {
                SendRequest::write_inline(n, inline, far(slot, remote.sink))
            }
            Op::Write => SendRequest::write(n, place, far(slot, remote.sink)),
            Op::Read => SendRequest::read(n, place[0], far(slot, readable(remote)?)),
            Op::FetchAdd => SendRequest::fetch_add(n, place[0], far(slot, readable(remote)?), 1),
        };
        Ok(if signaled { request.signaled() } else { request })
    };
    // The whole batches that cover all slots.
    (0..u64::from(slots.div_ceil(batch)))
        .map(|b| {
            let first = b * u64::from(batch);
            (0..u64::from(batch)).map(|i| request(first + i, i + 1 == u64::from(batch))).collect()
        })
        .collect()
}

fn readable(remote: &RemoteMemory) -> Result<RemoteMr, PerfError> {
    remote.source.ok_or_else(|| PerfError::Peer("has no region to read from".to_owned()))
}

/// Returns true if this end receives the messages themselves, not notes about them.
fn receives_messages(role: Role, spec: &Spec) -> bool {
    spec.op == Op::Send && (spec.flow == Flow::PingPong || role == Role::Peer)
}

/// Returns the number of receives posted per QP with traffic.
fn receives(role: Role, spec: &Spec) -> u32 {
    if receives_messages(role, spec) { spec.receives() } else { SMALL_RECEIVES }
}

/// Returns the offset of a note's buffer. There are far more buffers than notes in flight on a QP.
/// Notes of several QPs that share a buffer have the same content.
fn note_place(receive: u64) -> u64 {
    receive % (MEMORY / 8) * 8
}

/// Outstanding Reads and atomics of an RC QP, as on adapters; fewer if the device supports fewer.
const WIRED_READS: u16 = 16;
/// Size in bytes of the notes, and of a memory region that carries no messages.
const MEMORY: u64 = 4096;
