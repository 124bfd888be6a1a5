//! Hostile peers: nearly correct frames in every phase, single bytes, incomplete FPDUs, guessed
//! STags, and ten thousand silent connections. Other clients are unaffected, and the daemon returns
//! to its former footprint.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rnic_client::{
    AcceptOptions, Access, Completion, CompletionOpcode, ConnectOptions, Context, Cq,
    DisconnectReason, Error, ListKind, Mr, Qp, QpOptions, RecvRequest, Rows, SendRequest,
};
use rnic_tests::target::{Bystanders, LEN, Target};
use rnic_tests::traffic::Rng;
use rnic_tests::wire::{self, CRC, Ending, fpdu, tagged, untagged};
use rnic_tests::{DEADLINE, Daemon, engine};
use rustix::net::sockopt::set_socket_linger;

fn daemon(config: &str) -> Daemon {
    Daemon::start(&format!("{}{config}", engine(2, "tcp")))
}

/// Returns the number of rounds of a seeded test.
fn rounds(short: u64) -> u64 {
    if std::env::var_os("RNIC_TEST_LONG").is_some() { 50 * short } else { short }
}

/// Corrupts some bytes of a valid frame in one of several ways.
fn mutate(frame: &mut Vec<u8>, rng: &mut Rng) {
    let at = rng.below(frame.len() as u64) as usize;
    let some = 1 + rng.below(40) as usize;
    match rng.below(7) {
        0 => frame[at] ^= 1 << rng.below(8),
        1 => frame[at] = rng.word() as u8,
        2 => frame.truncate(at),
        3 => drop(frame.drain(at..(at + some).min(frame.len()))),
        4 => {
            let again = frame[at..(at + some).min(frame.len())].to_vec();
            frame.splice(at..at, again);
        }
        5 => {
            let mut noise = vec![0; some];
            rng.fill(&mut noise);
            frame.splice(at..at, noise);
        }
        _ => {
            let end = (at + some).min(frame.len());
            rng.fill(&mut frame[at..end]);
        }
    }
}

/// Corrupts a ULPDU and adds a correct CRC, so that the error is detected after the CRC check.
fn mutate_with_valid_crc(ulpdu: &mut Vec<u8>, rng: &mut Rng) -> Vec<u8> {
    mutate(ulpdu, rng);
    fpdu(ulpdu)
}

/// Closes a connection in one of several ways. Returns the stream if only the sending side is
/// closed.
fn close(peer: TcpStream, rng: &mut Rng) -> Option<TcpStream> {
    match rng.below(3) {
        0 => set_socket_linger(&peer, Some(Duration::ZERO)).unwrap(),
        1 => {}
        // It fails if the other end has reset the connection.
        _ => return peer.shutdown(Shutdown::Write).is_ok().then_some(peer),
    }
    None
}

/// Waits until the other end has closed the connection.
fn await_close(peer: Option<TcpStream>) {
    if let Some(mut peer) = peer {
        let ending = wire::ending(&mut peer);
        assert!(!matches!(ending, Ending::Silence(_)), "{ending:?}");
    }
}

/// Waits until the connection of a QP has ended in any way, and discards its completions.
fn await_end(target: &Target, qp: Qp) {
    match qp.wait_connected(Some(DEADLINE)) {
        Ok(_) => drop(qp.wait_disconnected(Some(DEADLINE)).unwrap()),
        Err(Error::Unreachable { .. } | Error::Disconnected(_)) => {}
        Err(other) => panic!("{other}"),
    }
    drop(qp);
    let mut some = [Completion::default(); 64];
    while target.cq.poll(&mut some).unwrap() > 0 {}
}

