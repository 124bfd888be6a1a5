//! Start-up frames byte by byte (RFC 5044 section 7.1): which are sent, accepted, and answered with
//! a close.

use super::*;

/// Returns the bytes that arrive until the peer's graceful close. A reset fails the test.
fn finished(stream: &mut TcpStream, node: &mut Node) -> Vec<u8> {
    stream.set_nonblocking(true).expect("flag");
    let mut all = Vec::new();
    node.until(|_| {
        let mut buffer = [0; 1024];
        match stream.read(&mut buffer) {
            Ok(0) => return true,
            Ok(n) => all.extend(&buffer[..n]),
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock, "{e}"),
        }
        false
    });
    all
}

/// Frames that are invalid as requests and as replies.
fn malformed(reply: bool) -> Vec<Vec<u8>> {
    let good = frame(reply, 0x40, 1, &[]);
    let mut all = Vec::new();
    for at in 0..16 {
        let mut wrong_key = good.clone();
        wrong_key[at] ^= 0x80;
        all.push(wrong_key);
    }
    // Two Initiators, or two Responders.
    all.push(frame(!reply, 0x40, 1, &[]));
    for revision in [3, 255] {
        all.push(frame(reply, 0x40, revision, &[]));
    }
    // These end after the header.
    for pd_length in [513_u16, 0xFFFF] {
        all.push([&good[..18], &pd_length.to_be_bytes()].concat());
    }
    // Announces enhanced data without room for it (RFC 6581).
    all.push(frame(reply, 0x50, 2, b"123"));
    all
}

//= MPA-7.1.1-2
//= MPA-7.1.1-15
//= MPA-7.1.1-16
//= MPA-7.1.1-19
//= MPA-7.1.2-2
//= MPA-7.1.2-2a
//= MPA-7.1.2-5
//= MPA-7.1.2-9
//= MPA-7.1.2-9c
//= MPA-8-7
#[test]
fn responder_closes_on_invalid_request() {
    let mut b = Node::new(options());
    let address = b.listen("127.0.0.1", 4);
    // Bytes that arrive too early.
    let early = [frame(false, 0x40, 1, b"data"), vec![0; 8]].concat();
    for bytes in malformed(false).into_iter().chain([early]) {
        let mut peer = raw(address);
        peer.write_all(&bytes).expect("write");
        // The peer neither sends nor closes, and no time passes.
        assert_eq!(closed(&mut peer, &mut b), b"", "{bytes:x?}");
        assert_eq!(b.cm.in_startup(), 0, "{bytes:x?}");
    }
    // The stream ends inside a frame.
    let mut peer = raw(address);
    peer.write_all(&frame(false, 0x40, 1, b"abc")[..21]).expect("write");
    peer.shutdown(Shutdown::Write).expect("FIN");
    assert_eq!(closed(&mut peer, &mut b), b"");
    assert!(b.cm.poll_event().is_none());
    assert_eq!((b.cm.in_startup(), b.row().pending, b.row().accepted), (0, 0, 0));
}

//= MPA-7.1.1-4
//= MPA-7.1.1-15
//= MPA-7.1.1-16
//= MPA-7.1.1-19
//= MPA-7.1.2-3
//= MPA-7.1.2-3a
//= MPA-7.1.2-5
//= MPA-7.1.2-8
//= MPA-7.1.2-9c
//= MPA-8-2
//= MPA-8-7
#[test]
fn initiator_closes_on_invalid_reply() {
    let mut a = Node::new(options());
    let (listener, address) = raw_listener();
    for bytes in malformed(true) {
        a.connect(ACTIVE, address, &[]);
        let mut peer = take(&listener, &mut a);
        let asked = read(&mut peer, 24, &mut a);
        peer.write_all(&bytes).expect("write");
        let reason = a.unreachable();
        assert!(reason.ends_with(": 2/0/04 (invalid start-up frame)"), "{reason} for {bytes:x?}");
        assert_eq!(closed(&mut peer, &mut a), b"", "{bytes:x?}");
        assert_eq!((a.cm.in_startup(), asked[17]), (0, 2));
        // An invalid frame does not mean that the peer supports only revision 1.
        let again = listener.accept().map(drop).map_err(|e| e.kind());
        assert_eq!(again, Err(std::io::ErrorKind::WouldBlock));
    }
    // If the stream ends first, that is the failure.
    a.connect(ACTIVE, address, &[]);
    let mut peer = take(&listener, &mut a);
    read(&mut peer, 24, &mut a);
    peer.write_all(&frame(true, 0x40, 1, b"data")[..21]).expect("write");
    peer.shutdown(Shutdown::Write).expect("FIN");
    assert!(a.unreachable().contains("2/0/01 (TCP closed"));
}

