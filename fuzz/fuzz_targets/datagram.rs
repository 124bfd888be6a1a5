//! Packets of RoCE v2 with datagrams, from anybody: any bytes, and packets that were written.
#![no_main]

use std::net::SocketAddr;

use libfuzzer_sys::fuzz_target;
use rnic_core::roce::sidr::{self, Message};
use rnic_core::roce::{Datagram, MAX_DATA, grh, packet};
use rnic_core::types::{Gid, QpId};
use rnic_fuzz::Input;

fuzz_target!(|data: &[u8]| {
    let [from, to] = [1, 2].map(|host| SocketAddr::from(([192, 0, 2, host], 4791)));
    // Any bytes: what is understood is written once more as something that is understood alike.
    if let Ok((datagram, found)) = packet::parse(from, to, data) {
        let again = packet::emit(&datagram, found, (from.port(), to.port()));
        assert_eq!(packet::parse(from, to, &again), Ok((datagram, found)));
        assert!(datagram.qp.0 < 1 << 24 && datagram.psn < 1 << 24 && found.len() <= MAX_DATA);
    }
    // One that was written, and then spoilt at one place, or cut off.
    let mut input = Input(data);
    let said = Datagram {
        from: Gid::from(from.ip()),
        source: QpId(input.u64() as u32 & 0xFF_FFFF),
        to: Gid::from(to.ip()),
        qp: QpId(input.u64() as u32 & 0xFF_FFFF),
        q_key: input.u64() as u32,
        psn: input.u64() as u32 & 0xFF_FFFF,
        immediate: (input.u8() & 1 != 0).then_some(input.u64() as u32),
        solicited: input.u8() & 1 != 0,
    };
    let (at, flip) = (usize::from(input.u16()), input.u8());
    let bytes = input.take(MAX_DATA);
    let mut written = packet::emit(&said, bytes, (from.port(), to.port()));
    assert_eq!(written.len(), packet::len(&said, bytes.len()));
    assert_eq!(packet::parse(from, to, &written), Ok((said, bytes)));
    assert_eq!(grh::parse(&grh::emit(&said, bytes.len())), Some((said.from, said.to)));
    let at = at % written.len();
    assert!(packet::parse(from, to, &written[..at]).is_err());
    written[at] ^= flip;
    // The byte that congestion control uses is in no checksum.
    assert_eq!(packet::parse(from, to, &written).is_ok(), flip == 0 || at == 4);
    between_queue_pairs_1(data);
});

/// Messages that resolve service IDs: any bytes, and any behind a header that is right.
fn between_queue_pairs_1(data: &[u8]) {
    let mut bytes = [0; sidr::LEN];
    let some = data.len().min(sidr::LEN);
    bytes[..some].copy_from_slice(&data[..some]);
    let understood = |bytes: &[u8]| match sidr::parse(bytes) {
        Ok(Message::Request(request)) => {
            assert_eq!(sidr::parse(&request.emit()), Ok(Message::Request(request)));
        }
        Ok(Message::Reply(reply)) => {
            assert!(reply.qp.0 < 1 << 24);
            assert_eq!(sidr::parse(&reply.emit()), Ok(Message::Reply(reply)));
        }
        Err(_) => {}
    };
    understood(data);
    bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
    for attribute in [0x17, 0x18] {
        (bytes[16], bytes[17]) = (0, attribute);
        understood(&bytes);
    }
}
