//! A well-behaved client that measures the effect of an attack: a ping-pong pair, commands
//! that every worker must acknowledge, sessions that open and close, and connections from slow
//! peers.

use std::io::{Lines, StdinLock, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rnic_abi::abi::control::{Event, MrRequest, MrSource, ReplyBody, RequestBody};
use rnic_abi::types::*;

use super::intruder::Intruder;
use crate::DEADLINE;
use crate::pinger::Pinger;
use crate::raw::Raw;
use crate::traffic::Failure;
use crate::wire::{self, CRC};

/// Number of peers that connect at the same time.
const PEERS: usize = 8;
/// Delay before a peer sends its MPA Request: a round trip around the world.
const START: Duration = Duration::from_millis(150);
/// Time limit of an operation during a measurement.
pub const TIMEOUT: Duration = Duration::from_secs(3);

/// Takes a measurement for each line of `asked` and prints the results in one line:
///
/// - `pair MS`: round trips per second;
/// - `commands MS`: the longest times of a registration, a deregistration and the destruction of a
///   QP, in microseconds;
/// - `sessions MS`: the longest times to open and to end a session, in microseconds;
/// - `peers MS`: the number of peers served within this time, and the number of peers;
/// - `counted N`: N, after N round trips, N sets of commands and N sessions.
///
/// # Errors
///
/// If the daemon refuses an ordinary request.
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
            "sessions" => sessions(socket, TIMEOUT, goes_on)?.map(micros).to_vec(),
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

/// Returns a closure that returns true `n` times.
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

    /// Returns the longest times of a registration, a deregistration and the destruction of a QP.
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
            // Assigns the QP to a worker.
            self.session.call(RequestBody::QpToError { qp })?;
            timed(&mut self.session, 2, RequestBody::DestroyQp { qp })?;
        }
        self.session.forget_events();
        Ok(longest)
    }

    /// Connects peers that send their MPA Request late. Returns the number of peers served.
    fn peers(&mut self, timeout: Duration) -> Result<usize, Failure> {
        self.session.forget_events();
        let dial = |_| TcpStream::connect_timeout(&self.address, timeout).ok();
        let peers: Vec<TcpStream> = (0..PEERS).filter_map(dial).collect();
        std::thread::sleep(START);
        let mut waiting: Vec<SocketAddr> = Vec::new();
        for mut peer in &peers {
            if peer.write_all(&wire::request(CRC, 1, b"")).is_ok() {
                waiting.push(peer.local_addr()?);
            }
        }
        let end = Instant::now() + timeout;
        let mut served = 0;
        while served < waiting.len() {
            let left = end.saturating_duration_since(Instant::now());
            let Ok(event) = self.session.event_within(left) else { break };
            let Event::ConnectionRequest { request, addresses, .. } = event else { continue };
            served += usize::from(waiting.contains(&addresses.peer));
            let private_data = Vec::new();
            // The peer may have withdrawn the request.
            let _ = self.session.raw.try_call(RequestBody::Reject { request, private_data }, &[]);
        }
        Ok(served)
    }
}

/// Returns the longest time to open a session and the longest time to end a session.
fn sessions(
    socket: &Path,
    timeout: Duration,
    mut goes_on: impl FnMut() -> bool,
) -> Result<[Duration; 2], Failure> {
    let mut longest = [Duration::ZERO; 2];
    while goes_on() {
        let opening = Instant::now();
        let raw = Raw::open_within(socket, timeout).ok_or("no session")?;
        longest[0] = longest[0].max(opening.elapsed());
        let ending = Instant::now();
        if !raw.ends_within(timeout) {
            return Err("a session does not end".into());
        }
        longest[1] = longest[1].max(ending.elapsed());
    }
    Ok(longest)
}
