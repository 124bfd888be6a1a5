//! Connections of RC and UC QPs by messages of the InfiniBand connection manager, as seen by
//! applications, other daemons and a packet dissector.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use rnic_abi::roce::connection::{self, Message, Request, Service};
use rnic_abi::roce::{ServiceId, mad, packet};
use rnic_client::{
    Access, BindOptions, ConnectionRequest, Event, Gid, Listener, PortSpace, Qp, QpId, QpType,
    RcOffer, RcPeer, RecvRequest, SendRequest, Sending, Wiring,
};
use rnic_tests::client::Client;
use rnic_tests::{DEADLINE, Daemon, PATHS, omit, on_path, ports, tshark};

/// Addresses of the daemon, of another daemon, and of a host that the tests play.
const OWN: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
const NEXT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);

/// A client with an RC or UC QP.
struct End {
    client: Client,
    qp: Qp,
    psn: u32,
}

impl End {
    fn new(daemon: &Daemon, kind: QpType, psn: u32) -> Self {
        let client = Client::new(daemon);
        let qp = client.qp_of(kind);
        End { client, qp, psn }
    }

    fn offer(&self) -> RcOffer {
        RcOffer {
            psn: self.psn,
            responder_resources: 4,
            initiator_depth: 2,
            retry_count: 7,
            rnr_retry: 7,
            path_mtu: 1024,
            traffic_class: 0x28,
            srq: false,
        }
    }

    /// Listens at an address, on a port that the daemon chooses.
    fn listens(&self, space: PortSpace, ip: impl Into<IpAddr>) -> Listener {
        let address = SocketAddr::new(ip.into(), 0);
        let bound = self.client.context.bind_rc(space, address, BindOptions::default());
        let listener = bound.unwrap();
        listener.listen(2).unwrap();
        listener
    }

    fn asks(&self, space: PortSpace, peer: SocketAddr, private_data: &[u8]) {
        self.qp.start_connect_rc(space, peer, None, &self.offer(), private_data).unwrap();
    }

    /// Returns the event that answers a request or an accept.
    fn answer(&self) -> Event {
        self.client.event(|event| {
            use Event::*;
            matches!(
                event,
                RcReply { .. } | RcRejected { .. } | Unreachable { .. } | Established { .. }
            )
        })
    }

    fn is_disconnected(&self) {
        self.client.event(|event| matches!(event, Event::Disconnected { .. }));
    }

    /// Moves the QP to Rts, with a peer.
    fn attach(&self, peer: &RcPeer) {
        let gids = self.client.context.gids().unwrap();
        let wiring = Wiring {
            local: gids[usize::from(peer.source)].gid,
            remote: peer.gid,
            remote_qp: peer.qp,
            rq_psn: self.psn,
            path_mtu: peer.path_mtu,
            min_rnr_timer: 12,
            ird: 4,
            rights: Access::REMOTE_WRITE,
        };
        self.qp.to_rtr(&wiring).unwrap();
        let sending = Sending {
            sq_psn: peer.psn,
            timeout: peer.ack_timeout,
            retry_count: peer.retry_count,
            rnr_retry: peer.rnr_retry,
            ord: 2,
        };
        self.qp.to_rts(&sending).unwrap();
    }

    /// Sends a message to a peer that has a receive.
    fn sends(&self, to: &End) {
        let mr = to.client.region(4096, Access::LOCAL_WRITE);
        to.qp.post_recv(&[RecvRequest::new(7, &[mr.sge(0, 4096)])]).unwrap();
        self.qp.post_send(&[SendRequest::send_inline(1, b"ping").signaled()]).unwrap();
        self.client.success();
        let received = to.client.success();
        assert_eq!((received.wr_id, received.byte_len), (7, 4));
    }
}

fn daemon(ip: impl Into<IpAddr>, port: u16, more: &str) -> Daemon {
    let ip = ip.into();
    let config = format!("[device]\naddresses = [\"{ip}\"]\n[wired]\nport = {port}\n");
    Daemon::start(&format!("{more}{config}"))
}

fn next_request(listener: &Listener) -> ConnectionRequest {
    listener.accept_request(Some(DEADLINE)).unwrap()
}

/// Asserts that private data starts with these bytes and has this length.
fn begins(data: &[u8], with: &[u8], len: usize) {
    assert_eq!((&data[..with.len()], data.len()), (with, len));
    assert!(data[with.len()..].iter().all(|byte| *byte == 0));
}