#[test]
fn malformed_requests_harm_only_their_sender() {
    let daemon = daemon("[limits.peer]\nstag_guesses_per_minute = 1000000\n");
    let start = daemon.at_rest();
    let bystanders = Bystanders::start(&daemon);
    let target = Target::new(&daemon);
    // Next to the writable region there is one without remote access.
    let context = Context::open_at(daemon.socket()).unwrap();
    let buffer = context.create_shared_buffer(LEN as u64).unwrap();
    let pd = context.open_pd(None).unwrap();
    let private = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
    let mut rng = Rng::new(20);
    for round in 0..rounds(400) {
        let bytes = round as u8;
        let mut request = wire::request(CRC, 1, b"private data");
        let write = target.write(rng.below(64) * 8, &[bytes; 40]);
        let mut first = target.write(0, &[bytes; 16]);
        let phase = round % 6;
        if phase == 0 {
            let mut peer = wire::dial(target.listener.local_addr());
            mutate(&mut request, &mut rng);
            wire::send_bytes(&mut peer, &request);
            // If the mutated request is still valid, it stays undecided and ends with its
            // connection.
            set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
            continue;
        }
        let mut peer = wire::dial(target.listener.local_addr());
        wire::send_bytes(&mut peer, &request);
        // Skip requests of earlier rounds, which belong to closed connections.
        let qp = loop {
            let request = target.listener.accept_request(Some(DEADLINE)).unwrap();
            if request.peer() != peer.local_addr().unwrap() {
                continue;
            }
            let qp = target.pd.create_qp(&QpOptions::new(&target.cq)).unwrap();
            let sges = [target.inbox.sge(0, 64)];
            qp.post_recv(&[RecvRequest::new(1, &sges), RecvRequest::new(2, &sges)]).unwrap();
            request.start_accept(&qp, &AcceptOptions::default()).unwrap();
            break qp;
        };
        wire::reply(&mut peer);
        // The first FPDU, with a wrong or a correct CRC.
        if phase == 1 {
            let mut frame = fpdu(&first);
            mutate(&mut frame, &mut rng);
            wire::send_bytes(&mut peer, &frame);
        } else if phase == 2 {
            wire::send_bytes(&mut peer, &mutate_with_valid_crc(&mut first, &mut rng));
        } else {
            wire::send_bytes(&mut peer, &fpdu(&first));
        }
        // In the middle of messages: a Write, and a Send without the Last flag.
        let mut send = untagged(3, 0, 1, &[bytes; 24]);
        send[0] &= !0x40;
        let mut next = [write, send, target.write(8, b"12345678")][rng.below(3) as usize].clone();
        match phase {
            3 => {
                let mut frame = fpdu(&next);
                wire::send_bytes(&mut peer, &frame);
                mutate(&mut frame, &mut rng);
                wire::send_bytes(&mut peer, &frame);
            }
            4 => {
                wire::send_bytes(&mut peer, &fpdu(&next));
                wire::send_bytes(&mut peer, &mutate_with_valid_crc(&mut next, &mut rng));
            }
            // Nothing may follow a Terminate.
            5 => {
                wire::send_bytes(&mut peer, &fpdu(&untagged(7, 2, 1, &[0x11, 0x02, 0, 0])));
                mutate(&mut next, &mut rng);
                wire::send_bytes(&mut peer, &[fpdu(&next), next].concat());
            }
            _ => {}
        }
        let peer = close(peer, &mut rng);
        await_end(&target, qp);
        await_close(peer);
    }
    let mut bytes = vec![0xFF; LEN];
    private.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    bystanders.were_not_disturbed();
    drop((private, pd, buffer, context, target));
    daemon.shrinks_to(start);
}

#[test]
fn malformed_replies_harm_only_their_sender() {
    let daemon = daemon("");
    let start = daemon.at_rest();
    let target = Target::new(&daemon);
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let mut rng = Rng::new(21);
    for round in 0..rounds(150) {
        let qp = target.pd.create_qp(&QpOptions::new(&target.cq)).unwrap();
        let private_data = vec![0; 512];
        // Revision 1, so that the library does not retry a connection without a reply.
        let options = ConnectOptions { private_data, ..ConnectOptions::default() };
        qp.start_connect(address, &options).unwrap();
        let (mut peer, _) = server.accept().unwrap();
        peer.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut reply = wire::request(CRC, 1, b"welcome");
        reply[..16].copy_from_slice(b"MPA ID Rep Frame");
        match round % 4 {
            // Close before the reply.
            0 => {}
            1 => {
                mutate(&mut reply, &mut rng);
                wire::send_bytes(&mut peer, &reply);
            }
            // An FPDU directly after the reply, both mutated, or a truncated FPDU.
            2 => {
                reply.extend(fpdu(&target.write(0, &[1; 16])));
                mutate(&mut reply, &mut rng);
                wire::send_bytes(&mut peer, &reply);
            }
            _ => {
                let write = fpdu(&target.write(0, &[1; 16]));
                reply.extend(&write[..rng.below(write.len() as u64) as usize]);
                wire::send_bytes(&mut peer, &reply);
            }
        }
        let peer = close(peer, &mut rng);
        match qp.wait_connected(Some(DEADLINE)) {
            Ok(_) => drop(qp.wait_disconnected(Some(DEADLINE)).unwrap()),
            Err(Error::TimedOut { what }) => panic!("{what}"),
            Err(_) => {}
        }
        await_close(peer);
    }
    drop(target);
    daemon.shrinks_to(start);
}

