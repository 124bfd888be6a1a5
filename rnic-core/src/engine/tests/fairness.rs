//! No user gets more than its share of a worker. Clients and peers try to get more while another
//! user's QPs are measured.

use super::raw::{Raw, ulpdu};
use super::requests::{Mr, Wr};
use super::world::{QpShape, Wiring, World};
use crate::device::Window;
use crate::device::window::BindRequest;
use crate::engine::{Output, Receive, Work};
use crate::rdmap::Opcode;
use rnic_abi::abi::queue::ARM_NEXT;
use rnic_abi::types::{Access, QpState, Stag, Time, UserId, WindowKind};

const MINE: UserId = UserId(1);
const THEIRS: UserId = UserId(2);

/// Runs a round of the only worker, without polling its sockets.
fn round(w: &mut World) {
    begin(w);
    w.carry_out(0);
}

/// Like `round`, but does not carry out the engine's outputs.
fn begin(w: &mut World) {
    let now = w.now;
    w.engines[0].poll_doorbells(now);
    while let Some(work) = w.engines[0].poll_work(now) {
        match work {
            Work::Transmit(qp) => w.transmit(0, qp),
            Work::Receive(qp) => {
                read(w, qp);
            }
            Work::TurnTaken => {}
        }
    }
}

/// Reads a QP's socket as its worker does.
fn read(w: &mut World, qp: rnic_abi::types::QpId) -> Receive {
    let (link, end) = w.link_of(0, qp).expect("the QP has a socket");
    let now = w.now;
    let mut most = 0;
    let inbound = &mut w.links[link].pipes[1 - end];
    let received = w.engines[0].receive(qp, now, |buffers| {
        let mut into: Vec<&mut [u8]> = buffers.iter_mut().map(|b| &mut b[..]).collect();
        most = into.iter().map(|b| b.len()).sum();
        inbound.recv(&mut into, now)
    });
    if received == Receive::Progress {
        w.engines[0].handle_readable(qp);
    }
    received
}

/// Creates two QPs of one session of this user, connected by the direct path.
fn pair_of(w: &mut World, user: UserId, shape: QpShape) -> [usize; 2] {
    let app = w.app_of(0, user);
    let cq = w.cq(app, 1024);
    let ends = [w.qp(app, cq, cq, shape), w.qp(app, cq, cq, shape)];
    w.connect(ends[0], ends[1], Wiring::direct());
    w.settle();
    ends
}

/// Fills a send queue, as a client without pauses does.
fn top_up(w: &mut World, qp: usize, request: &Wr) {
    let free = w.qps[qp].sq.free() as usize;
    w.push(qp, &vec![request.clone(); free]);
    let app = w.qps[qp].app;
    let cq = w.qps[qp].send_cq;
    w.poll_cq(app, cq, usize::MAX);
}

fn completed(w: &World, qp: usize) -> u64 {
    w.qps[qp].shared.counters().sends_completed
}

fn zero_length(to: &Mr) -> Wr {
    Wr::write(1, &[], to, 0)
}

#[test]
fn two_users_share_a_worker_evenly() {
    for len in [0, 8, 5000, 100_000] {
        let mut w = World::new(&[1]);
        let shape = QpShape { sq: 64, rq: 1, ..QpShape::default() };
        let mine = pair_of(&mut w, MINE, shape);
        let theirs: Vec<_> = (0..20).map(|_| pair_of(&mut w, THEIRS, shape)).collect();
        let mut requests = Vec::new();
        for [from, to] in theirs.iter().copied().chain([mine]) {
            let a = w.any_mr(from, len.max(1));
            let b = w.any_mr(to, len.max(1));
            requests.push((from, Wr::write(1, &[a.sge(0..len)], &b, 0)));
        }
        for _ in 0..2000 {
            for (from, request) in &requests {
                top_up(&mut w, *from, request);
            }
            round(&mut w);
        }
        let of_mine = completed(&w, mine[0]);
        let of_theirs: Vec<u64> = theirs.iter().map(|[from, _]| completed(&w, *from)).collect();
        let all = of_mine + of_theirs.iter().sum::<u64>();
        let share = of_mine as f64 / all as f64;
        assert!((0.4..0.6).contains(&share), "{len} bytes: {share}, {of_theirs:?}");
        let least = of_theirs.iter().min().unwrap();
        let most = of_theirs.iter().max().unwrap();
        assert!(least * 2 > *most, "{len} bytes: {of_theirs:?}");
    }
}

