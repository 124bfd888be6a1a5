//! Checksummed traffic between two client processes that compare every received byte.
//!
//! A guest connects to a host. In each round it writes seeded data somewhere into the host's
//! region, describes the data in a Send, waits for the host's verdict, and reads the data back. No
//! round may fail, regardless of other load on the daemon.

use std::net::SocketAddr;
use std::time::Duration;

use rnic_client::{
    AcceptOptions, Access, Completion, CompletionOpcode, ConnectOptions, ConnectionRequest,
    Context, Cq, DisconnectReason, Listener, Mr, Pd, Qp, QpOptions, RecvRequest, RemoteMr,
    SendRequest,
};

/// Error of a client process.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Length of the host's region in bytes.
pub const REGION: usize = 256 * 1024;
/// Length in bytes of a claim, the Send that describes the data: offset and length, CRC, round.
const CLAIM: usize = 24;
/// Maximum number of unread claims.
const CLAIMS: u64 = 4;

/// A small generator of test data and choices. The same seed yields the same sequence.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Creates a generator with this seed.
    pub fn new(seed: u64) -> Self {
        Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Returns the next word (xorshift64*).
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Returns a number below `n`, which must not be 0.
    pub fn below(&mut self, n: u64) -> u64 {
        (self.word() >> 11) % n
    }

    /// Fills bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.word().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// One end: a QP and a buffer for claims.
struct End {
    qp: Qp,
    cq: Cq,
    claims: Mr,
    timeout: Duration,
}

impl End {
    fn new(context: &Context, pd: &Pd, timeout: Duration) -> Result<Self, Failure> {
        let cq = context.create_cq(64, None)?;
        let qp = pd.create_qp(&QpOptions::new(&cq))?;
        let buffer = context.create_shared_buffer(4096)?;
        let claims = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE)?;
        let end = End { qp, cq, claims, timeout };
        (0..CLAIMS).try_for_each(|slot| end.post_receive(slot))?;
        Ok(end)
    }

    fn post_receive(&self, slot: u64) -> Result<(), Failure> {
        let sges = [self.claims.sge(slot * CLAIM as u64, CLAIM as u32)];
        Ok(self.qp.post_recv(&[RecvRequest::new(slot, &sges)])?)
    }

    /// Waits for the next completion, which must be a success.
    fn completion(&self) -> Result<Completion, Failure> {
        let mut one = [Completion::default()];
        match self.cq.wait(&mut one, Some(self.timeout))? {
            0 => Err("no completion in time".into()),
            _ => Ok(one[0].ok()?),
        }
    }

    /// Returns the claim of a receive completion and posts its buffer again.
    fn claim(&self, completion: &Completion) -> Result<[u64; 3], Failure> {
        if completion.byte_len as usize != CLAIM {
            return Err(format!("a claim of {} bytes", completion.byte_len).into());
        }
        let mut bytes = [0; CLAIM];
        self.claims.read_at(completion.wr_id * CLAIM as u64, &mut bytes)?;
        self.post_receive(completion.wr_id)?;
        let mut words = [0; 3];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into()?);
        }
        Ok(words)
    }
}

/// Serves `guests` guests, each on its own thread, and reports how each connection ended.
pub fn host(
    context: &Context,
    listener: &Listener,
    guests: u32,
    timeout: Duration,
    report: impl Fn(String) + Sync,
) -> Result<(), Failure> {
    std::thread::scope(|scope| {
        for _ in 0..guests {
            let request = listener.accept_request(None)?;
            let report = &report;
            scope.spawn(move || match host_one(context, request, timeout) {
                Ok((rounds, end)) => report(format!("ended after {rounds} rounds: {end}")),
                Err(e) => report(format!("failed: {e}")),
            });
        }
        Ok(())
    })
}