/// Connects two ends, exchanges messages, and disconnects them.
fn meet(active: &End, passive: &End, space: PortSpace, at: impl Into<IpAddr>) {
    let at = at.into();
    let listener = passive.listens(space, at);
    let peer = listener.local_addr();
    active.asks(space, peer, b"hello");
    let request = next_request(&listener);
    begins(request.private_data(), b"hello", 56);
    assert_eq!(request.addresses().local, peer);
    let asked = *request.rc_peer().unwrap();
    assert_eq!((asked.qp, asked.psn), (active.qp.id(), active.psn));
    passive.attach(&asked);
    request.accept_rc(&passive.qp, &passive.offer(), b"welcome").unwrap();
    match active.answer() {
        Event::RcReply { peer, private_data, .. } => {
            begins(&private_data, b"welcome", 196);
            assert_eq!((peer.qp, peer.psn), (passive.qp.id(), passive.psn));
            assert_eq!(peer.gid, Gid::from(at));
            active.attach(&peer);
        }
        other => panic!("{other:?}"),
    }
    active.qp.establish_rc().unwrap();
    match passive.answer() {
        Event::Established { ird, ord, .. } => assert_eq!((ird, ord), (4, 2)),
        other => panic!("{other:?}"),
    }
    active.sends(passive);
    passive.sends(active);
    passive.qp.disconnect().unwrap();
    active.is_disconnected();
    passive.is_disconnected();
    // The end of the connection does not change the QPs, which still work.
    active.sends(passive);
    assert!(active.qp.disconnect().is_err());
}

#[test]
fn rc_and_uc_qps_connect_within_a_daemon() {
    let daemon = daemon(OWN, ports::unused_port(), "");
    for (kind, space) in [(QpType::Rc, PortSpace::Tcp), (QpType::Uc, PortSpace::Ib)] {
        let active = End::new(&daemon, kind, 0x111);
        let passive = End::new(&daemon, kind, 0x222);
        meet(&active, &passive, space, OWN);
    }
}

#[test]
fn qps_connect_by_packets_in_one_daemon() {
    for ip in [IpAddr::from(OWN), Ipv6Addr::LOCALHOST.into()] {
        let port = ports::unused_port();
        if UdpSocket::bind((ip, port)).is_err() {
            omit(&format!("cannot bind to {ip} on this host"));
            continue;
        }
        let daemon = daemon(ip, port, &on_path("tcp"));
        let active = End::new(&daemon, QpType::Rc, 1);
        let passive = End::new(&daemon, QpType::Rc, 2);
        meet(&active, &passive, PortSpace::Tcp, ip);
    }
}

#[test]
fn qps_connect_between_daemons() {
    let port = ports::unused_port();
    let a = daemon(OWN, port, "");
    let b = daemon(NEXT, port, "");
    let active = End::new(&a, QpType::Rc, 1);
    let passive = End::new(&b, QpType::Rc, 2);
    meet(&active, &passive, PortSpace::Tcp, NEXT);
    // A rejection with its private data, and a host without a listener.
    let active = End::new(&a, QpType::Rc, 1);
    let listener = passive.listens(PortSpace::Tcp, NEXT);
    let peer = listener.local_addr();
    active.asks(PortSpace::Tcp, peer, b"");
    next_request(&listener).reject(b"no").unwrap();
    match active.answer() {
        Event::RcRejected { reason: 28, private_data, .. } => begins(&private_data, b"no", 148),
        other => panic!("{other:?}"),
    }
    drop(listener);
    active.asks(PortSpace::Tcp, peer, b"");
    assert!(matches!(active.answer(), Event::RcRejected { reason: 8, .. }));
    // The end of a program ends its connections.
    let passive = End::new(&b, QpType::Rc, 2);
    let listener = passive.listens(PortSpace::Tcp, NEXT);
    active.asks(PortSpace::Tcp, listener.local_addr(), b"");
    let request = next_request(&listener);
    passive.attach(&request.rc_peer().copied().unwrap());
    request.accept_rc(&passive.qp, &passive.offer(), b"").unwrap();
    assert!(matches!(active.answer(), Event::RcReply { .. }));
    active.qp.establish_rc().unwrap();
    assert!(matches!(passive.answer(), Event::Established { .. }));
    drop((listener, passive));
    active.is_disconnected();
}

