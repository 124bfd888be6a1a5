//! Messages between daemons about RC and UC QPs, in the Private Data of start-up: any bytes, and
//! introductions that were written.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rnic_core::mpa::startup::RtrKinds;
use rnic_core::stream::introduction::{AskBack, Introduction};
use rnic_core::stream::startup::{Initiator, Options, Responder, ResponderStep};
use rnic_core::types::{Gid, QpId};
use rnic_fuzz::Input;

fuzz_target!(|data: &[u8]| {
    // Any bytes: what is understood is read once more as it was.
    if let Some(said) = Introduction::parse(data) {
        let bytes = said.emit();
        assert_eq!(Introduction::parse(&bytes), Some(said));
        // But for places that are kept for later versions.
        assert_eq!(bytes[8..50], data[8..50]);
        assert_eq!(bytes[56..], data[56..bytes.len()]);
        assert!(said.min_rnr_timer < 32 && said.rq_psn < 1 << 24);
        assert_eq!(AskBack::parse(data), None);
    }
    if let Some(question) = AskBack::parse(data) {
        let bytes = question.emit();
        assert_eq!(AskBack::parse(&bytes), Some(question));
        assert_eq!(bytes[8..], data[8..bytes.len()]);
    }
    assert!(!AskBack::is_confirmed_by(data) || data.starts_with(&AskBack::answer(true)));
    // One that was written, and then spoilt at one place, or cut off.
    let mut input = Input(data);
    let gid = |input: &mut Input<'_>| {
        let mut gid = [0; 16];
        let some = input.take(16);
        gid[..some.len()].copy_from_slice(some);
        Gid(gid)
    };
    let said = Introduction {
        gid: gid(&mut input),
        qp: QpId(input.u64() as u32),
        to_gid: gid(&mut input),
        to_qp: QpId(input.u64() as u32),
        ird: input.u16(),
        min_rnr_timer: input.u8() & 31,
        unreliable: input.u8() & 1 != 0,
        // A power of two, as verbs have it; less than 256 is none.
        path_mtu: 128 << (input.u8() % 6),
        rq_psn: input.u64() as u32 & 0xFF_FFFF,
        sq_psn: (input.u8() & 1 != 0).then(|| input.u64() as u32 & 0xFF_FFFF),
        dial: input.u64(),
        daemon: input.u64(),
    };
    let question = AskBack::about(&said);
    assert_eq!(AskBack::parse(&question.emit()), Some(question));
    let mut bytes = said.emit().to_vec();
    assert_eq!(Introduction::parse(&bytes), Some(said));
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

/// The Private Data that a responder finds in the request of an initiator that was given these.
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