/// Serves one guest until its connection ends. Returns the number of rounds and the disconnect
/// reason.
fn host_one(
    context: &Context,
    request: ConnectionRequest,
    timeout: Duration,
) -> Result<(u64, String), Failure> {
    let pd = context.open_pd(None)?;
    let buffer = context.create_shared_buffer(REGION as u64)?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let region = pd.reg_mr(&buffer, .., access)?;
    let end = End::new(context, &pd, timeout)?;
    let private_data = region.remote().to_bytes().to_vec();
    let options = AcceptOptions { private_data, ..AcceptOptions::default() };
    let mut rounds = 0;
    let verdict = (|| -> Result<(), Failure> {
        request.accept(&end.qp, &options)?;
        loop {
            let completion = end.completion()?;
            if completion.opcode != CompletionOpcode::Receive {
                continue;
            }
            let [place, crc, round] = end.claim(&completion)?;
            let offset = place >> 32;
            let len = place as u32 as usize;
            let mut found = vec![0; len];
            region.read_at(offset, &mut found)?;
            let right = u64::from(crc32c::crc32c(&found)) == crc;
            let answer = [round.to_le_bytes(), u64::from(right).to_le_bytes(), [0; 8]].concat();
            end.qp.post_send(&[SendRequest::send_inline(round, &answer).signaled()])?;
            if !right {
                return Err(format!("CORRUPTED: {len} bytes at {offset} of round {round}").into());
            }
            rounds += 1;
        }
    })();
    let why = verdict.err().map_or_else(String::new, |e| e.to_string());
    if why.contains("CORRUPTED") {
        return Err(why.into());
    }
    match end.qp.wait_disconnected(Some(timeout)) {
        Ok(reason) => Ok((rounds, format!("{reason:?}"))),
        Err(e) => Err(format!("{why}; then {e}").into()),
    }
}

/// Runs a guest of `host` while `go_on` returns true for the number of rounds so far. Returns the
/// number of rounds.
pub fn visit(
    context: &Context,
    host: SocketAddr,
    seed: u64,
    timeout: Duration,
    mut go_on: impl FnMut(u64) -> bool,
) -> Result<u64, Failure> {
    let pd = context.open_pd(None)?;
    let buffer = context.create_shared_buffer(2 * REGION as u64)?;
    let source = pd.reg_mr(&buffer, ..REGION as u64, Access::empty())?;
    let sink = pd.reg_mr(&buffer, REGION as u64.., Access::LOCAL_WRITE)?;
    let end = End::new(context, &pd, timeout)?;
    let options = ConnectOptions { timeout: Some(timeout), ..ConnectOptions::default() };
    let connected = end.qp.connect(host, &options)?;
    let region = RemoteMr::from_bytes(&connected.private_data)
        .ok_or("the private data contains no region")?;
    let mut rng = Rng::new(seed);
    let mut bytes = vec![0; REGION];
    let mut rounds = 0;
    while go_on(rounds) {
        let most = if rng.below(16) == 0 { REGION } else { 8192 };
        let len = 1 + rng.below(most as u64) as usize;
        let offset = rng.below((REGION - len + 1) as u64);
        let data = &mut bytes[..len];
        rng.fill(data);
        source.write_at(0, data)?;
        let crc = u64::from(crc32c::crc32c(data));
        let place = offset << 32 | len as u64;
        let claim = [place.to_le_bytes(), crc.to_le_bytes(), rounds.to_le_bytes()].concat();
        let sges = [source.sge(0, len as u32)];
        end.qp.post_send(&[
            SendRequest::write(1, &sges, region.at(offset)),
            SendRequest::send_inline(2, &claim),
            SendRequest::read(3, sink.sge(0, len as u32), region.at(offset)).signaled(),
        ])?;
        let mut judged = false;
        let mut read = false;
        while !(judged && read) {
            let completion = end.completion()?;
            match completion.opcode {
                CompletionOpcode::Receive => {
                    let [round, right, _] = end.claim(&completion)?;
                    if (round, right) != (rounds, 1) {
                        return Err(format!("the host reported wrong data in round {round}").into());
                    }
                    judged = true;
                }
                CompletionOpcode::RdmaRead => read = true,
                other => return Err(format!("unexpected completion of {other:?}").into()),
            }
        }
        let mut found = vec![0; len];
        sink.read_at(0, &mut found)?;
        if found != *data {
            return Err(format!("CORRUPTED: {len} bytes read from {offset} differ").into());
        }
        rounds += 1;
    }
    end.qp.disconnect()?;
    match end.qp.wait_disconnected(Some(timeout))? {
        DisconnectReason::Orderly => Ok(rounds),
        other => Err(format!("ended by {other:?}").into()),
    }
}
