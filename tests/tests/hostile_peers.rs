//! Peers that mean harm: frames that are nearly right at every phase, bytes that come one by one,
//! FPDUs that never end, STags that are guessed, and ten thousand connections that say nothing.
//! Others notice none of it, and afterwards the daemon holds what it held before.

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
use rnic_tests::{DEADLINE, Daemon, binaries, engine};
use rustix::net::sockopt::set_socket_linger;

fn daemon(config: &str) -> Daemon {
    Daemon::start(binaries!(), &format!("{}{config}", engine(2, "tcp")))
}

/// Rounds of a seeded test.
fn rounds(short: u64) -> u64 {
    if std::env::var_os("RNIC_TEST_LONG").is_some() { 50 * short } else { short }
}

/// Gets some bytes of a valid frame wrong, in one of the ways in which bytes can be wrong.
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

/// The same with a CRC that is right, so that what is wrong is seen behind it.
fn mutate_behind_crc(ulpdu: &mut Vec<u8>, rng: &mut Rng) -> Vec<u8> {
    mutate(ulpdu, rng);
    fpdu(ulpdu)
}

/// Ends a connection in one of the ways in which peers do. One that has only finished sending still
/// awaits the other end.
fn part(peer: TcpStream, rng: &mut Rng) -> Option<TcpStream> {
    match rng.below(3) {
        0 => set_socket_linger(&peer, Some(Duration::ZERO)).unwrap(),
        1 => {}
        // It fails if the other end has reset the connection.
        _ => return peer.shutdown(Shutdown::Write).is_ok().then_some(peer),
    }
    None
}

/// Waits for the other end of a connection.
fn parted(peer: Option<TcpStream>) {
    if let Some(mut peer) = peer {
        let said = wire::ending(&mut peer);
        assert!(!matches!(said, Ending::Silence(_)), "{said:?}");
    }
}

/// Waits for the end of a connection, however it ends, and takes its completions.
fn over(target: &Target, qp: Qp) {
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
fn frames_that_are_nearly_right_harm_only_their_sender() {
    let daemon = daemon("[limits.peer]\nstag_guesses_per_minute = 1000000\n");
    let start = daemon.at_rest();
    let bystanders = Bystanders::start(&daemon);
    let target = Target::new(&daemon);
    // Beside the region that may be written there is one that may not.
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
            wire::say(&mut peer, &request);
            // What is still a request stays undecided, and goes with its connection.
            set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
            continue;
        }
        let mut peer = wire::dial(target.listener.local_addr());
        wire::say(&mut peer, &request);
        // Requests of earlier rounds may be waiting whose peers are gone.
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
        // The first FPDU, with and without a right CRC.
        if phase == 1 {
            let mut frame = fpdu(&first);
            mutate(&mut frame, &mut rng);
            wire::say(&mut peer, &frame);
        } else if phase == 2 {
            wire::say(&mut peer, &mutate_behind_crc(&mut first, &mut rng));
        } else {
            wire::say(&mut peer, &fpdu(&first));
        }
        // In the middle of messages: a Write, and a Send of which this is not the last segment.
        let mut send = untagged(3, 0, 1, &[bytes; 24]);
        send[0] &= !0x40;
        let mut next = [write, send, target.write(8, b"12345678")][rng.below(3) as usize].clone();
        match phase {
            3 => {
                let mut frame = fpdu(&next);
                wire::say(&mut peer, &frame);
                mutate(&mut frame, &mut rng);
                wire::say(&mut peer, &frame);
            }
            4 => {
                wire::say(&mut peer, &fpdu(&next));
                wire::say(&mut peer, &mutate_behind_crc(&mut next, &mut rng));
            }
            // After a Terminate everything is too late.
            5 => {
                wire::say(&mut peer, &fpdu(&untagged(7, 2, 1, &[0x11, 0x02, 0, 0])));
                mutate(&mut next, &mut rng);
                wire::say(&mut peer, &[fpdu(&next), next].concat());
            }
            _ => {}
        }
        let peer = part(peer, &mut rng);
        over(&target, qp);
        parted(peer);
    }
    let mut bytes = vec![0xFF; LEN];
    private.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    bystanders.were_not_disturbed();
    drop((private, pd, buffer, context, target));
    daemon.shrinks_to(start);
}