#[test]
fn single_byte_arrivals_delay_no_other_peer() {
    let daemon = daemon("");
    let start = daemon.at_rest();
    let bystanders = Bystanders::start(&daemon);
    let target = Target::new(&daemon);
    let mut peers: Vec<_> = (0..40).map(|_| wire::dial(target.listener.local_addr())).collect();
    let each = |peers: &mut [TcpStream], bytes: &[u8]| {
        for byte in bytes {
            for peer in &mut *peers {
                peer.write_all(&[*byte]).unwrap();
            }
        }
    };
    each(&mut peers, &wire::request(CRC, 1, b"slow"));
    let qps: Vec<_> = peers.iter().map(|_| target.accept()).collect();
    for peer in &mut peers {
        wire::reply(peer);
    }
    each(&mut peers, &fpdu(&target.write(0, b"byte by byte")));
    for qp in &qps {
        qp.wait_connected(Some(DEADLINE)).unwrap();
    }
    each(&mut peers, &fpdu(&untagged(3, 0, 1, b"a message")));
    let mut received = 0;
    while received < qps.len() {
        assert_eq!(target.success().byte_len, 9);
        received += 1;
    }
    assert_eq!(&target.memory()[..12], b"byte by byte");
    drop((peers, qps, target));
    bystanders.were_not_disturbed();
    daemon.shrinks_to(start);
}

#[test]
fn thousand_partial_fpdus_stay_within_limits() {
    rnic_tests::process::raise_descriptor_limit();
    let daemon = daemon("[limits]\npartial_bytes = \"8MiB\"\nsession_partial_bytes = \"4MiB\"\n");
    let bystanders = Bystanders::start(&daemon);
    let target = Target::new(&daemon);
    let mut streams: Vec<_> = (0..1000).map(|_| target.open()).collect();
    let before = daemon.anonymous_kib();
    // Each peer sends half of an FPDU of 64 KiB, 32 MiB in total.
    let half = fpdu(&tagged(0, 0, 0, &vec![0; 64_000]))[..32_000].to_vec();
    for (peer, _) in &mut streams {
        wire::send_bytes(peer, &half);
    }
    // There is room for 2 pools of 16 buffers, and for 4 MiB in buffers of 32 KiB. The other
    // connections are evicted, with a reason.
    let mut left: Vec<_> = streams.iter().map(|(_, qp)| qp).collect();
    let deadline = Instant::now() + DEADLINE;
    while left.len() > 2 * 16 + 128 {
        assert!(Instant::now() < deadline, "{} are left", left.len());
        // DISCONNECTED follows the flushed receives, which need room in the CQ.
        let mut some = [Completion::default(); 64];
        while target.cq.poll(&mut some).unwrap() > 0 {}
        left.retain(|qp| match qp.wait_disconnected(Some(Duration::ZERO)) {
            Ok(DisconnectReason::Lost { why }) => {
                assert!(why.contains("limits.session_partial_bytes"), "{why}");
                false
            }
            Ok(other) => panic!("{other:?}"),
            Err(Error::TimedOut { .. }) => true,
            Err(other) => panic!("{other}"),
        });
    }
    assert!(left.len() > 100, "{} are left", left.len());
    let grown = daemon.anonymous_kib().saturating_sub(before);
    // 4 MiB, 2 pools of 16 full buffers, and overhead of the allocator.
    assert!(grown < 14 * 1024, "{grown} KiB");
    bystanders.were_not_disturbed();
}

/// Returns the number of bytes in the send queue of a TCP connection, from the kernel's table.
fn in_the_send_queue(local: SocketAddr, remote: SocketAddr) -> usize {
    let local = format!(":{:04X}", local.port());
    let remote = format!(":{:04X}", remote.port());
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let row = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|row| row.len() > 4 && row[1].ends_with(&local) && row[2].ends_with(&remote));
    let queues = row.expect("a row for the connection")[4].to_owned();
    usize::from_str_radix(queues.split(':').next().unwrap(), 16).unwrap()
}

