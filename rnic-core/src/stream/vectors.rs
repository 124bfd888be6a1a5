//! Encodes and decodes the literal FPDUs V1 to V11 through every layer. V1 and V2 are figures 5 and
//! 6 of RFC 5044.

use super::inbound::{Arrival, Inbound, InboundRead, SendKind};
use super::{Fault, terminate};
use crate::ddp::{Header, TaggedHeader, UntaggedHeader, qn};
use crate::mpa::tests::{frame, hex};
use crate::mpa::{Deframer, Framer};
use crate::rdmap::{Control, Opcode, ReadRequest, codes};
use rnic_abi::types::{Msn, Stag, TaggedOffset};

fn untagged(opcode: Opcode, inv_stag: u32, qn: u32, msn: u32) -> Header {
    Header::Untagged(UntaggedHeader {
        last: true,
        dv: 1,
        rsvd_ulp: Control { rv: 1, opcode }.byte(),
        inv_stag: Stag(inv_stag),
        qn,
        msn: Msn(msn),
        mo: 0,
    })
}

fn send(msn: u32) -> Header {
    untagged(Opcode::Send, 0, qn::SEND, msn)
}

fn write(stag: u32, to: u64) -> Header {
    Header::Tagged(TaggedHeader {
        last: true,
        dv: 1,
        rsvd_ulp: Control { rv: 1, opcode: Opcode::Write }.byte(),
        stag: Stag(stag),
        to: TaggedOffset(to),
    })
}

/// Both ends of one direction of a connection, with the receive state of RDMAP.
struct Bench {
    framer: Framer,
    deframer: Deframer,
    inbound: Inbound,
}

impl Bench {
    fn new(markers: bool) -> Self {
        Bench {
            framer: Framer::new(markers, true),
            deframer: Deframer::new(markers, true),
            inbound: Inbound::new(1),
        }
    }

