//! MPA start-up with scripted peers: which end sends first, how the initiator shows that it is
//! ready (RFC 6581), and Markers as the peer requested them (RFC 5044 section 4.3).

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Deref;

use rnic_client::{AcceptOptions, Access, ConnectOptions, Error, Qp, RecvRequest, SendRequest};
use rnic_tests::traffic::Rng;
use rnic_tests::wire::{self, CRC, fpdu, tagged, ulpdu, untagged};
use rnic_tests::{Client, DEADLINE, Daemon};

/// Flag of a revision 2 start-up frame: enhanced data follows.
const ENHANCED: u8 = 0x10;
/// Flag of a start-up frame: Markers requested.
const MARKERS: u8 = 0x80;
/// Peer-to-peer model, and three ready-to-receive messages: Send, Write, Read.
const PEER_TO_PEER: u16 = 0x8000;
const BY_SEND: u16 = 0x4000;
const BY_WRITE: u16 = 0x8000;
const BY_READ: u16 = 0x4000;

/// Encodes IRD and ORD with their flags as in a start-up frame.
fn enhanced(ird: u16, ord: u16) -> Vec<u8> {
    [ird.to_be_bytes(), ord.to_be_bytes()].concat()
}

fn reply(flags: u8, revision: u8, private_data: &[u8]) -> Vec<u8> {
    let mut frame = wire::request(flags, revision, private_data);
    frame[..16].copy_from_slice(b"MPA ID Rep Frame");
    frame
}

/// Returns true if a ULPDU is the agreed message.
type IsAgreed = fn(&[u8]) -> bool;

/// A client of a daemon, and a listener for the peer that it connects to.
struct Initiator {
    // Dropped before the daemon, which checks for leaked resources.
    client: Client,
    peer: TcpListener,
    daemon: Daemon,
}

impl Deref for Initiator {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Initiator {
    fn new(config: &str) -> Self {
        let daemon = Daemon::start(config);
        let client = Client::new(&daemon);
        let peer = TcpListener::bind("127.0.0.1:0").unwrap();
        Initiator { client, peer, daemon }
    }

    /// Creates a QP with two receives of zero bytes.
    fn ready(&self) -> Qp {
        let qp = self.qp();
        qp.post_recv(&[RecvRequest::new(1, &[]); 2]).unwrap();
        qp
    }

    /// Connects. Returns the peer's TCP connection, and the flags, revision and private data of the
    /// request.
    fn connecting(&self, qp: &Qp) -> (TcpStream, u8, u8, Vec<u8>) {
        let address: SocketAddr = self.peer.local_addr().unwrap();
        let options = ConnectOptions { private_data: b"me".into(), ..Default::default() };
        qp.start_connect(address, &options).unwrap();
        let (mut stream, _) = self.peer.accept().unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let frame = wire::exactly(&mut stream, 20);
        assert_eq!(&frame[..16], b"MPA ID Req Frame");
        let private = usize::from(u16::from_be_bytes([frame[18], frame[19]]));
        let private = wire::exactly(&mut stream, private);
        (stream, frame[16], frame[17], private)
    }

