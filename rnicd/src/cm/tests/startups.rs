//! Connections in start-up, silent and undecided: who is charged, who gives way, who is told.

use super::*;

/// Users.
const ALICE: u32 = 1000;
const MALLORY: u32 = 1001;
/// Sessions and listeners of Mallory's; the others are Alice's.
const HERS: SessionId = SessionId(3);
const HER_LISTENER: ListenerId = ListenerId(30);

fn quota(user: u32, startups: u32) -> Quota {
    let startups_key = format!("limits.user.startups (user {user})");
    Quota { user, startups, startups_key, accepts_per_second: 1_000_000 }
}

/// A node with both users, and the addresses where they listen.
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

/// Connects, and waits until the node has so many connections in start-up.
fn silent(node: &mut Node, to: SocketAddr, then: usize) -> TcpStream {
    let stream = raw(to);
    node.turn(Duration::ZERO);
    node.until(|n| n.cm.in_startup() == then);
    stream
}

/// A complete request to one of them, undecided.
fn undecided(node: &mut Node, to: SocketAddr) -> (TcpStream, RequestId) {
    let mut stream = raw(to);
    stream.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let request = node.request().id;
    (stream, request)
}

/// Whether the node has ended it by now.
fn is_over(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("flag");
    match (&mut &*stream).read(&mut [0; 64]) {
        Ok(n) => n == 0,
        Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
    }
}

#[test]
fn a_flood_to_one_users_listener_pushes_out_nobody_elses() {
    let (mut node, address, hers) = both(20, 20);
    let mine: Vec<_> = (1..=5).map(|n| silent(&mut node, address, n)).collect();
    // Far more than there is room for: only her own give way.
    let mut flood = Vec::new();
    for n in 6..=200 {
        flood.push(silent(&mut node, hers, n.min(20)));
    }
    node.until(|_| flood.iter().filter(|s| is_over(s)).count() == 180);
    assert!(!mine.iter().any(is_over));
    assert_eq!((node.cm.startups_of(ALICE), node.cm.startups_of(MALLORY)), (5, 15));
    let mut stream = &mine[0];
    stream.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let (request, now) = (node.request().id, node.now);
    node.cm.reject(request, &[], now).expect("undecided");
    // The rejected one waits for its peer's FIN and still counts.
    assert_eq!((node.row().pending, node.cm.startups_of(ALICE)), (0, 5));
}

#[test]
fn half_of_all_is_the_most_of_one_user() {
    let (mut node, address, hers) = both(20, 10);
    let flood: Vec<_> = (1..=30).map(|n| silent(&mut node, hers, n.min(10))).collect();
    node.until(|_| flood.iter().filter(|s| is_over(s)).count() == 20);
    let mine: Vec<_> = (11..=20).map(|n| silent(&mut node, address, n)).collect();
    assert!(!mine.iter().chain(&flood[20..]).any(is_over));
}

#[test]
fn undecided_requests_count_and_give_way_to_other_users_and_say_so() {
    let (mut node, address, hers) = both(10, 10);
    let mut requests: Vec<_> = (0..10).map(|_| undecided(&mut node, hers)).collect();
    assert_eq!((node.cm.startups(), node.cm.startups_of(MALLORY)), (10, 10));
    // Another one of hers is turned away, as by a full backlog.
    let turned_away = raw(hers);
    node.until(|_| is_over(&turned_away));
    assert!(!requests.iter().any(|(stream, _)| is_over(stream)));
    // One of another user's takes the place of her oldest.
    let (mine, request) = undecided_after_withdrawal(&mut node, address, requests.remove(0));
    assert_eq!((node.cm.startups_of(ALICE), node.cm.startups_of(MALLORY)), (1, 9));
    assert!(!is_over(&mine) && !requests.iter().any(|(stream, _)| is_over(stream)));
    // Accepted, it is a queue pair's.
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

/// A request that pushes out another one, whose owner is told.
fn undecided_after_withdrawal(
    node: &mut Node,
    to: SocketAddr,
    (gone, id): (TcpStream, RequestId),
) -> (TcpStream, RequestId) {
    let mut stream = raw(to);
    stream.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let reason = match node.event() {
        CmEvent::Withdrawn { listener: HER_LISTENER, request, reason } if request == id => reason,
        other => panic!("not withdrawn but {other:?}"),
    };
    assert_eq!(reason, "it gave way to a newer connection (limits.startups)");
    let now = node.now;
    assert!(node.cm.reject(id, &[], now).is_err());
    assert!(is_over(&gone));
    (stream, node.request().id)
}

#[test]
fn a_rejected_initiator_counts_until_its_peer_has_closed() {
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
        // It wants more reads than it is offered, which a Terminate tells it.
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
fn a_hosts_rate_of_connecting_is_counted_for_each_user() {
    let (mut node, address, hers) = both(100, 100);
    node.cm.set_options(CmOptions { peer_connections_per_second: 5, ..options() });
    let flood: Vec<_> = (0..20).map(|_| raw(hers)).collect();
    node.until(|_| flood.iter().filter(|s| is_over(s)).count() == 15);
    let mine = silent(&mut node, address, 6);
    assert!(!is_over(&mine));
}

#[test]
fn a_user_has_so_many_connections_taken_in_a_second_and_others_do_not_wait() {
    const RATE: u32 = 100;
    let (mut node, address, hers) = both(1000, 1000);
    let slow = Quota { accepts_per_second: RATE, ..quota(MALLORY, 1000) };
    node.cm.set_quota(HERS, slow);
    let _flood: Vec<_> = (0..60).map(|_| raw(hers)).collect();
    let taken = |n: &Node| n.cm.startups.of(MALLORY);
    // A tenth of a second's worth at once; the rest waits in the kernel.
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
fn guesses_at_a_users_stags_close_his_listeners_alone() {
    let (mut node, address, hers) = both(100, 100);
    let (peer, now) = (Ipv4Addr::LOCALHOST.into(), node.now);
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
fn closing_a_listener_does_not_look_at_what_came_to_others() {
    // Undecided requests inside the daemon, which cost no descriptors.
    const CROWD: u32 = 20_000;
    const ROUNDS: u32 = 100;
    let mut node = Node::direct();
    let crowded = node.listen("127.0.0.1", CROWD);
    let close = |node: &mut Node| {
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        // Of this thread, whatever else the machine does.
        let had = crate::clock::on_cpu();
        for n in 0..ROUNDS {
            let (id, now) = (ListenerId(100 + n), node.now);
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
fn what_the_kernel_keeps_for_a_connection_is_bounded_at_both_ends() {
    let buffers = SocketBuffers { send: 300_000, receive: 400_000 };
    let (mut a, mut b) = (
        Node::new(CmOptions { buffers, ..options() }),
        Node::new(CmOptions { buffers, ..options() }),
    );
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