//= MPA-C.2.2-1
#[test]
fn revision_0_in_a_reply_is_closed_in_order() {
    let mut a = Node::new(options());
    let (listener, address) = raw_listener();
    a.connect(ACTIVE, address, &[]);
    let mut peer = take(&listener, &mut a);
    read(&mut peer, 24, &mut a);
    peer.write_all(&frame(true, 0xC0, 0, &[])).expect("write");
    a.unreachable();
    assert_eq!(finished(&mut peer, &mut a), b"");
}

//= MPA-C.2.1-1
#[test]
fn revision_0_request_is_answered_and_closed() {
    let mut b = Node::new(options());
    let mut peer = raw(b.listen("127.0.0.1", 1));
    peer.write_all(&frame(false, 0xC0, 0, b"historic")).expect("write");
    let reply = finished(&mut peer, &mut b);
    assert_eq!((reply.len(), &reply[..16], reply[17]), (20, &b"MPA ID Rep Frame"[..], 1));
    assert!(b.cm.poll_event().is_none(), "nothing to decide");
    assert_eq!(b.cm.in_startup(), 1, "waits for the peer's FIN");
    drop(peer);
    b.until(|b| b.cm.in_startup() == 0);
}

//= MPA-7.1.2-8a
//= MPA-7.1.2-10
#[test]
fn slow_bytes_do_not_extend_the_deadline() {
    let tick = Duration::from_nanos(1);
    let step = Duration::from_millis(200);
    let mut b = Node::new(options());
    let mut peer = raw(b.listen("127.0.0.1", 1));
    b.until(|b| b.cm.in_startup() == 1);
    let began = b.now;
    for byte in &frame(false, 0x40, 1, &[])[..14] {
        peer.write_all(&[*byte]).expect("write");
        b.pass(step);
        b.turn(Duration::from_millis(1));
        assert_eq!(b.cm.in_startup(), 1);
    }
    let left = options().request_deadline - b.now.since(began) - tick;
    b.pass(left);
    assert_eq!(b.cm.in_startup(), 1);
    b.pass(tick);
    assert_eq!(b.cm.in_startup(), 0);
    assert_eq!(closed(&mut peer, &mut b), b"");

    let mut a = Node::new(options());
    let (listener, address) = raw_listener();
    a.connect(ACTIVE, address, &[]);
    let mut peer = take(&listener, &mut a);
    read(&mut peer, 24, &mut a);
    for byte in &frame(true, 0x40, 1, &[])[..9] {
        peer.write_all(&[*byte]).expect("write");
        a.pass(step);
        a.turn(Duration::from_millis(1));
        assert_eq!(a.cm.in_startup(), 1);
    }
    a.pass(options().reply_deadline - 9 * step);
    assert!(a.unreachable().contains("deadline"));
    assert_eq!(closed(&mut peer, &mut a), b"");
}

/// Lengths of private data at the limits.
const LENGTHS: [usize; 4] = [0, 1, 511, 512];

fn data(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n % 251) as u8).collect()
}

//= MPA-7.1-3
//= MPA-7.1-6
//= MPA-7.1-8
//= MPA-7.1.1-3
//= MPA-7.1.1-11
//= MPA-7.1.1-12
//= MPA-7.1.1-17
//= MPA-7.1.1-18
//= MPA-7.1.1-20
//= MPA-7.1.1-21
//= MPA-7.1.2-2
//= MPA-7.1.2-2b
//= MPA-7.1.2-2c
//= MPA-7.1.2-2e
//= MPA-7.1.2-2f
//= MPA-7.1.2-6a
//= MPA-7.1.2-9a
//= MPA-7.1.2-9b
#[test]
fn request_waits_and_gets_the_decided_reply() {
    let mut options = options();
    // Both are requested, but neither applies to the frames.
    options.startup.markers = true;
    options.startup.crc = true;
    let mut b = Node::new(options);
    let address = b.listen("127.0.0.1", 4);
    for (len, accepted) in LENGTHS.into_iter().flat_map(|len| [(len, true), (len, false)]) {
        let what = format!("{len} bytes, accepted {accepted}");
        let mut peer = raw(address);
        peer.write_all(&frame(false, 0x80, 1, &data(len))).expect("write");
        let request = b.request();
        assert_eq!((request.private_data, request.revision), (data(len), 1), "{what}");
        peer.set_nonblocking(true).expect("flag");
        b.turn(Duration::from_millis(1));
        let early = peer.peek(&mut [0]).map_err(|e| e.kind());
        assert_eq!(early, Err(std::io::ErrorKind::WouldBlock), "{what}");
        assert!(b.cm.poll_event().is_none());
        if accepted {
            b.accept(request.id, &data(len)).expect("accept");
            let n = b.connected().negotiated;
            assert_eq!((n.private_data, n.crc), (data(len), true), "{what}");
            assert!(n.tx_markers && n.rx_markers);
        } else {
            let now = b.now;
            b.cm.reject(request.id, &data(len), now).expect("reject");
        }
        let expected = frame(true, if accepted { 0xC0 } else { 0xE0 }, 1, &data(len));
        assert_eq!(read(&mut peer, 20 + len, &mut b), expected, "{what}");
        peer.set_nonblocking(true).expect("flag");
        // No byte follows the reply. It could only belong to an FPDU or a Marker.
        b.turn(Duration::from_millis(1));
        let behind = peer.read(&mut [0]);
        assert!(!matches!(behind, Ok(1..)), "{what}");
    }
}

