//! Datagrams as seen by applications, other daemons and a packet dissector.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use rnic_abi::roce::{Datagram, grh, packet};
use rnic_abi::types::QpId;
use rnic_client::{
    Access, Completion, CompletionStatus, DatagramAddress, GRH_LEN, Gid, Grh, Qp, QpType,
    RecvRequest, SendRequest, Sending, route_of,
};
use rnic_tests::client::Client;
use rnic_tests::{DEADLINE, Daemon, ports, tshark};

const KEY: u32 = 0x0123_4567;
const SENDING: Sending = Sending { sq_psn: 9, timeout: 0, retry_count: 0, rnr_retry: 0, ord: 0 };

/// Address of the daemon, and an address that it treats as another host's.
const OWN: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
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

    fn completes(&self, wr_id: u64) -> Completion {
        let completion = self.client.completion();
        assert_eq!((completion.wr_id, completion.status), (wr_id, CompletionStatus::Success));
        completion
    }
}

/// Returns the socket of the other host, played by this test, at a port that is free on every
/// address.
fn other_host() -> UdpSocket {
    let socket = UdpSocket::bind((OTHER, ports::unused_port())).unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket
}

fn daemon(port: u16, rules: &str) -> Daemon {
    let config = format!(
        "[control]\nmode = \"0666\"\n[device]\naddresses = [\"{OWN}\"]\n\
         [wired]\nport = {port}\n{rules}"
    );
    Daemon::start(&config)
}

fn to_other(qp: u32) -> DatagramAddress {
    DatagramAddress { source: 0, gid: Gid::from(IpAddr::from(OTHER)), qp: QpId(qp), q_key: KEY }
}

#[test]
fn wireshark_dissects_sent_datagrams() {
    let other = other_host();
    let at = other.local_addr().unwrap();
    let daemon = daemon(at.port(), "");
    let end = End::new(&daemon);
    let sends = [
        SendRequest::send_inline(1, b"hello"),
        SendRequest::send_inline_with_imm(2, b"", [1, 2, 3, 4]).solicited(),
    ];
    let mut packets = Vec::new();
    for (n, send) in sends.into_iter().enumerate() {
        end.qp.post_send(&[send.to(&to_other(0xABCDE)).signaled()]).unwrap();
        end.completes(n as u64 + 1);
        let mut bytes = [0; packet::MAX_LEN];
        let (len, from) = other.recv_from(&mut bytes).unwrap();
        let (datagram, data) = packet::parse(from, at, &bytes[..len]).unwrap();
        assert_eq!(data, [&b"hello"[..], b""][n]);
        let expected = Datagram {
            from: Gid::from(IpAddr::from(OWN)),
            source: end.qp.id(),
            to: Gid::from(at.ip()),
            qp: QpId(0xABCDE),
            p_key: 0xFFFF,
            q_key: KEY,
            psn: SENDING.sq_psn + n as u32,
            immediate: [None, Some(0x0102_0304)][n],
            solicited: n == 1,
        };
        assert_eq!(datagram, expected);
        packets.push((from, bytes[..len].to_vec()));
    }
    if !tshark::is_available() {
        return;
    }
    let fields = [
        "infiniband.bth.opcode",
        "infiniband.bth.destqp",
        "infiniband.bth.psn",
        "infiniband.deth.q_key",
        "infiniband.deth.srcqp",
        "_ws.malformed",
    ];
    let source = end.qp.id().0;
    assert_eq!(
        tshark::udp_fields(&packets, at, &fields),
        [
            format!("100|0x0abcde|9|0x0000000001234567|{source:#010x}|"),
            format!("101|0x0abcde|10|0x0000000001234567|{source:#010x}|"),
        ]
    );
}

