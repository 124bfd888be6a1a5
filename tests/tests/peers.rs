//! Scripted TCP peers: whatever bytes arrive, their sender gets a precise answer, memory is
//! unchanged, and other clients are unaffected.

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Instant;

use rnic_client::{
    Completion, CompletionStatus, Context, DisconnectReason, Error, Qp, QpOptions, TerminateCode,
    TerminateOrigin,
};
use rnic_tests::target::{Bystanders, LEN, Target};
use rnic_tests::traffic::Rng;
use rnic_tests::wire::{self, CRC, Ending, fpdu, tagged, terminated, untagged};
use rnic_tests::{DEADLINE, Daemon, engine};

fn tcp_daemon() -> Daemon {
    Daemon::start(&engine(2, "tcp"))
}

fn local_end(qp: &Qp) -> DisconnectReason {
    qp.wait_disconnected(Some(DEADLINE)).unwrap()
}

//= MPA-6-1
//= MPA-8-9
//= MPA-8-10
#[test]
fn corrupted_byte_is_terminated_not_placed() {
    let daemon = tcp_daemon();
    let bystanders = Bystanders::start(&daemon);
    let target = Target::new(&daemon);
    let good = fpdu(&target.write(8, b"eleven chars"));
    // Bytes 0 and 1 are the length. With a wrong length, the frame ends elsewhere or never.
    for at in 2..good.len() {
        let (mut peer, qp) = target.open();
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        // Further frames, which the daemon must read and discard. Unread bytes would make the
        // kernel reset the connection, and the Terminate would be lost.
        wire::send_bytes(&mut peer, &[bad, good.clone(), good.clone()].concat());
        assert_eq!(terminated(&mut peer), [2, 0, 2], "byte {at}");
        drop(peer);
        match local_end(&qp) {
            DisconnectReason::Terminate { origin: TerminateOrigin::Local, code, .. } => {
                assert_eq!(code, TerminateCode { layer: 2, etype: 0, code: 2 });
            }
            other => panic!("byte {at}: {other:?}"),
        }
        assert!(target.is_untouched(), "byte {at}");
        target.flushed(2);
    }
    // The same bytes without corruption are placed.
    let (mut peer, qp) = target.open();
    wire::send_bytes(&mut peer, &[good, fpdu(&untagged(3, 0, 1, b"there"))].concat());
    target.completion();
    assert_eq!(&target.memory()[8..20], b"eleven chars");
    drop((peer, qp));
    bystanders.were_not_disturbed();
}

#[test]
fn a_wrong_length_never_places_anything() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let good = fpdu(&target.write(0, b"payload"));
    for length in (0..64).chain([0x7FFF, 0xFFFF]) {
        if length == usize::from(u16::from_be_bytes([good[0], good[1]])) {
            continue;
        }
        let (mut peer, qp) = target.open();
        let mut bad = good.clone();
        bad[..2].copy_from_slice(&(length as u16).to_be_bytes());
        wire::send_bytes(&mut peer, &bad);
        peer.shutdown(Shutdown::Write).unwrap();
        // Either the frame seemed complete (2/0/2) or the connection ended inside it (2/0/1).
        let code = terminated(&mut peer);
        assert!([[2, 0, 2], [2, 0, 1]].contains(&code), "length {length}: {code:?}");
        drop(peer);
        local_end(&qp);
        assert!(target.is_untouched(), "length {length}");
        target.flushed(2);
    }
}

#[test]
fn fin_anywhere_in_a_message_is_a_plain_end() {
    let daemon = tcp_daemon();
    let bystanders = Bystanders::start(&daemon);
    let target = Target::new(&daemon);
    let good = fpdu(&target.write(100, b"eleven chars"));
    for cut in 0..good.len() {
        let (mut peer, qp) = target.open();
        wire::send_bytes(&mut peer, &good[..cut]);
        peer.shutdown(Shutdown::Write).unwrap();
        if cut == 0 {
            // Between messages: a graceful close, if this end agrees.
            assert_eq!(local_end(&qp), DisconnectReason::Orderly);
            assert_eq!(wire::ending(&mut peer), Ending::Fin(vec![]));
        } else {
            assert_eq!(terminated(&mut peer), [2, 0, 1], "cut at {cut}");
            assert!(matches!(local_end(&qp), DisconnectReason::Lost { .. }), "cut at {cut}");
        }
        assert!(target.is_untouched(), "cut at {cut}");
        target.flushed(2);
    }
    bystanders.were_not_disturbed();
}

