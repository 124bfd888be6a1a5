//! DDP segments over real TCP (RFC 5041): a scripted peer sends valid and invalid versions,
//! numbers, offsets, sizes and STags, and checks how the daemon segments long messages.

use std::net::TcpStream;

use rnic_client::{
    Access, CompletionStatus, Context, DisconnectReason, MrOptions, Qp, Scope, SendRequest,
};
use rnic_tests::target::{Bystanders, LEN, Target, UNTOUCHED};
use rnic_tests::wire::{self, fpdu, part, tagged, terminated, untagged};
use rnic_tests::{DEADLINE, Daemon, engine};

/// Length of a receive of [`Target`] in bytes.
const ROOM: usize = 64;

fn tcp_daemon() -> Daemon {
    Daemon::start(&engine(2, "tcp"))
}

/// Asserts that the connection ended with this Terminate on both ends. Its receives are flushed.
fn ends_with(code: [u8; 3], target: &Target, mut stream: TcpStream, qp: Qp, what: &str) {
    assert_eq!(terminated(&mut stream), code, "{what}");
    drop(stream);
    match qp.wait_disconnected(Some(DEADLINE)).unwrap() {
        DisconnectReason::Terminate { code: c, .. } => {
            assert_eq!([c.layer, c.etype, c.code], code, "{what}");
        }
        other => panic!("{what}: {other:?}"),
    }
    drop(qp);
    target.drain();
}

/// Ends a healthy connection. The remaining receives do not complete, since the QP is destroyed
/// before it notices the end.
fn leave(peer: TcpStream, qp: Qp) {
    drop(qp);
    drop(peer);
}

/// Returns the contents of the target's inbox.
fn inbox(target: &Target) -> Vec<u8> {
    let mut bytes = vec![0; 2 * ROOM];
    target.inbox.read_at(0, &mut bytes).unwrap();
    bytes
}

fn with_control(mut ulpdu: Vec<u8>, change: impl Fn(u8) -> u8) -> Vec<u8> {
    ulpdu[0] = change(ulpdu[0]);
    ulpdu
}

//= DDP-4.1-9
//= DDP-4.1-11
#[test]
fn one_ddp_version_and_ignored_reserved_bits() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    for dv in 0..4 {
        for (name, ulpdu, code) in [
            ("tagged", target.write(0, b"x"), [1, 1, 4]),
            ("untagged", untagged(3, 0, 1, b"x"), [1, 2, 6]),
        ] {
            // As the very first segment, and after others of version 1.
            for first in [true, false] {
                target.region.fill(0, LEN, UNTOUCHED).unwrap();
                let (mut peer, qp) = if first { target.connected() } else { target.open() };
                let ulpdu = with_control(ulpdu.clone(), |byte| byte & !3 | dv | 0x3C);
                wire::send_bytes(&mut peer, &fpdu(&ulpdu));
                if dv == 1 {
                    let number = if name == "tagged" { 1 } else { 2 };
                    wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, number, b"done")));
                    let lengths: Vec<_> =
                        (0..number).map(|_| target.completion().ok().unwrap().byte_len).collect();
                    assert_eq!(lengths.last(), Some(&4), "{name}");
                    leave(peer, qp);
                } else {
                    ends_with(code, &target, peer, qp, name);
                    assert!(target.is_untouched(), "{name}, version {dv}");
                }
            }
        }
    }
}

//= DDP-5.2-5
//= DDP-5.4-3
//= DDP-7.1-7
#[test]
fn send_segments_may_arrive_in_any_order() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let (mut peer, qp) = target.open();
    let parts = [(4, false, &b"4567"[..]), (0, false, b"0123"), (8, true, b"89")];
    for (offset, last, bytes) in parts {
        wire::send_bytes(&mut peer, &fpdu(&part(1, offset, last, bytes)));
    }
    let done = target.completion().ok().unwrap();
    assert_eq!((done.byte_len, &inbox(&target)[..10]), (10, &b"0123456789"[..]));
    leave(peer, qp);

    type Parts = &'static [(u32, &'static [u8])];
    let bad: [(&str, Parts); 4] = [
        ("the last is not the highest", &[(4, b"4567"), (0, b"0123")]),
        ("a gap", &[(0, b"0123"), (5, b"5")]),
        ("an overlap", &[(0, b"0123"), (2, b"2345")]),
        ("outside of the buffer", &[(0, b"0123"), (ROOM as u32 + 1, b"")]),
    ];
    for (name, parts) in bad {
        let (mut peer, qp) = target.open();
        for (n, (offset, bytes)) in (1..).zip(parts) {
            wire::send_bytes(&mut peer, &fpdu(&part(1, *offset, n == parts.len(), bytes)));
        }
        ends_with([1, 2, 4], &target, peer, qp, name);
    }
}

