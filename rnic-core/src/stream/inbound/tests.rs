//! Tests each receive check alone, and the order of the checks.

use proptest::prelude::*;

use super::*;
use crate::stream::{Enclose, terminate};
use rnic_abi::types::TerminateCode;

const LAST: u8 = 0x41;
const MORE: u8 = 0x01;

/// Returns an untagged segment.
fn untagged(control: u8, op: u8, qn: u32, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![control, op, 0xDE, 0xAD, 0xBE, 0xEF];
    out.extend([qn, msn, mo].into_iter().flat_map(u32::to_be_bytes));
    out.extend_from_slice(payload);
    out
}

/// Returns a tagged segment.
fn tagged(control: u8, op: u8, stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![control | 0x80, op];
    out.extend(stag.to_be_bytes());
    out.extend(to.to_be_bytes());
    out.extend_from_slice(payload);
    out
}

fn send(control: u8, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    untagged(control, 0x43, qn::SEND, msn, mo, payload)
}

fn read(control: u8, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    untagged(control, 0x41, qn::READ_REQUEST, msn, mo, payload)
}

/// Returns the fault of a segment on a new stream.
fn fault_of(ulpdu: &[u8]) -> Option<Fault> {
    Inbound::new(1).handle(ulpdu, true).err()
}

fn code_of(ulpdu: &[u8]) -> Option<TerminateCode> {
    fault_of(ulpdu).map(|f| f.code)
}

/// Handles a Send segment as the engine does, with a large buffer posted.
fn place(inbound: &mut Inbound, ulpdu: &[u8]) -> Result<Option<u32>, Fault> {
    match inbound.handle(ulpdu, true)? {
        Arrival::Send { mo, payload, last, .. } => {
            send_fits(mo, payload.len(), 1 << 20)?;
            inbound.sent_placed(mo, payload.len(), last)
        }
        other => panic!("not a Send: {other:?}"),
    }
}

//= DDP-5.4-4
#[test]
fn segments_in_any_order_before_the_last() {
    let mut inbound = Inbound::new(1);
    assert_eq!(place(&mut inbound, &send(MORE, 1, 10, &[0; 20])), Ok(None));
    assert_eq!(place(&mut inbound, &send(MORE, 1, 0, &[0; 10])), Ok(None));
    assert_eq!(place(&mut inbound, &send(LAST, 1, 30, &[0; 5])), Ok(Some(35)));
    assert_eq!(place(&mut inbound, &send(LAST, 2, 0, &[0; 7])), Ok(Some(7)));
}

#[test]
fn sends_have_their_own_msns_from_one() {
    for msn in [0, 2, 3, u32::MAX] {
        assert_eq!(code_of(&send(LAST, msn, 0, &[])), Some(codes::UNTAGGED_MSN), "{msn}");
        assert_eq!(code_of(&read(LAST, msn, 0, &[0; 28])), Some(codes::UNTAGGED_MSN), "{msn}");
    }
    let mut inbound = Inbound::new(1);
    for msn in 1..=3 {
        assert_eq!(place(&mut inbound, &send(LAST, msn, 0, &[])), Ok(Some(0)));
    }
    let first_read = inbound.handle(&read(LAST, 1, 0, &[0; 28]), true).map(drop);
    assert_eq!(first_read, Ok(()));
    let other_read = inbound.handle(&read(LAST, 4, 0, &[0; 28]), true).map(drop);
    assert_eq!(other_read, Err(Fault::segment(codes::UNTAGGED_MSN)));
}

//= DDP-4.3-9
#[test]
fn msn_wraps_to_zero() {
    let mut inbound = Inbound::new(1);
    inbound.set_next_msn(Msn(u32::MAX));
    for msn in [u32::MAX, 0, 1] {
        assert_eq!(place(&mut inbound, &send(LAST, msn, 0, &[1])), Ok(Some(1)));
        assert_eq!(inbound.handle(&read(LAST, msn, 0, &[0; 28]), true).map(drop), Ok(()));
    }
}

#[test]
fn next_message_before_last_segment() {
    let mut inbound = Inbound::new(1);
    assert_eq!(place(&mut inbound, &send(MORE, 1, 0, &[0; 4])), Ok(None));
    let result = place(&mut inbound, &send(LAST, 2, 0, &[0; 4]));
    assert_eq!(result, Err(Fault::segment(codes::UNTAGGED_MSN)));
}

#[test]
fn only_the_first_segment_takes_a_buffer() {
    let mut inbound = Inbound::new(1);
    for (control, mo, expected) in [(MORE, 0, true), (MORE, 4, false), (LAST, 8, false)] {
        let ulpdu = send(control, 1, mo, &[0; 4]);
        let Ok(Arrival::Send { first_of_message, .. }) = inbound.handle(&ulpdu, true) else {
            panic!("a valid Send");
        };
        assert_eq!(first_of_message, expected);
        assert!(inbound.sent_placed(mo, 4, control == LAST).is_ok());
    }
}

