//! RFC 5040 section 8.1.1, RFC 5041 sections 8.1, 8.2 and 8.3.1: obligations of the RNIC.

use std::collections::{BTreeSet, HashSet};

use rnic_abi::abi::control::{QpRequest, Refusal, RequestBody};
use rnic_client::{
    AcceptOptions, Access, Completion, CompletionStatus, Error, Event, QpOptions, RecvRequest,
    RemoteAddr, Scope, SendRequest, Stag,
};
use rnic_tests::raw::{Raw, qp_request};
use rnic_tests::wire::{self, CRC, fpdu, untagged};
use rnic_tests::{Client, DEADLINE, Daemon, PATHS, READ_WRITE, engine};

use crate::pair::*;

/// Terminate codes of a Write and a Read on a stream that may not use the STag.
const FOREIGN: [[u8; 3]; 2] = [[1, 1, 2], [0, 1, 3]];

//= RDMAP-8.1.1-1
//= DDP-8.2-1
//= DDP-8.2-4
//= DDP-8.3.1-1
#[test]
fn rdmap_8_1_1_1_other_domains_have_no_access() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let pair = Pair::new(&daemon);
        let other_pd = pair.holder.context.open_pd(None).unwrap();
        let region = page_in(&pair.holder, &other_pd, READ_WRITE, Scope::Pd);
        let at = region.remote().at(0);
        for (n, code) in FOREIGN.into_iter().enumerate() {
            // Same session, other domain.
            let ends = pair.connected();
            let outcome = [Pair::write, Pair::read][n](&pair, &ends, at, 8);
            assert_eq!(outcome, Outcome::Terminated(code), "{path}");
        }
        assert!(is_untouched(&region), "{path}");
        // A stream of the right domain reaches it.
        let ends = (other_pd.create_qp(&pair.holder.options()).unwrap(), pair.visitor.qp());
        pair.holder.join(&ends.1, &ends.0);
        assert_eq!(pair.write(&ends, at, 8), Outcome::Done, "{path}");
        assert_eq!(bytes(&region, 0, 8), [MARK; 8], "{path}");
    }
}

//= RDMAP-8.1.1-2
//= DDP-8.2-2
//= DDP-8.2-4
//= DDP-8.3-3
//= DDP-8.3.1-2
#[test]
fn rdmap_8_1_1_2_stream_scope_is_enforced() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let pair = Pair::new(&daemon);
        let chosen = pair.connected();
        let scope = Scope::Qp(chosen.0.id());
        let region = page_in(&pair.holder, &pair.holder.pd, READ_WRITE, scope);
        let at = region.remote().at(0);
        for (n, code) in FOREIGN.into_iter().enumerate() {
            let other = pair.connected();
            let outcome = [Pair::write, Pair::read][n](&pair, &other, at, 8);
            assert_eq!(outcome, Outcome::Terminated(code), "{path}");
        }
        assert!(is_untouched(&region), "{path}");
        assert_eq!(pair.write(&chosen, at, 8), Outcome::Done, "{path}");
        assert_eq!(bytes(&region, 0, 8), [MARK; 8], "{path}");
    }
}

//= RDMAP-8.1.1-3
//= DDP-8.1-1
//= DDP-8.3.1-3
#[test]
fn rdmap_8_1_1_3_bounds_are_exact_to_the_byte() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let pair = Pair::new(&daemon);
        // The middle of a shared buffer of which every byte is checked.
        let buffer = pair.holder.context.create_shared_buffer(LEN as u64).unwrap();
        let all = pair.holder.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
        let middle = pair.holder.pd.reg_mr(&buffer, 1000..1100, READ_WRITE).unwrap();
        let base = middle.remote().at(0);
        let at = |from: i64| RemoteAddr { addr: base.addr.wrapping_add_signed(from), ..base };
        let inside = [(0, 1), (0, 100), (99, 1), (50, 50), (100, 0)];
        let outside = [(-1, 1), (-1, 2), (0, 101), (99, 2), (100, 1), (1, 100), (-1, 102)];
        for (n, bounds) in [[1, 1, 1], [0, 1, 1]].into_iter().enumerate() {
            let reach = [Pair::write, Pair::read][n];
            let ends = pair.connected();
            for (from, len) in inside {
                all.fill(0, LEN, UNTOUCHED).unwrap();
                assert_eq!(reach(&pair, &ends, at(from), len), Outcome::Done, "{path} {from}");
                let found = bytes(&all, 0, LEN);
                let changed = (0..LEN).filter(|i| found[*i] != UNTOUCHED).collect::<BTreeSet<_>>();
                let from = 1000 + from as usize;
                let written = if n == 0 { from..from + len as usize } else { 0..0 };
                assert_eq!(changed, written.collect(), "{path} {len}");
            }
            for (from, len) in outside {
                all.fill(0, LEN, UNTOUCHED).unwrap();
                let ends = pair.connected();
                let outcome = reach(&pair, &ends, at(from), len);
                assert_eq!(outcome, Outcome::Terminated(bounds), "{path} {from} {len}");
                assert!(bytes(&all, 0, LEN).iter().all(|o| *o == UNTOUCHED), "{path} {from}");
            }
        }
    }
}