//= MPA-7.1-3
//= MPA-7.1-6
//= MPA-7.1.1-1
//= MPA-7.1.1-10
//= MPA-7.1.1-12
//= MPA-7.1.1-14
//= MPA-7.1.1-18
//= MPA-7.1.1-20
//= MPA-7.1.1-21
//= MPA-7.1.2-1
//= MPA-7.1.2-1a
//= MPA-7.1.2-3b
//= MPA-7.1.2-3c
//= MPA-7.1.2-9a
#[test]
fn initiator_sends_request_and_reads_reply() {
    let mut options = options();
    options.startup.markers = true;
    options.startup.revision = 1;
    let mut a = Node::new(options);
    let (listener, address) = raw_listener();
    for (len, accepted) in LENGTHS.into_iter().flat_map(|len| [(len, true), (len, false)]) {
        let what = format!("{len} bytes, accepted {accepted}");
        a.connect(ACTIVE, address, &data(len));
        let mut peer = take(&listener, &mut a);
        let expected = frame(false, 0xC0, 1, &data(len));
        assert_eq!(read(&mut peer, 20 + len, &mut a), expected, "{what}");
        let flags = if accepted { 0x40 } else { 0x60 };
        peer.write_all(&frame(true, flags, 1, &data(len))).expect("write");
        match a.event() {
            CmEvent::ConnectedTcp { qp: ACTIVE, negotiated: n, .. } if accepted => {
                assert_eq!((n.private_data, n.revision), (data(len), 1), "{what}");
                assert!(n.rx_markers && !n.tx_markers && n.crc);
            }
            CmEvent::Rejected { qp: ACTIVE, private_data } if !accepted => {
                assert_eq!(private_data, data(len), "{what}");
            }
            other => panic!("{what}: {other:?}"),
        }
        assert_eq!(a.cm.in_startup(), 0);
    }
}

#[test]
fn a_request_may_come_byte_by_byte() {
    let mut b = Node::new(options());
    let mut peer = raw(b.listen("127.0.0.1", 1));
    for byte in frame(false, 0x40, 1, b"slow") {
        peer.write_all(&[byte]).expect("write");
        b.turn(Duration::from_millis(1));
    }
    let request = b.request();
    assert_eq!((request.revision, request.peer_to_peer), (1, false));
    assert_eq!((request.private_data.as_slice(), request.reads), (&b"slow"[..], (None, None)));
    b.accept(request.id, b"fast").expect("accept");
    assert_eq!(b.connected().negotiated.revision, 1);
    assert_eq!(read(&mut peer, 24, &mut b), frame(true, 0x40, 1, b"fast"));
}

#[test]
fn bytes_before_the_reply_withdraw_the_request() {
    let mut b = Node::new(options());
    let address = b.listen("127.0.0.1", 3);
    // The byte arrives in one segment with the request.
    let mut peer = raw(address);
    let mut bytes = frame(false, 0x40, 1, &[]);
    bytes.push(0);
    peer.write_all(&bytes).expect("write");
    closed(&mut peer, &mut b);
    assert!(b.cm.poll_event().is_none());
    // After it.
    let mut peer = raw(address);
    peer.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let request = b.request().id;
    peer.write_all(&[0]).expect("write");
    assert!(b.withdrawn(request).contains("before"));
    assert!(matches!(b.accept(request, &[]), Err(Refusal::NoSuchObject { .. })));
    // A FIN after the request, which the manager sees only when it accepts.
    let mut peer = raw(address);
    peer.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let request = b.request().id;
    peer.shutdown(Shutdown::Write).expect("FIN");
    let begun = Instant::now();
    while matches!(&b.cm.slots[b.cm.requests[&request]].slot, Slot::Passive(p)
        if net::peek(&p.stream, &mut [0]).is_err())
    {
        assert!(begun.elapsed() < WATCHDOG);
        std::thread::yield_now();
    }
    assert!(matches!(b.accept(request, &[]), Err(Refusal::NoSuchObject { .. })));
    assert!(b.withdrawn(request).contains("closed"));
    assert_eq!((b.row().pending, b.row().accepted), (0, 0));
}