    /// Stops the daemon and returns its log.
    fn stop(self) -> Vec<String> {
        let Initiator { client, daemon, .. } = self;
        drop(client);
        daemon.stop()
    }
}

#[test]
fn initiator_sends_the_chosen_rtr_message() {
    let client = Initiator::new("");
    // The ready-to-receive message, the IRD and ORD flags of the Reply that requests it, and a
    // check of its first bytes.
    let ways: [(&str, u16, u16, IsAgreed); 4] = [
        ("Write", 0, BY_WRITE, |u| u == tagged(0, 0, 0, b"") || u[..2] == [0xC1, 0x40]),
        ("Read", 0, BY_READ, |u| u[..2] == [0x41, 0x41] && u.len() == 46 && u[30..34] == [0; 4]),
        ("Send", BY_SEND, 0, |u| u == untagged(3, 0, 1, b"")),
        ("any", BY_SEND, BY_WRITE | BY_READ, |u| u[..2] == [0xC1, 0x40] && u.len() == 14),
    ];
    for (way, in_ird, in_ord, is_agreed) in ways {
        let qp = client.ready();
        let (mut peer, flags, revision, private) = client.connecting(&qp);
        assert_eq!((flags & (CRC | ENHANCED | MARKERS), revision), (CRC | ENHANCED, 2));
        let ird = u16::from_be_bytes([private[0], private[1]]);
        let ord = [private[2], private[3]];
        assert_eq!(ird & (PEER_TO_PEER | BY_SEND), PEER_TO_PEER | BY_SEND);
        assert_eq!(u16::from_be_bytes(ord) & (BY_WRITE | BY_READ), BY_WRITE | BY_READ);
        assert_eq!(&private[4..], b"me");
        let agreed = enhanced(PEER_TO_PEER | in_ird | 4, in_ord | 4);
        wire::send_bytes(&mut peer, &reply(CRC | ENHANCED, 2, &agreed));
        let connected = qp.wait_connected(Some(DEADLINE)).unwrap();
        assert_eq!((connected.ird >= 4, connected.ord), (true, 4), "{way}");
        // The ready-to-receive message arrives first, without a work request.
        let first = ulpdu(&mut peer);
        assert!(is_agreed(&first), "{way}: {first:02x?}");
        if way == "Read" {
            // The Read is answered as usual, and completes nothing at the other end.
            let stag = &first[18..22];
            let to = &first[22..30];
            let stag = u32::from_be_bytes(stag.try_into().unwrap());
            let to = u64::from_be_bytes(to.try_into().unwrap());
            wire::send_bytes(&mut peer, &fpdu(&tagged(2, stag, to, b"")));
        }
        qp.post_send(&[SendRequest::send_inline(9, b"now").signaled()]).unwrap();
        assert_eq!(client.success().wr_id, 9, "{way}");
        let number = if way == "Send" { 2 } else { 1 };
        assert_eq!(ulpdu(&mut peer), untagged(3, 0, number, b"now"), "{way}");
        drop(qp);
    }
}

#[test]
fn initiator_without_common_rtr_terminates() {
    let client = Initiator::new("");
    let qp = client.ready();
    let (mut peer, ..) = client.connecting(&qp);
    // Peer-to-peer, but without a ready-to-receive message (RFC 6581 section 9: Terminate 2/0/7).
    wire::send_bytes(&mut peer, &reply(CRC | ENHANCED, 2, &enhanced(PEER_TO_PEER | 4, 4)));
    let mut said = Vec::new();
    let e = qp.wait_connected(Some(DEADLINE)).unwrap_err();
    assert!(matches!(e, Error::Unreachable { .. }), "{e}");
    // The peer closes after this end has closed.
    peer.shutdown(std::net::Shutdown::Write).unwrap();
    peer.read_to_end(&mut said).unwrap();
    assert_eq!(wire::terminate(&said), Some([2, 0, 7]), "{said:02x?}");
}

#[test]
fn responder_may_send_first_after_rtr() {
    let client = Initiator::new("");
    let listener = client.listener();
    let read = {
        let mut header = vec![0; 28];
        header[..4].copy_from_slice(&7u32.to_be_bytes());
        untagged(1, 1, 1, &header)
    };
    let ways = [
        ("Write", tagged(0, 0, 0, b""), 0, BY_WRITE),
        ("Read", read, 0, BY_READ),
        ("Send", untagged(3, 0, 1, b""), BY_SEND, 0),
    ];
    for (way, ready, in_ird, in_ord) in ways {
        let mut peer = wire::dial(listener.local_addr());
        let wants = enhanced(PEER_TO_PEER | in_ird | 2, in_ord | 2);
        wire::send_bytes(&mut peer, &wire::request(CRC | ENHANCED, 2, &wants));
        let request = listener.accept_request(Some(DEADLINE)).unwrap();
        assert!(request.peer_to_peer() && request.revision() == 2);
        let qp = client.ready();
        // Posted before the initiator sent anything: it must wait.
        qp.post_send(&[SendRequest::send_inline(9, b"hello").signaled()]).unwrap();
        request.start_accept(&qp, &AcceptOptions::default()).unwrap();
        let frame = wire::reply(&mut peer);
        assert_eq!((frame[16] & (CRC | ENHANCED), frame[17]), (CRC | ENHANCED, 2));
        let ird = u16::from_be_bytes([frame[20], frame[21]]);
        let ord = u16::from_be_bytes([frame[22], frame[23]]);
        assert_eq!(ird & PEER_TO_PEER, PEER_TO_PEER);
        assert!(ird & in_ird == in_ird && ord & in_ord == in_ord, "{way}: {ird:04x} {ord:04x}");
        peer.set_nonblocking(true).unwrap();
        let early = peer.peek(&mut [0]).unwrap_err();
        assert_eq!(early.kind(), std::io::ErrorKind::WouldBlock, "{way}");
        peer.set_nonblocking(false).unwrap();
        wire::send_bytes(&mut peer, &fpdu(&ready));
        qp.wait_connected(Some(DEADLINE)).unwrap();
        assert_eq!(client.success().wr_id, 9, "{way}");
        let mut messages = vec![ulpdu(&mut peer)];
        if way == "Read" {
            messages.push(ulpdu(&mut peer));
            assert!(messages.contains(&tagged(2, 7, 0, b"")), "{messages:02x?}");
        }
        assert!(messages.contains(&untagged(3, 0, 1, b"hello")), "{way}: {messages:02x?}");
        // A Send that only shows readiness consumes no receive. The next Send consumes it.
        let number = if way == "Send" { 2 } else { 1 };
        wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, number, b"")));
        assert_eq!(client.success().wr_id, 1, "{way}");
        drop(qp);
    }
}