//= RDMAP-8.1.1-4
//= DDP-8.3-1
//= DDP-8.3-2
//= DDP-8.3.1-4
#[test]
fn rdmap_8_1_1_4_stags_are_granted_and_revoked() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let pair = Pair::new(&daemon);
        let ends = pair.connected();
        let region = page(&pair.holder, READ_WRITE);
        let at = region.remote().at(16);
        assert_eq!(pair.write(&ends, at, 16), Outcome::Done, "{path}");
        region.deregister().unwrap();
        let outcome = pair.write(&ends, at, 16);
        assert_eq!(outcome, Outcome::Terminated([1, 1, 0]), "{path}");
        // The same by work request.
        let region = page(&pair.holder, READ_WRITE);
        let ends = pair.connected();
        assert_eq!(pair.write(&ends, region.remote().at(0), 16), Outcome::Done, "{path}");
        let invalidate = SendRequest::local_invalidate(9, region.lkey()).signaled();
        ends.0.post_send(&[invalidate]).unwrap();
        assert_eq!(pair.holder.completion().ok().unwrap().wr_id, 9, "{path}");
        let outcome = pair.read(&ends, region.remote().at(0), 16);
        assert_eq!(outcome, Outcome::Terminated([0, 1, 0]), "{path}");
    }
}

//= RDMAP-8.1.1-5
//= DDP-8.3.1-5
#[test]
fn rdmap_8_1_1_5_access_rights_are_independent() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let pair = Pair::new(&daemon);
        for write in [false, true] {
            for read in [false, true] {
                let mut access = Access::LOCAL_WRITE;
                access.set(Access::REMOTE_WRITE, write);
                access.set(Access::REMOTE_READ, read);
                let region = page(&pair.holder, access);
                let at = region.remote().at(0);
                let expected = |granted, code| {
                    if granted { Outcome::Done } else { Outcome::Terminated(code) }
                };
                let outcome = pair.read(&pair.connected(), at, 8);
                assert_eq!(outcome, expected(read, [0, 1, 2]), "{path} {access:?}");
                if read {
                    assert_eq!(pair.read_bytes(8), [UNTOUCHED; 8], "{path}");
                }
                let outcome = pair.write(&pair.connected(), at, 8);
                // DDP has no code for a missing right.
                assert_eq!(outcome, expected(write, [1, 1, 0]), "{path} {access:?}");
                assert_eq!(is_untouched(&region), !write, "{path} {access:?}");
            }
        }
    }
}

//= RDMAP-8.1.1-6
//= DDP-8.3.1-6
#[test]
fn rdmap_8_1_1_6_no_write_after_deregistration() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let pair = Pair::new(&daemon);
        let buffer = pair.holder.context.create_shared_buffer(1 << 20).unwrap();
        let view = pair.holder.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
        let big = pair.visitor.context.create_shared_buffer(1 << 20).unwrap();
        let source =
            pair.visitor.pd.reg_mr(&big, .., Access::LOCAL_WRITE | Access::REMOTE_READ).unwrap();
        source.fill(0, 1 << 20, MARK).unwrap();
        for by_read in [false, true] {
            for round in 0..20 {
                let region = pair.holder.pd.reg_mr(&buffer, .., READ_WRITE).unwrap();
                view.fill(0, 1 << 20, UNTOUCHED).unwrap();
                let ends = pair.connected();
                let sges = [source.sge(0, 1 << 20)];
                // The bytes come from the visitor's Write, or from the holder's own Read into the
                // region.
                if by_read {
                    let sink = region.sge(0, 1 << 20);
                    let read = SendRequest::read(1, sink, source.remote().at(0)).signaled();
                    ends.0.post_send(&[read; 16]).unwrap();
                } else {
                    let write = SendRequest::write(1, &sges, region.remote().at(0)).signaled();
                    ends.1.post_send(&[write; 16]).unwrap();
                }
                let began = std::time::Instant::now();
                let at = (round * 50_000) & !7;
                while view.load_u64(at).unwrap() == u64::from_ne_bytes([UNTOUCHED; 8]) {
                    assert!(began.elapsed() < DEADLINE, "nothing was placed");
                    std::thread::yield_now();
                }
                region.deregister().unwrap();
                view.fill(0, 1 << 20, 0x22).unwrap();
                let asker = if by_read { &pair.holder } else { &pair.visitor };
                for _ in 0..16 {
                    asker.completion();
                }
                let late = bytes(&view, 0, 1 << 20).iter().filter(|o| **o != 0x22).count();
                assert_eq!(late, 0, "{path} by_read={by_read} round {round}");
                pair.holder.drain();
                pair.visitor.drain();
            }
        }
    }
}

