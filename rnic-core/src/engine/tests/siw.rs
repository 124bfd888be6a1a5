//! Behaviour of Linux siw that its peers must handle. Recorded differences are in `captures`.

use super::requests::Wr;
use super::world::{A, World};
use crate::rdmap::ReadRequest;
use rnic_abi::types::{Stag, TaggedOffset};

/// Returns a Terminate in siw's layout: Layer and EType exchanged, M, D and R in the lowest bits.
fn terminate(control: [u8; 4], segment_len: u16, headers: &[&[u8]]) -> Vec<u8> {
    [&control[..], &segment_len.to_be_bytes(), &headers.concat()].concat()
}

#[test]
fn siw_names_a_failed_read_by_its_request() {
    // Number of response bytes already sent.
    for sent in [0, 1] {
        let (mut w, mut raw) = World::raw();
        let sink = w.any_mr(A, 30);
        let source = w.any_mr(A, 30);
        let reads = [(1, 0..10), (2, 10..13), (3, 13..30)];
        w.post(A, &reads.map(|(id, range)| Wr::read(id, sink.sge(range), &source, 0)));
        let asked = raw.segments(&mut w);
        assert_eq!(asked.len(), 3);
        let request = ReadRequest::parse(asked[1].payload.first_chunk().unwrap());
        let rest = ReadRequest {
            sink_to: TaggedOffset(request.sink_to.0 + u64::from(sent)),
            size: request.size - sent,
            ..request
        };
        // The request's size is in place of its MSN: 3, which is the MSN of the next request.
        let mut header = [0; 18];
        header[..2].copy_from_slice(&[0x41, 0x41]);
        header[9] = 1;
        header[13] = request.size as u8;
        let said = terminate([0x10, 0x00, 0x07, 0x00], 0, &[&header, &rest.emit()]);
        raw.terminate(&mut w, &said);
        assert_eq!(
            w.completions(A),
            ["1 RdmaRead WrFlush", "2 RdmaRead RemoteAccess 0/1/00", "3 RdmaRead WrFlush"]
        );
    }
}

#[test]
fn a_diagnosis_names_the_siw_layout() {
    let (mut w, mut raw) = World::raw();
    let header = [0xC1, 0x40, 0, 0, 0x12, 0x34, 0, 0, 0, 0, 0, 0, 0x10, 0];
    // siw reports the length of the payload; RFC 5040 requires the length of the segment.
    raw.terminate(&mut w, &terminate([0x11, 0x01, 0x03, 0x00], 64, &[&header]));
    let why = w.diagnosis(A);
    assert_eq!(
        why.text,
        "the peer ended the stream with Terminate 1/1/01 (tagged buffer: base or bounds \
         violation), written as Linux siw does; it concerns a tagged segment of 64 bytes at \
         0x1000 of STag 0x00001234"
    );
    assert_eq!((why.stag, why.length), (Some(Stag(0x1234)), Some(64)));
}
