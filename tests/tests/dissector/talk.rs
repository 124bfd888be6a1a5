//! Two ends that execute every operation, and the messages that they send.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use rnic_client::{
    AcceptOptions, Access, Completion, ConnectOptions, DisconnectReason, Error, Listener, Mr, Qp,
    QpOptions, RecvRequest, RemoteMr, Scope, SendRequest, Stag,
};
use rnic_tests::relay::Edit;
use rnic_tests::{Client, DEADLINE, Daemon, READ_WRITE};

pub const WRITE: u8 = 0;
const READ_REQUEST: u8 = 1;
pub const READ_RESPONSE: u8 = 2;
const SEND: u8 = 3;
const SEND_INVALIDATE: u8 = 4;
const SEND_SOLICITED: u8 = 5;
const SEND_SOLICITED_INVALIDATE: u8 = 6;
pub const TERMINATE: u8 = 7;
// Wireshark 4.0 does not decode 8 and 9, Immediate Data.
const ATOMIC_REQUEST: u8 = 10;
const ATOMIC_RESPONSE: u8 = 11;

/// Length of the large messages in bytes: at least three FPDUs.
const LARGE: u32 = 150_000;
/// Length of each end's memory in bytes.
const LEN: u64 = 1 << 20;

/// Configuration of two daemons, and its result on the wire.
pub struct Wire {
    pub name: &'static str,
    /// Configuration of the initiator's daemon and of the responder's.
    pub config: [&'static str; 2],
    pub edit: Edit,
    /// Negotiated revision, and Markers towards the initiator and the responder.
    pub revision: u64,
    pub markers: [bool; 2],
    pub crc: bool,
    /// Opcode of the initiator's RTR message.
    pub ready: Option<u8>,
}

pub const DEFAULT: Wire = Wire {
    name: "default",
    config: ["", ""],
    edit: |_| (),
    revision: 2,
    markers: [false; 2],
    crc: true,
    ready: Some(WRITE),
};

/// Flags of the RTR types in the ORD field of the Reply (RFC 6581 section 9.2).
const BY_WRITE: u8 = 0x80;
const BY_READ: u8 = 0x40;

pub fn wires() -> Vec<Wire> {
    let no_crc = "[mpa]\ncrc = false\n";
    let markers = "[mpa]\nmarkers = true\n";
    let markers_only = "[mpa]\nmarkers = true\ncrc = false\n";
    vec![
        DEFAULT,
        Wire {
            name: "ready by Read",
            edit: |reply| reply[22] &= !BY_WRITE,
            ready: Some(READ_REQUEST),
            ..DEFAULT
        },
        Wire {
            name: "ready by Send",
            edit: |reply| reply[22] &= !(BY_WRITE | BY_READ),
            ready: Some(SEND),
            ..DEFAULT
        },
        Wire {
            name: "no peer-to-peer",
            config: ["[mpa]\npeer_to_peer = false\n", ""],
            ready: None,
            ..DEFAULT
        },
        Wire {
            name: "revision 1",
            config: ["[mpa]\nrevision = 1\n", ""],
            revision: 1,
            ready: None,
            ..DEFAULT
        },
        Wire { name: "no CRC", config: [no_crc; 2], crc: false, ..DEFAULT },
        Wire { name: "Markers", config: [markers; 2], markers: [true; 2], ..DEFAULT },
        Wire { name: "Markers up", config: ["", markers], markers: [false, true], ..DEFAULT },
        Wire { name: "Markers down", config: [markers, ""], markers: [true, false], ..DEFAULT },
        Wire {
            name: "Markers, no CRC",
            config: [markers_only; 2],
            markers: [true; 2],
            crc: false,
            ..DEFAULT
        },
    ]
}

/// Number of messages by direction (true: up) and opcode.
pub type Count = BTreeMap<(bool, u8), usize>;

/// Posted messages and their payload on the wire.
#[derive(Default)]
pub struct Posted {
    pub messages: Count,
    pub bytes: BTreeMap<(bool, u8), u64>,
}

impl Posted {
    /// Removes the messages of the other direction.
    pub fn retain(&mut self, up: bool) {
        self.messages.retain(|(way, _), _| *way == up);
        self.bytes.retain(|(way, _), _| *way == up);
    }

