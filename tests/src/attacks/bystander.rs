//! Somebody who behaves well, and whose figures show what others do to it: a pair that bounces a
//! message, the commands that every worker has to acknowledge, new sessions and their ends, and
//! connections from peers that take their time.

use std::io::{Lines, StdinLock, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rnic_core::abi::control::{Event, MrRequest, MrSource, ReplyBody, RequestBody};
use rnic_core::types::*;

use super::intruder::Intruder;
use crate::DEADLINE;
use crate::pinger::Pinger;
use crate::raw::Raw;
use crate::traffic::Failure;
use crate::wire::{self, CRC};

/// Peers that connect at a time.
const PEERS: usize = 8;
/// How long they take for their request: a round trip around the world.
const START: Duration = Duration::from_millis(150);
/// What takes longer while it is measured has failed.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// Answers each line of `asked` with a line of figures: `pair MS` with round trips per second,
/// `commands MS` and `sessions MS` with the longest times of one in microseconds, `peers MS` with
/// how many of how many peers were served within this time, `counted N` with N after as many round
/// trips, sets of commands and sessions.
///
/// # Errors
///
/// If the daemon refuses what anybody may have.
pub fn serve(socket: &Path, asked: Lines<StdinLock<'_>>) -> Result<(), Failure> {
    let pinger = Pinger::at(socket);
    let mut own = Own::new(socket)?;
    println!("ready");
    for line in asked.map_while(Result::ok) {
        let (what, amount) = line.split_once(' ').unwrap_or((&line, "0"));
        let amount: u64 = amount.parse()?;
        let time = Duration::from_millis(amount);
        let begins = Instant::now();
        let goes_on = || begins.elapsed() < time;
        let figures: Vec<u64> = match what {
            "pair" => vec![pinger.rate(time) as u64],
            "commands" => own.commands(goes_on)?.map(micros).to_vec(),
            "sessions" => sessions(socket, PATIENCE, goes_on)?.map(micros).to_vec(),
            "peers" => vec![own.peers(time)? as u64, PEERS as u64],
            "counted" => {
                pinger.rounds(amount);
                own.commands(times(amount))?;
                sessions(socket, DEADLINE, times(amount))?;
                vec![amount]
            }
            other => return Err(format!("{other}?").into()),
        };
        let figures: Vec<String> = figures.iter().map(u64::to_string).collect();
        println!("{what}: {}", figures.join(" "));
    }
    Ok(())
}

/// Returns true so many times.
fn times(n: u64) -> impl FnMut() -> bool {
    let mut left = n;
    move || {
        let goes_on = left > 0;
        left = left.saturating_sub(1);
        goes_on
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

/// A session for commands and peers.
struct Own {
    session: Intruder,
    cq: CqId,
    buffer: SharedBufferId,
    address: SocketAddr,
}

impl Own {
    fn new(socket: &Path) -> Result<Self, Failure> {
        let mut session = Intruder::open(socket)?;
        let cq = session.cq(16, false)?.cq;
        let buffer = session.shared_buffer(4096)?;
        let (_, address) = session.listen(64)?;
        Ok(Own { session, cq, buffer, address })
    }

    /// The longest registration, deregistration and destruction of a QP.
    fn commands(&mut self, mut goes_on: impl FnMut() -> bool) -> Result<[Duration; 3], Failure> {
        let mut longest = [Duration::ZERO; 3];
        let mut timed = |session: &mut Intruder, n: usize, body| -> Result<ReplyBody, Failure> {
            let began = Instant::now();
            let reply = session.call(body)?;
            longest[n] = longest[n].max(began.elapsed());
            Ok(reply)
        };
        while goes_on() {
            let register = RequestBody::RegMr(MrRequest {
                pd: self.session.pd,
                source: MrSource::Shared { buffer: self.buffer, offset: 0 },
                length: 4096,
                iova: 0,
                access: Access::LOCAL_WRITE,
                scope: Scope::Pd,
            });
            let ReplyBody::Mr { mr, .. } = timed(&mut self.session, 0, register)? else {
                return Err("no region".into());
            };
            timed(&mut self.session, 1, RequestBody::DeregMr { mr })?;
            let qp = self.session.qp(self.cq, 1)?.qp;
            // Now a worker has it.
            self.session.call(RequestBody::QpToError { qp })?;
            timed(&mut self.session, 2, RequestBody::DestroyQp { qp })?;
        }
        self.session.forget_events();
        Ok(longest)
    }

    /// How many of some peers are served that leave the daemon waiting for their request a while.
    fn peers(&mut self, patience: Duration) -> Result<usize, Failure> {
        self.session.forget_events();
        let dial = |_| TcpStream::connect_timeout(&self.address, patience).ok();
        let peers: Vec<TcpStream> = (0..PEERS).filter_map(dial).collect();
        std::thread::sleep(START);
        let mut waiting: Vec<SocketAddr> = Vec::new();
        for mut peer in &peers {
            if peer.write_all(&wire::request(CRC, 1, b"")).is_ok() {
                waiting.push(peer.local_addr()?);
            }
        }
        let end = Instant::now() + patience;
        let mut served = 0;
        while served < waiting.len() {
            let left = end.saturating_duration_since(Instant::now());
            let Ok(event) = self.session.event_within(left) else { break };
            let Event::ConnectionRequest { request, addresses, .. } = event else { continue };
            served += usize::from(waiting.contains(&addresses.peer));
            let private_data = Vec::new();
            // It may have been withdrawn.
            let _ = self.session.raw.try_call(RequestBody::Reject { request, private_data }, &[]);
        }
        Ok(served)
    }
}

/// The longest that it took to open a session, and to end one.
fn sessions(
    socket: &Path,
    patience: Duration,
    mut goes_on: impl FnMut() -> bool,
) -> Result<[Duration; 2], Failure> {
    let mut longest = [Duration::ZERO; 2];
    while goes_on() {
        let opening = Instant::now();
        let raw = Raw::open_within(socket, patience).ok_or("no session")?;
        longest[0] = longest[0].max(opening.elapsed());
        let ending = Instant::now();
        if !raw.ends_within(patience) {
            return Err("a session does not end".into());
        }
        longest[1] = longest[1].max(ending.elapsed());
    }
    Ok(longest)
}