//= DDP-4.3-7
//= DDP-7.1-9
#[test]
fn each_ddp_queue_has_its_own_msn() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let (mut peer, qp) = target.open();
    wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, 1, b"first")));
    // A zero-length Read is answered regardless of its STag.
    wire::send_bytes(&mut peer, &fpdu(&untagged(1, 1, 1, &[0; 28])));
    wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, 2, b"second")));
    assert_eq!(wire::ulpdu(&mut peer), tagged(2, 0, 0, b""));
    assert_eq!([5, 6].map(|_| target.completion().ok().unwrap().byte_len), [5, 6]);
    wire::send_bytes(&mut peer, &fpdu(&untagged(1, 1, 3, &[0; 28])));
    ends_with([1, 2, 3], &target, peer, qp, "a Read was left out");
    for number in [0, 2, u32::MAX] {
        let (mut peer, qp) = target.open();
        wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, number, b"x")));
        ends_with([1, 2, 3], &target, peer, qp, "not the first message");
    }
}

//= DDP-7.1-2
//= DDP-7.1-6
//= DDP-7.1-8
#[test]
fn oversized_send_ends_only_its_stream() {
    let daemon = tcp_daemon();
    let bystanders = Bystanders::start(&daemon);
    let target = Target::new(&daemon);
    let (mut neighbour, neighbours_qp) = target.open();
    for (name, bytes, parts) in
        [("whole", ROOM + 1, vec![ROOM + 1]), ("in parts", ROOM + 1, vec![ROOM - 4, 5])]
    {
        target.inbox.fill(0, 2 * ROOM, UNTOUCHED).unwrap();
        let (mut peer, qp) = target.open();
        // Exactly as long as the receive. The second receive is too short.
        wire::send_bytes(&mut peer, &fpdu(&part(1, 0, true, &[1; ROOM])));
        assert_eq!(target.completion().ok().unwrap().byte_len as usize, ROOM);
        let mut offset = 0;
        for len in parts {
            let last = offset + len == bytes;
            wire::send_bytes(&mut peer, &fpdu(&part(2, offset as u32, last, &vec![2; len])));
            offset += len;
        }
        ends_with([1, 2, 5], &target, peer, qp, name);
        assert_eq!(inbox(&target)[ROOM..], [UNTOUCHED; ROOM], "{name}");
        assert_eq!(inbox(&target)[ROOM - 4..ROOM], [1; 4], "{name}: not even what would fit");
    }
    // Two receives, three Sends.
    let (mut peer, qp) = target.open();
    for number in 1..=3 {
        wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, number, b"hello")));
    }
    ends_with([1, 2, 2], &target, peer, qp, "no receive");
    wire::send_bytes(&mut neighbour, &fpdu(&untagged(3, 0, 1, b"still here")));
    let done = target.completion().ok().unwrap();
    assert_eq!((done.qp, done.byte_len), (neighbours_qp.id(), 10));
    leave(neighbour, neighbours_qp);
    bystanders.were_not_disturbed();
}