#[test]
fn silent_close_is_retried_as_revision_1() {
    let mut a = Node::new(options());
    let (listener, address) = raw_listener();
    a.connect(ACTIVE, address, b"data");
    let mut first = take(&listener, &mut a);
    let request = read(&mut first, 28, &mut a);
    assert_eq!((request[16] & 0x10, request[17]), (0x10, 2));
    drop(first);
    let mut second = take(&listener, &mut a);
    assert_eq!(read(&mut second, 24, &mut a), frame(false, 0x40, 1, b"data"));
    let mut reply = frame(true, 0x40, 1, b"fine");
    reply.extend(b"first FPDU");
    second.write_all(&reply).expect("write");
    let active = a.connected();
    assert_eq!(active.negotiated.revision, 1);
    assert_eq!(active.negotiated.private_data, b"fine");
    assert_eq!(active.negotiated.leftover, b"first FPDU");
    assert_eq!(a.cm.in_startup(), 0);
}

#[test]
fn revision_1_is_tried_from_the_same_port() {
    let mut a = Node::new(options());
    let (listener, address) = raw_listener();
    // Reserve the port as an rdma_cm id does.
    let reserved = net::bound(SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("bind");
    let local = net::local_address(&reserved).expect("an address");
    a.connect_from(ACTIVE, address, local);
    // A request of revision 2 has four bytes more. The peer reads all of it, so its close is a FIN.
    for (revision, length) in [(2, 24), (1, 20)] {
        let mut peer = take(&listener, &mut a);
        assert_eq!(peer.peer_addr().expect("a peer"), local);
        let request = read(&mut peer, length, &mut a);
        assert_eq!(request[17], revision);
        if revision == 1 {
            peer.write_all(&frame(true, 0x40, 1, &[])).expect("write");
            assert_eq!(a.connected().addresses.local, local);
        }
    }
}

#[test]
fn failed_start_of_the_retry_is_a_reset() {
    let mut a = Node::new(options());
    let (listener, address) = raw_listener();
    a.connect_from(ACTIVE, address, SocketAddr::from(([127, 0, 0, 1], 0)));
    let peer = take(&listener, &mut a);
    // No socket can be bound to an address that this host does not have.
    for (_, entry) in &mut a.cm.slots {
        let Slot::Active(active) = &mut entry.slot else { panic!("{entry:?}") };
        active.params.local = Some(SocketAddr::from(([192, 0, 2, 1], 0)));
    }
    drop(peer);
    let why = a.no_connection();
    assert_eq!(i32::from(why.errno), rustix::io::Errno::CONNRESET.raw_os_error());
    assert!(why.reason.contains("; as MPA revision 1: connect: "), "{}", why.reason);
}

#[test]
fn close_on_revision_1_too_is_unreachable() {
    let mut a = Node::new(options());
    let (listener, address) = raw_listener();
    a.connect(ACTIVE, address, &[]);
    for _ in 0..2 {
        // Close with the request unread: the initiator sees a reset, which some stacks send.
        drop(take(&listener, &mut a));
    }
    // The result is the failure of the first attempt; the second was a guess.
    let reason = a.unreachable();
    assert!(
        reason.starts_with("the peer accepted TCP, and closed it without an MPA reply"),
        "{reason}"
    );
    assert!(reason.contains("; as MPA revision 1: "), "{reason}");
    assert_eq!(a.cm.in_startup(), 0);
}

#[test]
fn retry_shares_the_deadline_of_the_attempt() {
    let mut a = Node::new(options());
    let (listener, address) = raw_listener();
    a.connect(ACTIVE, address, &[]);
    let first = take(&listener, &mut a);
    let replied = START.after(options().reply_deadline);
    a.until(|a| a.cm.next_timeout() == Some(replied));
    a.pass(options().reply_deadline - Duration::from_millis(1));
    drop(first);
    let _second = take(&listener, &mut a);
    let until = START.after(options().connect_deadline + options().reply_deadline);
    a.until(|a| a.cm.next_timeout() == Some(until));
    a.pass(options().connect_deadline + Duration::from_millis(1));
    let reason = a.unreachable();
    assert!(
        reason.starts_with("the peer accepted TCP, and closed it without an MPA reply"),
        "{reason}"
    );
    assert!(reason.contains("no MPA reply before the deadline (mpa.reply_deadline"), "{reason}");
}