    /// Encodes, compares and decodes an FPDU, and passes the result to `check`.
    fn pass(
        &mut self,
        header: Header,
        payload: &[u8],
        literal: &[u8],
        check: impl FnOnce(Result<Arrival<'_>, Fault>),
    ) {
        let mut bytes = [0xAA; 18];
        let len = header.emit(&mut bytes);
        let mut fpdu = frame(&mut self.framer, &bytes[..len], payload);
        assert_eq!(fpdu, literal);
        assert_eq!(self.deframer.needed(&fpdu), fpdu.len());
        let ulpdu = self.deframer.take(&mut fpdu).expect("a vector is valid");
        let parsed = Header::parse(ulpdu);
        assert_eq!(parsed, Ok((header, payload)));
        let arrival = self.inbound.handle(ulpdu, true);
        check(arrival);
        if let Ok(Arrival::Send { mo, payload, last, .. }) = arrival {
            let total = self.inbound.sent_placed(mo, payload.len(), last);
            assert_eq!(total, Ok(Some(payload.len() as u32)));
        }
    }

    /// Receives an FPDU as filler, without further checks.
    fn pass_filler(&mut self, mut fpdu: Vec<u8>) {
        let ulpdu = self.deframer.take(&mut fpdu).expect("valid FPDU");
        let Ok(Arrival::Send { mo, payload, last, .. }) = self.inbound.handle(ulpdu, true) else {
            panic!("the filler is a Send");
        };
        assert!(self.inbound.sent_placed(mo, payload.len(), last).is_ok());
    }
}

fn is_send(
    msn: u32,
    invalidate: Option<Stag>,
    bytes: &[u8],
) -> impl FnOnce(Result<Arrival<'_>, Fault>) {
    move |arrival| {
        let kind = SendKind { invalidate, ..SendKind::default() };
        let msn = Msn(msn);
        let payload = bytes;
        let first_of_message = true;
        let expected = Arrival::Send { kind, msn, mo: 0, payload, last: true, first_of_message };
        assert_eq!(arrival, Ok(expected));
    }
}

//= MPA-4.4-13
#[test]
fn v1_and_v2_sends_with_markers() {
    let mut bench = Bench::new(true);
    let v1 = hex(&format!(
        "00000000 002a4143 00000000 00000000 00000001 00000000 {} 52239983",
        "00".repeat(24)
    ));
    bench.pass(send(1), &[0; 24], &v1, is_send(1, None, &[0; 24]));

    // V2 begins at 0x1EC.
    let mut bench = Bench::new(true);
    let filler = vec![0; 0x1EC - 4 - 2 - 4 - 18];
    let mut bytes = [0; 18];
    send(1).emit(&mut bytes);
    let first = frame(&mut bench.framer, &bytes, &filler);
    assert_eq!(first.len(), 0x1EC);
    bench.pass_filler(first);
    let v2 = hex(&format!(
        "002a4143 00000000 00000000 00000002 00000000 00000014 {} 84925898",
        "00".repeat(24)
    ));
    bench.pass(send(2), &[0; 24], &v2, is_send(2, None, &[0; 24]));
}

#[test]
fn v3_send_without_markers() {
    let v3 =
        hex(&format!("002a4143 00000000 00000000 00000001 00000000 {} b7243ec3", "00".repeat(24)));
    Bench::new(false).pass(send(1), &[0; 24], &v3, is_send(1, None, &[0; 24]));
}

//= DDP-4.2-1
//= DDP-4.2-7
#[test]
fn v4_write_with_pad() {
    let v4 = hex("0013c140 12345678 00000000 00001000 68656c6c 6f000000 4bf8eb4a");
    Bench::new(false).pass(write(0x1234_5678, 0x1000), b"hello", &v4, |arrival| {
        let stag = Stag(0x1234_5678);
        let to = TaggedOffset(0x1000);
        let expected =
            Arrival::Write { stag, to, payload: &b"hello"[..], last: true, stag_changed: false };
        assert_eq!(arrival, Ok(expected));
    });
}

#[test]
fn v5_zero_length_write() {
    let v5 = hex("000ec140 00000000 00000000 00000000 a30572ab");
    Bench::new(false).pass(write(0, 0), &[], &v5, |arrival| {
        let stag = Stag(0);
        let to = TaggedOffset(0);
        let payload = &[][..];
        let expected = Arrival::Write { stag, to, payload, last: true, stag_changed: false };
        assert_eq!(arrival, Ok(expected));
    });
}

fn v6_request() -> ReadRequest {
    ReadRequest {
        sink_stag: Stag(0xA1A2_A3A4),
        sink_to: TaggedOffset(0x10),
        size: 4096,
        src_stag: Stag(0xB1B2_B3B4),
        src_to: TaggedOffset(0x20),
    }
}

const V6: &str = "002e4141 00000000 00000001 00000001 00000000 a1a2a3a4 00000000 00000010 \
                  00001000 b1b2b3b4 00000000 00000020 55c8c831";

#[test]
fn v6_read_request() {
    let header = untagged(Opcode::ReadRequest, 0, qn::READ_REQUEST, 1);
    Bench::new(false).pass(header, &v6_request().emit(), &hex(V6), |arrival| {
        let mut bytes = [0; 18];
        bytes.copy_from_slice(&hex(V6)[2..20]);
        let read = InboundRead { request: v6_request(), header: bytes, segment_len: 46 };
        assert_eq!(arrival, Ok(Arrival::ReadRequest(read)));
    });
}

#[test]
fn v7_terminate_for_a_crc_error() {
    let v7 = hex("00164147 00000000 00000002 00000001 00000000 20020000 7fe42585");
    let header = untagged(Opcode::Terminate, 0, qn::TERMINATE, 1);
    let payload = terminate::build(Fault::local(codes::LLP_CRC), &[], None);
    Bench::new(false).pass(header, &payload, &v7, |arrival| match arrival {
        Ok(Arrival::Terminate(t)) => assert_eq!(t.to_vec(), payload),
        other => panic!("{other:?}"),
    });
}

#[test]
fn v8_terminate_with_read_request() {
    let v8 =
        hex("00464147 00000000 00000002 00000001 00000000 0102e000 002e4141 00000000 00000001 \
         00000001 00000000 a1a2a3a4 00000000 00000010 00001000 b1b2b3b4 00000000 00000020 \
         a0ac155a");
    let header = untagged(Opcode::Terminate, 0, qn::TERMINATE, 1);
    let fault = Fault::read(codes::PROTECTION_ACCESS);
    let v6 = hex(V6);
    let payload = terminate::build(fault, &v6[2..48], None);
    Bench::new(false).pass(header, &payload, &v8, |arrival| match arrival {
        Ok(Arrival::Terminate(t)) => {
            assert_eq!(t.code, codes::PROTECTION_ACCESS);
            assert_eq!(t.segment_len, Some(46));
            assert_eq!(t.ddp_header, Some(&v6[2..20]));
            assert_eq!(t.read_request.map(|r| &r[..]), Some(&v6[20..48]));
        }
        other => panic!("{other:?}"),
    });
}

//= MPA-4.4-15
#[test]
fn v9_marker_between_pad_and_crc() {
    let payload: Vec<u8> = (0..488).map(|i| i as u8).collect();
    let mut v9 = hex("00000000 01fa4143 00000000 00000000 00000001 00000000");
    v9.extend_from_slice(&payload);
    v9.extend(hex("000001fc 68a8c2e0"));
    Bench::new(true).pass(send(1), &payload, &v9, is_send(1, None, &payload));
}

//= MPA-4.3-7
//= MPA-4.4-16
#[test]
fn v10_fpdu_ends_at_a_marker() {
    let payload: Vec<u8> = (0..484).map(|i| i as u8).collect();
    let mut first = hex("00000000 01f64143 00000000 00000000 00000001 00000000");
    first.extend_from_slice(&payload);
    first.extend(hex("8d49863e"));
    assert_eq!(first.len(), 512);
    let mut bench = Bench::new(true);
    bench.pass(send(1), &payload, &first, is_send(1, None, &payload));
    let second = hex(&format!(
        "00000000 002a4143 00000000 00000000 00000002 00000000 {} cc08199e",
        "00".repeat(24)
    ));
    bench.pass(send(2), &[0; 24], &second, is_send(2, None, &[0; 24]));
}

//= DDP-4.3-3
//= DDP-5.4-5
#[test]
fn v11_send_with_invalidate() {
    let v11 = hex("00124144 deadbeef 00000000 00000001 00000000 1c08461b");
    let header = untagged(Opcode::SendInvalidate, 0xDEAD_BEEF, qn::SEND, 1);
    Bench::new(false).pass(header, &[], &v11, is_send(1, Some(Stag(0xDEAD_BEEF)), &[]));
}
