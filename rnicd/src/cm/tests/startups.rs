//! Connections in start-up, silent and undecided: charges, evictions, and events.

use super::*;

const ALICE: u32 = 1000;
const MALLORY: u32 = 1001;
/// Mallory's session and listener. The other sessions and listeners are Alice's.
const HERS: SessionId = SessionId(3);
const HER_LISTENER: ListenerId = ListenerId(30);

fn quota(user: u32, startups: u32) -> Quota {
    let startups_key = format!("limits.user.startups (user {user})");
    Quota { user, startups, startups_key, accepts_per_second: 1_000_000 }
}

/// A node with both users, and the addresses of their listeners.
fn both(startups: usize, of_user: u32) -> (Node, SocketAddr, SocketAddr) {
    let mut node = Node::new(CmOptions { startups, ..options() });
    node.cm.set_quota(SESSION, quota(ALICE, of_user));
    node.cm.set_quota(HERS, quota(MALLORY, of_user));
    let address = node.listen("127.0.0.1", 64);
    let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
    let hers = node.cm.bind(HERS, HER_LISTENER, any_port.into()).expect("bind");
    node.cm.listen(HER_LISTENER, 64).expect("listen");
    (node, address, hers)
}

/// Connects, and waits until the node has this many connections in start-up.
fn silent(node: &mut Node, to: SocketAddr, then: usize) -> TcpStream {
    let stream = raw(to);
    node.turn(Duration::ZERO);
    node.until(|n| n.cm.in_startup() == then);
    stream
}

/// Sends a complete request, which stays undecided.
fn undecided(node: &mut Node, to: SocketAddr) -> (TcpStream, RequestId) {
    let mut stream = raw(to);
    stream.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let request = node.request().id;
    (stream, request)
}

/// Returns true if the node has ended the connection.
fn is_over(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("flag");
    match (&mut &*stream).read(&mut [0; 64]) {
        Ok(n) => n == 0,
        Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
    }
}

#[test]
fn flood_evicts_only_its_own_user() {
    let (mut node, address, hers) = both(20, 20);
    let mine: Vec<_> = (1..=5).map(|n| silent(&mut node, address, n)).collect();
    // Far more than the limit: only her own are evicted.
    let mut flood = Vec::new();
    for n in 6..=200 {
        flood.push(silent(&mut node, hers, n.min(20)));
    }
    node.until(|_| flood.iter().filter(|s| is_over(s)).count() == 180);
    assert!(!mine.iter().any(is_over));
    assert_eq!((node.cm.startups_of(ALICE), node.cm.startups_of(MALLORY)), (5, 15));
    let mut stream = &mine[0];
    stream.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let request = node.request().id;
    let now = node.now;
    node.cm.reject(request, &[], now).expect("undecided");
    // The rejected connection waits for its peer's FIN and still counts.
    assert_eq!((node.row().pending, node.cm.startups_of(ALICE)), (0, 5));
}

#[test]
fn one_user_gets_at_most_half() {
    let (mut node, address, hers) = both(20, 10);
    let flood: Vec<_> = (1..=30).map(|n| silent(&mut node, hers, n.min(10))).collect();
    node.until(|_| flood.iter().filter(|s| is_over(s)).count() == 20);
    let mine: Vec<_> = (11..=20).map(|n| silent(&mut node, address, n)).collect();
    assert!(!mine.iter().chain(&flood[20..]).any(is_over));
}

#[test]
fn undecided_requests_are_evicted_with_an_event() {
    let (mut node, address, hers) = both(10, 10);
    let mut requests: Vec<_> = (0..10).map(|_| undecided(&mut node, hers)).collect();
    assert_eq!((node.cm.startups(), node.cm.startups_of(MALLORY)), (10, 10));
    // Mallory's next connection is rejected, as with a full backlog.
    let turned_away = raw(hers);
    node.until(|_| is_over(&turned_away));
    assert!(!requests.iter().any(|(stream, _)| is_over(stream)));
    // A request for another user evicts her oldest.
    let (gone, id) = requests.remove(0);
    let (mine, request) = undecided_after_withdrawal(&mut node, address, gone, id);
    assert_eq!((node.cm.startups_of(ALICE), node.cm.startups_of(MALLORY)), (1, 9));
    assert!(!is_over(&mine) && !requests.iter().any(|(stream, _)| is_over(stream)));
    // After the accept it counts as a QP.
    node.accept(request, &[]).expect("undecided");
    node.connected();
    assert_eq!((node.cm.startups_of(ALICE), node.cm.startups()), (0, 9));
    let now = node.now;
    node.cm.drop_session(HERS, now);
    for (mut stream, _) in requests {
        assert_eq!(read(&mut stream, 20, &mut node)[16] & 0x20, 0x20);
    }
    node.until(|n| n.cm.in_startup() == 0);
    assert_eq!((node.cm.startups(), node.cm.next_timeout()), (0, None));
}

/// Sends a request that evicts another request, whose owner gets an event.
fn undecided_after_withdrawal(
    node: &mut Node,
    to: SocketAddr,
    gone: TcpStream,
    id: RequestId,
) -> (TcpStream, RequestId) {
    let mut stream = raw(to);
    stream.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let reason = match node.event() {
        CmEvent::Withdrawn { listener: HER_LISTENER, request, reason } if request == id => reason,
        other => panic!("expected Withdrawn, got {other:?}"),
    };
    assert_eq!(reason, "evicted for a newer connection (limits.startups)");
    let now = node.now;
    assert!(node.cm.reject(id, &[], now).is_err());
    assert!(is_over(&gone));
    (stream, node.request().id)
}

