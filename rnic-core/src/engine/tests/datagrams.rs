//! UD QPs, within an engine and between two engines by RoCE v2 packets.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::requests::Wr;
use super::world::network::{PORT, address_of};
use super::world::{MemoryKind, QpShape, World};
use crate::engine::{DatagramConfig, DatagramPort, DatagramRules, EngineCommand, PortChanges};
use rnic_abi::abi::control::{QpChange, Sending};
use rnic_abi::abi::queue::{DatagramParams, OWN_Q_KEY, SendOpcode};
use rnic_abi::roce::{Datagram, grh, packet};
use rnic_abi::types::{Gid, QpId, QpState};

const A: usize = 0;
const B: usize = 1;
pub(super) const KEY: u32 = 0x1234;
const MTU: u32 = 1024;

/// Allows all addresses except one.
struct Rules {
    forbidden: Option<IpAddr>,
}

impl DatagramRules for Rules {
    fn may_send(&self, _: IpAddr, to: IpAddr) -> bool {
        self.forbidden != Some(to)
    }

    fn may_receive(&self, at: IpAddr) -> bool {
        self.forbidden != Some(at)
    }
}

/// Returns two QPs in RTS, on one host or on two.
pub(super) fn pair(apart: bool) -> World {
    let mut w = World::new(if apart { &[1, 1] } else { &[1] });
    for host in [0, usize::from(apart)] {
        let app = w.app(host);
        let cq = w.cq(app, 1024);
        let qp = w.qp(app, cq, cq, QpShape { rq: 512, sq: 512, ..QpShape::default() });
        to_rtr(&mut w, qp);
        to_rts(&mut w, qp);
    }
    w.settle();
    w
}

pub(super) fn both() -> [World; 2] {
    [false, true].map(pair)
}

fn host_of(w: &World, qp: usize) -> usize {
    w.apps[w.qps[qp].app].host
}

/// Returns the ports of a QP.
pub(super) fn port_of(w: &World, qp: usize) -> DatagramPort {
    let host = host_of(w, qp);
    DatagramPort {
        gids: vec![Gid::from(address_of(host)), Gid([host as u8 + 1; 16])],
        mtu: MTU,
        udp: PORT,
        direct: true,
        internal: Vec::new(),
        changes: PortChanges::default(),
    }
}

fn to_rtr(w: &mut World, qp: usize) {
    let port = port_of(w, qp);
    let rules = Box::new(Rules { forbidden: None });
    let config = DatagramConfig { q_key: KEY, port: Arc::new(port), rules };
    w.attach_datagrams(qp, config);
}

fn to_rts(w: &mut World, qp: usize) {
    let sending = Sending { sq_psn: 0xFF_FFFE, timeout: 0, retry_count: 0, rnr_retry: 0, ord: 0 };
    w.change(qp, QpChange::ReadyToSend(sending));
}

/// Returns a request that sends a datagram to a QP, with this Q_Key.
pub(super) fn to(w: &World, wr: Wr, qp: usize, q_key: u32) -> Wr {
    let gid = Gid::from(address_of(host_of(w, qp)));
    addressed(wr, gid, w.qps[qp].id, q_key)
}

fn addressed(mut wr: Wr, gid: Gid, qp: QpId, q_key: u32) -> Wr {
    wr.header.rkey = qp.0;
    wr.header.inv_rkey = q_key;
    wr.header.params = DatagramParams { gid, source: 0 }.to_params(wr.header.params[0]);
    wr
}

fn dropped(w: &World, qp: usize) -> u64 {
    w.qps[qp].shared.counters().dropped
}