//= RDMAP-8.1.1-7
#[test]
fn rdmap_8_1_1_7_invalidate_needs_qp_scope() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let pair = Pair::new(&daemon);
        let ends = pair.connected();
        let shared = page(&pair.holder, READ_WRITE);
        let own = page_in(&pair.holder, &pair.holder.pd, READ_WRITE, Scope::Qp(ends.0.id()));
        let invalidate = |ends: &(rnic_client::Qp, rnic_client::Qp), stag| {
            ends.0.post_recv(&[RecvRequest::new(5, &[])]).unwrap();
            ends.1.post_send(&[SendRequest::send_invalidate(6, &[], stag)]).unwrap();
            pair.holder.completion()
        };
        let done = invalidate(&ends, own.rkey()).ok().unwrap();
        assert_eq!(done.invalidated, Some(own.rkey()), "{path}");
        let outcome = pair.write(&ends, own.remote().at(0), 8);
        assert_eq!(outcome, Outcome::Terminated([1, 1, 0]), "{path}");
        assert!(is_untouched(&own), "{path}");
        let ends = pair.connected();
        let refused = invalidate(&ends, shared.rkey());
        assert_eq!(refused.status, CompletionStatus::RemoteInvalidRequest, "{path}");
        assert_eq!(terminated(&ends.0), [0, 2, 9], "{path}");
        // Other streams can still use the shared region.
        pair.visitor.drain();
        let outcome = pair.write(&pair.connected(), shared.remote().at(0), 8);
        assert_eq!(outcome, Outcome::Done, "{path}");
    }
}

//= RDMAP-8.1.1-8
//= RDMAP-8.1.1-8a
//= RDMAP-8.1-0
#[test]
fn rdmap_8_1_1_8_stags_are_random_and_sparse() {
    const COUNT: usize = 1000;
    let issue = |daemon: &Daemon| -> Vec<u32> {
        let side = Client::new(daemon);
        let buffer = side.context.create_shared_buffer(4096).unwrap();
        let regions: Vec<_> =
            (0..COUNT).map(|_| side.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap()).collect();
        regions.iter().map(|r| r.rkey().0).collect()
    };
    let first = Daemon::start(&engine(2, "direct"));
    let second = Daemon::start(&engine(2, "direct"));
    let a = issue(&first);
    let again = issue(&first);
    let b = issue(&second);
    let all: HashSet<u32> = a.iter().chain(&again).copied().collect();
    assert_eq!(all.len(), 2 * COUNT, "freed STags are reused at once");
    assert!(!all.contains(&0) && !all.contains(&u32::MAX));
    // Another daemon issues other STags, in another order.
    assert!(a.iter().zip(&b).filter(|(a, b)| a == b).count() < 3);
    for list in [&a, &b] {
        for sixteenth in 0..16 {
            let n = list.iter().filter(|s| **s >> 28 == sixteenth).count();
            assert!((20..130).contains(&n), "{n} of {COUNT} begin with {sixteenth:x}");
        }
        let steps: HashSet<u32> = list.windows(2).map(|w| w[1].wrapping_sub(w[0])).collect();
        assert!(steps.len() > COUNT - 10, "a step repeats");
        let keys: HashSet<u8> = list.iter().map(|s| *s as u8).collect();
        assert!(keys.len() > 200, "only {} different keys", keys.len());
    }
}

