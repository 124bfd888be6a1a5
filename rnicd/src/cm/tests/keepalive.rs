//! Keepalive and timeouts on every connection, from its start.

use std::os::fd::AsFd;

use socket2::{SockRef, TcpKeepalive};

use super::passed::{Rig, request};
use super::*;

/// Keepalive on or off, its idle time and interval, and the user timeout of a socket.
type KeepaliveSettings = (bool, Duration, Duration, Option<Duration>);

fn keepalive_settings(socket: &impl AsFd) -> KeepaliveSettings {
    let s = SockRef::from(socket);
    let times = (s.tcp_keepalive_time(), s.tcp_keepalive_interval());
    (
        s.keepalive().expect("an option"),
        times.0.expect("an option"),
        times.1.expect("an option"),
        s.tcp_user_timeout().expect("an option"),
    )
}

const WATCHED: KeepaliveSettings = (
    true,
    Duration::from_secs(20),
    Duration::from_secs(10),
    // The defaults of an empty configuration.
    Some(Duration::from_secs(60)),
);

#[test]
fn keepalive_is_set_on_both_ends_at_start() {
    let mut a = Node::new(options());
    let mut b = Node::new(options());
    let address = b.listen("127.0.0.1", 1);
    a.connect(ACTIVE, address, &[]);
    let sockets = |node: &Node| -> Vec<KeepaliveSettings> {
        let streams = node.cm.slots.iter().filter_map(|(_, entry)| entry.slot.stream());
        streams.map(keepalive_settings).collect()
    };
    assert_eq!(sockets(&a), [WATCHED], "on its way");
    a.turn(Duration::from_millis(100));
    let request = b.request();
    assert_eq!(sockets(&b), [WATCHED], "undecided");
    b.accept(request.id, &[]).expect("accept");
    assert_eq!(keepalive_settings(&b.connected().stream), WATCHED);
    assert_eq!(keepalive_settings(&a.connected().stream), WATCHED);
}

#[test]
fn retry_has_the_configured_keepalive() {
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
    let (asked, _, _, user_timeout) = keepalive_settings(&a.connected().stream);
    assert_eq!((asked, user_timeout), (false, tcp.user_timeout));
}

#[test]
fn released_socket_gets_its_keepalive_back() {
    let own: KeepaliveSettings =
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
    assert_eq!(keepalive_settings(&r.client), WATCHED);
    read(&mut r.peer, 28, &mut r.node);
    r.peer.write_all(&frame(true, 0x60, 1, b"no")).expect("write");
    assert!(matches!(r.node.event(), CmEvent::Rejected { .. }));
    assert_eq!(keepalive_settings(&r.client), own);

    let mut r = Rig::new();
    r.serve_over();
    assert_eq!(keepalive_settings(&r.client), WATCHED);
    r.peer.write_all(&request()).expect("write");
    let asked = r.node.request();
    let now = r.node.now;
    assert_eq!(r.node.cm.reject(asked.id, b"no", now), Ok(Rejection::Done));
    let (keepalive, _, _, user_timeout) = keepalive_settings(&r.client);
    assert_eq!((keepalive, user_timeout), (false, None));
}