#[test]
fn a_flush_takes_turns() {
    let mut w = World::new(&[1]);
    let shape = QpShape { sq: 512, rq: 512, inline: 0, sges: 1, ..QpShape::default() };
    let [dead, _] = pair_of(&mut w, THEIRS, shape);
    let [busy, peer] = pair_of(&mut w, MINE, QpShape::default());
    let to = w.any_mr(peer, 1);
    w.abort(dead);
    w.completions(dead);
    for n in 0..400 {
        w.push(dead, &[Wr::send(n, &[])]);
        w.recv(dead, n, &[]);
    }
    let flushed = |w: &World| completed(w, dead) + w.qps[dead].shared.counters().receives_completed;
    let mut before = flushed(&w);
    let mut rounds = 0;
    while flushed(&w) < 800 {
        w.push(busy, &[zero_length(&to)]);
        round(&mut w);
        rounds += 1;
        // One turn, or two if a round ends late.
        assert!(flushed(&w) - before <= 128, "{} at once", flushed(&w) - before);
        before = flushed(&w);
        assert!(rounds < 100);
        // No other QP waits longer than a round for the flush.
        assert!(completed(&w, busy) + 1 >= rounds, "{} of {rounds}", completed(&w, busy));
        w.completions(busy);
    }
    assert!(rounds >= 6, "{rounds}");
    let order = w.completions(dead);
    assert_eq!(order.len(), 800);
    let sends: Vec<_> = order.iter().filter(|c| c.ends_with("Send WrFlush")).collect();
    assert!(sends.iter().enumerate().all(|(n, c)| c.starts_with(&format!("{n} "))), "in order");
}

#[test]
fn requests_in_flight_are_flushed_in_turns() {
    let mut w = World::new(&[1]);
    let shape = QpShape { sq: 512, rq: 1, inline: 0, sges: 1, ..QpShape::default() };
    let [from, to] = pair_of(&mut w, MINE, shape);
    let sink = w.any_mr(from, 4);
    let source = w.any_mr(to, 4);
    // The first request waits for other workers, and the rest wait for it.
    w.answer_changes = false;
    let window = w.window(from, WindowKind::Type1);
    let region = w.mr(from, 100, Access::LOCAL_WRITE | Access::MW_BIND);
    let reads: Vec<Wr> = (0..4).map(|n| Wr::read(n, sink.all(), &source, 0)).collect();
    w.post(from, &reads);
    w.completions(from);
    w.post(from, &[Wr::bind(0, &bind_to(&window, &region))]);
    w.push(from, &(1..300).map(|n| Wr::send(n, &[])).collect::<Vec<_>>());
    w.abort(from);
    let found = w.completions(from);
    let expected: Vec<String> = std::iter::once("0 BindMw WrFlush".to_owned())
        .chain((1..300).map(|n| format!("{n} Send WrFlush")))
        .collect();
    assert_eq!(found, expected);
    assert!(w.events(from).iter().any(|e| e.starts_with("aborted") || e.contains("disconnected")));
}

fn bind_to(window: &Window, region: &Mr) -> BindRequest {
    super::windows::to(window, region, 0..10, Access::REMOTE_WRITE)
}

#[test]
fn at_most_one_event_is_on_its_way() {
    let mut w = World::new(&[1]);
    let [qp, _] = pair_of(&mut w, MINE, QpShape::default());
    w.abort(qp);
    w.completions(qp);
    let app = w.qps[qp].app;
    let cq = w.qps[qp].send_cq;
    for _ in 0..3 {
        for n in 0..50 {
            w.apps[app].cqs[cq].consumer.arm(ARM_NEXT);
            w.push(qp, &[Wr::send(n, &[])]);
            begin(&mut w);
            w.poll_cq(app, cq, usize::MAX);
        }
        let mut events = 0;
        while let Some(output) = w.engines[0].poll_output() {
            events += usize::from(matches!(output, Output::NotifyCq(_)));
        }
        assert_eq!(events, 1);
    }
}