#[test]
fn a_datagram_arrives_with_grh_and_source() {
    for mut w in both() {
        let a = w.any_mr(A, 300);
        let b = w.any_mr(B, 400);
        let bytes = a.pattern(1);
        w.recv(B, 1, &[b.sge(0..17), b.sge(17..400)]);
        let wr = to(&w, Wr::send(2, &[a.sge(0..7), a.sge(7..300)]), B, KEY);
        w.post(A, &[wr]);
        assert_eq!(w.completions(A), ["2 Send"]);
        assert_eq!(w.completions(B), [format!("1 Receive 340 from {}", w.qps[A].id)]);
        assert_eq!(b.bytes()[grh::LEN..340], bytes);
        let header: [u8; grh::LEN] = b.bytes()[..grh::LEN].try_into().unwrap();
        let ports = [A, B].map(|qp| Gid::from(address_of(host_of(&w, qp))));
        assert_eq!(grh::parse(&header), Some((ports[0], ports[1])));
        let counters = w.qps[B].shared.counters();
        assert_eq!((counters.bytes_received, counters.receives_completed), (300, 1));
        assert_eq!(w.qps[A].shared.counters().bytes_sent, 300);
    }
}

#[test]
fn immediate_inline_and_empty_datagrams() {
    for mut w in both() {
        let b = w.any_mr(B, 100);
        for wr_id in 1..=3 {
            w.recv(B, wr_id, &[b.all()]);
        }
        let mut immediate = Wr::new(SendOpcode::SendImmediate, 4, &[]);
        immediate.header.params[0] = 0x0102_0304 << 32;
        let sends = [immediate, Wr::send(5, &[]).inline(b"hello"), Wr::send(6, &[])];
        let sends = sends.map(|wr| to(&w, wr, B, KEY));
        w.post(A, &sends);
        assert_eq!(w.completions(A), ["4 Send", "5 Send", "6 Send"]);
        let from = w.qps[A].id;
        let came = [
            format!("1 Receive 40 immediate 0x102030400000000 from {from}"),
            format!("2 Receive 45 from {from}"),
            format!("3 Receive 40 from {from}"),
        ];
        assert_eq!(w.completions(B), came);
    }
}

#[test]
fn dropped_datagrams_are_counted() {
    for mut w in both() {
        let a = w.any_mr(A, 300);
        let b = w.any_mr(B, 300);
        let whole = Wr::send(1, &[a.all()]);
        let sends = [
            to(&w, whole.clone(), B, KEY),
            to(&w, whole.clone(), B, KEY + 1),
            addressed(whole.clone(), Gid::from(address_of(host_of(&w, B))), QpId(0xABCDEF), KEY),
            addressed(whole.clone(), Gid::from(address_of(7)), w.qps[B].id, KEY),
        ];
        w.post(A, &sends);
        assert_eq!(w.completions(A), ["1 Send"; 4]);
        assert_eq!(dropped(&w, B), 2, "without a receive, and with another key");
        // A datagram that is too long does not consume the receive.
        w.recv(B, 2, &[b.all()]);
        let sends = [to(&w, whole, B, KEY), to(&w, Wr::send(3, &[a.sge(0..260)]), B, KEY)];
        w.post(A, &sends);
        assert_eq!(w.completions(B), [format!("2 Receive 300 from {}", w.qps[A].id)]);
        assert_eq!(dropped(&w, B), 3);
        let said: Vec<_> = w.diagnoses(B).into_iter().map(|record| record.text).collect();
        assert_eq!(said.len(), 3, "{said:#?}");
        for (text, word) in said.iter().zip(["no receive", "its Q_Key", "340 bytes"]) {
            assert!(text.contains(word), "{text}");
        }
        // The owners of the QPs get an event for each record, and the sender one for the missing QP
        // of its own daemon.
        let events = w.events(B);
        assert_eq!(events.len(), 3, "{events:#?}");
        let mut texts = said.iter().zip(&events);
        assert!(texts.all(|(text, event)| event.contains(text)), "{events:#?}");
        let events = w.events(A);
        let is_local = host_of(&w, A) == host_of(&w, B);
        assert_eq!(events.len(), usize::from(is_local), "{events:#?}");
        assert!(events.iter().all(|event| event.contains("no UD queue pair 11259375")));
        assert_eq!(w.diagnoses(A).len(), events.len());
        assert_eq!((w.state(A), w.state(B)), (QpState::Rts, QpState::Rts));
    }
}