#[test]
fn peer_that_does_not_read_is_bounded() {
    const CHUNK: usize = 64 << 10;
    let daemon = daemon("[limits]\nsocket_send_bytes = \"512KiB\"\n");
    let target = Target::new(&daemon);
    let (peer, qp) = target.open();
    let buffer = target.context.create_shared_buffer(CHUNK as u64).unwrap();
    let data = target.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
    let sges = [data.sge(0, CHUNK as u32)];
    let local = target.listener.local_addr();
    let remote = peer.local_addr().unwrap();
    let queued = || in_the_send_queue(local, remote);
    let deadline = Instant::now() + DEADLINE;
    // Post until TCP accepts no more. A request completes when TCP has its last byte.
    let mut posted = 0;
    let mut taken = 0;
    loop {
        while posted < taken + 8 {
            qp.post_send(&[SendRequest::send(1, &sges).signaled()]).unwrap();
            posted += 1;
        }
        let mut some = [Completion::default(); 8];
        match target.cq.wait(&mut some, Some(Duration::from_millis(500))) {
            // The worker may have had no CPU time.
            Ok(0) | Err(Error::TimedOut { .. }) if queued() < 64 << 10 => {
                assert!(Instant::now() < deadline, "{} bytes after {taken} requests", queued());
            }
            Ok(0) | Err(Error::TimedOut { .. }) => break,
            Ok(n) => {
                assert!(some[..n].iter().all(|one| one.ok().is_ok()));
                taken += n;
            }
            Err(other) => panic!("{other}"),
        }
        assert!(taken * CHUNK < 64 << 20, "{taken} requests are taken");
    }
    // The window is closed, and the rest stays within the limit.
    assert!(queued() <= 512 << 10, "{} bytes after {taken} requests", queued());
    drop((peer, qp));
}

#[test]
fn stag_guesser_is_refused_for_a_while() {
    let daemon = daemon("[limits.peer]\nstag_guesses_per_minute = 5\n");
    let target = Target::new(&daemon);
    for guess in 0..5 {
        let (mut peer, qp) = target.open();
        wire::send_bytes(&mut peer, &fpdu(&tagged(0, 0x5151_5100 + guess, 0, b"mine?")));
        match wire::ending(&mut peer) {
            Ending::Fin(bytes) => assert_eq!(wire::terminate(&bytes), Some([1, 1, 0])),
            other => panic!("{other:?}"),
        }
        drop(peer);
        await_end(&target, qp);
    }
    // The control thread may process the last guess a moment later.
    let address = target.listener.local_addr();
    let deadline = Instant::now() + DEADLINE;
    loop {
        let Some(mut peer) = wire::try_dial(address) else { break };
        wire::send_bytes(&mut peer, &wire::request(CRC, 1, b""));
        match wire::ending_after(&mut peer, Duration::from_millis(200)) {
            // If the send consumes the reset, the read sees an end of stream.
            Ending::Reset(bytes) | Ending::Fin(bytes) if bytes.is_empty() => break,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
    }
    // Another address of the same host counts as a different peer.
    let mut peer = wire::dial_from([127, 0, 0, 2], address);
    wire::send_bytes(&mut peer, &wire::request(CRC, 1, b""));
    loop {
        let request = target.listener.accept_request(Some(DEADLINE)).unwrap();
        if request.peer() == peer.local_addr().unwrap() {
            break;
        }
    }
    let log = daemon.stop();
    let lines: Vec<_> = log.iter().filter(|l| l.contains("used 5 invalid STags")).collect();
    assert_eq!(lines.len(), 1, "{log:?}");
    assert!(lines[0].contains("127.0.0.1"), "{lines:?}");
}

/// One end of a ping-pong.
struct Player {
    qp: Qp,
    cq: Cq,
    message: Mr,
}

impl Player {
    fn new(context: &Context) -> Self {
        let pd = context.open_pd(None).unwrap();
        let cq = context.create_cq(64, None).unwrap();
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let buffer = context.create_shared_buffer(4096).unwrap();
        let message = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
        let player = Player { qp, cq, message };
        player.post_recv();
        player
    }

    fn post_recv(&self) {
        self.qp.post_recv(&[RecvRequest::new(1, &[self.message.sge(0, 8)])]).unwrap();
    }

    fn send(&self) {
        self.qp.post_send(&[SendRequest::send_inline(2, b"pingpong").signaled()]).unwrap();
    }

    fn receive(&self) {
        let mut one = [Completion::default()];
        loop {
            assert_eq!(self.cq.wait(&mut one, Some(DEADLINE)).unwrap(), 1);
            if one[0].ok().unwrap().opcode == CompletionOpcode::Receive {
                return self.post_recv();
            }
        }
    }
}

/// Returns the median of many round trips between two QPs of a session.
fn median_round_trip(ping: &Player, pong: &Player) -> Duration {
    const ROUNDS: usize = 2000;
    let mut times = Vec::with_capacity(ROUNDS);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                pong.receive();
                pong.send();
            }
        });
        for _ in 0..ROUNDS {
            let begun = Instant::now();
            ping.send();
            ping.receive();
            times.push(begun.elapsed());
        }
    });
    times.sort_unstable();
    times[ROUNDS / 2]
}