#[test]
fn spoofed_local_datagrams_are_dropped() {
    let other = other_host();
    let at = other.local_addr().unwrap();
    let daemon = daemon(at.port(), "");
    let end = End::new(&daemon);
    let mr = end.client.region(4096, Access::LOCAL_WRITE);
    end.qp.post_recv(&[RecvRequest::new(7, &[mr.sge(0, 4096)])]).unwrap();

    let own = SocketAddr::new(OWN.into(), at.port());
    let datagram = |from: Ipv4Addr, q_key| Datagram {
        from: Gid::from(IpAddr::from(from)),
        source: QpId(77),
        to: Gid::from(IpAddr::from(OWN)),
        qp: end.qp.id(),
        p_key: 0xFFFF,
        q_key,
        psn: 0,
        immediate: Some(5),
        solicited: false,
    };
    let send = |socket: &UdpSocket, datagram: &Datagram, data: &[u8]| {
        let from = socket.local_addr().unwrap().port();
        socket.send_to(&packet::emit(datagram, data, from, at.port()), own).unwrap();
    };
    // From the daemon's own address, which any program on this host can use.
    let forger = UdpSocket::bind((OWN, 0)).unwrap();
    send(&forger, &datagram(OWN, KEY), b"forged");
    // From a port of another host that is not its daemon's port.
    let stranger = UdpSocket::bind((OTHER, 0)).unwrap();
    send(&stranger, &datagram(OTHER, KEY), b"of a program");
    // A wrong checksum, an unknown QP, a wrong Q_Key, and a byte that is not a packet.
    let mut spoilt = packet::emit(&datagram(OTHER, KEY), b"spoilt", at.port(), at.port());
    spoilt[30] ^= 1;
    other.send_to(&spoilt, own).unwrap();
    send(&other, &Datagram { qp: QpId(0xFFFFFF), ..datagram(OTHER, KEY) }, b"to no QP");
    send(&other, &datagram(OTHER, KEY ^ 1), b"with another key");
    other.send_to(b"?", own).unwrap();
    send(&other, &datagram(OTHER, KEY), b"as it should be");

    let completion = end.completes(7);
    assert_eq!((completion.src_qp, completion.grh), (QpId(77), Some(Grh::Ipv4)));
    assert_eq!(completion.byte_len as usize, GRH_LEN + 15);
    assert_eq!(completion.immediate.map(|data| data[..4].to_vec()), Some(vec![0, 0, 0, 5]));
    let mut bytes = vec![0; GRH_LEN + 15];
    mr.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes[GRH_LEN..], b"as it should be");
    let header: [u8; grh::LEN] = bytes[..GRH_LEN].try_into().unwrap();
    let [from, to] = [OTHER, OWN].map(|ip| Gid::from(IpAddr::from(ip)));
    assert_eq!(route_of(&header), Some((from, to)));
    // This QP dropped only the datagram with the wrong key.
    assert_eq!(end.qp.query().unwrap().counters.dropped, 1);
    assert_eq!(daemon.status().packets_dropped, 2, "those not from a daemon's port");
    // None of the senders gets a reply.
    for socket in [&other, &forger, &stranger] {
        socket.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        assert!(socket.recv_from(&mut [0; 100]).is_err());
    }
}

#[test]
fn connection_rules_apply_to_datagrams() {
    let other = other_host();
    let at = other.local_addr().unwrap();
    let rules = format!("[[connect]]\nwho = \"*\"\nnetwork = \"{OWN}/32\"\nports = \"*\"\n");
    let daemon = daemon(at.port(), &rules);
    let end = End::new(&daemon);
    let near = DatagramAddress { gid: Gid::from(IpAddr::from(OWN)), ..to_other(0xABCDE) };
    for (wr_id, to, status) in
        [(1, near, CompletionStatus::Success), (2, to_other(3), CompletionStatus::LocalQpOperation)]
    {
        end.qp.post_send(&[SendRequest::send_inline(wr_id, b"?").to(&to).signaled()]).unwrap();
        let completion = end.client.completion();
        assert_eq!((completion.wr_id, completion.status), (wr_id, status));
        if completion.diagnosis_id != 0 {
            let why = end.client.context.diagnosis(completion.diagnosis_id).unwrap();
            assert!(format!("{why:?}").contains(&OTHER.to_string()), "{why:?}");
        }
    }
}

/// A program announces a QP to its peer once it is in RTR, so a datagram sent after that must
/// arrive.
#[test]
fn datagrams_arrive_once_the_qp_receives() {
    let other = other_host();
    let daemon = daemon(other.local_addr().unwrap().port(), "");
    let sender = End::new(&daemon);
    let client = Client::new(&daemon);
    let mr = client.region(4096, Access::LOCAL_WRITE);
    for round in 0..2000 {
        let receiver = client.qp_of(QpType::Ud);
        receiver.post_recv(&[RecvRequest::new(round, &[mr.sge(0, 4096)])]).unwrap();
        receiver.receive_datagrams(KEY).unwrap();
        let to = DatagramAddress { gid: Gid::from(IpAddr::from(OWN)), ..to_other(receiver.id().0) };
        sender.qp.post_send(&[SendRequest::send_inline(round, b"?").to(&to).signaled()]).unwrap();
        sender.completes(round);
        let completion = client.completion();
        assert_eq!((completion.wr_id, completion.status), (round, CompletionStatus::Success));
    }
}