#[test]
fn a_high_bit_selects_the_senders_q_key() {
    for mut w in both() {
        w.change(A, QpChange::QKey(77));
        let b = w.any_mr(B, 40);
        w.recv(B, 1, &[b.all()]);
        let sends = [2, 3].map(|n| to(&w, Wr::send(n, &[]), B, OWN_Q_KEY | KEY));
        w.post(A, &sends[..1]);
        assert!(w.completions(B).is_empty());
        w.change(B, QpChange::QKey(77));
        w.post(A, &sends[1..]);
        assert_eq!(w.completions(B).len(), 1);
    }
}

#[test]
fn an_invalid_datagram_request_is_explained() {
    type Spoil = fn(&mut Wr);
    let wrong: [(Spoil, &str, &str); 6] = [
        (|wr| wr.header.params[3] = 2, "LocalQpOperation", "GID index 2"),
        (|wr| wr.header.params[3] = 1 << 16, "LocalQpOperation", "GID index 65536"),
        (|wr| wr.header.remote_addr = 1, "LocalQpOperation", "parameters"),
        (
            |wr| wr.header.opcode = SendOpcode::SendInvalidate as u8,
            "LocalQpOperation",
            "only Sends",
        ),
        (|wr| wr.sges[0].length = MTU + 1, "LocalLength", "1025 bytes"),
        (|wr| wr.sges[0].lkey ^= 0x100, "LocalProtection", ""),
    ];
    for (spoil, status, word) in wrong {
        let mut w = pair(false);
        let a = w.any_mr(A, 2000);
        let mut wr = to(&w, Wr::send(1, &[a.sge(0..100)]), B, KEY);
        spoil(&mut wr);
        let next = to(&w, Wr::send(2, &[]), B, KEY);
        w.post(A, &[wr, next]);
        assert_eq!(w.completions(A), [format!("1 Send {status}"), "2 Send WrFlush".to_owned()]);
        assert_eq!((w.state(A), w.state(B)), (QpState::Sqe, QpState::Rts));
        assert!(w.diagnoses(A)[0].text.contains(word), "{:?}", w.diagnoses(A)[0].text);
    }
}

/// In state SQE (IBTA specification, volume 1, section 10.3.1.6) the application can return the QP
/// to RTS at once, and receiving continues.
#[test]
fn a_failed_datagram_stops_sending_alone() {
    for mut w in both() {
        let a = w.any_mr(A, 64);
        let b = w.any_mr(B, 64);
        let send = |w: &World, n, qp| to(w, Wr::send(n, &[]), qp, KEY);
        let mut wrong = send(&w, 1, B);
        wrong.header.params[3] = 2;
        let later = [send(&w, 2, B), send(&w, 3, B)];
        w.post(A, &[&[wrong.clone()], &later[..]].concat());
        let done = w.completions(A);
        assert_eq!(done, ["1 Send LocalQpOperation", "2 Send WrFlush", "3 Send WrFlush"]);
        let many: Vec<Wr> = (10..200).map(|n| send(&w, n, B)).collect();
        w.post(A, &many);
        let flushed = w.completions(A);
        assert!(flushed.len() == 190 && flushed.iter().all(|one| one.ends_with("WrFlush")));
        w.recv(A, 4, &[a.all()]);
        let back = send(&w, 5, A);
        w.post(B, &[back]);
        assert_eq!((w.completions(A).len(), w.completions(B)), (1, vec!["5 Send".to_owned()]));
        assert_eq!(w.state(A), QpState::Sqe);
        w.change(A, QpChange::QKey(KEY));
        assert_eq!(w.state(A), QpState::Sqe);
        to_rts(&mut w, A);
        assert_eq!(w.state(A), QpState::Rts);
        w.recv(B, 6, &[b.all()]);
        let next = send(&w, 7, B);
        w.post(A, &[next]);
        assert_eq!((w.completions(A), w.completions(B).len()), (vec!["7 Send".to_owned()], 1));
        // The transition to Error flushes posted receives as well.
        w.recv(A, 8, &[]);
        w.post(A, &[wrong]);
        assert_eq!(w.completions(A).len(), 1);
        w.abort(A);
        w.settle();
        assert_eq!(
            (w.completions(A), w.state(A)),
            (vec!["8 Receive WrFlush".to_owned()], QpState::Error)
        );
    }
}