#[test]
fn replies_that_are_nearly_right_harm_only_their_sender() {
    let daemon = daemon("");
    let start = daemon.at_rest();
    let target = Target::new(&daemon);
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let mut rng = Rng::new(21);
    for round in 0..rounds(150) {
        let qp = target.pd.create_qp(&QpOptions::new(&target.cq)).unwrap();
        let private_data = vec![0; 512];
        // Revision 1, so that a connection that ends without a reply is not tried again.
        let options = ConnectOptions { private_data, ..ConnectOptions::default() };
        qp.start_connect(address, &options).unwrap();
        let (mut peer, _) = server.accept().unwrap();
        peer.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut reply = wire::request(CRC, 1, b"welcome");
        reply[..16].copy_from_slice(b"MPA ID Rep Frame");
        match round % 4 {
            // Gone before a word.
            0 => {}
            1 => {
                mutate(&mut reply, &mut rng);
                wire::say(&mut peer, &reply);
            }
            // An FPDU right behind the reply, and one cut off.
            2 => {
                reply.extend(fpdu(&target.write(0, &[1; 16])));
                mutate(&mut reply, &mut rng);
                wire::say(&mut peer, &reply);
            }
            _ => {
                let write = fpdu(&target.write(0, &[1; 16]));
                reply.extend(&write[..rng.below(write.len() as u64) as usize]);
                wire::say(&mut peer, &reply);
            }
        }
        let peer = part(peer, &mut rng);
        match qp.wait_connected(Some(DEADLINE)) {
            Ok(_) => drop(qp.wait_disconnected(Some(DEADLINE)).unwrap()),
            Err(Error::TimedOut { what }) => panic!("{what}"),
            Err(_) => {}
        }
        parted(peer);
    }
    drop(target);
    daemon.shrinks_to(start);
}