#[test]
fn requests_without_messages_are_charged() {
    // Windows that are bound repeatedly, and Reads without responses.
    for reads in [false, true] {
        let mut w = World::new(&[1]);
        let shape = QpShape { sq: 512, rq: 1, inline: 0, sges: 1, ..QpShape::default() };
        let [qp, peer] = pair_of(&mut w, THEIRS, shape);
        let [busy, other] = pair_of(&mut w, MINE, QpShape::default());
        let from = w.any_mr(peer, 4);
        let to = w.any_mr(other, 1);
        let many: Vec<Wr> = if reads {
            w.disconnect(peer);
            let sink = w.any_mr(qp, 4);
            (0..512).map(|n| Wr::read(n, sink.all(), &from, 0)).collect()
        } else {
            let region = w.mr(qp, 100, Access::LOCAL_WRITE | Access::MW_BIND);
            let window = w.window(qp, WindowKind::Type2);
            let mut bind = bind_to(&window, &region);
            let next = |bind: &mut BindRequest| {
                let wr = Wr::bind(7, bind);
                let key = bind.new.0.wrapping_add(1) & 0xFF;
                bind.window = bind.new;
                bind.new = Stag(bind.new.0 & !0xFF | key);
                wr
            };
            let mut requests = Vec::new();
            for _ in 0..256 {
                requests.push(next(&mut bind));
                requests.push(Wr::local_invalidate(8, bind.window));
            }
            requests
        };
        w.push(qp, &many);
        let mut before = completed(&w, qp);
        let mut rounds = 0;
        while completed(&w, qp) < 512 {
            w.push(busy, &[zero_length(&to)]);
            round(&mut w);
            rounds += 1;
            assert!(completed(&w, qp) - before <= 64, "{} at once", completed(&w, qp) - before);
            before = completed(&w, qp);
            assert!(completed(&w, busy) + 1 >= rounds && rounds < 100);
            w.completions(busy);
        }
        assert!(rounds >= 8, "{rounds}");
        assert_ne!(w.state(qp), QpState::Error);
    }
}

#[test]
fn stag_changes_are_requested_in_small_numbers() {
    let mut w = World::new(&[1]);
    w.answer_changes = false;
    let mut qps = Vec::new();
    let mut windows = Vec::new();
    for user in [THEIRS, MINE] {
        for _ in 0..6 {
            let [qp, _] = pair_of(&mut w, user, QpShape::default());
            let region = w.mr(qp, 100, Access::LOCAL_WRITE | Access::MW_BIND);
            let window = w.window(qp, WindowKind::Type1);
            w.push(qp, &[Wr::bind(1, &bind_to(&window, &region))]);
            qps.push(qp);
            windows.push((window, region));
        }
    }
    w.settle();
    assert_eq!(w.changes.len(), 8, "four of each user");
    // Destroy a QP that waits for its change, and one whose change has been requested.
    w.destroy(qps[5]);
    w.destroy(qps[0]);
    w.answer_changes = true;
    while !w.changes.is_empty() {
        assert!(w.changes.len() <= 8);
        w.answer();
        w.settle();
    }
    for qp in [1, 2, 3, 4, 6, 7, 8, 9, 10, 11] {
        assert_eq!(w.completions(qps[qp]), ["1 BindMw"], "{qp}");
    }
}

/// Returns FPDUs of 20 bytes without effect.
fn empty_writes(raw: &mut Raw, count: usize) -> Vec<u8> {
    let header = raw.tagged(Opcode::Write, Stag(0), 0, true);
    raw.fpdu(&ulpdu(&header, &[])).repeat(count)
}

/// Creates a QP of this user, and a scripted peer.
fn raw_of(w: &mut World, user: UserId) -> (usize, Raw) {
    let app = w.app_of(0, user);
    let cq = w.cq(app, 128);
    let qp = w.qp(app, cq, cq, QpShape::default());
    let options = Wiring::tcp().with(|o| o.peer_to_peer = false).a;
    let raw = w.connect_raw(qp, true, options, options);
    (qp, raw)
}