#[test]
fn send_offset_is_checked_before_its_end() {
    assert_eq!(send_fits(0, 0, 0), Ok(()));
    assert_eq!(send_fits(10, 0, 10), Ok(()));
    assert_eq!(send_fits(4, 6, 10), Ok(()));
    assert_eq!(send_fits(11, 0, 10), Err(Fault::segment(codes::UNTAGGED_MO)));
    assert_eq!(send_fits(11, 100, 10), Err(Fault::segment(codes::UNTAGGED_MO)));
    assert_eq!(send_fits(4, 7, 10), Err(Fault::segment(codes::UNTAGGED_TOO_LONG)));
    let wide = u64::from(u32::MAX);
    assert_eq!(send_fits(u32::MAX, 1, wide), Err(Fault::segment(codes::UNTAGGED_TOO_LONG)));
}

#[test]
fn changed_stag_in_a_write_is_reported() {
    let mut inbound = Inbound::new(1);
    let mut changed = |control, stag, payload: &[u8]| match inbound
        .handle(&tagged(control, 0x40, stag, 0, payload), true)
    {
        Ok(Arrival::Write { stag_changed, .. }) => stag_changed,
        other => panic!("{other:?}"),
    };
    assert!(!changed(MORE, 9, &[]));
    assert!(!changed(MORE, 1, &[0]));
    assert!(!changed(MORE, 2, &[]));
    assert!(!changed(MORE, 1, &[0]));
    assert!(changed(MORE, 2, &[0]));
    assert!(!changed(LAST, 1, &[0]));
    assert!(!changed(LAST, 2, &[0]));
}

//= DDP-4.1-11
#[test]
fn wrong_ddp_version() {
    for version in [0, 1] {
        let op = version << 6;
        for dv in 0..4 {
            let untagged = untagged(0x40 | dv, op | 3, 0, 1, 0, &[]);
            let tagged = tagged(0x40 | dv, op, 1, 0, &[]);
            let codes = [&untagged, &tagged]
                .map(|u| Inbound::new(version).handle(u, true).err().map(|f| f.code));
            let expected = [codes::UNTAGGED_VERSION, codes::TAGGED_VERSION];
            assert_eq!(codes, expected.map(|c| (dv != version).then_some(c)), "DV {dv}");
        }
    }
}

//= DDP-4.1-9
#[test]
fn reserved_bits_are_accepted() {
    assert_eq!(code_of(&untagged(0x7D, 0x73, 0, 1, 0, &[])), None);
    assert_eq!(code_of(&tagged(0x7D, 0x70, 1, 0, &[])), None);
}

//= MPA-3-6
#[test]
fn segment_shorter_than_its_header() {
    for first in [0x41, 0xC1] {
        let header = if first == 0x41 { 18 } else { 14 };
        for len in 0..header {
            let mut ulpdu = vec![0x43; len];
            if let Some(byte) = ulpdu.first_mut() {
                *byte = first;
            }
            assert_eq!(fault_of(&ulpdu), Some(Fault::TOO_SHORT), "{len} of {header}");
            let [high, low] = (len as u16).to_be_bytes();
            let reported = terminate::build(Fault::TOO_SHORT, &ulpdu, None);
            assert_eq!(reported, [0x02, 0xFF, 0x80, 0, high, low]);
        }
    }
}

#[test]
fn opcode_may_not_change_inside_a_message() {
    let mut inbound = Inbound::new(1);
    assert_eq!(place(&mut inbound, &send(MORE, 1, 0, &[0])), Ok(None));
    let result = place(&mut inbound, &untagged(LAST, 0x45, 0, 1, 1, &[0]));
    assert_eq!(result, Err(Fault::segment(codes::OPERATION_OPCODE)));

    let mut inbound = Inbound::new(1);
    assert!(inbound.handle(&tagged(MORE, 0x40, 1, 0, &[0]), true).is_ok());
    let response = tagged(LAST, 0x42, 1, 1, &[0]);
    let result = inbound.handle(&response, true);
    assert_eq!(result.err(), Some(Fault::segment(codes::OPERATION_OPCODE)));
}

