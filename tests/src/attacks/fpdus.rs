//! Many connections that carry FPDUs of the minimum length as fast as TCP allows.

use std::convert::Infallible;
use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::path::Path;

use super::intruder::{End, Intruder};
use super::progress::Progress;
use crate::traffic::Failure;
use crate::wire::{self, CRC, fpdu, tagged};

/// Number of connections.
const CONNECTIONS: usize = 64;

/// Sends Writes without data (20 bytes each) on every writable connection, forever.
pub fn run(socket: &Path) -> Result<Infallible, Failure> {
    let mut intruder = Intruder::open(socket)?;
    let cq = intruder.cq(64, false)?.cq;
    let (_, address) = intruder.listen(CONNECTIONS as u32)?;
    let mut peers: Vec<(TcpStream, usize)> = Vec::new();
    let mut ends: Vec<End> = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut peer = wire::dial(address);
        peer.write_all(&wire::request(CRC, 1, b""))?;
        let end = intruder.qp(cq, 1)?;
        intruder.accept(&end)?;
        wire::reply(&mut peer);
        peer.set_nonblocking(true)?;
        peers.push((peer, 0));
        ends.push(end);
    }
    let one = fpdu(&tagged(0, 0, 0, b""));
    let burst = one.repeat(BURST);
    let progress = Progress::begin();
    loop {
        for (peer, done) in &mut peers {
            match peer.write(&burst[*done..]) {
                Ok(n) => {
                    progress.add((n / one.len()) as u64);
                    *done = (*done + n) % burst.len();
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// FPDUs per `write`: as many bytes as the daemon reads in one call.
const BURST: usize = 256 * 1024 / 20;