#[test]
fn bytes_that_come_one_by_one_are_in_nobodys_way() {
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

/// Anonymous memory of a daemon in KiB.
fn anonymous(daemon: &Daemon) -> u64 {
    let rollup = format!("/proc/{}/smaps_rollup", daemon.pid());
    let rollup = std::fs::read_to_string(rollup).unwrap();
    let line = rollup.lines().find_map(|l| l.strip_prefix("Anonymous:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse().unwrap()
}

#[test]
fn a_thousand_halves_of_fpdus_cost_no_more_than_they_may() {
    rnic_tests::process::raise_descriptor_limit();
    let daemon = daemon("[limits]\npartial_bytes = \"8MiB\"\nsession_partial_bytes = \"4MiB\"\n");
    let bystanders = Bystanders::start(&daemon);
    let target = Target::new(&daemon);
    let mut streams: Vec<_> = (0..1000).map(|_| target.open()).collect();
    let before = anonymous(&daemon);
    // Of an FPDU of 64 KiB each sends half, which would be 32 MiB.
    let half = fpdu(&tagged(0, 0, 0, &vec![0; 64_000]))[..32_000].to_vec();
    for (peer, _) in &mut streams {
        wire::say(peer, &half);
    }
    // There is room for 2 pools of 16 and 4 MiB in buffers of 32 KiB; the others are told why they
    // had to give way.
    let mut left: Vec<_> = streams.iter().map(|(_, qp)| qp).collect();
    let deadline = Instant::now() + DEADLINE;
    while left.len() > 2 * 16 + 128 {
        assert!(Instant::now() < deadline, "{} are left", left.len());
        // The end is told when every receive has been flushed, which takes room.
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
    let grown = anonymous(&daemon).saturating_sub(before);
    // 4 MiB, 2 pools of 16 whole buffers, and what the allocator keeps in between.
    assert!(grown < 14 * 1024, "{grown} KiB");
    bystanders.were_not_disturbed();
}

/// Bytes that TCP has taken from one end of a connection and the other has not, by the kernel's
/// table.
fn in_the_send_queue(local: SocketAddr, remote: SocketAddr) -> usize {
    let (local, remote) = (format!(":{:04X}", local.port()), format!(":{:04X}", remote.port()));
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let row = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|row| row.len() > 4 && row[1].ends_with(&local) && row[2].ends_with(&remote));
    let queues = row.expect("the connection is there")[4].to_owned();
    usize::from_str_radix(queues.split(':').next().unwrap(), 16).unwrap()
}

#[test]
fn a_peer_that_does_not_read_costs_the_kernel_no_more_than_it_may() {
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
    // Until nothing more is taken: requests complete when TCP has their last byte.
    let (mut posted, mut taken) = (0, 0);
    loop {
        while posted < taken + 8 {
            qp.post_send(&[SendRequest::send(1, &sges).signaled()]).unwrap();
            posted += 1;
        }
        let mut some = [Completion::default(); 8];
        match target.cq.wait(&mut some, Some(Duration::from_millis(500))) {
            // The worker may have had no CPU for so long.
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
    // Its window is closed, and the rest stands where it may.
    assert!(queued() <= 512 << 10, "{} bytes after {taken} requests", queued());
    drop((peer, qp));
}

#[test]
fn whoever_guesses_stags_is_turned_away_for_a_while() {
    let daemon = daemon("[limits.peer]\nstag_guesses_per_minute = 5\n");
    let target = Target::new(&daemon);
    for guess in 0..5 {
        let (mut peer, qp) = target.open();
        wire::say(&mut peer, &fpdu(&tagged(0, 0x5151_5100 + guess, 0, b"mine?")));
        match wire::ending(&mut peer) {
            Ending::Fin(bytes) => assert_eq!(wire::terminate(&bytes), Some([1, 1, 0])),
            other => panic!("{other:?}"),
        }
        drop(peer);
        over(&target, qp);
    }
    // The control thread may learn of the last guess a moment later.
    let address = target.listener.local_addr();
    let deadline = Instant::now() + DEADLINE;
    loop {
        let Some(mut peer) = wire::knock(address) else { break };
        wire::say(&mut peer, &wire::request(CRC, 1, b""));
        match wire::ending_after(&mut peer, Duration::from_millis(200)) {
            // A reset that the request has run into is told there, and the rest reads as an end.
            Ending::Reset(bytes) | Ending::Fin(bytes) if bytes.is_empty() => break,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
    }
    // Another address of the same host is another peer.
    let mut peer = wire::dial_from([127, 0, 0, 2], address);
    wire::say(&mut peer, &wire::request(CRC, 1, b""));
    loop {
        let request = target.listener.accept_request(Some(DEADLINE)).unwrap();
        if request.peer() == peer.local_addr().unwrap() {
            break;
        }
    }
    let said = daemon.stop();
    let told: Vec<_> =
        said.iter().filter(|l| l.contains("limits.peer.stag_guesses_per_minute = 5")).collect();
    assert_eq!(told.len(), 1, "{said:?}");
    assert!(told[0].contains("127.0.0.1"), "{told:?}");
}

/// One end of a ping-pong.
struct Player {
    qp: Qp,
    cq: Cq,
    ball: Mr,
}

impl Player {
    fn new(context: &Context) -> Self {
        let pd = context.open_pd(None).unwrap();
        let cq = context.create_cq(64, None).unwrap();
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let buffer = context.create_shared_buffer(4096).unwrap();
        let ball = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
        let player = Player { qp, cq, ball };
        player.expect();
        player
    }

    fn expect(&self) {
        self.qp.post_recv(&[RecvRequest::new(1, &[self.ball.sge(0, 8)])]).unwrap();
    }

    fn throw(&self) {
        self.qp.post_send(&[SendRequest::send_inline(2, b"pingpong").signaled()]).unwrap();
    }

    fn catch(&self) {
        let mut one = [Completion::default()];
        loop {
            assert_eq!(self.cq.wait(&mut one, Some(DEADLINE)).unwrap(), 1);
            if one[0].ok().unwrap().opcode == CompletionOpcode::Receive {
                return self.expect();
            }
        }
    }
}

/// Median of many round trips between two QPs of a session.
fn median_round_trip(ping: &Player, pong: &Player) -> Duration {
    const ROUNDS: usize = 2000;
    let mut times = Vec::with_capacity(ROUNDS);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                pong.catch();
                pong.throw();
            }
        });
        for _ in 0..ROUNDS {
            let begun = Instant::now();
            ping.throw();
            ping.catch();
            times.push(begun.elapsed());
        }
    });
    times.sort_unstable();
    times[ROUNDS / 2]
}

#[test]
fn ten_thousand_silent_connections_are_in_nobodys_way() {
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

/// How many connections in start-up the daemon's user may have.
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
    // Fewer than there are, so that the oldest have to give way; descriptors may lower it further.
    let configured = all * 9 / 10;
    let daemon = daemon(&format!(
        "[mpa]\nstartup_deadline = \"3600s\"\n[limits]\nstartups = {configured}\n\
         [limits.user]\nstartups = {configured}\n"
    ));
    let start = daemon.at_rest();
    let memory = anonymous(&daemon);
    let context = Context::open_at(daemon.socket()).unwrap();
    let most = startups(&context);
    assert!((1..=configured).contains(&most), "{most} of {configured}");
    let (ping, pong) = (Player::new(&context), Player::new(&context));
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
    // One more comes in and goes, and all before it have come to this listener.
    drop(target.open());
    let full = most - 1..=most;
    daemon.settles("full", |s| full.contains(&(s.startups as usize)));
    // The oldest gave way and the newest did not.
    silent[0].set_read_timeout(Some(DEADLINE)).unwrap();
    let mut byte = [0];
    let gone = silent[0].read(&mut byte).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::ConnectionReset);
    let newest = silent.last_mut().unwrap();
    newest.set_nonblocking(true).unwrap();
    assert_eq!(newest.read(&mut byte).unwrap_err().kind(), ErrorKind::WouldBlock);
    // Others connect to the same listeners and work.
    for target in [&target, &other] {
        for _ in 0..20 {
            let (mut peer, qp) = target.open();
            wire::say(&mut peer, &fpdu(&target.write(0, b"works")));
            wire::say(&mut peer, &fpdu(&untagged(3, 0, 1, b"")));
            target.completion();
            drop(peer);
            assert_eq!(qp.wait_disconnected(Some(DEADLINE)).unwrap(), DisconnectReason::Orderly);
            drop(qp);
            target.drain();
        }
        assert_eq!(&target.memory()[..5], b"works");
    }
    // Another pair's messages come, and its latency is what it was.
    let crowded = (0..3).map(|_| median_round_trip(&ping, &pong)).min().unwrap();
    assert!(!is_measured || crowded < alone * 2, "{crowded:?} instead of {alone:?}");
    let held = daemon.status().startups as usize;
    assert!(full.contains(&held), "{held} instead of {most}");
    drop(silent);
    daemon.settles("rid of them", |s| s.startups == 0);
    drop((ping, pong, listener, target, other, context));
    daemon.shrinks_to(start);
    let kept = anonymous(&daemon).saturating_sub(memory);
    assert!(kept < 16 * 1024, "{kept} KiB are kept");
}
