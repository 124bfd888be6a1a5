//! One end of the RDMA connections: memory, queues and the two parts that are played with them.
//!
//! The driver posts the messages and holds the clock; the peer answers. A stream ends when the
//! peer has all of it: it acknowledges the end of Writes, and Sends by the credits that also keep
//! the driver from sending more than the peer has receives for.

use std::net::SocketAddr;
use std::slice::from_ref;
use std::time::{Duration, Instant};

use rnic_client::{
    AcceptOptions, Access, CompletionOpcode, ConnectOptions, Context, Listener, Mr, Pd, Qp,
    QpOptions, QpType, RecvRequest, RemoteMr, SendRequest, Sending, Sge, Wiring,
};

use super::completions::{Completions, await_word};
use super::error::PerfError;
use super::spec::{Flow, INLINE, Op, SMALL_RECEIVES, Spec};
use super::stats::Times;
use super::talk::Place;

/// Which process an end belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The process that measures the time and tells the other what to do.
    Driver,
    /// The process that answers the driver.
    Peer,
}

/// The memory of the other end.
#[derive(Clone, Copy, Debug)]
pub struct RemoteMemory {
    /// To read from; the driver needs none of the peer's role.
    pub source: Option<RemoteMr>,
    /// Region that this end may write to.
    pub sink: RemoteMr,
}

/// One end of all connections of a measurement.
pub struct End {
    role: Role,
    spec: Spec,
    /// With and without traffic.
    qps: Vec<Qp>,
    /// Positions of those with traffic.
    active: Vec<usize>,
    completions: Completions,
    /// Where messages come from.
    source: Mr,
    /// Where messages go: what the other end writes or sends.
    sink: Mr,
    /// Where credits and acknowledgements go, 8 bytes each.
    notes: Mr,
    /// Receives posted so far, which are spread over the sink.
    posted: u64,
    /// Balls played so far by Writes.
    balls: u64,
    /// Regions that nobody uses.
    _idle: Vec<Mr>,
}

