//! Sends messages from one QP to another. A run lasts from the post until the program sees the
//! completion or the data.
//!
//! The two QPs are connected over the direct path within one engine, or over TCP between two
//! engines. Segments, FPDUs and CRCs are real, and two copies of the bytes replace the kernel.

use rnic_abi::abi::queue::{SendFlags, SendOpcode};

use crate::pair::{Pair, Path};
use crate::{Run, Subject};

/// Number of messages per batch.
const BATCH: u64 = 32;
/// Size of a small message in bytes.
const SMALL: usize = 8;
/// Size of a long message in bytes.
const LONG: usize = 64 << 10;

pub(crate) fn subjects() -> Vec<Subject> {
    let mut all = Vec::new();
    for path in [Path::Direct, Path::Tcp { emss: LOOPBACK }, Path::Tcp { emss: ETHERNET }] {
        let name = path_name(path);
        let mut add = |what: &str, count, prepare: fn(Path) -> Run| {
            let prepare = move || prepare(path);
            all.push(Subject::counted("engine", format!("{name}/{what}"), count, prepare));
        };
        // Small messages do not depend on the MSS.
        if path != (Path::Tcp { emss: ETHERNET }) {
            add("write_8_batch_32", BATCH, small_writes);
            add("send_8", 1, small_send);
        }
        add("write_64k", 1, long_write);
        if let Some(long) = all.pop() {
            all.push(long.moving(LONG));
        }
    }
    all
}

fn path_name(path: Path) -> &'static str {
    match path {
        Path::Direct => "direct",
        Path::Tcp { emss: LOOPBACK } => "tcp",
        Path::Tcp { .. } => "tcp_1460",
    }
}

/// Posts 32 Writes to different addresses. The last one is signaled.
fn small_writes(path: Path) -> Run {
    let mut pair = Pair::new(path);
    let mut batch = 0u64;
    let mut found = [0; BATCH as usize * SMALL];
    Box::new(move || {
        batch += 1;
        let sent: [u8; BATCH as usize * SMALL] =
            std::array::from_fn(|at| batch.to_le_bytes()[at % SMALL] ^ (at / SMALL) as u8);
        pair.ends[0].memory.write(0, &sent).expect("mapped");
        for n in 0..BATCH {
            let at = n as usize * SMALL;
            let flags = if n + 1 == BATCH { SendFlags::SIGNALED } else { SendFlags::empty() };
            let header = pair.request(SendOpcode::Write, flags, batch, at);
            pair.push(&header, at..at + SMALL);
        }
        pair.ring();
        pair.turn_until_completed(0, batch, 0);
        pair.turn_until(|pair| {
            pair.ends[1].memory.read(0, &mut found).expect("mapped");
            found == sent
        });
    })
}

/// Posts one Send and waits until both programs have their completions.
fn small_send(path: Path) -> Run {
    let mut pair = Pair::new(path);
    let mut number = 0u64;
    Box::new(move || {
        number += 1;
        pair.ends[0].memory.write(0, &number.to_le_bytes()).expect("mapped");
        pair.post_receive(number, 0..SMALL);
        let header = pair.request(SendOpcode::Send, SendFlags::SIGNALED, number, 0);
        pair.push(&header, 0..SMALL);
        pair.ring();
        pair.turn_until_completed(0, number, 0);
        pair.turn_until_completed(1, number, SMALL as u32);
        assert_eq!(pair.ends[1].memory.load_u64(0), Ok(number));
    })
}

/// Posts one Write and waits until its last bytes have arrived.
fn long_write(path: Path) -> Run {
    let mut pair = Pair::new(path);
    let last = LONG - SMALL;
    let mut number = 0u64;
    let sent = crate::pattern(LONG);
    pair.ends[0].memory.write(0, &sent).expect("mapped");
    Box::new(move || {
        number += 1;
        for at in [0, LONG / 2, last] {
            pair.ends[0].memory.store_u64(at, number).expect("mapped");
        }
        let header = pair.request(SendOpcode::Write, SendFlags::SIGNALED, number, 0);
        pair.push(&header, 0..LONG);
        pair.ring();
        pair.turn_until_completed(0, number, 0);
        pair.turn_until(|pair| pair.ends[1].memory.load_u64(last) == Ok(number));
        for at in [0, LONG / 2] {
            assert_eq!(pair.ends[1].memory.load_u64(at), Ok(number));
        }
    })
}

/// Effective MSS of the loopback interface and of Ethernet, in bytes.
const LOOPBACK: usize = 65_483;
const ETHERNET: usize = 1460;
