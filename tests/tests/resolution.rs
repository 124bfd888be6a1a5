//! Queue pairs of datagrams by the ports that they serve, as applications, other daemons and a
//! packet dissector see it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use rnic_client::{
    Access, BindOptions, ConnectionRequest, Error, Event, GRH_LEN, Gid, Listener, Qp, QpType,
    RecvRequest, Refusal, ResolveOptions, SendRequest, Sending,
};
use rnic_core::roce::sidr::{self, Message, Reply, ServiceId, Status};
use rnic_core::roce::{Datagram, packet};
use rnic_core::types::QpId;
use rnic_tests::client::Client;
use rnic_tests::{DEADLINE, Daemon, binaries, omit, on_path, ports, tshark};
use rustix::io::Errno;

const KEY: u32 = 0x0123_4567;
const SENDING: Sending = Sending { sq_psn: 9, timeout: 0, retry_count: 0, rnr_retry: 0, ord: 0 };

/// Where the daemon is, where another one is, and a host that tests speak for.
const OWN: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
const NEXT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);

/// A client with a queue pair of datagrams in Rts.
struct End {
    client: Client,
    qp: Qp,
}

impl End {
    fn new(daemon: &Daemon) -> Self {
        let client = Client::new(daemon);
        let qp = client.qp_of(QpType::Datagrams);
        qp.receive_datagrams(KEY).unwrap();
        qp.to_rts(&SENDING).unwrap();
        End { client, qp }
    }

    /// Listens at an address, at a port that the daemon chooses.
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

    /// What came of it.
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
    Daemon::start(binaries!(), &config)
}

/// The other host, for which this test sends and receives, at a port that is free everywhere.
fn other_host() -> UdpSocket {
    let socket = UdpSocket::bind((OTHER, ports::of_nobody())).unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket
}

fn next_request(listener: &Listener) -> ConnectionRequest {
    listener.accept_request(Some(DEADLINE)).unwrap()
}

/// Private data as they come.
fn begins(data: &[u8], with: &[u8], len: usize) {
    assert_eq!((&data[..with.len()], data.len()), (with, len));
    assert!(data[with.len()..].iter().all(|byte| *byte == 0));
}

/// A question is asked and answered, and a datagram goes where the answer says.
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
    let daemon = daemon(OWN, ports::of_nobody(), "");
    let (active, passive) = (End::new(&daemon), End::new(&daemon));
    meet(&active, &passive, OWN);
    // Both may be one, and a queue pair that serves asks, too.
    meet(&passive, &active, OWN);
}

#[test]
fn within_a_daemon_by_way_of_packets_of_either_family() {
    for ip in [IpAddr::from(OWN), Ipv6Addr::LOCALHOST.into()] {
        let port = ports::of_nobody();
        if UdpSocket::bind((ip, port)).is_err() {
            omit(&format!("nothing can be bound to {ip} here"));
            continue;
        }
        let config = format!("[device]\naddresses = [\"{ip}\"]\n[wired]\nport = {port}\n");
        let daemon = Daemon::start(binaries!(), &format!("{}{config}", on_path("tcp")));
        meet(&End::new(&daemon), &End::new(&daemon), ip);
    }
}

