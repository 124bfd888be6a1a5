//! Verification of connection requests: answers, timeouts, and the user that is charged.

use super::*;

/// Sessions that own QPs. [`SESSION`] is the daemon's.
const ALICES: SessionId = SessionId(4);
const MALLORYS: SessionId = SessionId(5);
const DAEMON: u32 = 0;
const ALICE: u32 = 1000;
const MALLORY: u32 = 1001;

/// A node that listens, with a start-up limit for each user.
fn node(of_user: u32) -> (Node, SocketAddr) {
    let mut node = Node::new(options());
    for (session, user) in [(SESSION, DAEMON), (ALICES, ALICE), (MALLORYS, MALLORY)] {
        let startups_key = "limits.user.startups".to_owned();
        let quota = Quota { user, startups: of_user, startups_key, accepts_per_second: 1_000_000 };
        node.cm.set_quota(session, quota);
    }
    let address = node.listen("127.0.0.1", u32::MAX);
    (node, address)
}

/// An undecided request.
fn undecided(node: &mut Node, to: SocketAddr) -> (TcpStream, RequestId) {
    let mut stream = raw(to);
    stream.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let request = node.request().id;
    (stream, request)
}

fn ask(
    node: &mut Node,
    request: RequestId,
    of: SessionId,
    peer: SocketAddr,
) -> Result<(), Refusal> {
    let params = ConnectParams {
        session: of,
        qp: PASSIVE,
        peer,
        local: None,
        ird: None,
        ord: None,
        private_data: b"did you?".to_vec(),
        peer_to_peer: true,
    };
    let now = node.now;
    node.cm.ask_back(request, params, now)
}

fn answered(node: &mut Node, about: RequestId) -> Result<Vec<u8>, String> {
    match node.event() {
        CmEvent::Answered { request, answer } if request == about => answer,
        other => panic!("expected an answer, got {other:?}"),
    }
}

#[test]
fn the_answer_is_the_private_data_of_a_rejection() {
    let (mut node, address) = node(10);
    let (_stream, request) = undecided(&mut node, address);
    let (peer, at) = raw_listener();
    ask(&mut node, request, ALICES, at).expect("room");
    assert_eq!((node.cm.startups_of(ALICE), node.cm.startups_of(DAEMON)), (2, 0));
    let mut question = take(&peer, &mut node);
    question.write_all(&frame(true, 0x40 | 0x20, 2, b"yes")).expect("write");
    assert_eq!(answered(&mut node, request), Ok(b"yes".to_vec()));
    // The request itself is still undecided.
    assert_eq!(node.cm.startups_of(ALICE), 1);
    node.accept(request, b"").expect("undecided");
}

#[test]
fn questions_end_in_time_and_with_their_request() {
    let (mut node, address) = node(10);
    let (_peer, at) = raw_listener();
    let (_stream, request) = undecided(&mut node, address);
    ask(&mut node, request, ALICES, at).expect("room");
    node.pass(Duration::from_secs(3));
    assert!(answered(&mut node, request).is_err());
    assert_eq!(node.cm.startups_of(ALICE), 1);
    // The peer of the next request closes the connection.
    let (stream, request) = undecided(&mut node, address);
    ask(&mut node, request, ALICES, at).expect("room");
    assert_eq!(node.cm.startups_of(ALICE), 3);
    drop(stream);
    node.withdrawn(request);
    assert_eq!((node.cm.startups_of(ALICE), node.cm.request_checks.len()), (1, 0));
}

#[test]
fn questions_are_charged_to_the_owner_of_the_qp() {
    let (mut node, address) = node(8);
    let (_peer, at) = raw_listener();
    let (_alices, request) = undecided(&mut node, address);
    ask(&mut node, request, ALICES, at).expect("room");
    // Many more than Mallory's limit: the oldest are evicted.
    let mut flood = Vec::new();
    for _ in 0..50 {
        let mut stream = raw(address);
        stream.write_all(&frame(false, 0x40, 1, &[])).expect("write");
        let request = loop {
            match node.event() {
                CmEvent::Request { request, .. } => break request,
                CmEvent::Withdrawn { .. } | CmEvent::Answered { .. } => {}
                other => panic!("{other:?}"),
            }
        };
        ask(&mut node, request, MALLORYS, at).expect("room");
        flood.push(stream);
    }
    assert!(node.cm.startups_of(MALLORY) <= 8);
    assert_eq!((node.cm.startups_of(ALICE), node.cm.startups_of(DAEMON)), (2, 0));
    let now = node.now;
    node.cm.reject(request, b"", now).expect("Alice's request is undecided");
}

#[test]
fn question_needs_two_startups() {
    let (mut node, address) = node(1);
    let (_peer, at) = raw_listener();
    let (_stream, request) = undecided(&mut node, address);
    ask(&mut node, request, ALICES, at).expect_err("no room");
    node.withdrawn(request);
    assert_eq!(node.cm.startups(), 0);
}

#[test]
fn questions_arrive_while_the_daemon_drains() {
    let (mut node, address) = node(10);
    node.cm.set_draining(true);
    node.cm.ignore_draining(LISTENER);
    let (_stream, request) = undecided(&mut node, address);
    let now = node.now;
    node.cm.reject(request, b"yes", now).expect("undecided");
}

#[test]
fn passed_listener_covers_its_own_address() {
    let mut node = Node::new(options());
    for (n, (at, covered, not)) in
        [("127.0.0.1:0", "127.0.0.1", "127.0.0.2"), ("0.0.0.0:0", "127.0.0.2", "::1")]
            .into_iter()
            .enumerate()
    {
        let socket = std::net::TcpListener::bind(at).expect("bind");
        let id = ListenerId(100 + n as u32);
        node.cm.adopt(SESSION, id, socket.into()).expect("adopt");
        let listens = |ip: &str| node.cm.listens_at(id, ip.parse().expect("an address"));
        assert!(listens(covered) && !listens(not), "{at}");
    }
    assert!(!node.cm.listens_at(ListenerId(99), IpAddr::from([127, 0, 0, 1])));
}