#[test]
fn a_datagram_goes_to_one_host() {
    for to in ["224.0.0.1", "255.255.255.255", "0.0.0.0", "ff02::1", "::"] {
        let mut w = pair(true);
        w.network.holds = true;
        let gid = Gid::from(to.parse::<IpAddr>().unwrap());
        w.post(A, &[addressed(Wr::send(1, &[]), gid, QpId(2), KEY)]);
        assert_eq!(w.completions(A), ["1 Send LocalQpOperation"], "{to}");
        assert!(w.network.packets.is_empty());
    }
}

#[test]
fn rules_apply_to_each_datagram() {
    for mut w in both() {
        let b = w.any_mr(B, 40);
        for wr_id in 1..=3 {
            w.recv(B, wr_id, &[b.all()]);
        }
        let sends = [4, 5, 6].map(|n| to(&w, Wr::send(n, &[]), B, KEY));
        w.post(A, &sends[..1]);
        assert_eq!(w.completions(B).len(), 1);
        let of_b = address_of(host_of(&w, B));
        let forbid = |w: &mut World, qp: usize, forbidden| {
            let rules = Box::new(Rules { forbidden });
            w.command(qp, |id| EngineCommand::SetDatagramRules(id, rules));
        };
        forbid(&mut w, B, Some(of_b));
        w.post(A, &sends[1..2]);
        assert!(w.completions(B).is_empty());
        assert!(w.diagnosis(B).text.contains("[[listen]]"));
        forbid(&mut w, A, Some(of_b));
        w.post(A, &sends[2..]);
        assert_eq!(w.completions(A).last().unwrap(), "6 Send LocalQpOperation");
        assert!(w.diagnosis(A).text.contains(&of_b.to_string()));
    }
}

#[test]
fn datagrams_by_qp_state() {
    for apart in [false, true] {
        let mut w = World::new(if apart { &[1, 1] } else { &[1] });
        for host in [0, usize::from(apart)] {
            let app = w.app(host);
            let cq = w.cq(app, 16);
            let qp = w.qp(app, cq, cq, QpShape::default());
            to_rtr(&mut w, qp);
        }
        w.settle();
        let b = w.any_mr(B, 40);
        w.recv(B, 1, &[b.all()]);
        w.recv(B, 2, &[b.all()]);
        let sends = [3, 4].map(|n| to(&w, Wr::send(n, &[]), B, KEY));
        w.post(A, &sends[..1]);
        assert_eq!((w.state(A), w.completions(A).len()), (QpState::Rtr, 0));
        to_rts(&mut w, A);
        w.settle();
        assert_eq!(w.completions(A), ["3 Send"]);
        assert_eq!((w.state(B), w.completions(B).len()), (QpState::Rtr, 1));
        w.change(A, QpChange::DrainSendQueue);
        w.settle();
        assert_eq!(w.events(A).len(), 1);
        w.post(A, &sends[1..]);
        assert_eq!((w.state(A), w.completions(A).len()), (QpState::Sqd, 0));
        to_rts(&mut w, A);
        w.settle();
        assert_eq!((w.completions(A).len(), w.completions(B).len()), (1, 1));
    }
}

