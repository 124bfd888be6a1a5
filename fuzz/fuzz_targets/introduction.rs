//! Messages between daemons about RC and UC QPs, in the Private Data of start-up: arbitrary bytes,
//! and valid introductions.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rnic_abi::types::{Gid, QpId};
use rnic_core::mpa::startup::RtrKinds;
use rnic_core::stream::introduction::{Introduction, VerificationQuery};
use rnic_core::stream::startup::{Initiator, Options, Responder, ResponderStep};
use rnic_fuzz::Input;

fuzz_target!(|data: &[u8]| {
    // Arbitrary bytes. Encoding and decoding a parsed message must return the same message.
    if let Some(introduction) = Introduction::parse(data) {
        let bytes = introduction.emit();
        assert_eq!(Introduction::parse(&bytes), Some(introduction));
        // Bytes 50 to 55 contain reserved bits.
        assert_eq!(bytes[8..50], data[8..50]);
        assert_eq!(bytes[56..], data[56..bytes.len()]);
        assert!(introduction.min_rnr_timer < 32 && introduction.rq_psn < 1 << 24);
        assert_eq!(VerificationQuery::parse(data), None);
    }
    if let Some(question) = VerificationQuery::parse(data) {
        let bytes = question.emit();
        assert_eq!(VerificationQuery::parse(&bytes), Some(question));
        assert_eq!(bytes[8..], data[8..bytes.len()]);
    }
    assert!(
        !VerificationQuery::is_confirmed_by(data)
            || data.starts_with(&VerificationQuery::answer(true))
    );
    // A valid introduction, then the same one with one changed byte, or truncated.
    let mut input = Input(data);
    let gid = |input: &mut Input<'_>| {
        let mut gid = [0; 16];
        let some = input.take(16);
        gid[..some.len()].copy_from_slice(some);
        Gid(gid)
    };
    let introduction = Introduction {
        gid: gid(&mut input),
        qp: QpId(input.u64() as u32),
        to_gid: gid(&mut input),
        to_qp: QpId(input.u64() as u32),
        ird: input.u16(),
        min_rnr_timer: input.u8() & 31,
        unreliable: input.u8() & 1 != 0,
        // A power of two. 128 means that the sender has no path MTU.
        path_mtu: 128 << (input.u8() % 6),
        rq_psn: input.u64() as u32 & 0xFF_FFFF,
        sq_psn: (input.u8() & 1 != 0).then(|| input.u64() as u32 & 0xFF_FFFF),
        dial: input.u64(),
        daemon: input.u64(),
    };
    let question = VerificationQuery::about(&introduction);
    assert_eq!(VerificationQuery::parse(&question.emit()), Some(question));
    let mut bytes = introduction.emit().to_vec();
    assert_eq!(Introduction::parse(&bytes), Some(introduction));
    assert_eq!(through_start_up(&bytes).as_deref(), Some(&bytes[..]));
    let at = usize::from(input.u8()) % bytes.len();
    assert_eq!(Introduction::parse(&bytes[..at]), None);
    let flip = input.u8();
    bytes[at] ^= flip;
    match Introduction::parse(&bytes) {
        None => assert!(at < 5 && flip != 0),
        Some(other) => assert!(at >= 5 || flip == 0, "{other:?}"),
    }
});

/// Returns the Private Data that a responder receives from an initiator with `private_data`.
fn through_start_up(private_data: &[u8]) -> Option<Vec<u8>> {
    let options = Options {
        revision: 2,
        crc: true,
        markers: false,
        rdmac: false,
        peer_to_peer: true,
        ird: 1,
        ord: 1,
        rtr: RtrKinds::all(),
    };
    let initiator = Initiator::new(&options, private_data).ok()?;
    let mut responder = Responder::new(&options);
    match responder.handle_input(initiator.request()).ok()? {
        ResponderStep::Request(request) => Some(request.private_data),
        ResponderStep::NeedMore => None,
    }
}