    fn add(&mut self, up: bool, opcode: u8, len: u32) {
        *self.messages.entry((up, opcode)).or_default() += 1;
        *self.bytes.entry((up, opcode)).or_default() += u64::from(len);
    }
}

/// A client of a daemon with a QP and a region.
struct Talker {
    /// True for the initiator, which sends in direction `Up`.
    up: bool,
    client: Client,
    qp: Qp,
    mr: Mr,
}

impl Talker {
    fn new(daemon: &Daemon, up: bool) -> Self {
        let client = Client::new(daemon);
        let options = QpOptions { signal_all: true, ..client.options() };
        let qp = client.pd.create_qp(&options).unwrap();
        let mr = client.region(LEN, READ_WRITE | Access::REMOTE_ATOMIC);
        // Sends go to the upper half, which no other operation uses.
        for n in 0..16 {
            let len = if n < 15 { 4096 } else { LARGE };
            let sge = mr.sge(LEN / 2 + n * 4096, len);
            qp.post_recv(&[RecvRequest::new(100 + n, &[sge])]).unwrap();
        }
        Talker { up, client, qp, mr }
    }

    /// Registers a region that the peer may invalidate.
    fn revocable(&self) -> Mr {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        self.client.region_for(Scope::Qp(self.qp.id()), 64, access)
    }

    fn completes(&self, count: usize) -> Vec<Completion> {
        self.client.successes(count)
    }

    /// Executes every operation towards the other end, one after the other.
    fn run_operations(&self, to: &Talker, posted: &mut Posted) {
        let up = self.up;
        let mine = &self.mr;
        let theirs = to.mr.remote();
        for len in [0, 1, 20, 21, 100] {
            posted.add(up, SEND, len);
            self.qp.post_send(&[SendRequest::send(1, &[mine.sge(0, len)])]).unwrap();
        }
        posted.add(up, SEND_SOLICITED, 9);
        self.qp.post_send(&[SendRequest::send(1, &[mine.sge(0, 9)]).solicited()]).unwrap();
        self.completes(6);
        to.completes(6);
        let gone = [to.revocable(), to.revocable()];
        posted.add(up, SEND_INVALIDATE, 7);
        posted.add(up, SEND_SOLICITED_INVALIDATE, 0);
        let sges = [mine.sge(0, 7)];
        self.qp
            .post_send(&[
                SendRequest::send_invalidate(1, &sges, gone[0].rkey()),
                SendRequest::send_invalidate(1, &[], gone[1].rkey()).solicited(),
            ])
            .unwrap();
        self.completes(2);
        let stags: Vec<Option<Stag>> = to.completes(2).iter().map(|c| c.invalidated).collect();
        assert_eq!(stags, gone.each_ref().map(|mr| Some(mr.rkey())));
        for len in [0, 3, 1000, LARGE] {
            posted.add(up, WRITE, len);
            posted.add(up, READ_REQUEST, 28);
            posted.add(!up, READ_RESPONSE, len);
            let sges = [mine.sge(0, len)];
            self.qp
                .post_send(&[
                    SendRequest::write(1, &sges, theirs.at(0)),
                    SendRequest::read(2, mine.sge(u64::from(LARGE), len), theirs.at(0)),
                ])
                .unwrap();
            self.completes(2);
        }
        let sink = mine.sge(0, 8);
        let word = theirs.at(4096);
        let atomics = [
            SendRequest::fetch_add(4, sink, word, 5),
            SendRequest::compare_swap(5, sink, word, 0, u64::MAX),
            SendRequest::compare_swap(6, sink, word, 1, 2),
        ];
        for _ in &atomics {
            posted.add(up, ATOMIC_REQUEST, 52);
            posted.add(!up, ATOMIC_RESPONSE, 12);
        }
        self.qp.post_send(&atomics).unwrap();
        self.completes(3);
        let sink = self.revocable();
        posted.add(up, READ_REQUEST, 28);
        posted.add(!up, READ_RESPONSE, 64);
        self.qp
            .post_send(&[SendRequest::read_invalidate(3, sink.sge(0, 64), theirs.at(5))])
            .unwrap();
        self.completes(1);
        // The last receive is the large one.
        for len in [2, 4, 8, 16, 32, 64, 128, LARGE] {
            posted.add(up, SEND, len);
            self.qp.post_send(&[SendRequest::send(1, &[mine.sge(0, len)])]).unwrap();
        }
        self.completes(8);
        to.completes(8);
    }
}

/// How a conversation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Orderly,
    /// The initiator writes to, or reads from, an unknown STag.
    BadWrite,
    BadRead,
    /// The initiator changes a word at an unknown STag.
    BadAtomic,
    /// The initiator sends more than fits into the receive.
    BadSend,
    Rejected,
}