#[test]
fn copier_memory_keeps_datagrams_in_order() {
    for mut w in both() {
        let shared = w.any_mr(B, 100);
        w.kind = MemoryKind::ThroughCopier;
        let a = w.any_mr(A, 50);
        let b = w.any_mr(B, 100);
        let bytes = a.pattern(9);
        w.answer_copies = false;
        w.recv(B, 1, &[b.all()]);
        w.recv(B, 2, &[shared.all()]);
        let sends =
            [Wr::send(3, &[a.all()]), Wr::send(4, &[]).inline(b"x")].map(|wr| to(&w, wr, B, KEY));
        w.post(A, &sends);
        assert!(w.completions(A).is_empty());
        assert!(w.run_copy_job());
        w.settle();
        assert_eq!(w.completions(A), ["3 Send", "4 Send"]);
        assert!(w.completions(B).is_empty(), "the first is being written");
        assert!(w.run_copy_job());
        w.settle();
        let from = w.qps[A].id;
        let came = [format!("1 Receive 90 from {from}"), format!("2 Receive 41 from {from}")];
        assert_eq!(w.completions(B), came);
        assert_eq!(b.bytes()[40..90], bytes);
    }
}

#[test]
fn an_overloaded_copier_drops_datagrams() {
    let mut w = pair(false);
    w.kind = MemoryKind::ThroughCopier;
    let b = w.any_mr(B, 100);
    w.answer_copies = false;
    for wr_id in 0..300 {
        w.recv(B, wr_id, &[b.all()]);
    }
    let sends: Vec<Wr> = (0..300).map(|wr_id| to(&w, Wr::send(wr_id, &[]), B, KEY)).collect();
    w.post(A, &sends);
    assert_eq!((w.completions(A).len(), dropped(&w, B)), (300, 44));
    while w.run_copy_job() {}
    w.settle();
    assert_eq!(w.completions(B).len(), 256);
    let one = to(&w, Wr::send(0, &[]), B, KEY);
    w.post(A, &[one]);
    assert!(w.run_copy_job());
    w.settle();
    assert_eq!(w.completions(B), [format!("256 Receive 40 from {}", w.qps[A].id)]);
}

#[test]
fn a_datagram_flush_waits_for_the_copier() {
    let mut w = pair(false);
    w.kind = MemoryKind::ThroughCopier;
    let b = w.any_mr(B, 100);
    w.answer_copies = false;
    w.recv(B, 1, &[b.all()]);
    w.recv(B, 2, &[b.all()]);
    let wr = to(&w, Wr::send(3, &[]), B, KEY);
    w.post(A, &[wr]);
    w.abort(B);
    assert!(w.completions(B).is_empty());
    assert!(w.run_copy_job());
    w.settle();
    assert_eq!(w.completions(B)[1..], ["2 Receive WrFlush"]);
}

#[test]
fn a_qp_sends_to_itself() {
    for mut w in both() {
        let a = w.any_mr(A, 50);
        w.recv(A, 1, &[a.all()]);
        let wr = to(&w, Wr::send(2, &[]).inline(b"me"), A, KEY);
        w.post(A, &[wr]);
        assert_eq!(w.completions(A).len(), 2);
        assert_eq!(a.bytes()[40..42], *b"me");
    }
}

/// A link loses, duplicates and reorders packets. Datagrams arrive complete, and the link has
/// dropped every missing datagram.
#[test]
fn a_lossy_link_delivers_whole_datagrams() {
    for seed in 1..=20 {
        let mut w = pair(true);
        w.network.seed = Some(seed);
        w.network.holds = true;
        let a = w.any_mr(A, 64);
        let b = w.any_mr(B, 512 * 48);
        for n in 0..512 {
            w.recv(B, n as u64, &[b.sge(n * 48..n * 48 + 48)]);
        }
        const SENT: u64 = 300;
        for n in 0..SENT {
            a.set(
                &[n.to_be_bytes(), [0; 8], [0; 8], [0; 8], [0; 8], [0; 8], [0; 8], [0; 8]].concat(),
            );
            let wr = to(&w, Wr::send(n, &[a.sge(0..8)]), B, KEY);
            w.post(A, &[wr]);
        }
        assert_eq!(w.completions(A).len() as u64, SENT);
        w.network.holds = false;
        w.settle();
        let came = w.completions(B).len();
        let network = &w.network;
        assert!(network.lost > 0 && network.doubled > 0 && network.overtaken > 0);
        assert_eq!(came, SENT as usize + network.doubled - network.lost);
        let mut times = vec![0; SENT as usize];
        let mut ordered = true;
        let mut last = 0;
        for n in 0..came {
            let data: [u8; 8] = b.bytes()[n * 48 + 40..n * 48 + 48].try_into().unwrap();
            let number = u64::from_be_bytes(data);
            times[number as usize] += 1;
            ordered &= number >= last;
            last = number;
        }
        assert!(!ordered && times.contains(&0), "seed {seed}");
        assert_eq!((w.state(A), w.state(B), dropped(&w, B)), (QpState::Rts, QpState::Rts, 0));
    }
}

