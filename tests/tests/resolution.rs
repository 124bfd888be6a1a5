//! Service ID resolution (SIDR) for UD QPs, as seen by applications, other daemons and a packet
//! dissector.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use rnic_abi::roce::sidr::{self, Message, Reply, Status};
use rnic_abi::roce::{PortSpace, ServiceId, mad, packet};
use rnic_abi::types::QpId;
use rnic_client::{
    Access, BindOptions, ConnectionRequest, Error, Event, GRH_LEN, Gid, Listener, Qp, QpType,
    RecvRequest, Refusal, ResolveOptions, SendRequest, Sending,
};
use rnic_tests::client::Client;
use rnic_tests::{DEADLINE, Daemon, omit, on_path, ports, tshark};
use rustix::io::Errno;

const KEY: u32 = 0x0123_4567;
const SENDING: Sending = Sending { sq_psn: 9, timeout: 0, retry_count: 0, rnr_retry: 0, ord: 0 };

/// Addresses of the daemon, of another daemon, and of a host that the tests play.
const OWN: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
const NEXT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);

/// A client with a UD QP in RTS.
struct End {
    client: Client,
    qp: Qp,
}

impl End {
    fn new(daemon: &Daemon) -> Self {
        let client = Client::new(daemon);
        let qp = client.qp_of(QpType::Ud);
        qp.receive_datagrams(KEY).unwrap();
        qp.to_rts(&SENDING).unwrap();
        End { client, qp }
    }

    /// Listens at an address, on a port that the daemon chooses.
    fn listens(&self, ip: impl Into<IpAddr>, backlog: u32) -> Listener {
        let address = SocketAddr::new(ip.into(), 0);
        let listener = self.client.context.bind_datagrams(address, BindOptions::default()).unwrap();
        listener.listen(backlog).unwrap();
        listener
    }

    fn asks(&self, peer: SocketAddr, private_data: &[u8]) {
        let private_data = private_data.to_vec();
        let options = ResolveOptions { private_data, ..ResolveOptions::default() };
        self.qp.start_resolve(peer, &options).unwrap();
    }

    /// Returns the event that ends the lookup.
    fn answer(&self) -> Event {
        self.client.event(|event| {
            use Event::*;
            matches!(event, Resolved { .. } | Rejected { .. } | Unreachable { .. })
        })
    }

    fn errno(&self) -> Errno {
        match self.answer() {
            Event::Unreachable { errno, .. } => Errno::from_raw_os_error(errno.into()),
            other => panic!("{other:?}"),
        }
    }
}

fn daemon(ip: Ipv4Addr, port: u16, more: &str) -> Daemon {
    let config = format!("[device]\naddresses = [\"{ip}\"]\n[wired]\nport = {port}\n{more}");
    Daemon::start(&config)
}

/// Opens the socket of the host that this test plays, on a port that is free on all addresses.
fn other_host() -> UdpSocket {
    let socket = UdpSocket::bind((OTHER, ports::unused_port())).unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket
}

fn next_request(listener: &Listener) -> ConnectionRequest {
    listener.accept_request(Some(DEADLINE)).unwrap()
}

/// Asserts that private data starts with these bytes and has this length.
fn begins(data: &[u8], with: &[u8], len: usize) {
    assert_eq!((&data[..with.len()], data.len()), (with, len));
    assert!(data[with.len()..].iter().all(|byte| *byte == 0));
}

/// Resolves `passive`, and sends a datagram with the result.
fn meet(active: &End, passive: &End, at: impl Into<IpAddr>) {
    let at = at.into();
    let listener = passive.listens(at, 2);
    let peer = listener.local_addr();
    let mr = passive.client.region(4096, Access::LOCAL_WRITE);
    passive.qp.post_recv(&[RecvRequest::new(7, &[mr.sge(0, 4096)])]).unwrap();
    let found = std::thread::scope(|scope| {
        let asks = scope.spawn(|| {
            let private_data = b"hello".to_vec();
            let options = ResolveOptions { private_data, ..ResolveOptions::default() };
            active.qp.resolve(peer, &options).unwrap()
        });
        let request = next_request(&listener);
        begins(request.private_data(), b"hello", 180);
        assert_eq!(request.addresses().local, peer);
        request.accept_datagrams(&passive.qp, b"welcome").unwrap();
        asks.join().unwrap()
    });
    begins(&found.private_data, b"welcome", 136);
    assert_eq!((found.address.qp, found.address.q_key), (passive.qp.id(), KEY));
    assert_eq!((found.addresses.peer, found.address.gid), (peer, Gid::from(at)));
    let send = SendRequest::send_inline(1, b"ping").to(&found.address).signaled();
    active.qp.post_send(&[send]).unwrap();
    active.client.success();
    let received = passive.client.success();
    assert_eq!((received.wr_id, received.byte_len as usize), (7, GRH_LEN + 4));
    assert_eq!(received.src_qp, active.qp.id());
}

