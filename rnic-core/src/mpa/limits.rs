//! Tests MPA against its rows of the table `limit`.

use super::startup::{Enhanced, Frame, FrameKind, Progress, Repr, RtrKinds};
use super::tests::pattern;
use super::*;
use crate::conformance::limit;
use crate::stream::startup::{Initiator, Options, Responder, ResponderStep};

const OPTIONS: Options = Options {
    revision: 2,
    crc: true,
    markers: false,
    rdmac: false,
    peer_to_peer: false,
    ird: u16::MAX,
    ord: u16::MAX,
    rtr: RtrKinds::all(),
};

/// Returns a Request of revision 1 with this length of Private Data; only its header unless `all`.
fn request(private_data: usize, all: bool) -> Vec<u8> {
    let mut bytes = b"MPA ID Req Frame\x40\x01".to_vec();
    bytes.extend((private_data as u16).to_be_bytes());
    assert_eq!(bytes.len(), limit("MPA startup frame header"));
    bytes.resize(bytes.len() + if all { private_data } else { 0 }, 7);
    bytes
}

//= MPA-7.1.1-18
//= MPA-7.1.1-19
//= MPA-7.1.1-21
//= MPA-7.1.2-9
//= MPA-7.1.2-9b
#[test]
fn private_data_limit() {
    let most = limit("MPA Private Data, maximum");
    let header = limit("MPA startup frame header");
    for len in [0, 1, most - 1, most] {
        let bytes = request(len, true);
        let Ok(Progress::Complete(frame, &[])) = Frame::check(FrameKind::Request, 1, &bytes) else {
            panic!("a Request with {len} bytes")
        };
        assert_eq!(frame.private_data(), vec![7; len]);
        // The header alone determines the length. Later bytes are not part of the frame.
        let progress = Frame::check(FrameKind::Request, 1, &bytes[..header]);
        assert!(len == 0 || progress == Ok(Progress::NeedMore(header + len)));
        let more = [&bytes[..], b"more"].concat();
        let progress = Frame::check(FrameKind::Request, 1, &more);
        assert!(matches!(progress, Ok(Progress::Complete(_, b"more"))), "{progress:?}");
    }
    for len in [most + 1, 0xFFFF] {
        assert!(Frame::check(FrameKind::Request, 1, &request(len, false)).is_err(), "{len}");
    }
    assert!(Initiator::new(&OPTIONS, &pattern(most)).is_ok());
    assert!(Initiator::new(&OPTIONS, &pattern(most + 1)).is_err());
    let mut responder = Responder::new(&OPTIONS);
    assert!(matches!(responder.handle_input(&request(0, true)), Ok(ResponderStep::Request(_))));
    assert!(responder.accept(None, None, 1, 1, &pattern(most + 1)).is_err());
    assert!(responder.accept(None, None, 1, 1, &pattern(most)).is_ok());
}

#[test]
fn enhanced_data_limits() {
    let room =
        limit("MPA Private Data, maximum") - limit("enhanced connection data inside Private Data");
    let most = limit("IRD and ORD, maximum negotiable (0x3FFF means not negotiated)");
    for (len, revision) in [(room, 2), (room + 1, 1)] {
        let initiator = Initiator::new(&OPTIONS, &pattern(len)).expect("fits");
        let Ok(Progress::Complete(frame, &[])) =
            Frame::check(FrameKind::Request, 2, initiator.request())
        else {
            panic!("a Request")
        };
        let repr = Repr::parse(&frame);
        assert_eq!((repr.revision, repr.private_data), (revision, &pattern(len)[..]));
        let stated = Enhanced {
            peer_to_peer: false,
            rtr: RtrKinds::empty(),
            ird: most as u16,
            ord: most as u16,
        };
        assert_eq!(repr.enhanced, (revision == 2).then_some(stated));
    }
}

//= MPA-3-4
//= MPA-4.5-1
//= MPA-4.5-2
#[test]
fn mulpdu_limits() {
    let least = limit("MULPDU, minimum") as u16;
    let most = limit("MULPDU and ULPDU sent, maximum") as u16;
    for markers in [false, true] {
        let all: Vec<u16> = (0..70_000).map(|emss| mulpdu(emss, markers)).collect();
        assert_eq!(all.iter().min(), Some(&least));
        assert_eq!(all.iter().max(), Some(&most));
        for (emss, mulpdu) in all.into_iter().enumerate() {
            // The formula of section 4.5.
            let marked = if markers { 4 * (emss as f64 / 512.0).ceil() as i64 } else { 0 };
            let formula = emss as i64 - (6 + marked + emss as i64 % 4);
            let expected = formula.clamp(i64::from(least), i64::from(most));
            assert_eq!(i64::from(mulpdu), expected, "EMSS {emss}, Markers {markers}");
        }
    }
}

//= MPA-4.3-4
//= MPA-4.3-9
#[test]
fn marker_interval() {
    let interval = limit("Marker interval");
    let mut framer = Framer::new(true, false);
    let mut stream = Vec::new();
    let mut starts = Vec::new();
    // No byte of the payload is 0, unlike the RESERVED bytes of Markers.
    for len in (1..40).map(|n| n * 37) {
        starts.push(stream.len());
        stream.extend(super::tests::frame(&mut framer, &[], &vec![0xEE; len]));
    }
    for at in (0..stream.len()).step_by(interval) {
        let marker = &stream[at..at + 4];
        assert_eq!(marker[..2], [0, 0], "position {at}");
        let fpdu = starts.iter().rev().find(|start| **start <= at).expect("the first is at 0");
        // In an FPDU that starts with a Marker, the length field follows the Marker.
        let length_at = if fpdu.is_multiple_of(interval) { fpdu + 4 } else { *fpdu };
        let back = u16::from_be_bytes([marker[2], marker[3]]);
        assert_eq!(usize::from(back), at.saturating_sub(length_at), "position {at}");
    }
}

#[test]
fn longest_fpdu_has_max_fpdu_bytes() {
    let at = |phase| Framer::at_phase(phase).fpdu_len(MAX_ULPDU);
    assert_eq!((0..MARKER_INTERVAL).step_by(4).map(at).max(), Some(MAX_FPDU));
}