/// However often a session registers and deregisters, the STags it has seen do not predict another
/// session's STags.
//= RDMAP-8.1.1-8
#[test]
fn rdmap_8_1_1_8_seen_stags_predict_no_others() {
    const SEEN: usize = 6000;
    const NEXT: usize = 20;
    let daemon = Daemon::start(&engine(2, "direct"));
    let attacker = Client::new(&daemon);
    let victim = Client::new(&daemon);
    let [own, buffer] = [&attacker, &victim].map(|s| s.context.create_shared_buffer(4096).unwrap());
    let mut seen = Vec::new();
    // First half of the regions together, and then one by one.
    for at_once in [SEEN / 2, 1] {
        for _ in 0..SEEN / 2 / at_once {
            let regions: Vec<_> = (0..at_once)
                .map(|_| attacker.pd.reg_mr(&own, .., Access::LOCAL_WRITE).unwrap())
                .collect();
            for region in regions {
                seen.push(region.rkey().0);
                region.deregister().unwrap();
            }
        }
        let regions: Vec<_> = (0..NEXT)
            .map(|_| victim.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap())
            .collect();
        let next: Vec<u32> = regions.iter().map(|r| r.rkey().0).collect();
        // Indices seen before, with any key, freed first, last or in between.
        let indices: HashSet<u32> = seen.iter().map(|stag| stag >> 8).collect();
        assert!(next.iter().all(|stag| !indices.contains(&(stag >> 8))), "an index is reused");
        // Guesses that continue from the last STags by a step of the index, the key, or both.
        let [.., before, last] = seen[..] else { panic!("none seen") };
        let step = last.wrapping_sub(before);
        let guesses: HashSet<u32> = (1..=NEXT as u32)
            .flat_map(|n| [n, n << 8, n << 8 | n, n.wrapping_mul(step)])
            .map(|step| last.wrapping_add(step))
            .collect();
        assert!(next.iter().all(|stag| !guesses.contains(stag)), "predictable from {last:#x}");
        regions.into_iter().for_each(|region| region.deregister().unwrap());
    }
}

//= RDMAP-8.1.1-9
#[test]
fn rdmap_8_1_1_9_foreign_cqs_are_refused() {
    let daemon = Daemon::start(&engine(2, "direct"));
    let owner = Client::new(&daemon);
    let mut other = Raw::open(daemon.socket());
    let pd = other.pd();
    let own = other.cq(16);
    let foreign = owner.cq.id();
    for (send_cq, recv_cq) in [(foreign, own), (own, foreign), (foreign, foreign)] {
        let request = QpRequest { pd, send_cq, recv_cq, ..qp_request(pd, own) };
        let answer = other.call(RequestBody::CreateQp(request));
        let Err(Refusal::NoSuchObject { kind, handle }) = answer else { panic!("{answer:?}") };
        assert_eq!((kind.as_str(), handle), ("CQ", foreign.0));
    }
    let destroy = RequestBody::DestroyCq { cq: foreign };
    assert!(matches!(other.call(destroy), Err(Refusal::NoSuchObject { .. })));
}

//= RDMAP-8.1.1-10
#[test]
fn rdmap_8_1_1_10_full_cq_spares_other_streams() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let pair = Pair::new(&daemon);
        let small = pair.holder.context.create_cq(4, None).unwrap();
        let victim = pair.holder.pd.create_qp(&QpOptions::new(&small)).unwrap();
        let flood = pair.visitor.qp();
        pair.holder.join(&flood, &victim);
        // A QP of the same session and domain, with another CQ.
        let spared = pair.connected();
        let region = page(&pair.holder, READ_WRITE);
        victim.post_recv(&[RecvRequest::new(1, &[]); 16]).unwrap();
        flood.post_send(&[SendRequest::send_inline(1, b""); 16]).unwrap();
        victim.wait_disconnected(Some(DEADLINE)).unwrap();
        let cq = loop {
            match pair.holder.context.next_event(Some(DEADLINE)).unwrap() {
                Some(Event::CqError { cq, .. }) => break cq,
                Some(_) => {}
                None => panic!("{path}: no CQ error event"),
            }
        };
        assert_eq!(cq, small.id(), "{path}");
        flood.wait_disconnected(Some(DEADLINE)).unwrap();
        pair.visitor.drain();
        for _ in 0..10 {
            let outcome = pair.write(&spared, region.remote().at(0), 64);
            assert_eq!(outcome, Outcome::Done, "{path}");
        }
    }
}