#[test]
fn invalid_connection_requests_are_refused() {
    let daemon = daemon(OWN, ports::unused_port(), "");
    let active = End::new(&daemon, QpType::Rc, 1);
    let passive = End::new(&daemon, QpType::Rc, 2);
    let listener = passive.listens(PortSpace::Tcp, OWN);
    let peer = listener.local_addr();
    let start = |qp: &Qp, space, offer: &RcOffer, len| {
        let refused = qp.start_connect_rc(space, peer, None, offer, &vec![7; len]);
        refused.expect_err("an invalid request").to_string()
    };
    let offer = active.offer();
    let qp = &active.qp;
    for (refused, names) in [
        (start(qp, PortSpace::Udp, &offer, 0), "space"),
        (start(qp, PortSpace::Tcp, &RcOffer { psn: 1 << 24, ..offer }, 0), "psn"),
        (start(qp, PortSpace::Tcp, &RcOffer { retry_count: 8, ..offer }, 0), "retry_count"),
        (start(qp, PortSpace::Tcp, &RcOffer { rnr_retry: 8, ..offer }, 0), "rnr_retry"),
        (start(qp, PortSpace::Tcp, &RcOffer { path_mtu: 1000, ..offer }, 0), "path_mtu"),
        (start(qp, PortSpace::Tcp, &offer, 57), "private_data"),
        (start(&active.client.qp_of(QpType::Iwarp), PortSpace::Tcp, &offer, 0), "iWARP"),
    ] {
        assert!(refused.contains(names), "{refused} does not name {names}");
    }
    assert!(qp.establish_rc().is_err());
    active.asks(PortSpace::Tcp, peer, b"");
    // One connection per QP.
    start(qp, PortSpace::Tcp, &offer, 0);
    let request = next_request(&listener);
    assert!(request.accept_rc(&passive.client.qp_of(QpType::Iwarp), &offer, b"").is_err());
    assert!(matches!(active.answer(), Event::RcRejected { reason: 28, .. }));
    // A cancelled attempt is withdrawn.
    active.asks(PortSpace::Tcp, peer, b"");
    let request = next_request(&listener);
    active.qp.abort().unwrap();
    assert!(matches!(active.answer(), Event::Unreachable { .. }));
    assert!(request.accept_rc(&passive.qp, &offer, b"").is_err());
}

/// Returns a request of `OTHER` with this ID and QP 0x77.
fn request_to(listener: &Listener, id: u32) -> Request {
    Request {
        exchange: mad::Exchange { transaction: 5, id },
        service: ServiceId::new(PortSpace::Tcp, listener.local_addr().port()),
        guid: 1,
        qp: QpId(0x77),
        psn: 3,
        responder_resources: 1,
        initiator_depth: 1,
        kind: Service::Reliable,
        response_timeout: 20,
        max_cm_retries: 15,
        retry_count: 7,
        rnr_retry: 7,
        path_mtu: 3,
        srq: false,
        traffic_class: 0,
        ack_timeout: 17,
        from_gid: Gid::from(IpAddr::from(OTHER)),
        to_gid: Gid::from(IpAddr::from(OWN)),
        from: SocketAddr::new(OTHER.into(), 1234),
        to: OWN.into(),
        private_data: [0; 56],
    }
}

#[test]
fn first_message_replaces_a_lost_rtu() {
    for path in PATHS {
        let daemon = daemon(OWN, ports::unused_port(), &on_path(path));
        let active = End::new(&daemon, QpType::Rc, 1);
        let passive = End::new(&daemon, QpType::Rc, 2);
        let listener = passive.listens(PortSpace::Tcp, OWN);
        active.asks(PortSpace::Tcp, listener.local_addr(), b"");
        let request = next_request(&listener);
        passive.attach(request.rc_peer().unwrap());
        request.accept_rc(&passive.qp, &passive.offer(), b"").unwrap();
        match active.answer() {
            Event::RcReply { peer, .. } => active.attach(&peer),
            other => panic!("{other:?}"),
        }
        // The active end sends a message and no RTU.
        active.sends(&passive);
        assert!(matches!(passive.answer(), Event::Established { .. }), "{path}");
    }
}