//= MPA-1.2-2
//= MPA-4.3-3
//= MPA-4.4-3
//= MPA-4.4-4
//= MPA-4.4-8
#[test]
fn crc_follows_the_configuration_only() {
    let mut seen = Vec::new();
    for (config, crc) in [("", CRC), ("[mpa]\ncrc = false\n", 0)] {
        let client = Initiator::new(config);
        let listener = client.listener();
        let mut of_client = Vec::new();
        // As initiator, then as responder. The peer accepts both.
        for active in [true, false] {
            let qp = client.ready();
            let mut peer = if active {
                let (mut peer, flags, ..) = client.connecting(&qp);
                assert_eq!(flags & (CRC | MARKERS), crc, "{config:?}");
                wire::send_bytes(&mut peer, &reply(0, 1, b"welcome"));
                peer
            } else {
                let mut peer = wire::dial(listener.local_addr());
                wire::send_bytes(&mut peer, &wire::request(0, 1, b"please"));
                let request = listener.accept_request(Some(DEADLINE)).unwrap();
                assert_eq!(request.private_data(), b"please");
                request.start_accept(&qp, &AcceptOptions::default()).unwrap();
                assert_eq!(wire::reply(&mut peer)[16] & (CRC | MARKERS), crc, "{config:?}");
                peer
            };
            wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, 1, b"")));
            let mut connected = qp.wait_connected(Some(DEADLINE)).unwrap();
            assert_eq!(client.success().wr_id, 1);
            qp.post_send(&[SendRequest::send_inline(9, b"now").signaled()]).unwrap();
            assert_eq!(client.success().wr_id, 9);
            // All attributes of the connection that the program can read, except for addresses,
            // which differ in each run.
            let row = qp.query().unwrap();
            connected.addresses = row.addresses.unwrap();
            let ports = [connected.addresses.local, connected.addresses.peer];
            let text = format!("{connected:?} {:?} {:?} {}", row.state, row.counters, row.path);
            of_client.push(
                ports.iter().fold(text, |text, a| text.replace(&a.to_string(), "an address")),
            );
            // The CRC field is present in either case.
            assert_eq!(wire::exactly(&mut peer, 28)[..2], [0, 21]);
            // Dropped before the peer, whose end would flush the second receive to the CQ of the
            // next QP.
            drop(qp);
        }
        seen.push(of_client);
        let said = client.stop();
        let warned = said.iter().any(|line| line.contains("mpa.crc = false"));
        assert_eq!(warned, crc == 0, "{said:?}");
    }
    assert_eq!(seen[0], seen[1]);
}

//= MPA-7.1.1-17
//= MPA-C.2.4-1
//= MPA-C.2.5-1
#[test]
fn revision_0_peer_is_reported() {
    let client = Initiator::new("[mpa]\nrdmac = true\n");
    let listener = client.listener();
    // A zero-length Write of version 0, after the first Marker.
    let write = {
        let mut fpdu = vec![0, 0, 0, 0, 0, 14, 0xC0];
        fpdu.resize(4 + 2 + 14, 0);
        let crc = crc32c::crc32c(&fpdu);
        [&fpdu[..], &crc.to_le_bytes()].concat()
    };
    for active in [true, false] {
        let qp = client.ready();
        let mut peer = if active {
            let (mut peer, _, revision, _) = client.connecting(&qp);
            assert_eq!(revision, 1);
            wire::send_bytes(&mut peer, &reply(CRC | MARKERS, 0, b""));
            peer
        } else {
            let mut peer = wire::dial(listener.local_addr());
            wire::send_bytes(&mut peer, &wire::request(CRC | MARKERS, 0, b""));
            let request = listener.accept_request(Some(DEADLINE)).unwrap();
            assert_eq!(request.revision(), 0);
            request.start_accept(&qp, &AcceptOptions::default()).unwrap();
            let frame = wire::reply(&mut peer);
            assert_eq!((frame[16], frame[17]), (CRC | MARKERS, 0));
            peer
        };
        wire::send_bytes(&mut peer, &write);
        assert_eq!(qp.wait_connected(Some(DEADLINE)).unwrap().revision, 0);
        qp.post_send(&[SendRequest::send_inline(9, b"").signaled()]).unwrap();
        assert_eq!(client.success().wr_id, 9);
        // Marker, length, DV and RV 0.
        assert_eq!(wire::exactly(&mut peer, 8), [0, 0, 0, 0, 0, 18, 0x40, 0x03]);
        // Dropped before the peer, whose end would flush the receives to the CQ of the next QP.
        drop(qp);
    }
}

