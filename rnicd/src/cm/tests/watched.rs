//! Peers that are gone are noticed, on every connection and from its start.

use std::os::fd::AsFd;

use socket2::{SockRef, TcpKeepalive};

use super::passed::{Rig, request};
use super::*;

/// What makes a socket notice: whether its peer is asked, after which silence, how often, and how
/// long an acknowledgement may take.
type Vigilance = (bool, Duration, Duration, Option<Duration>);

fn vigilance(socket: &impl AsFd) -> Vigilance {
    let s = SockRef::from(socket);
    let times = (s.tcp_keepalive_time(), s.tcp_keepalive_interval());
    (
        s.keepalive().expect("an option"),
        times.0.expect("an option"),
        times.1.expect("an option"),
        s.tcp_user_timeout().expect("an option"),
    )
}

const WATCHED: Vigilance = (
    true,
    Duration::from_secs(20),
    Duration::from_secs(10),
    // The defaults, as an administrator gets them who writes nothing.
    Some(Duration::from_secs(60)),
);

#[test]
fn both_ends_of_a_connection_are_watched_from_the_start() {
    let (mut a, mut b) = (Node::new(options()), Node::new(options()));
    let address = b.listen("127.0.0.1", 1);
    a.connect(ACTIVE, address, &[]);
    let sockets = |node: &Node| -> Vec<Vigilance> {
        let streams = node.cm.slots.iter().filter_map(|(_, entry)| entry.slot.stream());
        streams.map(vigilance).collect()
    };
    assert_eq!(sockets(&a), [WATCHED], "on its way");
    a.turn(Duration::from_millis(100));
    let request = b.request();
    assert_eq!(sockets(&b), [WATCHED], "undecided");
    b.accept(request.id, &[]).expect("accept");
    assert_eq!(vigilance(&b.connected().stream), WATCHED);
    assert_eq!(vigilance(&a.connected().stream), WATCHED);
}

#[test]
fn the_second_attempt_is_watched_as_well_and_times_are_the_administrators() {
    let tcp = Tcp {
        keepalive: None,
        keepalive_interval: Duration::from_secs(3),
        user_timeout: Some(Duration::from_millis(2500)),
    };
    let mut a = Node::new(CmOptions { tcp, ..options() });
    let (listener, address) = raw_listener();
    a.connect(ACTIVE, address, &[]);
    let first = take(&listener, &mut a);
    drop(first);
    let mut second = take(&listener, &mut a);
    read(&mut second, 20, &mut a);
    second.write_all(&frame(true, 0x40, 1, &[])).expect("write");
    let (asked, _, _, user_timeout) = vigilance(&a.connected().stream);
    assert_eq!((asked, user_timeout), (false, tcp.user_timeout));
}

#[test]
fn passed_connections_are_watched_until_they_are_given_back() {
    let own: Vigilance =
        (true, Duration::from_secs(77), Duration::from_secs(7), Some(Duration::from_secs(777)));
    let set = |socket: &TcpStream| {
        let socket = SockRef::from(socket);
        let times = TcpKeepalive::new().with_time(own.1).with_interval(own.2);
        socket.set_tcp_keepalive(&times).expect("an option");
        socket.set_tcp_user_timeout(own.3).expect("an option");
    };
    let mut r = Rig::new();
    set(&r.client);
    r.connect_over().expect("connect");
    assert_eq!(vigilance(&r.client), WATCHED);
    read(&mut r.peer, 28, &mut r.node);
    r.peer.write_all(&frame(true, 0x60, 1, b"no")).expect("write");
    assert!(matches!(r.node.event(), CmEvent::Rejected { .. }));
    assert_eq!(vigilance(&r.client), own);

    let mut r = Rig::new();
    r.serve_over();
    assert_eq!(vigilance(&r.client), WATCHED);
    r.peer.write_all(&request()).expect("write");
    let (asked, now) = (r.node.request(), r.node.now);
    assert_eq!(r.node.cm.reject(asked.id, b"no", now), Ok(Rejection::Done));
    let (keepalive, _, _, user_timeout) = vigilance(&r.client);
    assert_eq!((keepalive, user_timeout), (false, None));
}