#[test]
fn between_daemons() {
    let port = ports::of_nobody();
    let (a, b) = (daemon(OWN, port, ""), daemon(NEXT, port, ""));
    let (active, passive) = (End::new(&a), End::new(&b));
    meet(&active, &passive, NEXT);
    // Who says no, with his reasons, and who is not there.
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
        Err(Error::Unreachable { reason }) => assert!(reason.contains("listens"), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_cannot_be_asked_or_answered_is_refused() {
    let daemon = daemon(OWN, ports::of_nobody(), "");
    let (active, passive) = (End::new(&daemon), End::new(&daemon));
    let listener = passive.listens(OWN, 2);
    let peer = listener.local_addr();
    let refused = |result: Result<(), Error>| match result {
        Err(Error::Refused { refusal, .. }) => refusal,
        other => panic!("{other:?}"),
    };
    active.asks(peer, b"");
    let request = next_request(&listener);
    // One question at a time.
    let again = active.qp.start_resolve(peer, &ResolveOptions::default());
    assert!(matches!(refused(again), Refusal::WrongState { .. }));
    // Only with a queue pair that receives datagrams.
    let idle = passive.client.qp_of(QpType::Datagrams);
    let refusal = refused(request.accept_datagrams(&idle, b""));
    assert!(matches!(refusal, Refusal::WrongState { .. }), "{refusal}");
    assert!(matches!(active.answer(), Event::Rejected { .. }));
    // One that is given up is withdrawn.
    active.asks(peer, b"");
    let request = next_request(&listener);
    active.qp.abort().unwrap();
    assert_eq!(active.errno(), Errno::CONNRESET);
    let refusal = refused(request.accept_datagrams(&passive.qp, b""));
    assert!(matches!(refusal, Refusal::NoSuchObject { .. }), "{refusal}");
    // A queue pair that is gone asks nothing.
    let short = active.client.qp_of(QpType::Datagrams);
    short.start_resolve(peer, &ResolveOptions::default()).unwrap();
    let request = next_request(&listener);
    drop(short);
    refused(request.accept_datagrams(&passive.qp, b""));
    // There is nothing else to be ended, and a queue pair goes on as if nobody had tried.
    assert!(matches!(refused(passive.qp.abort()), Refusal::WrongState { .. }));
    // What is told of the Q_Key is what the queue pair has.
    passive.qp.set_q_key(5).unwrap();
    active.asks(peer, b"");
    next_request(&listener).accept_datagrams(&passive.qp, b"").unwrap();
    assert!(matches!(active.answer(), Event::Resolved { q_key: 5, .. }));
}

#[test]
fn rules_hold_for_who_asks_and_who_is_asked() {
    let port = ports::of_nobody();
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
    // Another port; another host; one where only the port of datagrams is forbidden.
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

/// A management datagram to or from the host that the test speaks for.
fn packet(from: Ipv4Addr, to: Ipv4Addr, mad: &sidr::Bytes, port: u16) -> Vec<u8> {
    let gid = |ip: Ipv4Addr| Gid::from(IpAddr::from(ip));
    let datagram = Datagram {
        from: gid(from),
        source: sidr::QP,
        to: gid(to),
        qp: sidr::QP,
        q_key: sidr::Q_KEY,
        psn: 0,
        immediate: None,
        solicited: false,
    };
    packet::emit(&datagram, mad, (port, port))
}

/// What has come to the host that the test speaks for.
fn message(socket: &UdpSocket) -> (Message, Vec<u8>) {
    let mut bytes = [0; packet::MAX_LEN];
    let (len, from) = socket.recv_from(&mut bytes).unwrap();
    let at = socket.local_addr().unwrap();
    let (datagram, data) = packet::parse(from, at, &bytes[..len]).unwrap();
    assert_eq!((datagram.source, datagram.qp, datagram.q_key), (sidr::QP, sidr::QP, sidr::Q_KEY));
    (sidr::parse(data).unwrap(), bytes[..len].to_vec())
}

#[test]
fn on_the_wire_it_is_what_others_read() {
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
    // Without an answer the same is sent again.
    assert_eq!(message(&other).1, first);
    let reply = Reply {
        exchange: asked.exchange,
        service: asked.service,
        status: Status::VALID,
        qp: QpId(0x12_3456),
        q_key: 77,
        private_data: sidr::filled_up(b"welcome").unwrap(),
    };
    let own = SocketAddr::new(OWN.into(), port);
    other.send_to(&packet(OTHER, OWN, &reply.emit(), port), own).unwrap();
    match end.answer() {
        Event::Resolved { addresses, remote_qp, q_key, private_data, .. } => {
            assert_eq!((remote_qp, q_key), (reply.qp, 77));
            assert_eq!(addresses.peer, SocketAddr::new(OTHER.into(), 7471));
            begins(&private_data, b"welcome", 136);
        }
        answer => panic!("{answer:?}"),
    }

    // The other way round.
    let listener = end.listens(OWN, 1);
    let asked = sidr::Request {
        service: ServiceId::of_port(listener.local_addr().port()),
        from: SocketAddr::new(OTHER.into(), 1234),
        to: OWN.into(),
        ..asked
    };
    other.send_to(&packet(OTHER, OWN, &asked.emit(), port), own).unwrap();
    let request = next_request(&listener);
    assert_eq!(request.peer(), asked.from);
    request.accept_datagrams(&end.qp, b"").unwrap();
    let (answer, second) = message(&other);
    let Message::Reply(answer) = answer else { panic!("{answer:?}") };
    assert_eq!((answer.status, answer.qp, answer.q_key), (Status::VALID, end.qp.id(), KEY));
    assert_eq!(answer.exchange, asked.exchange);
    // No longer than what was asked.
    assert_eq!(second.len(), first.len());

    if !tshark::is_there() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("packets.pcap");
    let packets: Vec<_> = [first, second].map(|bytes| (own, bytes)).into();
    std::fs::write(&file, tshark::udp_capture(&packets, at)).unwrap();
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
    let found = tshark::udp_fields(&file, port, &fields);
    assert_eq!(found, [line("0x0017"), line("0x0018")]);
}

#[test]
fn others_can_neither_fill_the_daemon_nor_use_it_against_a_third() {
    let other = other_host();
    let port = other.local_addr().unwrap().port();
    let daemon = daemon(OWN, port, "[limits.peer]\nconnections_per_second = 100000\n");
    let end = End::new(&daemon);
    let listener = end.listens(OWN, 3);
    let own = SocketAddr::new(OWN.into(), port);
    let request = |n: u64| sidr::Request {
        exchange: sidr::Exchange { transaction: n, id: 1 },
        service: ServiceId::of_port(listener.local_addr().port()),
        from: SocketAddr::new(OTHER.into(), 1234),
        to: OWN.into(),
        private_data: [0; sidr::REQUEST_DATA],
    };
    let send = |mad: &sidr::Bytes| {
        other.send_to(&packet(OTHER, OWN, mad, port), own).unwrap();
    };
    // What is no message, what is for another key, and who speaks for a third.
    send(&[0xFF; sidr::LEN]);
    let noise = &mut request(1).emit();
    noise[3] = 0x81;
    send(noise);
    send(&sidr::Request { from: SocketAddr::new(NEXT.into(), 1), ..request(2) }.emit());
    let forger = UdpSocket::bind((OWN, 0)).unwrap();
    forger.send_to(&packet(OWN, OWN, &request(3).emit(), port), own).unwrap();
    for n in 10..5000 {
        send(&request(n).emit());
    }
    let requests: Vec<_> = (0..3).map(|_| next_request(&listener)).collect();
    assert!(listener.accept_request(Some(Duration::from_millis(50))).is_err());
    // Nobody was answered meanwhile, and programs are served as ever.
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
fn one_that_nobody_answers_ends() {
    let other = other_host();
    let port = other.local_addr().unwrap().port();
    let daemon = daemon(OWN, port, "[mpa]\nreply_deadline = \"1s\"\n");
    let end = End::new(&daemon);
    end.asks(SocketAddr::new(OTHER.into(), 7471), b"");
    assert_eq!(end.errno(), Errno::TIMEDOUT);
    // At most at once, after a quarter of a second, and half a second later; a busy machine leaves
    // some out, which `cm::tests::sidr` counts under virtual time.
    let sent = std::iter::from_fn(|| {
        other.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        other.recv_from(&mut [0; 1000]).ok()
    });
    assert!((1..=3).contains(&sent.count()));
}
