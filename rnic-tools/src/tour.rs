//! Performs and verifies every operation between two processes, for `rnicd demo` and the end-to-end
//! tests.
//!
//! The guest ([`visit`]) posts the operations. The host ([`host`]) provides a region, and two
//! regions that only this connection may use, and answers each message with a report of the data
//! received (a `HostReport`). The guest alone verifies the results.

use std::cell::Cell;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rnic_client::*;

/// Size of the host's region, and of the largest message, in bytes.
pub const REGION: u32 = 1 << 20;
const REPORT: u32 = 40;
const RECEIVES: u32 = 64;
const NO_SUCH_STAG: Stag = Stag(0x5ABA_D000);

/// A failure of the tour.
#[derive(Debug, thiserror::Error)]
pub enum TourError {
    /// A call or a request failed.
    #[error("{step}: {source}")]
    Call {
        /// The current operation.
        step: &'static str,
        /// Error of the call or of the completion.
        source: Error,
    },
    /// The verification of an operation failed.
    #[error("{step}: {what}")]
    Wrong {
        /// The current operation.
        step: &'static str,
        /// The difference found.
        what: String,
    },
}

/// An operation that was performed and verified.
#[derive(Clone, Debug)]
pub struct Step {
    /// Name of the operation, as in RFC 5040.
    pub name: &'static str,
    /// Description of the verification, with numbers.
    pub detail: String,
    /// Time taken, including verification.
    pub took: Duration,
}

/// The host's report of a received message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HostReport {
    len: u32,
    solicited: bool,
    invalidated: Stag,
    /// Immediate Data as a big-endian number; 0 if there was none.
    immediate: u64,
    message: u64,
    region: u64,
}

impl HostReport {
    fn to_bytes(self) -> [u8; REPORT as usize] {
        let mut b = [0; REPORT as usize];
        b[..4].copy_from_slice(&self.len.to_le_bytes());
        b[4] = u8::from(self.solicited);
        b[8..12].copy_from_slice(&self.invalidated.0.to_le_bytes());
        b[16..24].copy_from_slice(&self.message.to_le_bytes());
        b[24..32].copy_from_slice(&self.region.to_le_bytes());
        b[32..40].copy_from_slice(&self.immediate.to_le_bytes());
        b
    }

    fn from_bytes(b: &[u8; REPORT as usize]) -> Self {
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
        HostReport {
            len: u32_at(0),
            solicited: b[4] != 0,
            invalidated: Stag(u32_at(8)),
            message: u64_at(16),
            region: u64_at(24),
            immediate: u64_at(32),
        }
    }
}

