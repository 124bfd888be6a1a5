//! Deframes a stream of many FPDUs.

use std::hint::black_box;

use rnic_core::ddp::TaggedHeader;
use rnic_core::mpa::{Deframer, Framer};

use crate::{Run, Subject, codec, pattern};

pub(crate) fn subjects() -> Vec<Subject> {
    let mut all = Vec::new();
    for (payload, count) in [(8, 1024), (1440, 128), (codec::longest_payload(), 4)] {
        // The whole stream at once, or in pieces of the size of an Ethernet segment, most of which
        // end within an FPDU.
        for (how, piece) in [("whole", usize::MAX), ("pieces", 1448)] {
            let subject =
                Subject::counted("deframer", format!("{how}/{payload}"), count, move || {
                    take_apart(payload, count, piece)
                });
            all.push(subject.moving(payload * count as usize));
        }
    }
    all
}

/// Deframes `count` FPDUs of Writes of `payload` bytes each, `piece` bytes at a time.
fn take_apart(payload: usize, count: u64, piece: usize) -> Run {
    let mut framer = Framer::new(false, true);
    let len = framer.fpdu_len(TaggedHeader::LEN + payload);
    let mut stream = vec![0; len * count as usize];
    let payload = pattern(payload);
    for (to, out) in (0..).zip(stream.chunks_exact_mut(len)) {
        codec::frame(&mut framer, out, to, &payload);
    }
    let expected = (count, count as usize * (TaggedHeader::LEN + payload.len()));
    let mut deframer = Deframer::new(false, true);
    Box::new(move || {
        let stream = black_box(&mut stream[..]);
        // The bytes of an incomplete FPDU are `taken..have`.
        let mut taken = 0;
        let mut have = 0;
        let mut found = (0, 0);
        while have < stream.len() {
            have = have.saturating_add(piece).min(stream.len());
            loop {
                let needed = deframer.needed(&stream[taken..have]);
                if have - taken < needed {
                    break;
                }
                let ulpdu = deframer.take(&mut stream[taken..taken + needed]);
                found.0 += 1;
                found.1 += ulpdu.expect("it is intact").len();
                taken += needed;
            }
        }
        assert_eq!((taken, found), (stream.len(), expected));
    })
}