#[test]
fn receiving_small_segments_takes_turns() {
    // Few such streams, and more streams than may keep the data that they have read.
    for streams in [1, 12] {
        let mut w = World::new(&[1]);
        let [busy, other] = pair_of(&mut w, MINE, QpShape::default());
        let to = w.any_mr(other, 1);
        let peers: Vec<_> = (0..streams).map(|_| raw_of(&mut w, THEIRS)).collect();
        let mut theirs = Vec::new();
        for (qp, mut raw) in peers {
            let bytes = empty_writes(&mut raw, 5000);
            let now = w.now;
            assert_eq!(w.links[raw.link].send(1, &bytes, now).expect("open link"), bytes.len());
            theirs.push(qp);
        }
        let received = |w: &World, qp: usize| w.qps[qp].shared.counters().segments_received;
        let all = |w: &World| theirs.iter().map(|qp| received(w, *qp)).sum::<u64>();
        for qp in &theirs {
            let id = w.qps[*qp].id;
            w.engines[0].handle_readable(id);
        }
        let mut before = 0;
        let mut rounds = 0;
        while all(&w) < 5000 * streams {
            w.push(busy, &[zero_length(&to)]);
            round(&mut w);
            rounds += 1;
            let now = all(&w);
            assert!(now - before <= 400, "{} at once", now - before);
            before = now;
            assert!(completed(&w, busy) + 1 >= rounds, "{} of {rounds}", completed(&w, busy));
            assert!(rounds < 2000 * streams);
            w.completions(busy);
        }
        assert!(rounds >= 30 * streams, "{rounds}");
        // Each stream had its turns.
        assert!(theirs.iter().all(|qp| received(&w, *qp) == 5000));
        w.settle();
        assert_eq!(w.state(theirs[0]), QpState::Rts);
    }
}

#[test]
fn the_next_turn_places_the_rest_in_order() {
    for pause in [false, true] {
        let mut w = World::new(&[1]);
        let app = w.app_of(0, THEIRS);
        let cq = w.cq(app, 128);
        let rnr_timeout = pause.then_some(std::time::Duration::from_secs(1));
        let qp = w.qp(app, cq, cq, QpShape { rnr_timeout, ..QpShape::default() });
        let options = Wiring::tcp().with(|o| o.peer_to_peer = false).a;
        let mut raw = w.connect_raw(qp, true, options, options);
        let to = w.any_mr(qp, 3000 * 8);
        let mut bytes = Vec::new();
        let mut expected = Vec::new();
        for n in 0..3000u64 {
            let header = raw.tagged(Opcode::Write, to.stag, to.iova + n * 8, true);
            bytes.extend(raw.fpdu(&ulpdu(&header, &n.to_be_bytes())));
            expected.extend_from_slice(&n.to_be_bytes());
            if n % 700 == 600 {
                // At first there is no receive, if the QP may wait for one.
                let header = raw.untagged(Opcode::Send, 0, 1 + n as u32 / 700, 0, true);
                bytes.extend(raw.fpdu(&ulpdu(&header, &[])));
            }
        }
        if !pause {
            (0..4).for_each(|n| w.recv(qp, n, &[]));
        }
        raw.bytes(&mut w, &bytes);
        let mut found = w.completions(qp);
        for n in 0..4 {
            if pause {
                assert_ne!(to.bytes(), expected);
                w.recv(qp, n, &[]);
                w.settle();
                found.extend(w.completions(qp));
            }
        }
        assert_eq!(found, ["0 Receive", "1 Receive", "2 Receive", "3 Receive"]);
        assert!(to.bytes() == expected);
        assert_eq!(w.state(qp), QpState::Rts);
        // Data left at the end of the stream are dropped.
        let now = w.now;
        w.links[raw.link].send(1, &bytes, now).expect("open link");
        w.round();
        w.abort(qp);
        assert_eq!(w.state(qp), QpState::Error);
    }
}

#[test]
fn needless_doorbells_are_charged() {
    let mut w = World::new(&[1]);
    let app = w.app_of(0, THEIRS);
    let cq = w.cq(app, 64);
    let shape = QpShape { sq: 1, rq: 1, inline: 0, sges: 1, ..QpShape::default() };
    let qps: Vec<usize> = (0..300).map(|_| w.qp(app, cq, cq, shape)).collect();
    for pair in qps.chunks(2) {
        w.connect(pair[0], pair[1], Wiring::direct());
    }
    let [busy, other] = pair_of(&mut w, MINE, QpShape::default());
    let to = w.any_mr(other, 1);
    w.settle();
    for _ in 0..50 {
        for qp in &qps {
            let index = w.qps[*qp].doorbell;
            w.ring(app, 0, index);
        }
        let done = completed(&w, busy);
        let turns = w.engines[0].turns();
        w.push(busy, &[zero_length(&to)]);
        round(&mut w);
        round(&mut w);
        assert_eq!(completed(&w, busy), done + 1);
        let turns = w.engines[0].turns() - turns;
        assert!((8..200).contains(&turns), "{turns} turns in two rounds");
        w.completions(busy);
    }
    // The engine becomes idle.
    w.settle();
}