//= DDP-6.1-1
#[test]
fn start_up_and_messages_may_come_byte_by_byte() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let mut peer = wire::dial(target.listener.local_addr());
    let request = wire::request(CRC, 1, b"private");
    for byte in &request {
        wire::send_bytes(&mut peer, &[*byte]);
    }
    let qp = target.accept();
    wire::reply(&mut peer);
    let message = [fpdu(&target.write(3, b"drop by drop")), fpdu(&untagged(3, 0, 1, b"hello"))];
    for byte in message.concat() {
        wire::send_bytes(&mut peer, &[byte]);
    }
    let received = target.completion();
    assert_eq!((received.status, received.byte_len), (CompletionStatus::Success, 5));
    assert_eq!(&target.memory()[3..15], b"drop by drop");
    drop((peer, qp));
}

#[test]
fn fin_within_the_request_gets_no_reply() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let request = wire::request(CRC, 1, b"data");
    for cut in 0..request.len() {
        let mut peer = wire::dial(target.listener.local_addr());
        wire::send_bytes(&mut peer, &request[..cut]);
        peer.shutdown(Shutdown::Write).unwrap();
        match wire::ending(&mut peer) {
            Ending::Fin(said) | Ending::Reset(said) => {
                assert!(said.is_empty(), "cut at {cut}: {said:?}")
            }
            other => panic!("cut at {cut}: {other:?}"),
        }
    }
    daemon.wait_status("without half-open connections", |s| s.startups == 0);
    let (peer, qp) = target.open();
    drop((peer, qp));
}

#[test]
fn each_violation_has_its_terminate() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let stag = target.region.rkey().0;
    let base = target.region.iova();
    let end = base + LEN as u64;
    let read = |src: u32, from: u64, size: u32| {
        let mut header = 1u32.to_be_bytes().to_vec();
        header.extend(0u64.to_be_bytes());
        header.extend(size.to_be_bytes());
        header.extend(src.to_be_bytes());
        header.extend(from.to_be_bytes());
        untagged(1, 1, 1, &header)
    };
    let version = |mut ulpdu: Vec<u8>, byte: usize, bits: u8| {
        ulpdu[byte] = ulpdu[byte] & !bits | bits & 0x82;
        ulpdu
    };
    let cases: Vec<(&str, Vec<u8>, [u8; 3])> = vec![
        ("unknown STag", tagged(0, stag ^ 0x5555_5500, base, b"x"), [1, 1, 0]),
        ("beyond the region", target.write(LEN as u64 - 1, b"xy"), [1, 1, 1]),
        ("before the region", tagged(0, stag, base - 1, b"xy"), [1, 1, 1]),
        ("offset wraps", tagged(0, stag, u64::MAX, b"xy"), [1, 1, 3]),
        ("end of address space", tagged(0, stag, u64::MAX - 1, b"xy"), [1, 1, 3]),
        ("DDP version, tagged", version(target.write(0, b"x"), 0, 3), [1, 1, 4]),
        ("DDP version, untagged", version(untagged(3, 0, 1, b"x"), 0, 3), [1, 2, 6]),
        ("RDMAP version", version(untagged(3, 0, 1, b"x"), 1, 0xC0), [0, 2, 5]),
        ("queue number", untagged(3, 9, 1, b"x"), [1, 2, 1]),
        ("message number", untagged(3, 0, 2, b"x"), [1, 2, 3]),
        ("unknown opcode", untagged(12, 0, 1, b"x"), [0, 2, 6]),
        ("opcode of another queue", untagged(3, 1, 1, b"x"), [0, 2, 6]),
        ("tagged Send", tagged(3, stag, base, b"x"), [0, 2, 6]),
        ("response to no read", tagged(2, stag, base, b"x"), [0, 2, 6]),
        ("too long for the receive", untagged(3, 0, 1, &[0; 65]), [1, 2, 5]),
        ("too short for a header", vec![0x41, 0x43, 0, 0], [0, 2, 0xFF]),
        ("read of an unknown STag", read(stag ^ 0x5555_5500, base, 1), [0, 1, 0]),
        ("read without the right", read(stag, base, 1), [0, 1, 2]),
        (
            "invalidate of another's STag",
            {
                let mut ulpdu = untagged(4, 0, 1, b"");
                ulpdu[2..6].copy_from_slice(&stag.to_be_bytes());
                ulpdu
            },
            [0, 2, 9],
        ),
    ];
    assert_eq!(end - base, LEN as u64);
    for (name, ulpdu, code) in cases {
        let (mut peer, qp) = target.open();
        // The data after the faulty segment must have no effect.
        wire::send_bytes(&mut peer, &[fpdu(&ulpdu), fpdu(&target.write(0, b"late"))].concat());
        assert_eq!(terminated(&mut peer), code, "{name}");
        drop(peer);
        assert!(matches!(local_end(&qp), DisconnectReason::Terminate { .. }), "{name}");
        assert!(target.is_untouched(), "{name}");
        drop(qp);
        let mut some = [Completion::default(); 16];
        while target.cq.poll(&mut some).unwrap() > 0 {}
    }
}