//= DDP-5.2-11
//= DDP-7.1-13
//= DDP-7.1-14
//= DDP-7.1-15
#[test]
fn write_is_placed_exactly_or_refused() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let stag = target.region.rkey().0;
    let base = target.region.iova();
    let (mut peer, qp) = target.open();
    wire::send_bytes(&mut peer, &fpdu(&target.write(0, &[7; LEN])));
    // Zero-length Writes, with any address.
    for (stag, offset) in [(0, 0), (u32::MAX, u64::MAX), (stag ^ 0xFF, base), (stag, base - 1)] {
        wire::send_bytes(&mut peer, &fpdu(&tagged(0, stag, offset, b"")));
    }
    wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, 1, b"done")));
    assert_eq!(target.completion().ok().unwrap().byte_len, 4);
    assert_eq!(target.memory(), [7; LEN]);
    leave(peer, qp);

    target.region.fill(0, LEN, UNTOUCHED).unwrap();
    for (name, offset, len, code) in [
        ("one byte below", base - 1, LEN, [1, 1, 1]),
        ("one byte above", base + 1, LEN, [1, 1, 1]),
        ("behind the end", base + LEN as u64, 1, [1, 1, 1]),
        ("up to 2^64 - 1", u64::MAX - 8, 8, [1, 1, 1]),
        ("up to 2^64", u64::MAX - 7, 8, [1, 1, 3]),
        ("up to 2^64 + 5", u64::MAX - 2, 8, [1, 1, 3]),
    ] {
        let (mut peer, qp) = target.open();
        wire::send_bytes(&mut peer, &fpdu(&tagged(0, stag, offset, &vec![7; len])));
        ends_with(code, &target, peer, qp, name);
        assert!(target.is_untouched(), "{name}");
    }
    // The first of two segments is placed, the second is not.
    let (mut peer, qp) = target.open();
    let first = with_control(target.write(LEN as u64 - 8, b"first"), |byte| byte & !0x40);
    wire::send_bytes(
        &mut peer,
        &[fpdu(&first), fpdu(&target.write(LEN as u64 - 3, b"then"))].concat(),
    );
    ends_with([1, 1, 1], &target, peer, qp, "the second segment");
    assert_eq!(target.memory()[LEN - 8..], *b"first\xA5\xA5\xA5");
}

//= DDP-7.1-11
//= DDP-7.1-12
//= DDP-7.1-16
#[test]
fn write_without_access_is_refused() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let region = |context: &Context, pd, access, scope| {
        let buffer = context.create_shared_buffer(LEN as u64).unwrap();
        let options = MrOptions { access, scope, ..MrOptions::default() };
        let region = rnic_client::Pd::reg_mr_with(pd, &buffer, .., &options).unwrap();
        region.fill(0, LEN, UNTOUCHED).unwrap();
        region
    };
    let write = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let other_session = Context::open_at(daemon.socket()).unwrap();
    let others_pd = other_session.open_pd(None).unwrap();
    let second_pd = target.context.open_pd(None).unwrap();
    let (peer, neighbour) = target.open();
    let regions = [
        ("of another session", region(&other_session, &others_pd, write, Scope::Pd), [1, 1, 2]),
        ("of another domain", region(&target.context, &second_pd, write, Scope::Pd), [1, 1, 2]),
        (
            "of another stream",
            region(&target.context, &target.pd, write, Scope::Qp(neighbour.id())),
            [1, 1, 2],
        ),
        (
            "for reading only",
            region(
                &target.context,
                &target.pd,
                Access::REMOTE_READ | Access::LOCAL_WRITE,
                Scope::Pd,
            ),
            [1, 1, 0],
        ),
    ];
    for (name, region, code) in &regions {
        let (mut peer, qp) = target.open();
        wire::send_bytes(&mut peer, &fpdu(&tagged(0, region.rkey().0, region.iova(), b"x")));
        ends_with(*code, &target, peer, qp, name);
        let mut bytes = vec![0; LEN];
        region.read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, [UNTOUCHED; LEN], "{name}");
    }
    let gone = region(&target.context, &target.pd, write, Scope::Pd);
    let ulpdu = tagged(0, gone.rkey().0, gone.iova(), b"x");
    gone.deregister().unwrap();
    let (mut other, qp) = target.open();
    wire::send_bytes(&mut other, &fpdu(&ulpdu));
    ends_with([1, 1, 0], &target, other, qp, "revoked");
    leave(peer, neighbour);
}

//= DDP-4.4-1
//= DDP-7.1-17
#[test]
fn segment_shorter_than_its_header_is_refused() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    for (first, len) in [(0x41, 0), (0x41, 1), (0xC1, 1), (0xC1, 13), (0x41, 13), (0x41, 17)] {
        let (mut peer, qp) = target.open();
        let ulpdu = vec![first; len];
        wire::send_bytes(&mut peer, &fpdu(&ulpdu));
        let told = wire::ulpdu(&mut peer);
        // Unspecified error, with only M set.
        assert_eq!(told[18..], [0x02, 0xFF, 0x80, 0, 0, len as u8], "{len} bytes");
        drop((peer, qp));
        target.flushed(2);
    }
}