#[test]
fn ten_thousand_silent_connections_are_harmless() {
    rnic_tests::process::raise_descriptor_limit();
    let Some(hard) = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum else {
        return silent_connections(10_000);
    };
    let room = usize::try_from(hard).unwrap_or(usize::MAX).saturating_sub(1000);
    if room < 10_000 {
        rnic_tests::omit(&format!(
            "only {room} connections: the hard limit on descriptors is {hard}"
        ));
    }
    silent_connections(room.min(10_000));
}

/// Returns the limit on connections in start-up of the daemon's user.
fn startups(context: &Context) -> usize {
    let mut from = Some(0);
    let mut least = usize::MAX;
    while let Some(place) = from {
        let page = context.list(ListKind::Limits, place).unwrap();
        let Rows::Limits(rows) = page.rows else { panic!("{:?}", page.rows) };
        let these = rows.iter().filter(|row| row.key.contains("startups"));
        least = these.map(|row| row.limit as usize).fold(least, usize::min);
        from = page.next;
    }
    least
}

fn silent_connections(all: usize) {
    // Fewer than the connections, so that the oldest are evicted. Descriptors may lower the limit.
    let configured = all * 9 / 10;
    let daemon = daemon(&format!(
        "[mpa]\nstartup_deadline = \"3600s\"\n[limits]\nstartups = {configured}\n\
         [limits.user]\nstartups = {configured}\n"
    ));
    let start = daemon.at_rest();
    let memory = daemon.anonymous_kib();
    let context = Context::open_at(daemon.socket()).unwrap();
    let most = startups(&context);
    assert!((1..=configured).contains(&most), "{most} of {configured}");
    let ping = Player::new(&context);
    let pong = Player::new(&context);
    let listener = context.listen("127.0.0.1:0", 4).unwrap();
    ping.qp.start_connect(listener.local_addr(), &ConnectOptions::default()).unwrap();
    let request = listener.accept_request(Some(DEADLINE)).unwrap();
    request.accept(&pong.qp, &AcceptOptions::default()).unwrap();
    ping.qp.wait_connected(Some(DEADLINE)).unwrap();
    let is_measured = rnic_tests::timing("round trips beside silent connections");
    let alone = (0..3).map(|_| median_round_trip(&ping, &pong)).min().unwrap();

    let target = Target::new(&daemon);
    let other = Target::new(&daemon);
    let addresses = [target.listener.local_addr(), other.listener.local_addr()];
    let mut silent: Vec<_> =
        (0..all).map(|n| TcpStream::connect(addresses[n % 2]).unwrap()).collect();
    // After one more connection, all earlier ones have reached this listener.
    drop(target.open());
    let full = most - 1..=most;
    daemon.wait_status("full", |s| full.contains(&(s.startups as usize)));
    // The oldest connection was evicted and the newest was not.
    silent[0].set_read_timeout(Some(DEADLINE)).unwrap();
    let mut byte = [0];
    let gone = silent[0].read(&mut byte).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::ConnectionReset);
    let newest = silent.last_mut().unwrap();
    newest.set_nonblocking(true).unwrap();
    assert_eq!(newest.read(&mut byte).unwrap_err().kind(), ErrorKind::WouldBlock);
    // Other peers still connect to the same listeners.
    for target in [&target, &other] {
        for _ in 0..20 {
            let (mut peer, qp) = target.open();
            wire::send_bytes(&mut peer, &fpdu(&target.write(0, b"works")));
            wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, 1, b"")));
            target.completion();
            drop(peer);
            assert_eq!(qp.wait_disconnected(Some(DEADLINE)).unwrap(), DisconnectReason::Orderly);
            drop(qp);
            target.drain();
        }
        assert_eq!(&target.memory()[..5], b"works");
    }
    // The latency of another pair is unaffected.
    let crowded = (0..3).map(|_| median_round_trip(&ping, &pong)).min().unwrap();
    assert!(!is_measured || crowded < alone * 2, "{crowded:?} instead of {alone:?}");
    let held = daemon.status().startups as usize;
    assert!(full.contains(&held), "{held} instead of {most}");
    drop(silent);
    daemon.wait_status("rid of them", |s| s.startups == 0);
    drop((ping, pong, listener, target, other, context));
    daemon.shrinks_to(start);
    let kept = daemon.anonymous_kib().saturating_sub(memory);
    assert!(kept < 16 * 1024, "{kept} KiB are kept");
}