impl End {
    /// Memory and QPs, receives posted, nothing connected.
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
            kind: if spec.wired { QpType::Wired } else { QpType::Connected },
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
            balls: 0,
            _idle: idle,
        };
        for at in 0..end.active.len() {
            for _ in 0..receives(role, spec) {
                end.post_receive(at)?;
            }
        }
        Ok(end)
    }

    /// What the other end may read, or change.
    pub fn source(&self) -> RemoteMr {
        self.source.remote()
    }

    /// What the other end may write.
    pub fn sink(&self) -> RemoteMr {
        self.sink.remote()
    }

    /// Connects all QPs, one after the other.
    pub fn connect(&self, peer: SocketAddr) -> Result<(), PerfError> {
        let options = ConnectOptions::default();
        self.qps.iter().try_for_each(|qp| qp.connect(peer, &options).map(drop))?;
        Ok(())
    }

    /// Accepts connections for all QPs, one after the other.
    pub fn accept(&self, listener: &Listener) -> Result<(), PerfError> {
        let options = AcceptOptions::default();
        for qp in &self.qps {
            listener.accept_request(options.timeout)?.accept(qp, &options)?;
        }
        Ok(())
    }

    /// The QPs, for the other end to be wired to.
    pub fn places(&self, context: &Context) -> Result<Vec<Place>, PerfError> {
        let gids = context.gids()?;
        let row = gids.first().ok_or_else(|| PerfError::Daemon("has no GID".to_owned()))?;
        Ok(self.qps.iter().map(|qp| Place { gid: row.gid, qp: qp.id() }).collect())
    }

    /// Wires all QPs by hand, each to the one of the same number.
    pub fn wire(&self, context: &Context, peers: &[Place]) -> Result<(), PerfError> {
        let device = context.device()?;
        let (ird, ord) = (device.max_ird.min(WIRED_READS), device.max_ord.min(WIRED_READS));
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

    /// The first QP with traffic, and where its completions come.
    pub fn parts(&mut self) -> (&Qp, &mut Completions) {
        (&self.qps[self.active[0]], &mut self.completions)
    }

    /// The path of its connections, in the daemon's words.
    pub fn path(&self) -> Result<String, PerfError> {
        Ok(self.active_qp(0).query()?.path)
    }

    /// The driver's part of `count` messages or round trips; notes the times of round trips.
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
                self.answered_balls(remote, count, times)?
            }
            (Flow::PingPong, Op::Send) => self.serve_balls(count, times)?,
            (Flow::PingPong, Op::Write) => self.write_balls(remote, count, times)?,
        }
        Ok(start.elapsed())
    }

    /// The peer's part.
    pub fn follow(&mut self, remote: &RemoteMemory, count: u64) -> Result<(), PerfError> {
        match (self.spec.flow, self.spec.op) {
            (_, Op::Read | Op::FetchAdd) => Ok(()),
            (Flow::Stream, Op::Send) => self.take_sends(count),
            (Flow::Stream, Op::Write) => self.acknowledge_end(),
            (Flow::PingPong, Op::Send) => self.return_balls(count),
            (Flow::PingPong, Op::Write) => self.write_balls_back(remote, count),
        }
    }

    // Streams.

    /// Posts `count` messages, rounded up to whole batches, as room comes.
    fn stream(&mut self, remote: &RemoteMemory, count: u64) -> Result<Duration, PerfError> {
        let Spec { op, size, slots, batch, depth, .. } = self.spec;
        let local = if op.is_answered() { &self.sink } else { &self.source };
        let place = |slot| local.sge(u64::from(slot) * u64::from(size), size);
        let places: Vec<Sge> = (0..slots).map(place).collect();
        let inline = vec![0x5A; if self.spec.inline() { size as usize } else { 0 }];
        // Every batch there is, made once: posting is what is measured.
        let batches = make_batches(&self.spec, remote, &places, &inline)?;
        let window = u64::from(receives(Role::Peer, &self.spec));
        let mut flows = vec![StreamState::default(); self.active.len()];
        let (mut turn, mut outstanding, mut sent, mut credited) = (0, 0, 0, 0);
        let count = self.whole_batches(count);

        let start = Instant::now();
        while sent < count || outstanding > 0 {
            // All the room there is: who waits for a completion after each batch has one under way.
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
            // The peer credits the last one when it has come.
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

    /// Messages in whole batches, at least `count`.
    fn whole_batches(&self, count: u64) -> u64 {
        count.next_multiple_of(self.spec.batch.into())
    }

    /// Tells the peer on every QP that this was all, and waits until it has heard of all.
    fn end_stream(&mut self) -> Result<(), PerfError> {
        for at in 0..self.active.len() {
            self.send_note(at, 0)?;
        }
        self.progress(|_| ()).map(drop)
    }

    /// The other side of `end_stream`.
    fn acknowledge_end(&mut self) -> Result<(), PerfError> {
        let mut ends = 0;
        while ends < self.active.len() as u64 {
            ends += self.progress(|_| ())?.messages;
        }
        self.send_note(0, 0)
    }

    /// Takes the Sends of a stream and gives credit for each quarter of the receives.
    fn take_sends(&mut self, count: u64) -> Result<(), PerfError> {
        let count = self.whole_batches(count);
        let quarter = u64::from(receives(self.role, &self.spec)) / 4;
        let (mut taken, mut credited) = (0, 0);
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

    fn serve_balls(&mut self, count: u64, times: &mut Times) -> Result<(), PerfError> {
        let mut then = Instant::now();
        for _ in 0..count {
            self.send_ball()?;
            self.progress(|_| ())?;
            let now = Instant::now();
            times.record(now - then);
            then = now;
        }
        Ok(())
    }

    fn return_balls(&mut self, count: u64) -> Result<(), PerfError> {
        for _ in 0..count {
            self.progress(|_| ())?;
            self.send_ball()?;
        }
        Ok(())
    }

    fn send_ball(&self) -> Result<(), PerfError> {
        let size = self.spec.size;
        let place = self.source.sge(0, size);
        let request = match self.spec.inline() {
            true => SendRequest::send_inline(0, &[0x5A; INLINE as usize][..size as usize]),
            false => SendRequest::send(0, from_ref(&place)),
        };
        Ok(self.active_qp(0).post_send(&[request])?)
    }

    fn write_balls(
        &mut self,
        remote: &RemoteMemory,
        count: u64,
        times: &mut Times,
    ) -> Result<(), PerfError> {
        let mut then = Instant::now();
        for _ in 0..count {
            self.balls += 1;
            self.write_ball(remote)?;
            await_word(&self.sink, u64::from(self.spec.size) - 8, self.balls)?;
            let now = Instant::now();
            times.record(now - then);
            then = now;
        }
        Ok(())
    }

    fn write_balls_back(&mut self, remote: &RemoteMemory, count: u64) -> Result<(), PerfError> {
        for _ in 0..count {
            self.balls += 1;
            await_word(&self.sink, u64::from(self.spec.size) - 8, self.balls)?;
            self.write_ball(remote)?;
        }
        Ok(())
    }

    /// Writes a ball whose last word is its number. The place it comes from is free, because the
    /// ball before has come back.
    fn write_ball(&self, remote: &RemoteMemory) -> Result<(), PerfError> {
        let size = self.spec.size as usize;
        let number = self.balls.to_ne_bytes();
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

    fn answered_balls(
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
            self.completions.next()?;
            let now = Instant::now();
            times.record(now - then);
            then = now;
        }
        Ok(())
    }

    // Receives.

    /// Waits for completions. Says of each send request which QP with traffic it was of, posts a
    /// receive for each one used up, and returns what they brought.
    fn progress(&mut self, mut completed: impl FnMut(usize)) -> Result<Arrived, PerfError> {
        let mut arrived = Arrived::default();
        let mut used = Vec::new();
        for completion in self.completions.next()? {
            let of = |at: &usize| self.qps[*at].id() == completion.qp;
            let Some(at) = self.active.iter().position(of) else { continue };
            if completion.opcode != CompletionOpcode::Receive {
                completed(at);
                continue;
            }
            arrived.messages += 1;
            if !messages_come(self.role, &self.spec) {
                let mut bytes = [0; 8];
                self.notes.read_at(note_place(completion.wr_id), &mut bytes)?;
                arrived.note = arrived.note.max(u64::from_le_bytes(bytes));
            }
            used.push(at);
        }
        used.into_iter().try_for_each(|at| self.post_receive(at))?;
        Ok(arrived)
    }

    /// Sends 8 bytes about other messages.
    fn send_note(&self, at: usize, number: u64) -> Result<(), PerfError> {
        let bytes = number.to_le_bytes();
        Ok(self.active_qp(at).post_send(&[SendRequest::send_inline(0, &bytes)])?)
    }

    /// Posts a receive on the QP with traffic number `at`.
    fn post_receive(&mut self, at: usize) -> Result<(), PerfError> {
        let n = self.posted;
        self.posted += 1;
        let size = u64::from(self.spec.size);
        let place = match messages_come(self.role, &self.spec) {
            true => self.sink.sge(n % u64::from(self.spec.slots) * size, self.spec.size),
            false => self.notes.sge(note_place(n), 8),
        };
        Ok(self.active_qp(at).post_recv(&[RecvRequest::new(n, from_ref(&place))])?)
    }

    fn active_qp(&self, at: usize) -> &Qp {
        &self.qps[self.active[at]]
    }
}

/// A QP with traffic, during a stream.
#[derive(Clone, Copy, Default)]
struct StreamState {
    /// Requests posted and not completed.
    outstanding: u32,
    /// Number of its next batch, of those made.
    next: usize,
}

/// What came with the completions of one look.
#[derive(Clone, Copy, Default)]
struct Arrived {
    /// Messages received since the last look.
    messages: u64,
    /// The highest note among them.
    note: u64,
}

/// So many regions of one byte each, side by side in one buffer.
pub fn many_regions(context: &Context, pd: &Pd, count: u32) -> Result<Vec<Mr>, PerfError> {
    let buffer = context.create_shared_buffer(u64::from(count).max(1))?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let region = |n| Ok(pd.reg_mr(&buffer, n..n + 1, access)?);
    (0..u64::from(count)).map(region).collect()
}

/// Requests for the places in turn, in batches whose last one is signaled.
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
    // Until the places come round, and whole batches.
    (0..u64::from(slots.div_ceil(batch)))
        .map(|b| {
            let first = b * u64::from(batch);
            (0..u64::from(batch)).map(|i| request(first + i, i + 1 == u64::from(batch))).collect()
        })
        .collect()
}

fn readable(remote: &RemoteMemory) -> Result<RemoteMr, PerfError> {
    remote.source.ok_or_else(|| PerfError::Peer("has nothing to read from".to_owned()))
}

/// Whether the messages themselves come to the receives of this end, and not notes about them.
fn messages_come(role: Role, spec: &Spec) -> bool {
    spec.op == Op::Send && (spec.flow == Flow::PingPong || role == Role::Peer)
}

/// Receives posted per QP with traffic.
fn receives(role: Role, spec: &Spec) -> u32 {
    if messages_come(role, spec) { spec.receives() } else { SMALL_RECEIVES }
}

/// Where the note of a receive goes: far more places than notes are under way on one QP, and those
/// of several QPs all say the same.
fn note_place(receive: u64) -> u64 {
    receive % (MEMORY / 8) * 8
}

/// Reads and atomic operations that may be outstanding on a QP that is wired by hand, if the device
/// takes as many: as adapters do.
const WIRED_READS: u16 = 16;
/// Bytes of the memory of an end that has no part in carrying messages, and of the notes.
const MEMORY: u64 = 4096;