#[test]
fn qps_of_a_dead_cq_end_in_steps() {
    let mut w = World::new(&[1]);
    let app = w.app_of(0, THEIRS);
    let tiny = w.cq(app, 1);
    let cq = w.cq(app, 1024);
    let shape = QpShape { sq: 2, rq: 2, inline: 0, sges: 1, ..QpShape::default() };
    let mut qps = Vec::new();
    for _ in 0..60 {
        let ends = [w.qp(app, cq, cq, shape), w.qp(app, cq, tiny, shape)];
        w.connect(ends[0], ends[1], Wiring::direct());
        qps.push(ends);
    }
    w.settle();
    w.recv(qps[0][1], 1, &[]);
    w.recv(qps[0][1], 2, &[]);
    w.push(qps[0][0], &[Wr::send(1, &[]), Wr::send(2, &[])]);
    let dead = |w: &World| qps.iter().filter(|[_, b]| w.state(*b) == QpState::Error).count();
    let mut before = 0;
    let mut rounds = 0;
    while dead(&w) < 60 {
        round(&mut w);
        assert!(dead(&w) - before <= 10, "{} at once", dead(&w) - before);
        before = dead(&w);
        rounds += 1;
        assert!(rounds < 100);
    }
    assert!(rounds >= 6, "{rounds}");
    w.settle();
}

#[test]
fn qps_of_a_session_end_in_steps() {
    let mut w = World::new(&[1]);
    let app = w.app_of(0, THEIRS);
    let cq = w.cq(app, 64);
    let shape = QpShape { sq: 1, rq: 1, inline: 0, sges: 1, ..QpShape::default() };
    let qps: Vec<usize> = (0..100).map(|_| w.qp(app, cq, cq, shape)).collect();
    for pair in qps.chunks(2) {
        w.connect(pair[0], pair[1], Wiring::direct());
    }
    let [busy, other] = pair_of(&mut w, MINE, QpShape::default());
    let to = w.any_mr(other, 1);
    let theirs = w.any_mr(qps[0], 1);
    w.settle();
    let session = w.apps[app].session;
    let now = w.now;
    w.engines[0].close_session(session, now);
    // Its memory becomes inaccessible first.
    assert!(w.engines[0].state.stags.copier_of(theirs.stag).is_none());
    let mut before = w.engines[0].qp_count();
    let mut ended = None;
    let mut steps = 0;
    while ended.is_none() {
        assert!(w.engines[0].is_ending() && !w.engines[0].prepare_sleep());
        ended = w.engines[0].poll_session_end(now);
        assert!(before - w.engines[0].qp_count() <= 8);
        before = w.engines[0].qp_count();
        steps += 1;
        // Other users get turns, and the user's QPs get none.
        let bell = w.qps[qps[99]].doorbell;
        w.ring(app, 0, bell);
        w.push(busy, &[zero_length(&to)]);
        round(&mut w);
        assert_eq!(completed(&w, busy), steps);
        w.completions(busy);
    }
    assert_eq!((ended, before), (Some(session), 2));
    assert!(steps >= 12 && !w.engines[0].is_ending());
    assert_eq!(w.engines[0].poll_timeout(), None);
}

#[test]
fn many_deadlines_are_handled_in_steps() {
    let mut w = World::new(&[1]);
    let app = w.app_of(0, THEIRS);
    let cq = w.cq(app, 64);
    let shape = QpShape { sq: 1, rq: 1, inline: 0, sges: 1, ..QpShape::default() };
    let options = Wiring::tcp().a;
    let qps: Vec<usize> = (0..50).map(|_| w.qp(app, cq, cq, shape)).collect();
    for qp in &qps {
        w.connect_raw(*qp, false, options, options);
    }
    let late = w.next_timeout().expect("each waits for its first FPDU").0 + 1_000_000_000;
    let dead = |w: &World| qps.iter().filter(|qp| w.state(**qp) == QpState::Error).count();
    for expected in [16, 32, 48, 50] {
        assert!(w.next_timeout().is_some_and(|at| at < Time(late)));
        w.engines[0].handle_timeout(Time(late));
        assert_eq!(dead(&w), expected);
        w.carry_out(0);
    }
    assert_eq!(w.next_timeout(), None);
}