/// Runs a conversation between two ends. Returns the posted messages. `via` maps the listener to
/// the address that the initiator connects to.
pub fn converse(wire: &Wire, ending: Ending, via: impl FnOnce(&Listener) -> SocketAddr) -> Posted {
    let daemons = wire.config.map(Daemon::start);
    let a = Talker::new(&daemons[0], true);
    let b = Talker::new(&daemons[1], false);
    let listener = b.client.listener();
    let options = ConnectOptions { private_data: b"initiator".to_vec(), ..Default::default() };
    a.qp.start_connect(via(&listener), &options).unwrap();
    let request = listener.accept_request(Some(DEADLINE)).unwrap();
    assert_eq!(request.private_data(), b"initiator");
    let mut posted = Posted::default();
    if ending == Ending::Rejected {
        request.reject(b"not now").unwrap();
        match a.qp.wait_connected(Some(DEADLINE)) {
            Err(Error::Rejected { private_data }) => assert_eq!(private_data, b"not now"),
            other => panic!("{other:?}"),
        }
        return posted;
    }
    let private_data = b"a responder".to_vec();
    request.start_accept(&b.qp, &AcceptOptions { private_data, ..Default::default() }).unwrap();
    assert_eq!(a.qp.wait_connected(Some(DEADLINE)).unwrap().private_data, b"a responder");
    match wire.ready {
        Some(READ_REQUEST) => {
            posted.add(true, READ_REQUEST, 28);
            posted.add(false, READ_RESPONSE, 0);
        }
        Some(opcode) => posted.add(true, opcode, 0),
        None => {}
    }
    let nowhere = RemoteMr { rkey: Stag(0x5500_0055), ..b.mr.remote() };
    match ending {
        Ending::Orderly => {
            a.run_operations(&b, &mut posted);
            b.run_operations(&a, &mut posted);
            a.qp.disconnect().unwrap();
            for end in [&b, &a] {
                let reason = end.qp.wait_disconnected(Some(DEADLINE)).unwrap();
                assert_eq!(reason, DisconnectReason::Orderly);
            }
        }
        Ending::BadWrite => {
            posted.add(true, WRITE, 5);
            a.qp.post_send(&[SendRequest::write(1, &[a.mr.sge(0, 5)], nowhere.at(0))]).unwrap();
        }
        Ending::BadRead => {
            posted.add(true, READ_REQUEST, 28);
            a.qp.post_send(&[SendRequest::read(1, a.mr.sge(0, 5), nowhere.at(0))]).unwrap();
        }
        Ending::BadAtomic => {
            posted.add(true, ATOMIC_REQUEST, 52);
            let sink = a.mr.sge(0, 8);
            let at = nowhere.at(0);
            a.qp.post_send(&[SendRequest::fetch_add(1, sink, at, 1)]).unwrap();
        }
        Ending::BadSend => {
            posted.add(true, SEND, 4097);
            a.qp.post_send(&[SendRequest::send(1, &[a.mr.sge(0, 4097)])]).unwrap();
        }
        Ending::Rejected => {}
    }
    if ending != Ending::Orderly {
        let encloses = match ending {
            Ending::BadRead => 2 + 18 + 28,
            Ending::BadSend | Ending::BadAtomic => 2 + 18,
            _ => 2 + 14,
        };
        posted.add(false, TERMINATE, 4 + encloses);
        for end in [&a, &b] {
            let reason = end.qp.wait_disconnected(Some(DEADLINE)).unwrap();
            assert!(matches!(reason, DisconnectReason::Terminate { .. }), "{reason:?}");
        }
    }
    posted
}