/// Reads a message and returns the header of its last segment, and its payload. Asserts that the
/// offsets have no gap, and that the headers otherwise differ only in L.
fn message(peer: &mut TcpStream) -> (Vec<u8>, Vec<u8>) {
    let mut payload = Vec::new();
    let mut first: Option<Vec<u8>> = None;
    loop {
        let ulpdu = wire::ulpdu(peer);
        let (len, offset) = if ulpdu[0] & 0x80 == 0 { (18, 14) } else { (14, 6) };
        let at = |header: &[u8]| {
            let field = header[offset..len].iter();
            field.fold(0u64, |sum, byte| sum << 8 | u64::from(*byte))
        };
        let header = &ulpdu[..len];
        let first = first.get_or_insert_with(|| header.to_vec());
        assert_eq!(header[0] & !0x40, first[0] & !0x40);
        assert_eq!(header[1..offset], first[1..offset]);
        assert_eq!(at(header), at(first) + payload.len() as u64);
        payload.extend(&ulpdu[len..]);
        if header[0] & 0x40 != 0 {
            return (first.clone(), payload);
        }
        assert!(ulpdu.len() > len, "a segment of no bytes");
    }
}

//= DDP-4.1-3
//= DDP-5.2-1
#[test]
fn segments_never_span_messages() {
    const LONG: usize = 300_000;
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let buffer = target.context.create_shared_buffer(LONG as u64).unwrap();
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let source = target.pd.reg_mr(&buffer, .., access).unwrap();
    let bytes: Vec<u8> =
        (0..LONG as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    source.write_at(0, &bytes).unwrap();
    let (mut peer, qp) = target.open();
    let all = [source.sge(0, LONG as u32)];
    let to = rnic_client::RemoteAddr { addr: 0x1_0000_0007, rkey: rnic_client::Stag(0x1234_5678) };
    qp.post_send(&[SendRequest::write(1, &all, to), SendRequest::send(2, &all)]).unwrap();
    let (header, payload) = message(&mut peer);
    assert!(payload == bytes);
    assert_eq!(header[0] & 0xBF, 0x81);
    assert_eq!(header[1..], tagged(0, 0x1234_5678, 0x1_0000_0007, b"")[1..]);
    let (header, payload) = message(&mut peer);
    assert!(payload == bytes);
    assert_eq!(header[0] & 0xBF, 0x01);
    assert_eq!(header[1..], untagged(3, 0, 1, b"")[1..]);
    // And as a Read Response, to the address in the Read Request.
    let mut read = 0x8765_4321u32.to_be_bytes().to_vec();
    read.extend(9u64.to_be_bytes());
    read.extend((LONG as u32).to_be_bytes());
    read.extend(source.rkey().0.to_be_bytes());
    read.extend(source.iova().to_be_bytes());
    wire::send_bytes(&mut peer, &fpdu(&untagged(1, 1, 1, &read)));
    let (header, payload) = message(&mut peer);
    assert!(payload == bytes);
    assert_eq!(header[1..], tagged(2, 0x8765_4321, 9, b"")[1..]);
    leave(peer, qp);
}

//= DDP-A-1
#[test]
fn idle_application_does_not_block_its_peer() {
    const ROUNDS: usize = 1000;
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let buffer = target.context.create_shared_buffer(1 << 16).unwrap();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let region = target.pd.reg_mr(&buffer, .., access).unwrap();
    let (mut peer, qp) = target.open();
    let payload = vec![9; 60_000];
    // Far more than the sockets buffer. The client makes no call, and the peer gets no reply.
    let write = fpdu(&tagged(0, region.rkey().0, region.iova(), &payload));
    for _ in 0..ROUNDS {
        std::io::Write::write_all(&mut peer, &write).expect("room in the window");
    }
    wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, 1, b"")));
    assert_eq!(target.completion().status, CompletionStatus::Success);
    let mut found = vec![0; payload.len()];
    region.read_at(0, &mut found).unwrap();
    assert!(found == payload);
    leave(peer, qp);
}