/// Returns a packet from an address, as an attacker would forge it.
fn forged(w: &World, from: IpAddr, qp: usize, q_key: u32) -> (SocketAddr, SocketAddr, Vec<u8>) {
    let datagram = Datagram {
        from: Gid::from(from),
        source: QpId(5),
        to: Gid::from(address_of(host_of(w, qp))),
        qp: w.qps[qp].id,
        p_key: 0xFFFF,
        q_key,
        psn: 0,
        immediate: None,
        solicited: true,
    };
    let packet = packet::emit(&datagram, b"forged", PORT, PORT);
    let [from, to] = [datagram.from, datagram.to].map(|gid| SocketAddr::new(gid.address(), PORT));
    (from, to, packet)
}

/// A packet with the host's own address as source is forged, because a host sends no packets to
/// itself.
#[test]
fn a_packet_from_an_own_address_is_dropped() {
    let mut w = pair(true);
    let b = w.any_mr(B, 100);
    w.recv(B, 1, &[b.all()]);
    for (from, comes) in [(address_of(1), false), (address_of(9), true)] {
        let (from, to, packet) = forged(&w, from, B, KEY);
        w.engines[1].handle_datagram(from, to, &packet, w.now);
        w.settle();
        assert_eq!(w.completions(B).len(), usize::from(comes), "{from}");
    }
    assert_eq!(dropped(&w, B), 0);
}

/// The flooded QP's user is charged until its debt is so large that further packets are dropped
/// unread. Other users of the worker get their turns, and later the user gets turns again.
#[test]
fn a_flood_is_charged_to_its_target() {
    let mut w = pair(true);
    let app = w.app_of(1, rnic_abi::types::UserId(4321));
    let cq = w.cq(app, 64);
    let other = w.qp(app, cq, cq, QpShape::default());
    to_rtr(&mut w, other);
    to_rts(&mut w, other);
    let own = w.any_mr(other, 100);
    let (from, to_b, packet) = forged(&w, address_of(9), B, KEY);
    let mut turns = 0;
    for n in 0..5000 {
        w.engines[1].handle_datagram(from, to_b, &packet, w.now);
        if n % 500 == 0 {
            w.recv(other, n, &[own.all()]);
            let wr = to(&w, Wr::send(n, &[]).inline(b"own"), other, KEY);
            w.push(other, &[wr]);
            w.round();
            w.round();
            turns += w.completions(other).len();
        }
    }
    w.settle();
    turns += w.completions(other).len();
    assert_eq!(turns, 20, "ten sent and ten received");
    assert_eq!(dropped(&w, B), 5000, "no receive was posted");
    let b = w.any_mr(B, 100);
    w.recv(B, 1, &[b.all()]);
    w.engines[1].handle_datagram(from, to_b, &packet, w.now);
    w.settle();
    assert_eq!(w.completions(B).len(), 1);
}

/// Incoming packets never cause a reply.
#[test]
fn nothing_answers_a_packet() {
    let mut w = pair(true);
    w.network.holds = true;
    for key in [KEY, KEY + 1] {
        let (from, to, packet) = forged(&w, address_of(9), B, key);
        for len in 0..=packet.len() {
            w.engines[1].handle_datagram(from, to, &packet[..len], w.now);
        }
    }
    w.settle();
    assert!(w.network.packets.is_empty());
}