#[test]
fn missing_receive_is_a_terminate() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let (mut peer, qp) = target.open();
    let sends: Vec<u8> = (1..=3).flat_map(|n| fpdu(&untagged(3, 0, n, b"hello"))).collect();
    wire::send_bytes(&mut peer, &sends);
    assert_eq!(terminated(&mut peer), [1, 2, 2]);
    drop(peer);
    assert!(matches!(local_end(&qp), DisconnectReason::Terminate { .. }));
}

#[test]
fn peer_terminate_is_reported_and_not_answered() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let (mut peer, qp) = target.open();
    wire::send_bytes(&mut peer, &fpdu(&untagged(7, 2, 1, &[0x11, 0x02, 0, 0])));
    assert_eq!(wire::ending(&mut peer), Ending::Fin(vec![]));
    peer.shutdown(Shutdown::Write).unwrap();
    match local_end(&qp) {
        DisconnectReason::Terminate { origin: TerminateOrigin::Peer, code, .. } => {
            assert_eq!(code, TerminateCode { layer: 1, etype: 1, code: 2 });
        }
        other => panic!("{other:?}"),
    }
    target.flushed(2);
}

#[test]
fn random_bytes_harm_only_their_sender() {
    let daemon = tcp_daemon();
    let bystanders = Bystanders::start(&daemon);
    let target = Target::new(&daemon);
    let mut rng = Rng::new(11);
    let rounds = if std::env::var_os("RNIC_TEST_LONG").is_some() { 20_000 } else { 300 };
    for round in 0..rounds {
        let mut noise = vec![0; 1 + rng.below(600) as usize];
        rng.fill(&mut noise);
        match round % 4 {
            // Noise instead of a request, or in the middle of a valid one.
            0 => {
                let mut peer = wire::dial(target.listener.local_addr());
                let request = wire::request(CRC, 1, b"some private data");
                let keep = rng.below(16) as usize;
                wire::send_bytes(&mut peer, &[&request[..keep], &noise[..]].concat());
                peer.shutdown(Shutdown::Write).unwrap();
                assert!(!matches!(wire::ending(&mut peer), Ending::Silence(_)));
            }
            // Before the first message, after it, and with valid framing.
            phase => {
                let (mut peer, qp) = if phase == 1 { target.connected() } else { target.open() };
                if phase == 3 {
                    noise = fpdu(&noise);
                }
                wire::send_bytes(&mut peer, &noise);
                // The connection may have been reset already.
                let _ = peer.shutdown(Shutdown::Write);
                let said = wire::ending(&mut peer);
                assert!(!matches!(said, Ending::Silence(_)), "{said:?} to {noise:02x?}");
                drop(peer);
                // A connection that was never established is unreachable and has no disconnect.
                match qp.wait_connected(Some(DEADLINE)) {
                    Ok(_) if phase == 1 => drop(local_end(&qp)),
                    Err(Error::Unreachable { .. }) if phase == 1 => {}
                    Err(Error::Disconnected(_)) if phase != 1 => {}
                    other => panic!("{other:?} after {noise:02x?}"),
                }
                drop(qp);
                let mut some = [Completion::default(); 16];
                while target.cq.poll(&mut some).unwrap() > 0 {}
            }
        }
        assert!(target.is_untouched(), "round {round}: {noise:02x?}");
    }
    bystanders.were_not_disturbed();
}