/// 64-bit FNV-1a over words of 8 bytes, which is sufficient for comparisons.
fn digest(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(0xCBF2_9CE4_8422_2325, |hash, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

/// Returns bytes that no other message of the tour has.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

// ---------------------------------------------------------------------------------------------
// Host

/// Serves `guests` guests. Each guest makes two connections: the tour, and a connection that ends
/// in an intended error.
pub fn host(
    context: &Context,
    listener: &Listener,
    guests: u32,
    timeout: Duration,
) -> Result<(), Error> {
    for _ in 0..guests * 2 {
        host_one(context, listener, timeout)?;
    }
    Ok(())
}

fn host_one(context: &Context, listener: &Listener, timeout: Duration) -> Result<(), Error> {
    let pd = context.open_pd(None)?;
    let cq = context.create_cq(4 * RECEIVES, None)?;
    let qp = pd.create_qp(&QpOptions {
        sq_depth: RECEIVES,
        rq_depth: RECEIVES,
        max_recv_sge: 3,
        ..QpOptions::new(&cq)
    })?;
    let buffer = context.create_shared_buffer(u64::from(REGION) * 2 + 8192)?;
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let region = pd.reg_mr(&buffer, ..u64::from(REGION), all | Access::REMOTE_ATOMIC)?;
    let inbox_at = u64::from(REGION);
    let inbox = pd.reg_mr(&buffer, inbox_at..inbox_at * 2, Access::LOCAL_WRITE)?;
    let reports = pd.reg_mr(&buffer, inbox_at * 2..inbox_at * 2 + 4096, Access::LOCAL_WRITE)?;
    let only = MrOptions { access: all, scope: Scope::Qp(qp.id()), ..MrOptions::default() };
    let lent = inbox_at * 2 + 4096;
    let own = [
        pd.reg_mr_with(&buffer, lent..lent + 1024, &only)?,
        pd.reg_mr_with(&buffer, lent + 1024..lent + 2048, &only)?,
    ];
    // Small receives, so that enough can be posted for the batches.
    let small = 4096;
    let receive = |slot: u32| -> [Sge; 3] {
        let at = u64::from(slot * small);
        [inbox.sge(at, 100), inbox.sge(at + 100, 1), inbox.sge(at + 101, small - 101)]
    };
    for slot in 0..RECEIVES {
        let sges = receive(slot);
        qp.post_recv(&[RecvRequest::new(u64::from(slot), &sges)]).map_err(|e| e.source)?;
    }
    let mut greeting = region.remote().to_bytes().to_vec();
    greeting.extend(own.iter().flat_map(|mr| mr.rkey().0.to_le_bytes()));
    let request = listener.accept_request(Some(timeout))?;
    let options = AcceptOptions {
        private_data: greeting,
        timeout: Some(timeout),
        ..AcceptOptions::default()
    };
    request.accept(&qp, &options)?;
    let mut scratch = vec![0; REGION as usize];
    let mut completions = [Completion::default(); 16];
    let mut slot_of_report = 0;
    loop {
        let n = cq.wait(&mut completions, Some(timeout))?;
        if n == 0 {
            return Err(Error::TimedOut { what: "the guest's next message" });
        }
        for c in &completions[..n] {
            if c.status == CompletionStatus::WrFlush {
                // The guest has disconnected, or has caused the intended error.
                qp.wait_disconnected(Some(timeout))?;
                return Ok(());
            }
            let c = c.ok()?;
            if c.opcode != CompletionOpcode::Receive {
                continue;
            }
            let at = c.wr_id * u64::from(small);
            // With Immediate Data, `byte_len` is the length of the Write; the receive has no data.
            let received = if c.immediate.is_some() { 0 } else { c.byte_len };
            let message = &mut scratch[..received as usize];
            inbox.read_at(at, message)?;
            let message = digest(message);
            region.read_at(0, &mut scratch)?;
            let host_report = HostReport {
                len: c.byte_len,
                solicited: c.solicited,
                invalidated: c.invalidated.unwrap_or(Stag(0)),
                immediate: c.immediate.map_or(0, u64::from_be_bytes),
                message,
                region: digest(&scratch),
            };
            let slot = c.wr_id as u32;
            let sges = receive(slot);
            qp.post_recv(&[RecvRequest::new(c.wr_id, &sges)]).map_err(|e| e.source)?;
            let report_at = u64::from(slot_of_report * 64);
            slot_of_report = (slot_of_report + 1) % RECEIVES;
            reports.write_at(report_at, &host_report.to_bytes())?;
            let report = [reports.sge(report_at, REPORT)];
            qp.post_send(&[SendRequest::send(u64::MAX, &report).signaled()])
                .map_err(|e| e.source)?;
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Guest

/// Visits the host at `address`: performs every operation, disconnects, then causes an error on
/// purpose.
pub fn visit(
    context: &Context,
    address: SocketAddr,
    timeout: Duration,
) -> Result<Vec<Step>, TourError> {
    let mut guest = Guest::connect(context, address, timeout)?;
    guest.sends()?;
    guest.writes()?;
    guest.reads()?;
    guest.immediate_data()?;
    guest.atomics()?;
    guest.invalidates()?;
    guest.batches()?;
    guest.leave()?;
    guest.refused_write(context, address)?;
    Ok(guest.steps)
}

struct Guest {
    steps: Vec<Step>,
    step: &'static str,
    began: Instant,
    timeout: Duration,
    cq: Cq,
    qp: Qp,
    pd: Pd,
    buffer: SharedBuffer,
    memory: Mr,
    reports: Mr,
    host: RemoteMr,
    own: [Stag; 2],
    next_id: Cell<u64>,
    seen: Vec<HostReport>,
    /// Expected content of the host's region.
    expected: Vec<u8>,
}

impl Guest {
    fn connect(
        context: &Context,
        address: SocketAddr,
        timeout: Duration,
    ) -> Result<Self, TourError> {
        let step = "connect";
        let began = Instant::now();
        let call = |source| TourError::Call { step, source };
        let pd = context.open_pd(None).map_err(call)?;
        let cq = context.create_cq(4 * RECEIVES, None).map_err(call)?;
        let options = QpOptions {
            sq_depth: RECEIVES,
            rq_depth: RECEIVES,
            max_send_sge: 3,
            max_inline: 64,
            ..QpOptions::new(&cq)
        };
        let qp = pd.create_qp(&options).map_err(call)?;
        let buffer = context.create_shared_buffer(u64::from(REGION) + 4096).map_err(call)?;
        let size = u64::from(REGION);
        let memory = pd.reg_mr(&buffer, ..size, Access::LOCAL_WRITE).map_err(call)?;
        let reports = pd.reg_mr(&buffer, size.., Access::LOCAL_WRITE).map_err(call)?;
        let connect = ConnectOptions { timeout: Some(timeout), ..ConnectOptions::default() };
        let mut guest = Guest {
            steps: Vec::new(),
            step,
            began,
            timeout,
            cq,
            qp,
            pd,
            buffer,
            memory,
            reports,
            host: RemoteMr { addr: 0, len: 0, rkey: Stag(0) },
            own: [Stag(0); 2],
            next_id: Cell::new(1 << 32),
            seen: Vec::new(),
            expected: vec![0; REGION as usize],
        };
        for slot in 0..RECEIVES {
            guest.post_report(slot)?;
        }
        let connected = guest.qp.connect(address, &connect).map_err(call)?;
        let greeting = connected.private_data;
        let (host, keys) =
            RemoteMr::from_bytes(&greeting).zip(greeting.get(RemoteMr::LEN..)).ok_or_else(
                || guest.wrong(format!("{} bytes of private data: no greeting", greeting.len())),
            )?;
        let [a0, a1, a2, a3, b0, b1, b2, b3] = *keys else {
            return Err(guest.wrong("the greeting lacks the keys".to_owned()));
        };
        guest.host = host;
        guest.own =
            [u32::from_le_bytes([a0, a1, a2, a3]), u32::from_le_bytes([b0, b1, b2, b3])].map(Stag);
        guest.done(format!("IRD {} ORD {}", connected.ird, connected.ord));
        Ok(guest)
    }

    fn sends(&mut self) -> Result<(), TourError> {
        for (name, len, solicited) in [
            ("Send", 3000, false),
            ("Send of no bytes", 0, false),
            ("Send with Solicited Event", 101, true),
        ] {
            self.begin(name);
            let message = pattern(u64::from(len) + 1, len as usize);
            self.write_local(0, &message)?;
            let sges = [self.memory.sge(0, len)];
            let mut request = SendRequest::send(self.id(), &sges).signaled();
            if solicited {
                request = request.solicited();
            }
            self.post(&[request])?;
            self.completed(1)?;
            let s = self.host_report()?;
            self.check(
                s.len == len && s.solicited == solicited && s.message == digest(&message),
                &s,
            )?;
            self.done(format!("{len} bytes, digest verified by the host"));
        }
        self.begin("Send, gathered and inline");
        let message = pattern(77, 64);
        self.post_inline(&message)?;
        let s = self.host_report()?;
        self.check(s.len == 64 && s.message == digest(&message), &s)?;
        let whole = pattern(78, 700);
        self.write_local(0, &whole[..300])?;
        self.write_local(1000, &whole[300..301])?;
        self.write_local(2000, &whole[301..])?;
        let sges = [self.memory.sge(0, 300), self.memory.sge(1000, 1), self.memory.sge(2000, 399)];
        self.post(&[SendRequest::send(self.id(), &sges).signaled()])?;
        self.completed(1)?;
        let s = self.host_report()?;
        self.check(s.len == 700 && s.message == digest(&whole), &s)?;
        self.done("64 bytes inline, 700 bytes from 3 SGEs into 3".to_owned());
        Ok(())
    }

    fn writes(&mut self) -> Result<(), TourError> {
        self.begin("RDMA Write");
        let data = pattern(5, REGION as usize);
        self.write_local(0, &data)?;
        self.expected.copy_from_slice(&data);
        let sges = [self.memory.sge(0, REGION)];
        self.post(&[SendRequest::write(self.id(), &sges, self.host.at(0)).signaled()])?;
        self.completed(1)?;
        self.region_is_as_expected()?;
        self.done(format!("{} KiB, region verified by the host", REGION / 1024));

        self.begin("RDMA Write, inline and at odd offsets");
        let data = pattern(6, 41);
        self.expected[777..818].copy_from_slice(&data);
        self.post(&[SendRequest::write_inline(self.id(), &data, self.host.at(777)).signaled()])?;
        self.completed(1)?;
        self.region_is_as_expected()?;
        self.done("41 bytes".to_owned());

        self.begin("RDMA Write of no bytes");
        // STag and offset of a zero-length Write are ignored (RFC 5041 section 5.2).
        let nowhere = RemoteAddr { addr: u64::MAX, rkey: NO_SUCH_STAG };
        self.post(&[SendRequest::write(self.id(), &[], nowhere).signaled()])?;
        self.completed(1)?;
        self.region_is_as_expected()?;
        self.done("to an STag that does not exist: ignored, as required".to_owned());
        Ok(())
    }

    fn reads(&mut self) -> Result<(), TourError> {
        self.begin("RDMA Read");
        self.memory_fill(0)?;
        let sink = self.memory.sge(0, REGION);
        self.post(&[SendRequest::read(self.id(), sink, self.host.at(0)).signaled()])?;
        let c = self.completed(1)?;
        self.check(c.byte_len == REGION, &c)?;
        let mut found = vec![0; REGION as usize];
        self.read_local(0, &mut found)?;
        self.check(found == self.expected, &"the bytes read differ")?;
        self.done(format!("{} KiB, compared", REGION / 1024));

        self.begin("RDMA Read of no bytes");
        let nowhere = RemoteAddr { addr: 1, rkey: NO_SUCH_STAG };
        self.post(&[SendRequest::read(self.id(), Sge::default(), nowhere).signaled()])?;
        let c = self.completed(1)?;
        self.check(c.byte_len == 0, &c)?;
        self.done("from an STag that does not exist: answered, as required".to_owned());

        self.begin("RDMA Read, then a fenced RDMA Write");
        let before = self.expected[4096..8192].to_vec();
        let after = pattern(9, 4096);
        self.write_local(65536, &after)?;
        let sges = [self.memory.sge(65536, 4096)];
        let read = self.id();
        let write = self.id();
        self.post(&[
            SendRequest::read(read, self.memory.sge(0, 4096), self.host.at(4096)),
            SendRequest::write(write, &sges, self.host.at(4096)).fence().signaled(),
        ])?;
        self.completed(1)?;
        let mut found = vec![0; 4096];
        self.read_local(0, &mut found)?;
        self.check(found == before, &"the Read returned data of the Write after it")?;
        self.expected[4096..8192].copy_from_slice(&after);
        self.region_is_as_expected()?;
        self.done("the Read returned the old bytes, the region has the new ones".to_owned());
        Ok(())
    }

    fn immediate_data(&mut self) -> Result<(), TourError> {
        self.begin("RDMA Write with Immediate Data");
        let data = pattern(10, 4096);
        self.expected[..4096].copy_from_slice(&data);
        self.write_local(0, &data)?;
        let sges = [self.memory.sge(0, 4096)];
        let immediate = *b"immediat";
        let request = SendRequest::write_with_imm(self.id(), &sges, self.host.at(0), immediate);
        self.post(&[request.signaled().solicited()])?;
        self.completed(1)?;
        let s = self.host_report()?;
        let same = s.immediate == u64::from_be_bytes(immediate);
        self.check(same && s.len == 4096 && s.solicited, &s)?;
        self.check(s.region == digest(&self.expected), &"the completion came before the data")?;
        self.done("4 KiB, and 8 bytes in a receive completion of the host".to_owned());
        Ok(())
    }

    fn atomics(&mut self) -> Result<(), TourError> {
        self.begin("Atomic FetchAdd");
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
        let old = word(&self.expected[8192..8200]);
        let sinks: Vec<Sge> = (0..8).map(|n| self.memory.sge(8 * n, 8)).collect();
        let at = self.host.at(8192);
        let adds: Vec<_> =
            sinks.iter().map(|sink| SendRequest::fetch_add(self.id(), *sink, at, 3)).collect();
        self.post(&adds.iter().map(|add| add.signaled()).collect::<Vec<_>>())?;
        self.completed(8)?;
        let mut found = [0; 64];
        self.read_local(0, &mut found)?;
        let seen: Vec<u64> = found.chunks(8).map(word).collect();
        let expected: Vec<u64> = (0..8).map(|n| old.wrapping_add(3 * n)).collect();
        self.check(seen == expected, &seen)?;
        let now = old.wrapping_add(24);
        self.expected[8192..8200].copy_from_slice(&now.to_ne_bytes());
        self.region_is_as_expected()?;
        self.done("added 3 eight times, each saw the result of the one before".to_owned());

        self.begin("Atomic CmpSwap");
        let swap = |id, sink, compare, new| {
            SendRequest::compare_swap(id, sink, at, compare, new).signaled()
        };
        self.post(&[swap(self.id(), sinks[0], now, 1), swap(self.id(), sinks[1], now, 2)])?;
        self.completed(2)?;
        self.read_local(0, &mut found)?;
        let seen = [word(&found[..8]), word(&found[8..16])];
        self.check(seen == [now, 1], &seen)?;
        self.expected[8192..8200].copy_from_slice(&1u64.to_ne_bytes());
        self.region_is_as_expected()?;
        self.done("the first of two swapped, the second found a different word".to_owned());
        Ok(())
    }

    fn invalidates(&mut self) -> Result<(), TourError> {
        for (i, name) in ["Send with Invalidate", "Send with Solicited Event and Invalidate"]
            .into_iter()
            .enumerate()
        {
            self.begin(name);
            let stag = self.own[i];
            let request = SendRequest::send_invalidate(self.id(), &[], stag).signaled();
            self.post(&[if i == 1 { request.solicited() } else { request }])?;
            self.completed(1)?;
            let s = self.host_report()?;
            self.check(s.invalidated == stag && s.solicited == (i == 1), &s)?;
            self.done(format!("the host saw its STag {stag} invalidated"));
        }
        self.begin("RDMA Read with Local Invalidate");
        let own = MrOptions { scope: Scope::Qp(self.qp.id()), ..MrOptions::default() };
        let sink = self.pd.reg_mr_with(&self.buffer, ..4096, &own);
        let sink = sink.map_err(|e| self.failed(e))?;
        let request = SendRequest::read_invalidate(self.id(), sink.sge(0, 4096), self.host.at(0));
        self.post(&[request.signaled()])?;
        self.completed(1)?;
        let mut found = vec![0; 4096];
        self.read_local(0, &mut found)?;
        self.check(found == self.expected[..4096], &"the bytes read differ")?;
        self.done("4 KiB, and the sink is no longer registered".to_owned());

        self.begin("Local Invalidate");
        let region = self.pd.reg_mr(&self.buffer, ..4096, Access::LOCAL_WRITE);
        let region = region.map_err(|e| self.failed(e))?;
        self.post(&[SendRequest::local_invalidate(self.id(), region.rkey()).signaled()])?;
        self.completed(1)?;
        self.done("an STag that the whole PD may use, on every worker".to_owned());
        Ok(())
    }

    fn batches(&mut self) -> Result<(), TourError> {
        self.begin("Batch: 31 unsignaled RDMA Writes and a Send");
        let data: Vec<[u8; 8]> = (0..31u64).map(|i| (i * 0x0101_0101_0101).to_le_bytes()).collect();
        let mut requests = Vec::new();
        for (i, bytes) in data.iter().enumerate() {
            let at = i * 8;
            self.expected[at..at + 8].copy_from_slice(bytes);
            requests.push(SendRequest::write_inline(self.id(), bytes, self.host.at(at as u64)));
        }
        requests.push(SendRequest::send_inline(self.id(), b"done").signaled());
        self.post(&requests)?;
        self.completed(1)?;
        let s = self.host_report()?;
        self.check(s.region == digest(&self.expected), &"the Send overtook a Write")?;
        self.done("one doorbell, one completion, all Writes before the Send".to_owned());
        Ok(())
    }

    /// Makes a second connection and writes to an invalid STag.
    fn refused_write(&mut self, context: &Context, address: SocketAddr) -> Result<(), TourError> {
        self.begin("RDMA Write to an invalid STag");
        let call = |source| TourError::Call { step: "RDMA Write to an invalid STag", source };
        let cq = context.create_cq(16, None).map_err(call)?;
        let qp = self.pd.create_qp(&QpOptions::new(&cq)).map_err(call)?;
        let options = ConnectOptions { timeout: Some(self.timeout), ..ConnectOptions::default() };
        qp.connect(address, &options).map_err(call)?;
        let nowhere = RemoteAddr { addr: 0, rkey: NO_SUCH_STAG };
        qp.post_send(&[SendRequest::write_inline(1, b"forbidden", nowhere).signaled()])
            .map_err(|e| call(e.source))?;
        let reason = qp.wait_disconnected(Some(self.timeout)).map_err(call)?;
        let expected = TerminateCode { layer: 1, etype: 1, code: 0 };
        match reason {
            DisconnectReason::Terminate { origin: TerminateOrigin::Peer, code, .. }
                if code == expected =>
            {
                self.done(format!("refused by the host's RNIC with Terminate {code}"));
                Ok(())
            }
            other => Err(self.wrong(format!("ended: {other} instead of Terminate {expected}"))),
        }
    }

    fn leave(&mut self) -> Result<(), TourError> {
        self.begin("disconnect");
        self.qp.disconnect().map_err(|e| self.failed(e))?;
        let reason = self.qp.wait_disconnected(Some(self.timeout)).map_err(|e| self.failed(e))?;
        self.check(reason == DisconnectReason::Orderly, &reason)?;
        self.done("gracefully, with a FIN in each direction".to_owned());
        Ok(())
    }

    // -----------------------------------------------------------------------------------------

    fn begin(&mut self, step: &'static str) {
        self.step = step;
        self.began = Instant::now();
    }

    fn done(&mut self, detail: String) {
        self.steps.push(Step { name: self.step, detail, took: self.began.elapsed() });
    }

    fn failed(&self, source: Error) -> TourError {
        TourError::Call { step: self.step, source }
    }

    fn wrong(&self, what: String) -> TourError {
        TourError::Wrong { step: self.step, what }
    }

    fn check(&self, right: bool, found: &dyn std::fmt::Debug) -> Result<(), TourError> {
        if right { Ok(()) } else { Err(self.wrong(format!("found {found:?}"))) }
    }

    fn id(&self) -> u64 {
        self.next_id.set(self.next_id.get() + 1);
        self.next_id.get()
    }

    fn post(&self, requests: &[SendRequest<'_>]) -> Result<(), TourError> {
        self.qp.post_send(requests).map_err(|e| self.failed(e.source))
    }

    fn post_inline(&mut self, bytes: &[u8]) -> Result<(), TourError> {
        let id = self.id();
        self.post(&[SendRequest::send_inline(id, bytes).signaled()])?;
        self.completed(1).map(|_| ())
    }

    fn post_report(&self, slot: u32) -> Result<(), TourError> {
        let sges = [self.reports.sge(u64::from(slot) * 64, REPORT)];
        self.qp
            .post_recv(&[RecvRequest::new(u64::from(slot), &sges)])
            .map_err(|e| self.failed(e.source))
    }

    /// Waits until `n` requests of this end have completed. Keeps reports that arrive in the
    /// meantime.
    fn completed(&mut self, n: usize) -> Result<Completion, TourError> {
        let mut last = None;
        let mut left = n;
        while left > 0 {
            for c in self.wait()? {
                if c.opcode != CompletionOpcode::Receive {
                    left -= 1;
                    last = Some(c);
                }
            }
        }
        last.ok_or_else(|| self.wrong("nothing completed".to_owned()))
    }

    fn host_report(&mut self) -> Result<HostReport, TourError> {
        while self.seen.is_empty() {
            self.wait()?;
        }
        Ok(self.seen.remove(0))
    }

    fn wait(&mut self) -> Result<Vec<Completion>, TourError> {
        let mut completions = [Completion::default(); 16];
        let n = self.cq.wait(&mut completions, Some(self.timeout)).map_err(|e| self.failed(e))?;
        if n == 0 {
            return Err(self.failed(Error::TimedOut { what: "a completion" }));
        }
        let mut ours = Vec::new();
        for c in &completions[..n] {
            let c = c.ok().map_err(|e| self.failed(e))?;
            if c.opcode == CompletionOpcode::Receive {
                let mut report = [0; REPORT as usize];
                self.reports.read_at(c.wr_id * 64, &mut report).map_err(|e| self.failed(e))?;
                self.seen.push(HostReport::from_bytes(&report));
                self.post_report(c.wr_id as u32)?;
            }
            ours.push(c);
        }
        Ok(ours)
    }

    /// Verifies the digest of the host's region, which a Send after all Writes requests.
    fn region_is_as_expected(&mut self) -> Result<(), TourError> {
        self.post_inline(b"?")?;
        let s = self.host_report()?;
        self.check(s.region == digest(&self.expected), &"the region differs")
    }

    fn write_local(&self, at: u64, bytes: &[u8]) -> Result<(), TourError> {
        self.memory.write_at(at, bytes).map_err(|e| self.failed(e))
    }

    fn read_local(&self, at: u64, bytes: &mut [u8]) -> Result<(), TourError> {
        self.memory.read_at(at, bytes).map_err(|e| self.failed(e))
    }

    fn memory_fill(&self, byte: u8) -> Result<(), TourError> {
        self.memory.fill(0, REGION as usize, byte).map_err(|e| self.failed(e))
    }
}
