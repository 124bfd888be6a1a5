//! Connections from the attacker's own peers to its own listeners that are never established:
//! undecided requests, silent connections, and requests with wrong STags.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rnic_abi::abi::control::RequestBody;
use rnic_abi::types::CqId;
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::intruder::Intruder;
use super::progress::Progress;
use crate::traffic::Failure;
use crate::wire::{self, CRC, fpdu, tagged};

/// Keeps 4,000 complete requests undecided, at listeners with the maximum backlog.
pub fn undecided(socket: &Path) -> Result<Infallible, Failure> {
    const LISTENERS: usize = 8;
    const MOST: usize = 4000;
    let mut intruder = Intruder::open(socket)?;
    let addresses = (0..LISTENERS)
        .map(|_| intruder.listen(1024).map(|(_, address)| address))
        .collect::<Result<Vec<_>, _>>()?;
    let mut peers = VecDeque::new();
    let progress = Progress::begin();
    for n in 0.. {
        // `dial_from` varies the source address, so that the ports suffice at any rate.
        if let Some(mut peer) = dial_from(n, addresses[n % LISTENERS]) {
            let _ = peer.write_all(&wire::request(CRC, 1, b"never"));
            peers.push_back(peer);
        }
        intruder.forget_events();
        progress.add(1);
        if peers.len() > MOST {
            peers.pop_front();
        }
    }
    Err("the counter has overflowed".into())
}

/// Opens 20,000 connections a second that send nothing.
pub fn silent(socket: &Path) -> Result<Infallible, Failure> {
    const RATE: u64 = 20_000;
    const KEPT: usize = 2000;
    let mut intruder = Intruder::open(socket)?;
    let (_, address) = intruder.listen(1024)?;
    let mut peers = VecDeque::new();
    let progress = Progress::begin();
    let began = Instant::now();
    for n in 0u64.. {
        peers.extend(dial_from(n as usize, address));
        if peers.len() > KEPT
            && let Some(oldest) = peers.pop_front()
        {
            // A reset leaves no TIME_WAIT socket.
            set_socket_linger(&oldest, Some(Duration::ZERO))?;
        }
        progress.add(1);
        let due = began + Duration::from_nanos(n * 1_000_000_000 / RATE);
        if let Some(early) = due.checked_duration_since(Instant::now())
            && early > Duration::from_millis(1)
        {
            std::thread::sleep(early);
        }
    }
    Err("the counter has overflowed".into())
}

/// Sends Writes with unknown STags to the attacker's own QPs, from an address that other clients
/// share.
pub fn guesses(socket: &Path) -> Result<Infallible, Failure> {
    let mut intruder = Intruder::open(socket)?;
    let cq = intruder.cq(64, false)?.cq;
    let (_, address) = intruder.listen(64)?;
    let progress = Progress::begin();
    loop {
        // The daemon may have refused the connection.
        if guess(&mut intruder, cq, address).is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        progress.add(1);
    }
}

fn guess(intruder: &mut Intruder, cq: CqId, address: SocketAddr) -> Option<()> {
    let mut peer = TcpStream::connect(address).ok()?;
    peer.set_read_timeout(Some(STEP_TIMEOUT)).ok()?;
    peer.write_all(&wire::request(CRC, 1, b"")).ok()?;
    let end = intruder.qp(cq, 1).ok()?;
    let taken = intruder.accept_within(&end, STEP_TIMEOUT).ok().and_then(|()| {
        let mut reply = [0; 20];
        std::io::Read::read_exact(&mut peer, &mut reply).ok()?;
        peer.write_all(&fpdu(&tagged(0, 0x5151_5100, 0, b"mine?"))).ok()?;
        // A Terminate and the FIN.
        wire::ending_after(&mut peer, STEP_TIMEOUT);
        Some(())
    });
    intruder.call(RequestBody::DestroyQp { qp: end.qp }).ok()?;
    taken
}

/// Time limit of each step of a guess.
const STEP_TIMEOUT: Duration = Duration::from_millis(200);

/// Connects from one of many addresses of this host. Returns `None` on failure.
fn dial_from(n: usize, to: SocketAddr) -> Option<TcpStream> {
    let source = [127, 1, (n / 200 % 40) as u8, 1 + (n % 200) as u8];
    let family = AddressFamily::INET;
    let kind = SocketType::STREAM;
    // Nonblocking: within a host the connection exists when `connect` returns.
    let stream = rustix::net::socket_with(family, kind, SocketFlags::NONBLOCK, None).ok()?;
    rustix::net::bind(&stream, &SocketAddr::from((source, 0))).ok()?;
    match rustix::net::connect(&stream, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Some(stream.into()),
        Err(_) => None,
    }
}
