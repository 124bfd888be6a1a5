//! Scripted TCP peers: whatever bytes arrive, memory is unchanged and other clients are unaffected.

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Instant;

use rnic_client::{
    Access, Completion, CompletionOpcode, CompletionStatus, Context, DisconnectReason, Error, Qp,
    QpOptions, RemoteAddr, SendRequest, Stag, TerminateCode, TerminateOrigin,
};
use rnic_tests::target::{Bystanders, Target};
use rnic_tests::traffic::Rng;
use rnic_tests::wire::{self, CRC, Ending, fpdu, tagged, terminated, ulpdus, untagged};
use rnic_tests::{DEADLINE, Daemon, engine};

fn tcp_daemon() -> Daemon {
    Daemon::start(&engine(2, "tcp"))
}

fn local_end(qp: &Qp) -> DisconnectReason {
    qp.wait_disconnected(Some(DEADLINE)).unwrap()
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
    drop((peer, qp));
}

//= RDMAP-5.4-9
//= RDMAP-6.2.1-1
//= RDMAP-6.2.1-4
/// The socket is full of the application's data, and the peer keeps sending and finally sends a
/// Terminate, too. The peer still receives exactly one Terminate, followed by a FIN, and each
/// request of the application completes once.
#[test]
fn terminate_is_last_through_a_full_socket() {
    let daemon = tcp_daemon();
    let target = Target::new(&daemon);
    let big = target.context.create_shared_buffer(1 << 20).unwrap();
    let big = target.pd.reg_mr(&big, .., Access::LOCAL_WRITE).unwrap();
    let (mut peer, qp) = target.open();
    let sges = [big.sge(0, 1 << 20)];
    let to = RemoteAddr { addr: 0, rkey: Stag(7) };
    let writes: Vec<SendRequest<'_>> =
        (100..164).map(|n| SendRequest::write(n, &sges, to).signaled()).collect();
    qp.post_send(&writes).unwrap();
    // The first bytes have arrived, so the socket is filling.
    let first = wire::ulpdu(&mut peer);
    let mut sender = peer.try_clone().unwrap();
    let fault = fpdu(&tagged(0, 1, 0, b"x"));
    let good = fpdu(&target.write(0, &[1; 1000]));
    let ours = fpdu(&untagged(7, 2, 1, &[0x12, 5, 0, 0]));
    let (sent, mut said) = std::thread::scope(|scope| {
        // Far more than socket buffers hold, so the daemon has to read and discard it.
        let sending = scope.spawn(move || {
            wire::send_bytes(&mut sender, &fault);
            for _ in 0..20_000 {
                wire::send_bytes(&mut sender, &good);
            }
            wire::send_bytes(&mut sender, &ours);
            sender.shutdown(Shutdown::Write).is_ok()
        });
        let said = until_fin(&mut peer);
        (sending.join().unwrap(), said)
    });
    assert!(sent, "the connection was not reset");
    said.insert(0, first);
    let terminates = said.iter().filter(|ulpdu| ulpdu[1] & 0x0F == 7).count();
    assert_eq!((terminates, said.last().unwrap()[1]), (1, 0x47));
    assert_eq!(said.last().unwrap()[18..20], [0x11, 0x00]);
    assert!(target.is_untouched(), "data after the fault was placed");
    match qp.wait_disconnected(Some(DEADLINE)).unwrap() {
        DisconnectReason::Terminate { origin: TerminateOrigin::Local, code, .. } => {
            assert_eq!(code, TerminateCode { layer: 1, etype: 1, code: 0 });
        }
        other => panic!("{other:?}"),
    }
    let seen: Vec<Completion> = (0..66).map(|_| target.completion()).collect();
    // Each queue completes in its own order. Their flushes may interleave.
    let (sends, receives): (Vec<Completion>, Vec<Completion>) =
        seen.into_iter().partition(|c| c.opcode != CompletionOpcode::Receive);
    let names = |of: &[Completion]| of.iter().map(|c| c.wr_id).collect::<Vec<u64>>();
    assert_eq!(names(&sends), (100..164).collect::<Vec<u64>>());
    assert_eq!(names(&receives), [1, 2]);
    let taken = sends.iter().take_while(|c| c.status == CompletionStatus::Success).count();
    assert!(taken < 64, "the socket had no room for all");
    let flushed = |c: &Completion| c.status == CompletionStatus::WrFlush;
    assert!(sends[taken..].iter().chain(&receives).all(flushed));
    assert_eq!(target.cq.poll(&mut [Completion::default()]).unwrap(), 0);
}

/// Returns the ULPDUs of the daemon up to its FIN, which must be the end.
fn until_fin(peer: &mut TcpStream) -> Vec<Vec<u8>> {
    match wire::ending(peer) {
        Ending::Fin(bytes) => ulpdus(&bytes),
        other => panic!("{other:?}"),
    }
}