#[test]
fn a_passing_response_may_enclose_a_write() {
    let write = |control, stag| tagged(control, 0x40, stag, 0, &[0]);
    let response = |control| tagged(control, 0x42, 1, 0, &[0]);
    let segments = [
        response(MORE),
        write(MORE, 2),
        response(MORE),
        write(LAST, 2),
        write(LAST, 3),
        response(LAST),
    ];
    let mut inbound = Inbound::new(1);
    inbound.allow_passing_responses();
    for segment in &segments {
        match inbound.handle(segment, true) {
            Ok(Arrival::Write { stag_changed: false, .. } | Arrival::ReadResponse { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    // Without such responses the first Write is refused.
    let mut inbound = Inbound::new(1);
    assert!(inbound.handle(&segments[0], true).is_ok());
    let result = inbound.handle(&segments[1], true);
    assert_eq!(result.err(), Some(Fault::segment(codes::OPERATION_OPCODE)));
}

#[test]
fn tagged_and_untagged_segments_may_alternate() {
    let mut inbound = Inbound::new(1);
    assert_eq!(place(&mut inbound, &send(MORE, 1, 0, &[0; 3])), Ok(None));
    assert!(inbound.handle(&tagged(MORE, 0x40, 1, 0, &[0]), true).is_ok());
    assert!(inbound.handle(&read(LAST, 1, 0, &[0; 28]), true).is_ok());
    assert_eq!(place(&mut inbound, &send(LAST, 1, 3, &[0; 3])), Ok(Some(6)));
    assert!(inbound.handle(&tagged(LAST, 0x40, 1, 1, &[0]), true).is_ok());
    assert!(inbound.handle(&tagged(LAST, 0x42, 1, 1, &[0]), true).is_ok());
}

#[test]
fn segmented_read_request_takes_one_slot() {
    let whole: Vec<u8> = (0..28).collect();
    let mut inbound = Inbound::new(1);
    let part = read(MORE, 1, 12, &whole[12..20]);
    assert_eq!(inbound.handle(&part, true), Ok(Arrival::Part));
    let part = read(MORE, 1, 0, &whole[..12]);
    assert_eq!(inbound.handle(&part, false), Ok(Arrival::Part));
    let last = read(LAST, 1, 20, &whole[20..]);
    let mut header = [0; 18];
    header.copy_from_slice(&last[..18]);
    let mut bytes = [0; 28];
    bytes.copy_from_slice(&whole);
    let request = ReadRequest::parse(&bytes);
    let expected = InboundRead { request, header, segment_len: 26 };
    assert_eq!(inbound.handle(&last, false), Ok(Arrival::ReadRequest(expected)));
    assert!(inbound.handle(&read(LAST, 2, 0, &whole), true).is_ok());
}

//= RDMAP-7.2-6
#[test]
fn read_request_of_the_wrong_size() {
    for (mo, len, code) in [
        (29, 0, codes::UNTAGGED_MO),
        (u32::MAX, 1, codes::UNTAGGED_MO),
        (0, 29, codes::UNTAGGED_TOO_LONG),
        (28, 1, codes::UNTAGGED_TOO_LONG),
        (0, 27, codes::OPERATION_UNSPECIFIED),
        (1, 27, codes::OPERATION_UNSPECIFIED),
        (0, 0, codes::OPERATION_UNSPECIFIED),
    ] {
        let fault = fault_of(&read(LAST, 1, mo, &vec![0; len]));
        assert_eq!(fault, Some(Fault::segment(code)), "MO {mo}, {len} bytes");
    }
}

#[test]
fn read_request_errors_enclose_its_headers() {
    let header: Vec<u8> = (0..28).map(|i| 0xE0 + i / 4).collect();
    let mut ulpdu = read(LAST, 1, 0, &header);
    ulpdu[0] |= 0x3C;
    let Ok(Arrival::ReadRequest(arrival)) = Inbound::new(1).handle(&ulpdu, true) else {
        panic!("a valid Read Request");
    };
    for code in [
        codes::PROTECTION_INVALID_STAG,
        codes::PROTECTION_BOUNDS,
        codes::PROTECTION_ACCESS,
        codes::PROTECTION_STREAM,
        codes::PROTECTION_TO_WRAP,
    ] {
        let mut expected = vec![0x01, code.code, 0xE0, 0x00, 0x00, 46];
        expected.extend_from_slice(&ulpdu);
        assert_eq!(terminate::build(Fault::read(code), &ulpdu, None), expected);
        let InboundRead { request, header, segment_len } = &arrival;
        let later =
            terminate::build_from_bytes(Fault::read(code), *segment_len, header, Some(request));
        assert_eq!(later, expected);
    }
}

#[test]
fn terminate_encloses_the_advanced_read() {
    let ulpdu = read(LAST, 1, 0, &[0, 0, 0, 1].repeat(7));
    let Ok(Arrival::ReadRequest(arrival)) = Inbound::new(1).handle(&ulpdu, true) else {
        panic!("a valid Read Request");
    };
    let fault = Fault::read(codes::PROTECTION_INVALID_STAG);
    let rest = ReadRequest { size: 1_000, ..arrival.request }.advanced(600);
    let reported = terminate::build_from_bytes(fault, 46, &arrival.header, Some(&rest));
    let t = Terminate::parse(&reported).expect("complete Terminate");
    assert_eq!(t.ddp_header, Some(&ulpdu[..18]));
    let reported = t.read_request.map(ReadRequest::parse).expect("R is set");
    assert_eq!(reported, rest);
    assert_eq!((reported.size, reported.sink_to.0), (400, arrival.request.sink_to.0 + 600));
}

#[test]
fn typed_header_and_bytes_agree() {
    for ulpdu in [send(LAST, 7, 100, &[0; 9]), tagged(MORE, 0x40, 5, 77, &[0; 30])] {
        let (header, _) = Header::parse(&ulpdu).expect("long enough");
        for enclose in [Enclose::None, Enclose::Length, Enclose::Segment, Enclose::SegmentAndRead] {
            let fault = Fault { code: codes::TAGGED_BOUNDS, enclose };
            let read = ReadRequest::parse(&[3; 28]);
            let typed =
                terminate::build_from_header(fault, ulpdu.len() as u16, &header, Some(&read));
            assert_eq!(typed, terminate::build(fault, &ulpdu, Some(&read)));
        }
    }
}

#[test]
fn first_failed_check_is_reported() {
    // Each segment fails the expected check and every later one.
    let bad_everything = untagged(0x42, 0x8F, 9, 9, 9, &[0; 99]);
    assert_eq!(code_of(&bad_everything), Some(codes::UNTAGGED_VERSION));
    let bad_queue = untagged(LAST, 0x8F, 9, 9, 9, &[0; 99]);
    assert_eq!(code_of(&bad_queue), Some(codes::UNTAGGED_QN));
    let bad_version = untagged(LAST, 0x8F, 1, 9, 9, &[0; 99]);
    assert_eq!(code_of(&bad_version), Some(codes::OPERATION_VERSION));
    let bad_opcode = untagged(LAST, 0x4F, 1, 9, 9, &[0; 99]);
    assert_eq!(code_of(&bad_opcode), Some(codes::OPERATION_OPCODE));
    let bad_msn = read(LAST, 9, 99, &[0; 99]);
    assert_eq!(
        Inbound::new(1).handle(&bad_msn, false).err().map(|f| f.code),
        Some(codes::UNTAGGED_MSN)
    );
    let no_slot = read(LAST, 1, 99, &[0; 99]);
    let code = Inbound::new(1).handle(&no_slot, false).err().map(|f| f.code);
    assert_eq!(code, Some(codes::UNTAGGED_NO_BUFFER));
    let bad_offset = read(LAST, 1, 99, &[0; 99]);
    assert_eq!(code_of(&bad_offset), Some(codes::UNTAGGED_MO));
}

proptest! {
    #[test]
    fn arbitrary_segments_are_accepted_or_refused(
        ulpdus in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 1..20),
        version in 0u8..2,
    ) {
        let mut inbound = Inbound::new(version);
        for mut ulpdu in ulpdus {
            // Set the versions, otherwise no later check would be reached.
            if let [control, op, ..] = &mut ulpdu[..] {
                *control = *control & 0xC0 | version;
                *op = *op & 0x07 | version << 6;
            }
            match inbound.handle(&ulpdu, true) {
                Ok(Arrival::Send { mo, payload, last, .. }) => {
                    prop_assert!(inbound.sent_placed(mo, payload.len(), last).is_ok() || last);
                }
                Ok(_) => {}
                Err(fault) => {
                    let reported = terminate::build(fault, &ulpdu, None);
                    prop_assert!(Terminate::parse(&reported).is_ok());
                    break;
                }
            }
        }
    }

    #[test]
    fn any_segmentation_of_a_send(
        cuts in prop::collection::btree_set(1u32..5000, 0..12),
        shuffle in any::<prop::sample::Index>(),
        missing in any::<Option<prop::sample::Index>>(),
    ) {
        let mut edges: Vec<u32> = cuts.into_iter().collect();
        edges.insert(0, 0);
        edges.push(5000);
        let mut pieces: Vec<_> = edges.windows(2).map(|w| (w[0], w[1] - w[0])).collect();
        let last = pieces.pop().expect("at least one piece");
        if !pieces.is_empty() {
            let middle = shuffle.index(pieces.len());
            pieces.rotate_left(middle);
        }
        let missing = missing.filter(|_| !pieces.is_empty());
        let lacks = missing.map(|i| pieces.remove(i.index(pieces.len())));
        let mut inbound = Inbound::new(1);
        for (mo, len) in pieces {
            let placed = place(&mut inbound, &send(MORE, 1, mo, &vec![0; len as usize]));
            prop_assert_eq!(placed, Ok(None));
        }
        let end = place(&mut inbound, &send(LAST, 1, last.0, &vec![0; last.1 as usize]));
        let expected = match lacks {
            None => Ok(Some(5000)),
            Some(_) => Err(Fault::segment(codes::UNTAGGED_MO)),
        };
        prop_assert_eq!(end, expected);
    }
}