//= RDMAP-8.1.1-11
#[test]
fn rdmap_8_1_1_11_reads_outstanding_are_capped() {
    let config = "[engine]\nloopback = \"tcp\"\n[limits]\nird = 4\nord = 2\n";
    let daemon = Daemon::start(config);
    let pair = Pair::new(&daemon);
    let (holder, visitor) = pair.connected();
    let row = holder.query().unwrap();
    let other = visitor.query().unwrap();
    assert!(row.ird <= 4 && row.ord <= 2 && other.ird <= 4 && other.ord <= 2);
    // Further Reads wait, and all are answered.
    let region = page(&pair.holder, READ_WRITE);
    let sink = page(&pair.visitor, Access::LOCAL_WRITE);
    let read = SendRequest::read(1, sink.sge(0, 64), region.remote().at(0)).signaled();
    visitor.post_send(&[read; 32]).unwrap();
    for _ in 0..32 {
        pair.visitor.completion().ok().unwrap();
    }
    // A peer that sends one Read more than granted is terminated. It sends all of them at once.
    let listener = pair.holder.context.listen("127.0.0.1:0", 1).unwrap();
    let mut peer = wire::dial(listener.local_addr());
    wire::send_bytes(&mut peer, &wire::request(CRC, 1, b""));
    let request = listener.accept_request(Some(DEADLINE)).unwrap();
    let qp = pair.holder.qp();
    request.start_accept(&qp, &AcceptOptions { ird: Some(2), ..Default::default() }).unwrap();
    wire::reply(&mut peer);
    let big = pair.holder.context.create_shared_buffer(1 << 20).unwrap();
    let big = pair.holder.pd.reg_mr(&big, .., READ_WRITE).unwrap();
    let requests: Vec<u8> = (1..=3)
        .flat_map(|msn| {
            let mut header = 1u32.to_be_bytes().to_vec();
            header.extend(0u64.to_be_bytes());
            header.extend((1u32 << 20).to_be_bytes());
            header.extend(big.rkey().0.to_be_bytes());
            header.extend(big.iova().to_be_bytes());
            fpdu(&untagged(1, 1, msn, &header))
        })
        .collect();
    wire::send_bytes(&mut peer, &requests);
    // The peer does not read from its socket yet, so the first response cannot be complete.
    assert_eq!(terminated(&qp), [1, 2, 2]);
}

/// Returns the executable ranges of the daemon's memory.
fn executable(daemon: &Daemon) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", daemon.pid())).unwrap();
    let executable = |line: &&str| line.split_whitespace().nth(1).is_some_and(|r| r.contains('x'));
    maps.lines().filter(executable).map(str::to_owned).collect()
}

//= RDMAP-8.1.1-12
//= DDP-8.3.1-7
#[test]
fn rdmap_8_1_1_12_no_remote_code_is_loaded() {
    let daemon = Daemon::start(&engine(2, "tcp"));
    daemon.status();
    let before = executable(&daemon);
    assert!(!before.is_empty());
    let pair = Pair::new(&daemon);
    let ends = pair.connected();
    let region = page(&pair.holder, READ_WRITE);
    assert_eq!(pair.write(&ends, region.remote().at(0), 64), Outcome::Done);
    let mut stranger = Raw::open(daemon.socket());
    assert!(stranger.try_call(RequestBody::Status, &[]).is_some());
    stranger.send(&[0x90; 64], &[]);
    // The executable ranges are those from before the first request, and none is writable.
    assert_eq!(executable(&daemon), before);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", daemon.pid())).unwrap();
    let both = |line: &str| {
        let rights = line.split_whitespace().nth(1).unwrap_or_default();
        rights.contains('w') && rights.contains('x')
    };
    assert_eq!(maps.lines().find(|line| both(line)), None);
}

//= DDP-8.3-5
//= DDP-8.2-1
#[test]
fn ddp_8_3_5_refused_access_is_reported() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let pair = Pair::new(&daemon);
        let ends = pair.connected();
        let nothing = RemoteAddr { addr: 0x1000, rkey: Stag(0x7777_7700) };
        assert_eq!(pair.write(&ends, nothing, 8), Outcome::Terminated([1, 1, 0]), "{path}");
        let row = ends.0.query().unwrap();
        assert!(row.terminate.is_some(), "{path}: {row:?}");
        let error = ends.0.post_send(&[SendRequest::send_inline(1, b"")]).map(|()| {
            let mut one = [Completion::default()];
            pair.holder.cq.wait(&mut one, Some(DEADLINE)).unwrap();
            one[0].status
        });
        assert!(
            matches!(&error, Ok(CompletionStatus::WrFlush))
                || matches!(&error, Err(e) if matches!(e.source, Error::Refused { .. })),
            "{path}: {error:?}"
        );
    }
}
