//! RoCE v2 packets of UD QPs: arbitrary bytes, and packets encoded by `packet::emit`.
#![no_main]

use std::net::SocketAddr;

use libfuzzer_sys::fuzz_target;
use rnic_abi::roce::{Datagram, MAX_DATA, connection, grh, mad, packet, sidr};
use rnic_abi::types::{Gid, QpId};
use rnic_fuzz::Input;

fuzz_target!(|data: &[u8]| {
    let [from, to] = [1, 2].map(|host| SocketAddr::from(([192, 0, 2, host], 4791)));
    // Arbitrary bytes. Encoding and decoding a parsed packet must return the same packet.
    if let Ok((datagram, found)) = packet::parse(from, to, data) {
        let again = packet::emit(&datagram, found, from.port(), to.port());
        assert_eq!(packet::parse(from, to, &again), Ok((datagram, found)));
        assert!(datagram.qp.0 < 1 << 24 && datagram.psn < 1 << 24 && found.len() <= MAX_DATA);
    }
    // A valid packet, then the same packet with one changed byte, or truncated.
    let mut input = Input(data);
    let sent = Datagram {
        from: Gid::from(from.ip()),
        source: QpId(input.u64() as u32 & 0xFF_FFFF),
        to: Gid::from(to.ip()),
        qp: QpId(input.u64() as u32 & 0xFF_FFFF),
        p_key: input.u16(),
        q_key: input.u64() as u32,
        psn: input.u64() as u32 & 0xFF_FFFF,
        immediate: (input.u8() & 1 != 0).then_some(input.u64() as u32),
        solicited: input.u8() & 1 != 0,
    };
    let at = usize::from(input.u16());
    let flip = input.u8();
    let bytes = input.take(MAX_DATA);
    let mut written = packet::emit(&sent, bytes, from.port(), to.port());
    assert_eq!(written.len(), packet::len(&sent, bytes.len()));
    assert_eq!(packet::parse(from, to, &written), Ok((sent, bytes)));
    assert_eq!(grh::parse(&grh::emit(&sent, bytes.len())), Some((sent.from, sent.to)));
    let at = at % written.len();
    assert!(packet::parse(from, to, &written[..at]).is_err());
    written[at] ^= flip;
    // The ICRC excludes the congestion control byte.
    assert_eq!(packet::parse(from, to, &written).is_ok(), flip == 0 || at == 4);
    management_datagrams(data);
});

/// Checks management messages: arbitrary bytes, and arbitrary bytes after a valid header. Encoding
/// a parsed message must return one with the same meaning.
fn management_datagrams(data: &[u8]) {
    let mut bytes = [0; mad::LEN];
    let some = data.len().min(mad::LEN);
    bytes[..some].copy_from_slice(&data[..some]);
    understood(data);
    bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
    for attribute in 0x10..=0x18 {
        bytes[16] = 0;
        bytes[17] = attribute;
        understood(&bytes);
    }
}

fn understood(bytes: &[u8]) {
    match sidr::parse(bytes) {
        Ok(sidr::Message::Request(request)) => {
            assert_eq!(sidr::parse(&request.emit()), sidr::parse(bytes));
        }
        Ok(sidr::Message::Reply(reply)) => {
            assert_eq!(sidr::parse(&reply.emit()), sidr::parse(bytes));
        }
        Err(_) => {}
    }
    if let Ok(message) = connection::parse(bytes) {
        assert_eq!(connection::parse(&message.emit()), Ok(message));
    }
}