#[test]
fn within_a_daemon() {
    let daemon = daemon(OWN, ports::unused_port(), "");
    let active = End::new(&daemon);
    let passive = End::new(&daemon);
    meet(&active, &passive, OWN);
    // Both ends may be the same QP, and a listening QP may resolve, too.
    meet(&passive, &active, OWN);
}

#[test]
fn resolution_by_packets_in_one_daemon() {
    for ip in [IpAddr::from(OWN), Ipv6Addr::LOCALHOST.into()] {
        let port = ports::unused_port();
        if UdpSocket::bind((ip, port)).is_err() {
            omit(&format!("cannot bind to {ip} on this host"));
            continue;
        }
        let config = format!("[device]\naddresses = [\"{ip}\"]\n[wired]\nport = {port}\n");
        let daemon = Daemon::start(&format!("{}{config}", on_path("tcp")));
        meet(&End::new(&daemon), &End::new(&daemon), ip);
    }
}

#[test]
fn a_taken_port_ends_no_resolution_in_a_daemon() {
    let port = ports::unused_port();
    let _taken = (UdpSocket::bind((OWN, port)).unwrap(), TcpListener::bind((OWN, port)).unwrap());
    let daemon = daemon(OWN, port, "[engine]\nloopback = \"tcp\"\n");
    let active = End::new(&daemon);
    assert!(daemon.status().wired_port_problem.contains("in use"));
    meet(&active, &End::new(&daemon), OWN);
}