#[test]
fn thousand_silent_connections_are_harmless() {
    rnic_tests::process::raise_descriptor_limit();
    let config = "[engine]\nworkers = 2\n[mpa]\nstartup_deadline = \"30s\"\n";
    let daemon = Daemon::start(config);
    let bystanders = Bystanders::start(&daemon);
    let target = Target::new(&daemon);
    let before = daemon.footprint().resident;
    let silent: Vec<TcpStream> =
        (0..1000).map(|_| wire::dial(target.listener.local_addr())).collect();
    let status = daemon.wait_status("aware of all", |s| s.startups >= 900);
    assert!(status.startups <= 1024, "{status:?}");
    let grown = daemon.footprint().resident.saturating_sub(before);
    assert!(grown < 1000 * 8, "{grown} KiB for 1000 silent connections");
    // A connection that sends is served while the others are silent.
    let (peer, qp) = target.open();
    drop((peer, qp));
    daemon.wait_status("rid of them", |s| s.startups == 0);
    for mut stream in silent {
        assert!(!matches!(wire::ending(&mut stream), Ending::Silence(_)));
    }
    bystanders.were_not_disturbed();
}

#[test]
fn stalled_startup_times_out() {
    let config = "[engine]\nworkers = 1\n[mpa]\nfirst_fpdu_deadline = \"100ms\"\n";
    let daemon = Daemon::start(config);
    let target = Target::new(&daemon);
    let (mut peer, qp) = target.connected();
    let began = Instant::now();
    let e = qp.wait_connected(Some(DEADLINE)).unwrap_err();
    assert!(matches!(e, Error::Disconnected(_) | Error::Unreachable { .. }), "{e}");
    assert!(began.elapsed() < DEADLINE);
    assert!(!matches!(wire::ending(&mut peer), Ending::Silence(_)));
}

#[test]
fn an_initiator_survives_any_reply() {
    let daemon = tcp_daemon();
    let context = Context::open_at(daemon.socket()).unwrap();
    let pd = context.open_pd(None).unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address: SocketAddr = server.local_addr().unwrap();
    let mut rng = Rng::new(5);
    let mut replies: Vec<Vec<u8>> = vec![
        vec![],
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        // A request instead of a reply, a reply that is too long, revisions 0 and 9.
        wire::request(CRC, 1, b""),
        [&b"MPA ID Rep Frame\x40\x01"[..], &[0xFF, 0xFF], &[0; 600]].concat(),
        b"MPA ID Rep Frame\x40\x00\x00\x00".to_vec(),
        b"MPA ID Rep Frame\x40\x09\x00\x00".to_vec(),
        // Rejected.
        b"MPA ID Rep Frame\x60\x02\x00\x03no!".to_vec(),
    ];
    for n in 1..40 {
        let mut noise = b"MPA ID Rep Frame".to_vec();
        noise.resize(16 + n, 0);
        rng.fill(&mut noise[16..]);
        replies.push(noise);
    }
    for reply in replies {
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        qp.start_connect(address, &Default::default()).unwrap();
        let (mut stream, _) = server.accept().unwrap();
        wire::send_bytes(&mut stream, &reply);
        stream.shutdown(Shutdown::Write).unwrap();
        drop(stream);
        // If a peer closes without a reply, the library retries with revision 1.
        if reply.is_empty() {
            drop(server.accept().unwrap());
        }
        let outcome = qp.wait_connected(Some(DEADLINE));
        match (&outcome, &reply[..]) {
            (Err(Error::Rejected { private_data }), [.., b'n', b'o', b'!']) => {
                assert_eq!(private_data, b"no!");
            }
            (_, [.., b'n', b'o', b'!']) => panic!("{outcome:?}"),
            // Some noise is a valid reply. Then the connection ends at once.
            (Ok(_), _) => {
                local_end(&qp);
            }
            (Err(Error::TimedOut { .. }), _) => panic!("{reply:02x?} was not refused at once"),
            (Err(_), _) => {}
        }
    }
}