#[test]
fn a_connection_that_the_peer_has_lost_ends() {
    let other = UdpSocket::bind((OTHER, ports::unused_port())).unwrap();
    other.set_read_timeout(Some(DEADLINE)).unwrap();
    let port = other.local_addr().unwrap().port();
    let daemon = daemon(OWN, port, "");
    let send = |mad: &mad::Bytes| {
        let packet = mad::packet(OTHER.into(), OWN.into(), mad, port);
        other.send_to(&packet, (OWN, port)).unwrap();
    };
    let receive = || {
        let mut bytes = [0; 1000];
        let (len, from) = other.recv_from(&mut bytes).unwrap();
        let (_, mad) = packet::parse(from, other.local_addr().unwrap(), &bytes[..len]).unwrap();
        connection::parse(mad).unwrap()
    };
    let passive = End::new(&daemon, QpType::Rc, 2);
    let listener = passive.listens(PortSpace::Tcp, OWN);
    send(&request_to(&listener, 6).emit());
    next_request(&listener).accept_rc(&passive.qp, &passive.offer(), b"").unwrap();
    let Message::Reply(reply) = receive() else { panic!("expected REP") };
    send(&reply.ids.answered_by(6).emit_ready());
    assert!(matches!(passive.answer(), Event::Established { .. }));
    // The host uses the QP for another connection.
    send(&request_to(&listener, 7).emit());
    match receive() {
        Message::Reject(reject) => assert_eq!((reject.reason.0, reject.ids.receiver), (10, 7)),
        other => panic!("{other:?}"),
    }
    let Message::Disconnect(ids, QpId(0x77)) = receive() else { panic!("expected DREQ") };
    send(&ids.answered_by(6).emit_disconnected());
    passive.is_disconnected();
}

#[test]
fn a_repeated_refusal_is_one_diagnosis() {
    let daemon = daemon(OWN, ports::unused_port(), "");
    let active = End::new(&daemon, QpType::Rc, 1);
    let unserved = SocketAddr::new(OWN.into(), 7);
    // Diagnoses have successive numbers, and this refusal has one.
    let last = || active.qp.establish_rc().unwrap_err().diagnosis_id().unwrap();
    let before = last();
    for psn in [1, 1, 1, 2] {
        let offer = RcOffer { psn, ..active.offer() };
        active.qp.start_connect_rc(PortSpace::Tcp, unserved, None, &offer, b"").unwrap();
        assert!(matches!(active.answer(), Event::RcRejected { reason: 8, .. }));
    }
    // One diagnosis for each PSN: a request with the same PSN is a repetition.
    assert_eq!(last() - before - 1, 2);
}

#[test]
fn wireshark_reads_the_connection_messages() {
    let other = UdpSocket::bind((OTHER, ports::unused_port())).unwrap();
    other.set_read_timeout(Some(DEADLINE)).unwrap();
    let at = other.local_addr().unwrap();
    let port = at.port();
    let daemon = daemon(OWN, port, "");
    let end = End::new(&daemon, QpType::Rc, 0x0012_3456);
    let own = SocketAddr::new(OWN.into(), port);
    let mut packets = Vec::new();
    let mut receive = || {
        let mut bytes = [0; 1000];
        let (len, from) = other.recv_from(&mut bytes).unwrap();
        assert_eq!(from, own);
        packets.push((own, bytes[..len].to_vec()));
    };
    // REQ of the daemon, and its REP to a request of this host.
    end.asks(PortSpace::Tcp, SocketAddr::new(OTHER.into(), 7471), b"hello");
    receive();
    let passive = End::new(&daemon, QpType::Rc, 0x0065_4321);
    let listener = passive.listens(PortSpace::Tcp, OWN);
    let request = request_to(&listener, 6);
    other.send_to(&mad::packet(OTHER.into(), OWN.into(), &request.emit(), port), own).unwrap();
    let asked = next_request(&listener);
    assert_eq!(asked.rc_peer().unwrap().qp, QpId(0x77));
    asked.accept_rc(&passive.qp, &passive.offer(), b"welcome").unwrap();
    receive();
    // The daemon gives up its accept with REJ.
    passive.qp.abort().unwrap();
    receive();
    if !tshark::is_available() {
        return;
    }
    let fields = [
        "infiniband.mad.attributeid",
        "infiniband.cm.req.serviceid.dport",
        "infiniband.cm.req.localqpn",
        "infiniband.cm.req.startpsn",
        "infiniband.cm.req.retrcount",
        "infiniband.cm.req.pppmtu",
        "infiniband.cm.req.prim_localgid_ipv4",
        "infiniband.cm.req.ip_cm.sip4",
        "infiniband.cm.rep.localqpn",
        "infiniband.cm.rep.startpsn",
        "infiniband.cm.rep.respres",
        "infiniband.cm.rej.reason",
        "_ws.malformed",
    ];
    let found = tshark::udp_fields(&packets, at, &fields);
    let qps = [end.qp.id().0, passive.qp.id().0];
    // Port 7471. All loopback addresses have the GID of 127.0.0.1.
    let req = format!("0x0010|0x1d2f|{:#08x}|0x123456|0x07|0x03|127.0.0.1|127.0.0.1|||||", qps[0]);
    let rep = format!("0x0013||||||||{:#08x}|0x654321|0x04||", qps[1]);
    let rej = "0x0012|||||||||||0x001c|";
    assert_eq!(found, [&req, &rep, rej]);
}