/// Removes Markers from a stream that begins at position 0, and checks each. Returns the FPDUs.
fn without_markers(stream: &[u8]) -> Vec<Vec<u8>> {
    let mut fpdus = Vec::new();
    let mut at = 0;
    while at < stream.len() {
        // A Marker between FPDUs belongs to the following one, whose CRC covers it.
        let mut covered = Vec::new();
        let mut bare = Vec::new();
        let begin = at + if at % 512 == 0 { 4 } else { 0 };
        let mut whole = usize::MAX;
        while bare.len() < whole {
            if at.is_multiple_of(512) {
                let marker = &stream[at..at + 4];
                let back = usize::from(u16::from_be_bytes([marker[2], marker[3]]));
                let expected = at.saturating_sub(begin);
                assert_eq!((&marker[..2], back), (&[0, 0][..], expected), "Marker at {at}");
                covered.extend(marker);
                at += 4;
                continue;
            }
            covered.push(stream[at]);
            bare.push(stream[at]);
            at += 1;
            if bare.len() == 2 {
                let len = usize::from(u16::from_be_bytes([bare[0], bare[1]]));
                whole = (2 + len).next_multiple_of(4) + 4;
            }
        }
        let crc = covered.split_off(covered.len() - 4);
        assert_eq!(crc, crc32c::crc32c(&covered).to_le_bytes(), "CRC before {at}");
        let len = usize::from(u16::from_be_bytes([bare[0], bare[1]]));
        fpdus.push(bare[2..2 + len].to_vec());
    }
    fpdus
}

//= MPA-4.3-2
#[test]
fn requested_markers_are_sent_in_every_phase() {
    for config in ["[mpa]\nmulpdu = \"mss\"\n", "[mpa]\nmulpdu = \"max\"\n"] {
        let client = Initiator::new(config);
        let listener = client.listener();
        let buffer = client.context.create_shared_buffer(65536).unwrap();
        let source = client.pd.reg_mr(&buffer, .., Access::empty()).unwrap();
        let mut rng = Rng::new(3);
        let mut data = vec![0; 65536];
        rng.fill(&mut data);
        source.write_at(0, &data).unwrap();
        let mut peer = wire::dial(listener.local_addr());
        wire::send_bytes(&mut peer, &wire::request(CRC | MARKERS, 1, b""));
        let request = listener.accept_request(Some(DEADLINE)).unwrap();
        let qp = client.ready();
        request.start_accept(&qp, &AcceptOptions::default()).unwrap();
        wire::reply(&mut peer);
        // The daemon requests no Markers, so its peer sends none.
        wire::send_bytes(&mut peer, &fpdu(&tagged(0, 0, 0, b"")));
        qp.wait_connected(Some(DEADLINE)).unwrap();
        // Every length up to twice the Marker distance, so that every phase occurs.
        let lengths: Vec<u32> = (0..1100).chain([1460, 8960, 40_000]).collect();
        let sender = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut bytes = Vec::new();
                peer.read_to_end(&mut bytes).unwrap();
                bytes
            });
            for (n, len) in lengths.iter().enumerate() {
                let sges = [source.sge(0, *len)];
                qp.post_send(&[SendRequest::send(n as u64, &sges).signaled()]).unwrap();
                assert_eq!(client.success().wr_id, n as u64);
            }
            qp.disconnect().unwrap();
            reader.join().unwrap()
        });
        let mut messages: Vec<Vec<u8>> = Vec::new();
        let mut under_way = Vec::new();
        for ulpdu in without_markers(&sender) {
            assert_eq!(ulpdu[1], 0x43);
            let offset = u32::from_be_bytes(ulpdu[14..18].try_into().unwrap());
            assert_eq!(offset as usize, under_way.len());
            under_way.extend(&ulpdu[18..]);
            if ulpdu[0] & 0x40 != 0 {
                messages.push(std::mem::take(&mut under_way));
            }
        }
        assert_eq!(messages.len(), lengths.len());
        for (message, len) in messages.iter().zip(lengths) {
            assert!(message[..] == data[..len as usize], "message of {len} bytes");
        }
    }
}