#[test]
fn rejected_initiator_counts_until_peer_closes() {
    let (mut node, _, _) = both(10, 2);
    let (listener, address) = raw_listener();
    let mut peers = Vec::new();
    for n in 0..4 {
        let params = ConnectParams {
            session: HERS,
            qp: ACTIVE,
            peer: address,
            local: None,
            ird: None,
            ord: None,
            private_data: Vec::new(),
            peer_to_peer: true,
        };
        node.cm.connect(params, node.now).expect("idle");
        let mut peer = take(&listener, &mut node);
        // The reply requests a higher IRD than the initiator offers, which ends in a Terminate.
        peer.write_all(&frame(true, 0x50, 2, &[0, 16, 0, 17])).expect("write");
        node.unreachable();
        assert_eq!(node.cm.startups_of(MALLORY), (n + 1).min(2));
        peers.push(peer);
    }
    assert_eq!(node.cm.in_startup(), 2);
    drop(peers);
    node.until(|n| n.cm.in_startup() == 0);
    assert_eq!(node.cm.startups(), 0);
}

#[test]
fn connection_rate_is_per_host_and_user() {
    let (mut node, address, hers) = both(100, 100);
    node.cm.set_options(CmOptions { peer_connections_per_second: 5, ..options() });
    let flood: Vec<_> = (0..20).map(|_| raw(hers)).collect();
    node.until(|_| flood.iter().filter(|s| is_over(s)).count() == 15);
    let mine = silent(&mut node, address, 6);
    assert!(!is_over(&mine));
}

#[test]
fn accept_rate_of_a_user_delays_no_other() {
    const RATE: u32 = 100;
    let (mut node, address, hers) = both(1000, 1000);
    let slow = Quota { accepts_per_second: RATE, ..quota(MALLORY, 1000) };
    node.cm.set_quota(HERS, slow);
    let _flood: Vec<_> = (0..60).map(|_| raw(hers)).collect();
    let taken = |n: &Node| n.cm.startups.of(MALLORY);
    // The connections of a tenth of a second are accepted at once. The rest waits in the kernel.
    node.until(|n| taken(n) == 10);
    let _mine = silent(&mut node, address, 11);
    let begin = node.now;
    while taken(&node) < 60 {
        let passed = node.now.since(begin);
        let most = 10 + passed.as_millis() as usize * RATE as usize / 1000;
        assert!((most.saturating_sub(2)..=most).contains(&taken(&node)), "{passed:?}");
        node.turn(Duration::ZERO);
        node.pass(Duration::from_millis(5));
    }
}

#[test]
fn stag_guesses_close_only_the_users_listeners() {
    let (mut node, address, hers) = both(100, 100);
    let peer = Ipv4Addr::LOCALHOST.into();
    let now = node.now;
    for _ in 0..options().stag_guesses_per_minute {
        node.cm.stag_guessed(HERS, peer, now);
    }
    let turned_away = raw(hers);
    node.until(|_| is_over(&turned_away));
    let mine = silent(&mut node, address, 1);
    assert!(!is_over(&mine));
    drop(mine);
    node.until(|n| n.cm.in_startup() == 0);
    node.now = node.now.after(Duration::from_secs(60));
    silent(&mut node, hers, 1);
}

#[test]
fn closing_a_listener_scans_no_other_requests() {
    // Undecided requests inside the daemon, which use no descriptors.
    const CROWD: u32 = 20_000;
    const ROUNDS: u32 = 100;
    let mut node = Node::direct();
    let crowded = node.listen("127.0.0.1", CROWD);
    let close = |node: &mut Node| {
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        // CPU time of this thread, independent of the machine's load.
        let had = crate::clock::on_cpu();
        for n in 0..ROUNDS {
            let id = ListenerId(100 + n);
            let now = node.now;
            let session = SessionId(100 + n);
            node.cm.bind(session, id, any_port.into()).expect("bind");
            node.cm.close_listener(id, now).expect("close");
            node.cm.bind(session, id, any_port.into()).expect("bind");
            node.cm.drop_session(session, now);
            assert!(node.cm.listener(id).is_none());
        }
        crate::clock::on_cpu() - had
    };
    let alone = (0..3).map(|_| close(&mut node)).min().expect("some");
    for n in 0..CROWD {
        node.connect(QpId(1000 + n), crowded, &[]);
        while node.cm.poll_event().is_some() {}
    }
    assert_eq!(node.cm.in_startup(), CROWD as usize);
    let beside = (0..3).map(|_| close(&mut node)).min().expect("some");
    assert!(beside < alone * 5, "{beside:?} instead of {alone:?}");
}

#[test]
fn socket_buffers_are_bounded_at_both_ends() {
    let buffers = SocketBuffers { send: 300_000, receive: 400_000 };
    let mut a = Node::new(CmOptions { buffers, ..options() });
    let mut b = Node::new(CmOptions { buffers, ..options() });
    let address = b.listen("127.0.0.1", 1);
    a.connect(ACTIVE, address, &[]);
    a.turn(Duration::from_millis(100));
    let request = b.request().id;
    b.accept(request, &[]).expect("undecided");
    for connected in [a.connected(), b.connected()] {
        let socket = socket2::SockRef::from(&connected.stream);
        let sizes = (socket.send_buffer_size(), socket.recv_buffer_size());
        assert_eq!((sizes.0.expect("a size"), sizes.1.expect("a size")), (300_000, 400_000));
    }
}