#[test]
fn between_daemons() {
    let port = ports::unused_port();
    let a = daemon(OWN, port, "");
    let b = daemon(NEXT, port, "");
    let active = End::new(&a);
    let passive = End::new(&b);
    meet(&active, &passive, NEXT);
    // A rejection with its private data, and a host without a listener.
    let listener = passive.listens(NEXT, 2);
    active.asks(listener.local_addr(), b"");
    next_request(&listener).reject(b"no").unwrap();
    match active.answer() {
        Event::Rejected { private_data, .. } => begins(&private_data, b"no", 136),
        other => panic!("{other:?}"),
    }
    active.asks(listener.local_addr(), b"");
    drop(next_request(&listener));
    assert!(matches!(active.answer(), Event::Rejected { .. }));
    let peer = listener.local_addr();
    drop(listener);
    active.asks(peer, b"");
    assert_eq!(active.errno(), Errno::CONNREFUSED);
    match active.qp.resolve(peer, &ResolveOptions::default()) {
        Err(Error::Unreachable { reason }) => assert!(reason.contains("no listener"), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn invalid_resolutions_and_replies_are_refused() {
    let daemon = daemon(OWN, ports::unused_port(), "");
    let active = End::new(&daemon);
    let passive = End::new(&daemon);
    let listener = passive.listens(OWN, 2);
    let peer = listener.local_addr();
    let refused = |result: Result<(), Error>| match result {
        Err(Error::Refused { refusal, .. }) => refusal,
        other => panic!("{other:?}"),
    };
    active.asks(peer, b"");
    let request = next_request(&listener);
    // One lookup per QP at a time.
    let again = active.qp.start_resolve(peer, &ResolveOptions::default());
    assert!(matches!(refused(again), Refusal::WrongState { .. }));
    // Accepting requires a QP that can receive datagrams.
    let idle = passive.client.qp_of(QpType::Ud);
    let refusal = refused(request.accept_datagrams(&idle, b""));
    assert!(matches!(refusal, Refusal::WrongState { .. }), "{refusal}");
    assert!(matches!(active.answer(), Event::Rejected { .. }));
    // Aborting withdraws the request.
    active.asks(peer, b"");
    let request = next_request(&listener);
    active.qp.abort().unwrap();
    assert_eq!(active.errno(), Errno::CONNRESET);
    let refusal = refused(request.accept_datagrams(&passive.qp, b""));
    assert!(matches!(refusal, Refusal::NoSuchObject { .. }), "{refusal}");
    // A destroyed QP sends no requests.
    let short = active.client.qp_of(QpType::Ud);
    short.start_resolve(peer, &ResolveOptions::default()).unwrap();
    let request = next_request(&listener);
    drop(short);
    refused(request.accept_datagrams(&passive.qp, b""));
    // A UD QP has no connection to abort, and continues to work after the attempt.
    assert!(matches!(refused(passive.qp.abort()), Refusal::WrongState { .. }));
    // The reply carries the current Q_Key of the QP.
    passive.qp.set_q_key(5).unwrap();
    active.asks(peer, b"");
    next_request(&listener).accept_datagrams(&passive.qp, b"").unwrap();
    assert!(matches!(active.answer(), Event::Resolved { q_key: 5, .. }));
}

#[test]
fn rules_apply_to_both_ends_of_a_resolution() {
    let port = ports::unused_port();
    let rules = format!(
        "[[connect]]\nwho = \"*\"\nnetwork = \"{OWN}/32\"\nports = \"{port}\"\n\
         [[connect]]\nwho = \"*\"\nnetwork = \"{OWN}/32\"\nports = \"7000-7009\"\n\
         [[connect]]\nwho = \"*\"\nnetwork = \"{NEXT}/32\"\nports = \"7000-7009\"\n\
         [[listen]]\nwho = \"*\"\naddress = \"{OWN}/32\"\nports = \"7000-7009\"\n"
    );
    let daemon = daemon(OWN, port, &rules);
    let end = End::new(&daemon);
    let ask = |ip: Ipv4Addr, port| {
        let options = ResolveOptions::default();
        end.qp.start_resolve(SocketAddr::new(ip.into(), port), &options)
    };
    ask(OWN, 7001).unwrap();
    assert_eq!(end.errno(), Errno::CONNREFUSED);
    // Another port, another host, and a rule that omits only `wired.port`.
    for (ip, port) in [(OWN, 7010), (OTHER, 7001), (NEXT, 7001)] {
        match ask(ip, port) {
            Err(Error::Refused { refusal: Refusal::NotAllowed { rule, .. }, .. }) => {
                assert_eq!(rule, "connect");
            }
            other => panic!("{ip} {port}: {other:?}"),
        }
    }
    let bind = |port| {
        let address = SocketAddr::new(OWN.into(), port);
        end.client.context.bind_datagrams(address, BindOptions::default())
    };
    assert!(bind(7001).is_ok() && bind(7010).is_err() && bind(0).is_err());
}

/// Returns the next packet at the host that the test plays.
fn message(socket: &UdpSocket) -> (Message, Vec<u8>) {
    let mut bytes = [0; packet::MAX_LEN];
    let (len, from) = socket.recv_from(&mut bytes).unwrap();
    let at = socket.local_addr().unwrap();
    let (datagram, data) = packet::parse(from, at, &bytes[..len]).unwrap();
    assert_eq!((datagram.source, datagram.qp, datagram.q_key), (mad::QP, mad::QP, mad::Q_KEY));
    (sidr::parse(data).unwrap(), bytes[..len].to_vec())
}

#[test]
fn sidr_packets_are_interoperable() {
    let other = other_host();
    let at = other.local_addr().unwrap();
    let port = at.port();
    let daemon = daemon(OWN, port, "");
    let end = End::new(&daemon);
    end.asks(SocketAddr::new(OTHER.into(), 7471), b"hello");
    let (asked, first) = message(&other);
    let Message::Request(asked) = asked else { panic!("{asked:?}") };
    assert_eq!((asked.service, asked.to), (ServiceId(0x0111_1D2F), IpAddr::from(OTHER)));
    assert_eq!(asked.from.ip(), IpAddr::from(OWN));
    begins(&asked.private_data, b"hello", 180);
    // Without a reply the same request is sent again.
    assert_eq!(message(&other).1, first);
    let reply = Reply {
        exchange: asked.exchange,
        service: asked.service,
        status: Status::VALID,
        qp: QpId(0x12_3456),
        q_key: 77,
        private_data: mad::zero_padded(b"welcome").unwrap(),
    };
    let own = SocketAddr::new(OWN.into(), port);
    other.send_to(&mad::packet(OTHER.into(), OWN.into(), &reply.emit(), port), own).unwrap();
    match end.answer() {
        Event::Resolved { addresses, remote_qp, q_key, private_data, .. } => {
            assert_eq!((remote_qp, q_key), (reply.qp, 77));
            assert_eq!(addresses.peer, SocketAddr::new(OTHER.into(), 7471));
            begins(&private_data, b"welcome", 136);
        }
        answer => panic!("{answer:?}"),
    }

    // The opposite direction.
    let listener = end.listens(OWN, 1);
    let asked = sidr::Request {
        service: ServiceId::new(PortSpace::Udp, listener.local_addr().port()),
        from: SocketAddr::new(OTHER.into(), 1234),
        to: OWN.into(),
        ..asked
    };
    other.send_to(&mad::packet(OTHER.into(), OWN.into(), &asked.emit(), port), own).unwrap();
    let request = next_request(&listener);
    assert_eq!(request.peer(), asked.from);
    request.accept_datagrams(&end.qp, b"").unwrap();
    let (answer, second) = message(&other);
    let Message::Reply(answer) = answer else { panic!("{answer:?}") };
    assert_eq!((answer.status, answer.qp, answer.q_key), (Status::VALID, end.qp.id(), KEY));
    assert_eq!(answer.exchange, asked.exchange);
    // The reply is not longer than the request.
    assert_eq!(second.len(), first.len());

    if !tshark::is_available() {
        return;
    }
    let fields = [
        "infiniband.bth.destqp",
        "infiniband.deth.q_key",
        "infiniband.deth.srcqp",
        "infiniband.mad.mgmtclass",
        "infiniband.mad.method",
        "infiniband.mad.attributeid",
        "_ws.malformed",
    ];
    let line = |attribute| format!("0x000001|0x0000000080010000|0x00000001|0x07|0x03|{attribute}|");
    let packets = [first, second].map(|bytes| (own, bytes));
    let found = tshark::udp_fields(&packets, at, &fields);
    assert_eq!(found, [line("0x0017"), line("0x0018")]);
}

#[test]
fn requests_neither_exhaust_nor_amplify() {
    let other = other_host();
    let port = other.local_addr().unwrap().port();
    let daemon = daemon(OWN, port, "[limits.peer]\nconnections_per_second = 100000\n");
    let end = End::new(&daemon);
    let listener = end.listens(OWN, 3);
    let own = SocketAddr::new(OWN.into(), port);
    let request = |n: u64| sidr::Request {
        exchange: mad::Exchange { transaction: n, id: 1 },
        service: ServiceId::new(PortSpace::Udp, listener.local_addr().port()),
        from: SocketAddr::new(OTHER.into(), 1234),
        to: OWN.into(),
        private_data: [0; sidr::REQUEST_DATA],
    };
    let send = |mad: &mad::Bytes| {
        other.send_to(&mad::packet(OTHER.into(), OWN.into(), mad, port), own).unwrap();
    };
    // Bytes that are not a message, a message for another Q_Key, and a sender that claims to be a
    // third host.
    send(&[0xFF; mad::LEN]);
    let noise = &mut request(1).emit();
    noise[3] = 0x81;
    send(noise);
    send(&sidr::Request { from: SocketAddr::new(NEXT.into(), 1), ..request(2) }.emit());
    let forger = UdpSocket::bind((OWN, 0)).unwrap();
    forger.send_to(&mad::packet(OWN.into(), OWN.into(), &request(3).emit(), port), own).unwrap();
    for n in 10..5000 {
        send(&request(n).emit());
    }
    let requests: Vec<_> = (0..3).map(|_| next_request(&listener)).collect();
    assert!(listener.accept_request(Some(Duration::from_millis(50))).is_err());
    // No reply was sent, and programs are still served.
    other.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    assert!(other.recv_from(&mut [0; 1000]).is_err());
    other.set_read_timeout(Some(DEADLINE)).unwrap();
    let asked = SocketAddr::new(OTHER.into(), 1234);
    assert!(requests.iter().all(|request| request.peer() == asked));
    for request in requests {
        request.accept_datagrams(&end.qp, b"").unwrap();
        assert!(matches!(message(&other).0, Message::Reply(Reply { status: Status::VALID, .. })));
    }
    meet(&end, &End::new(&daemon), OWN);
}

#[test]
fn unanswered_resolution_times_out() {
    let other = other_host();
    let port = other.local_addr().unwrap().port();
    let daemon = daemon(OWN, port, "[mpa]\nreply_deadline = \"1s\"\n");
    let end = End::new(&daemon);
    end.asks(SocketAddr::new(OTHER.into(), 7471), b"");
    assert_eq!(end.errno(), Errno::TIMEDOUT);
    // The daemon sends the request at once, after 250 ms, and 500 ms later. On a busy machine it
    // may skip repetitions. `cm::tests::sidr` counts them in virtual time.
    let sent = std::iter::from_fn(|| {
        other.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        other.recv_from(&mut [0; 1000]).ok()
    });
    assert!((1..=3).contains(&sent.count()));
}
