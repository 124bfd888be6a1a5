//! Atomic operations and Immediate Data (RFC 7306) between two ends, and against a scripted peer.

use super::raw::{add_of, read_of};
use super::requests::{Mr, Wr, pattern};
use super::world::{A, B, MemoryKind, Wiring, World};
use crate::ddp::Header;
use crate::rdmap::{AtomicRequest, AtomicResponse, Opcode};
use rnic_abi::abi::queue::{SendFlags, SendOpcode};
use rnic_abi::types::{Access, AtomicOperation, QpState, Scope, Stag, TaggedOffset};

/// Kinds of memory that may contain the target word.
const KINDS: [MemoryKind; 3] =
    [MemoryKind::Shared, MemoryKind::Attached, MemoryKind::ThroughCopier];

/// Returns the words of a region.
fn words(mr: &Mr) -> Vec<u64> {
    mr.bytes().as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}

fn set_words(mr: &Mr, words: &[u64]) {
    mr.set(&words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>());
}

/// Connects two QPs, with memory of kind `a` at A and of kind `b` at B.
fn pair(wiring: Wiring, a: MemoryKind, b: MemoryKind) -> (World, Mr, Mr) {
    let mut w = World::connected(wiring);
    w.kind = a;
    let sinks = w.any_mr(A, 64);
    w.kind = b;
    let to = w.any_mr(B, 64);
    (w, sinks, to)
}

fn sink(mr: &Mr, n: usize) -> rnic_abi::abi::queue::Sge {
    mr.sge(8 * n..8 * n + 8)
}

//= 7306-5-4
//= 7306-5-6
//= 7306-5.1.1-1
//= 7306-5.1.1-8
//= 7306-5.1.1-10
//= 7306-5.1.2-3
//= 7306-5.1.2-4
//= 7306-5.1.2-5
//= 7306-5.2.1-15
//= 7306-5.2.1-16
//= 7306-5.2.1-21
//= 7306-5.2.2-3
//= 7306-5.2.2-10
#[test]
fn atomic_operations_return_old_values() {
    for (wiring, a, b) in Wiring::all()
        .into_iter()
        .flat_map(|w| KINDS.into_iter().flat_map(move |a| KINDS.map(|b| (w, a, b))))
    {
        let (mut w, sinks, to) = pair(wiring, a, b);
        set_words(&to, &[40, u64::MAX, 7, 7]);
        w.post(
            A,
            &[
                Wr::fetch_add(1, 2, sink(&sinks, 0), &to, 0),
                Wr::fetch_add(2, 2, sink(&sinks, 1), &to, 8),
                Wr::compare_swap(3, 7, 0x1122_3344_5566_7788, sink(&sinks, 2), &to, 16),
                Wr::compare_swap(4, 8, 9, sink(&sinks, 3), &to, 24),
                Wr::fetch_add(5, 0, sink(&sinks, 4), &to, 16),
            ],
        );
        let done = ["1 FetchAdd 8", "2 FetchAdd 8", "3 CompareSwap 8", "4 CompareSwap 8"];
        assert_eq!(w.completions(A), [&done[..], &["5 FetchAdd 8"]].concat(), "{wiring:?}");
        assert_eq!(words(&to)[..4], [42, 1, 0x1122_3344_5566_7788, 7], "{wiring:?} {a:?} {b:?}");
        assert_eq!(words(&sinks)[..5], [40, u64::MAX, 7, 7, 0x1122_3344_5566_7788]);
        assert_eq!(w.completions(B), [""; 0]);
        assert_eq!([w.events(A), w.events(B)].concat(), [""; 0]);
    }
}

//= 7306-5.2-2
//= 7306-5.2.2-9
#[test]
fn a_fence_and_ord_count_atomic_operations() {
    for wiring in Wiring::both() {
        let (mut w, sinks, to) = pair(wiring, MemoryKind::Shared, MemoryKind::ThroughCopier);
        let local = w.any_mr(A, 8);
        // Without the fence the Write would overtake the copier.
        let fenced = Wr::write(2, &[], &to, 0).inline(&100u64.to_ne_bytes()).with(SendFlags::FENCE);
        w.post(A, &[Wr::fetch_add(1, 1, local.all(), &to, 0), fenced]);
        assert_eq!(w.completions(A), ["1 FetchAdd 8", "2 RdmaWrite"]);
        assert_eq!(words(&to)[0], 100, "{wiring:?}");
        // Operations beyond ORD are sent as earlier ones complete.
        let many: Vec<_> =
            (0..20).map(|n| Wr::fetch_add(n, 1, sink(&sinks, n as usize % 8), &to, 8)).collect();
        w.post(A, &many);
        assert_eq!(w.completions(A).len(), 20);
        assert_eq!(words(&to)[1], 20);
    }
}

/// While the copier runs, other events at the responder cause no early response.
//= 7306-5.4-10
//= 7306-7-10
#[test]
fn an_atomic_response_waits_for_the_copier() {
    for wiring in Wiring::both() {
        let (mut w, sinks, to) = pair(wiring, MemoryKind::Shared, MemoryKind::ThroughCopier);
        w.kind = MemoryKind::Shared;
        let [at_a, at_b] = [A, B].map(|end| w.any_mr(end, 8));
        set_words(&to, &[5]);
        w.answer_copies = false;
        w.post(A, &[Wr::fetch_add(1, 1, sink(&sinks, 0), &to, 0)]);
        assert_eq!(w.copy_jobs.len(), 1, "one copy job");
        // An incoming segment, and a message of the responder.
        w.post(A, &[Wr::write(2, &[at_a.all()], &at_b, 0)]);
        w.recv(A, 4, &[]);
        w.post(B, &[Wr::send(3, &[])]);
        assert!(!w.completions(A).contains(&"1 FetchAdd".to_owned()), "{wiring:?}");
        assert_eq!(words(&sinks)[0], 0);
        w.answer_copies = true;
        w.settle();
        let done = w.completions(A);
        assert_eq!(done.iter().filter(|one| one.starts_with("1 FetchAdd")).count(), 1, "{done:?}");
        assert_eq!((words(&sinks)[0], words(&to)[0]), (5, 6));
    }
}

//= 7306-5-7
//= 7306-5.1.1-5
//= 7306-5.1.1-6
//= 7306-5.1.1-7
//= 7306-5.1.2-7
//= 7306-5.1.2-8
//= 7306-5.1.2-9
//= 7306-5.1.2-10
//= 7306-5.2.1-7
//= 7306-8.2-4
//= 7306-8.2-5
//= 7306-9-2
#[test]
fn invalid_atomics_fail_at_the_requester() {
    for wiring in Wiring::both() {
        let refused = |wr: &dyn Fn(&mut World, &Mr, &Mr) -> Wr| {
            let (mut w, sinks, to) = pair(wiring, MemoryKind::Shared, MemoryKind::Shared);
            let wr = wr(&mut w, &sinks, &to);
            w.post(A, &[wr, Wr::send(2, &[])]);
            assert_eq!(words(&to)[0], 0);
            assert_eq!(w.state(A), QpState::Error);
            let mut completions = w.completions(A);
            completions.truncate(1);
            (completions.remove(0), w.diagnosis(A).text)
        };
        let (done, text) = refused(&|_, s, t| Wr::fetch_add(1, 1, s.sge(0..7), t, 0));
        assert_eq!(done, "1 FetchAdd LocalLength", "{text}");
        assert!(text.contains("takes one SGE of 8 bytes"), "{text}");
        let (done, _) = refused(&|_, s, t| {
            let mut wr = Wr::fetch_add(1, 1, s.sge(0..4), t, 0);
            wr.sges.push(s.sge(4..8));
            wr
        });
        assert_eq!(done, "1 FetchAdd LocalLength");
        let (done, _) = refused(&|_, _, t| Wr::fetch_add(1, 1, sink(t, 0), t, 0));
        assert_eq!(done, "1 FetchAdd LocalProtection", "a sink of another session");
        let (done, _) = refused(&|_, s, t| {
            let mut wr = Wr::fetch_add(1, 1, sink(s, 0), t, 0);
            wr.header.params[2] = 1;
            wr
        });
        assert_eq!(done, "1 FetchAdd LocalQpOperation", "one parameter too many");
        // Faults detected by the peer.
        let (done, _) = refused(&|_, s, t| Wr::compare_swap(1, 0, 1, sink(s, 0), t, 4));
        assert_eq!(done, "1 CompareSwap RemoteOperation 0/2/07");
        let (done, _) = refused(&|_, s, t| Wr::fetch_add(1, 1, sink(s, 0), t, 4));
        assert_eq!(done, "1 FetchAdd RemoteOperation 0/2/07");
        let (done, _) = refused(&|_, s, t| Wr::fetch_add(1, 1, sink(s, 0), t, 64));
        assert_eq!(done, "1 FetchAdd RemoteAccess 0/1/01");
        let (done, _) = refused(&|w, s, _| {
            let read_only = w.mr(B, 8, Access::REMOTE_READ | Access::LOCAL_WRITE);
            Wr::fetch_add(1, 1, sink(s, 0), &read_only, 0)
        });
        assert_eq!(done, "1 FetchAdd RemoteAccess 0/1/02");
        // An aligned offset with an unaligned address, and the reverse.
        let (done, _) = refused(&|w, s, _| {
            w.kind = MemoryKind::Shared;
            let page = w.any_mr(B, 64);
            let odd = w.install_at(B, &page.mapping, 4, 32, 0x5000);
            Wr::fetch_add(1, 1, sink(s, 0), &Mr { stag: odd, iova: 0x5000, ..page }, 0)
        });
        assert_eq!(done, "1 FetchAdd RemoteOperation 0/2/07");
        let mut w = World::connected(wiring);
        let near = w.any_mr(A, 8);
        let page = w.any_mr(B, 64);
        let odd = w.install_at(B, &page.mapping, 8, 32, 0x5003);
        let to = Mr { stag: odd, iova: 0x5003, ..page.clone() };
        w.post(A, &[Wr::fetch_add(1, 1, near.all(), &to, 0)]);
        assert_eq!(w.completions(A), ["1 FetchAdd 8"]);
        assert_eq!(words(&page)[..2], [0, 1]);
    }
}

#[test]
fn the_failed_atomic_is_blamed() {
    for wiring in Wiring::both() {
        let (mut w, sinks, to) = pair(wiring, MemoryKind::Shared, MemoryKind::ThroughCopier);
        let gone = Mr { stag: Stag(to.stag.0 ^ 0xFF00), ..to.clone() };
        w.post(
            A,
            &[
                Wr::read(1, sink(&sinks, 0), &to, 0),
                Wr::fetch_add(2, 1, sink(&sinks, 1), &to, 0),
                Wr::fetch_add(3, 1, sink(&sinks, 2), &gone, 0),
                Wr::fetch_add(4, 1, sink(&sinks, 3), &to, 0),
            ],
        );
        let found = w.completions(A);
        assert_eq!(found[2..], ["3 FetchAdd RemoteAccess 0/1/00", "4 FetchAdd WrFlush"]);
    }
}

//= 7306-8.1-2
#[test]
fn a_region_revoked_before_its_atomic() {
    for kind in KINDS {
        let (mut w, mut raw) = World::raw();
        w.kind = kind;
        let word = w.any_mr(A, 8);
        let from = w.mr(A, 100, Access::REMOTE_READ);
        w.links[0].pipes[0].window = 0;
        raw.read(&mut w, 1, &read_of(&from, 0, 100));
        raw.atomic(&mut w, 2, &add_of(&word, 0));
        w.revoke(A, word.stag);
        w.links[0].pipes[0].window = 1 << 20;
        w.settle();
        let said = raw.segments(&mut w);
        assert_eq!(said[0].opcode(), Opcode::ReadResponse);
        assert_eq!(said[1].opcode(), Opcode::Terminate, "{kind:?}");
        // Code, M and D bits, length of the segment, header of the segment.
        assert_eq!(said[1].payload[..6], [0x01, 0x00, 0xC0, 0, 0, 70]);
        assert_eq!(said[1].payload.len(), 6 + 18);
        assert_eq!(word.bytes(), [0; 8]);
    }
}

#[test]
fn a_disconnect_waits_for_atomic_operations() {
    for (wiring, kind) in Wiring::both().into_iter().flat_map(|w| KINDS.map(|kind| (w, kind))) {
        let (mut w, sinks, to) = pair(wiring, MemoryKind::Shared, kind);
        w.push(A, &[Wr::fetch_add(1, 1, sink(&sinks, 0), &to, 0)]);
        w.disconnect(A);
        assert_eq!(w.completions(A), ["1 FetchAdd 8"], "{wiring:?} {kind:?}");
        assert_eq!(words(&to)[0], 1);
        // The peer has finished, so it does not respond any more.
        let mut w = World::connected(wiring);
        let near = w.any_mr(A, 8);
        let there = w.any_mr(B, 8);
        w.disconnect(B);
        w.post(A, &[Wr::fetch_add(3, 1, near.all(), &there, 0)]);
        assert_eq!(w.completions(A), ["3 FetchAdd RemoteAborted 2/0/01"]);
        assert_eq!(there.bytes(), [0; 8]);
    }
}

//= 7306-9-2
#[test]
fn windows_with_atomic_rights() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let near = w.any_mr(A, 8);
        let all = Access::LOCAL_WRITE | Access::MW_BIND;
        let region = w.mr(B, 16, all);
        let window = w.window(B, rnic_abi::types::WindowKind::Type2);
        let bind = super::windows::to(&window, &region, 8..16, Access::REMOTE_ATOMIC);
        w.post(B, &[Wr::bind(1, &bind)]);
        assert_eq!(w.completions(B), ["1 BindMw"]);
        let to = Mr { stag: bind.new, ..region.clone() };
        w.post(A, &[Wr::fetch_add(2, 3, near.all(), &to, 8)]);
        assert_eq!(w.completions(A), ["2 FetchAdd 8"]);
        assert_eq!(words(&region), [0, 3]);
        w.post(A, &[Wr::write(3, &[], &to, 8).inline(b"x")]);
        assert_eq!(words(&region), [0, 3]);
        assert_eq!(w.state(A), QpState::Error, "{wiring:?}");
    }
}

//= 7306-4.1-3
//= 7306-5-9
//= 7306-5.1.1-10
//= 7306-5.1.2-11
//= 7306-5.2-1
//= 7306-5.2.1-5
//= 7306-5.2.1-17
//= 7306-5.2.1-19
//= 7306-A-1
#[test]
fn atomic_headers_match_the_rfc() {
    let (mut w, mut raw) = World::raw();
    let near = w.any_mr(A, 16);
    let there = Stag(0xB1B2_B3B4);
    let to = Mr { stag: there, iova: 0x1000, ..near.clone() };
    w.post(
        A,
        &[
            Wr::fetch_add(1, 0x0102_0304_0506_0708, near.sge(0..8), &to, 8),
            Wr::compare_swap(2, 3, 4, near.sge(8..16), &to, 16),
        ],
    );
    let said = raw.segments(&mut w);
    assert_eq!(said.len(), 2);
    for (n, (segment, operation)) in (0u32..).zip(said.iter().zip([
        AtomicOperation::FetchAdd { add: 0x0102_0304_0506_0708, boundaries: 0 },
        AtomicOperation::CompareSwap {
            swap: 4,
            swap_mask: u64::MAX,
            compare: 3,
            compare_mask: u64::MAX,
        },
    ])) {
        assert_eq!(segment.header, raw.untagged(Opcode::AtomicRequest, 1, n + 1, 0, true));
        let to = TaggedOffset(0x1008 + 8 * u64::from(n));
        let expected = AtomicRequest { operation, id: n, stag: there, to };
        assert_eq!(segment.payload, expected.emit());
    }
    // The peer must return the identifier, but A does not depend on it.
    for (msn, original) in [(1, 0x1112_1314_1516_1718), (2, 3)] {
        let header = raw.untagged(Opcode::AtomicResponse, 3, msn, 0, true);
        raw.segment(&mut w, header, &AtomicResponse { id: 99, original }.emit());
    }
    assert_eq!(w.completions(A), ["1 FetchAdd 8", "2 CompareSwap 8"]);
    assert_eq!(words(&near), [0x1112_1314_1516_1718, 3]);
}

//= 7306-5.2.2-11
#[test]
fn responses_of_the_wrong_kind_answer_nothing() {
    // A Read Response while the oldest request is an atomic operation, and the reverse.
    let (mut w, mut raw) = World::raw();
    let word = w.any_mr(A, 8);
    w.post(A, &[Wr::fetch_add(1, 1, word.all(), &word, 0), Wr::read(2, word.all(), &word, 0)]);
    raw.segments(&mut w);
    raw.response(&mut w, word.stag, word.iova, &[1; 8], true);
    assert_eq!(raw.expect_terminate(&mut w).0, "0/2/06");
    assert_eq!(word.bytes(), [0; 8]);

    let (mut w, mut raw) = World::raw();
    let word = w.any_mr(A, 8);
    w.post(A, &[Wr::read(1, word.all(), &word, 0), Wr::fetch_add(2, 1, word.all(), &word, 0)]);
    raw.segments(&mut w);
    let header = raw.untagged(Opcode::AtomicResponse, 3, 1, 0, true);
    raw.segment(&mut w, header, &[1; 12]);
    assert_eq!(raw.expect_terminate(&mut w).0, "0/2/06");
    assert_eq!(word.bytes(), [0; 8]);
}

//= 7306-5.4-1
//= 7306-5.4-8
/// A part of the response does not change the sink and causes no completion.
#[test]
fn an_atomic_needs_its_complete_response() {
    let (mut w, mut raw) = World::raw();
    let near = w.any_mr(A, 8);
    let there = w.any_mr(A, 8);
    w.post(A, &[Wr::fetch_add(1, 1, near.all(), &there, 0)]);
    assert_eq!(raw.segments(&mut w).len(), 1);
    let response = AtomicResponse { id: 0, original: 7 }.emit();
    for (mo, range) in [(0, 0..8), (8, 8..12)] {
        assert_eq!((w.completions(A), words(&near)), (vec![], vec![0]));
        let header = raw.untagged(Opcode::AtomicResponse, 3, 1, mo, mo > 0);
        raw.segment(&mut w, header, &response[range]);
    }
    assert_eq!((w.completions(A), words(&near)), (vec!["1 FetchAdd 8".to_owned()], vec![7]));
}

//= 7306-5.2.2-5
//= 7306-5.2.2-11
#[test]
fn one_response_answers_one_operation() {
    let (mut w, mut raw) = World::raw();
    let word = w.any_mr(A, 16);
    w.post(A, &[Wr::fetch_add(1, 1, word.sge(0..8), &word, 0)]);
    raw.segments(&mut w);
    for msn in 1..=2 {
        let header = raw.untagged(Opcode::AtomicResponse, 3, msn, 0, true);
        let response = AtomicResponse { id: 0, original: u64::from(msn) };
        raw.segment(&mut w, header, &response.emit());
    }
    assert_eq!(raw.expect_terminate(&mut w).0, "0/2/06");
    assert_eq!(w.completions(A), ["1 FetchAdd 8"]);
    assert_eq!(words(&word), [1, 0]);
}

//= 7306-1.1-5
//= 7306-5.2.1-18
//= 7306-10.1-1
#[test]
fn unknown_atomic_operations_change_nothing() {
    for number in (0..16).filter(|number| ![0, 2].contains(number)) {
        let (mut w, mut raw) = World::raw();
        let word = w.any_mr(A, 8);
        let mut request = add_of(&word, 0).emit();
        request[3] = number;
        let header = raw.untagged(Opcode::AtomicRequest, 1, 1, 0, true);
        raw.segment(&mut w, header, &request);
        assert_eq!(raw.expect_terminate(&mut w).0.to_uppercase(), "0/2/FF", "{number}");
        assert_eq!(w.state(A), QpState::Terminate);
        assert_eq!(words(&word), [0]);
    }
}

#[test]
fn an_atomic_response_to_a_revoked_sink() {
    let (mut w, mut raw) = World::raw();
    let word = w.any_mr(A, 8);
    w.post(A, &[Wr::fetch_add(1, 1, word.all(), &word, 0)]);
    raw.segments(&mut w);
    w.revoke(A, word.stag);
    let header = raw.untagged(Opcode::AtomicResponse, 3, 1, 0, true);
    raw.segment(&mut w, header, &[1; 12]);
    assert_eq!(raw.expect_terminate(&mut w).0, "1/1/00");
    assert_eq!(w.completions(A), ["1 FetchAdd LocalAccess 1/1/00"]);
    assert_eq!(word.bytes(), [0; 8]);
}

//= 7306-1.1-4
#[test]
fn a_peer_without_atomics_refuses_them() {
    // siw reports an unexpected opcode, with the DDP header.
    let (mut w, mut raw) = World::raw();
    let word = w.any_mr(A, 8);
    w.post(A, &[Wr::fetch_add(1, 0, word.all(), &word, 0)]);
    let said = raw.ulpdus(&mut w);
    let mut terminate = vec![0x02, 0x06, 0xC0, 0, 0, 70];
    terminate.extend(&said[0][..18]);
    raw.terminate(&mut w, &terminate);
    assert_eq!(w.completions(A), ["1 FetchAdd RemoteOperation 0/2/06"]);
}

//= 7306-5.2.1-5
//= 7306-5.2.2-2
//= 7306-5.2.2-4
//= 7306-5.4-4
#[test]
fn segmented_atomic_requests() {
    let (mut w, mut raw) = World::raw();
    let word = w.any_mr(A, 8);
    let request = add_of(&word, 0).emit();
    let header = |mo, last| raw.untagged(Opcode::AtomicRequest, 1, 1, mo, last);
    let parts = [header(0, false), header(20, false), header(51, true)];
    for (part, range) in parts.into_iter().zip([0..20, 20..51, 51..52]) {
        assert_eq!(word.bytes(), [0; 8]);
        raw.segment(&mut w, part, &request[range]);
    }
    let said = raw.segments(&mut w);
    assert_eq!(said[0].payload, AtomicResponse { id: 0xA1A2_A3A4, original: 0 }.emit());
    assert_eq!(words(&word), [1]);
}

//= 7306-4.1-1
//= 7306-8.1-1
#[test]
fn an_rdmac_peer_gets_no_atomics() {
    let make: [fn(&Mr) -> Wr; 3] = [
        |mr| Wr::fetch_add(1, 1, mr.sge(0..8), mr, 0),
        |mr| Wr::compare_swap(1, 0, 1, mr.sge(0..8), mr, 0),
        |mr| Wr::write(1, &[], mr, 0).immediate(1),
    ];
    for make in make {
        let (mut w, mut raw) = World::raw_of_version(0);
        let mr = w.any_mr(A, 8);
        w.post(A, &[make(&mr)]);
        let done = w.completions(A);
        assert!(done[0].ends_with("LocalQpOperation"), "{done:?}");
        assert_eq!(raw.expect_terminate(&mut w), ("0/0/00".to_owned(), vec![]), "no headers");
        assert!(w.diagnosis(A).text.contains("uses RDMAC's version"));
    }
}

#[test]
fn an_atomic_on_a_missing_page() {
    rnic_abi::shm::fault::install().unwrap();
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let near = w.any_mr(A, 8);
        let (mapping, fd) = rnic_abi::shm::Mapping::create_shared_buffer(8192).unwrap();
        let word = w.mr_over(B, mapping, 8192, Access::all(), Scope::Pd, 0x10_0000);
        rustix::fs::ftruncate(&fd, 0).unwrap();
        w.post(A, &[Wr::fetch_add(1, 1, near.all(), &word, 0)]);
        assert_eq!(w.completions(A), ["1 FetchAdd WrFlush"], "{wiring:?}");
        assert!(w.diagnosis(B).text.contains("could not be reached"));
        assert_eq!(near.bytes(), [0; 8]);
    }
}

// --- Immediate Data ------------------------------------------------------------------------------

//= 7306-6-2
//= 7306-6.1-2
//= 7306-6.3-3
//= 7306-6.3-6
//= 7306-7-4
#[test]
fn immediate_data_report_the_write_length() {
    for (wiring, kind) in Wiring::all().into_iter().flat_map(|w| KINDS.map(|kind| (w, kind))) {
        let mut w = World::connected(wiring);
        let from = w.any_mr(A, 100_000);
        w.kind = kind;
        let to = w.any_mr(B, 100_000);
        let bytes = from.pattern(1);
        for id in 0..4 {
            w.recv(B, id, &[]);
        }
        w.post(
            A,
            &[
                Wr::write(1, &[from.all()], &to, 0).immediate(0x0102_0304_0506_0708),
                Wr::write(2, &[], &to, 5).immediate(u64::MAX).with(SendFlags::SOLICITED),
                Wr::write(3, &[], &to, 0).inline(b"abc"),
                Wr::write(4, &[], &to, 3).inline(b"de").immediate(9).unsignaled(),
                Wr::send(5, &[]),
            ],
        );
        let sent = ["1 RdmaWrite", "2 RdmaWrite", "3 RdmaWrite", "5 Send"];
        assert_eq!(w.completions(A), sent, "{wiring:?} {kind:?}");
        assert_eq!(
            w.completions(B),
            [
                "0 Receive 100000 immediate 0x102030405060708",
                "1 Receive solicited immediate 0xffffffffffffffff",
                "2 Receive 2 immediate 0x9",
                "3 Receive",
            ],
            "{wiring:?} {kind:?}"
        );
        assert_eq!(to.bytes(), [b"abcde", &bytes[5..]].concat());
    }
}

#[test]
fn immediate_data_fail_with_their_write() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let to = w.any_mr(B, 8);
        let gone = Mr { stag: Stag(to.stag.0 ^ 0xFF00), ..to.clone() };
        w.recv(B, 7, &[]);
        let local = w.any_mr(B, 8);
        w.post(A, &[Wr::write(1, &[local.all()], &gone, 0).immediate(1), Wr::send(2, &[])]);
        assert_eq!(w.completions(A)[0], "1 RdmaWrite LocalProtection", "{wiring:?}");
        assert_eq!(w.completions(B), ["7 Receive WrFlush"]);

        let mut w = World::connected(wiring);
        w.recv(B, 7, &[]);
        w.post(A, &[Wr::write(1, &[], &gone, 0).inline(&pattern(8, 1)).immediate(1)]);
        assert_eq!(w.completions(A), ["1 RdmaWrite"], "{wiring:?}");
        assert_eq!(w.completions(B), ["7 Receive WrFlush"]);
        assert_eq!(w.state(A), QpState::Error);
    }
}

//= 7306-6-1
//= 7306-6.1-1
//= 7306-6.1-3
//= 7306-6.1-4
//= 7306-6.2-1
//= 7306-6.3-2
//= 7306-6.3-4
//= 7306-6.3-5
#[test]
fn immediate_data_have_eight_bytes() {
    let (mut w, mut raw) = World::raw();
    w.recv(A, 1, &[]);
    w.recv(A, 2, &[]);
    let to = w.any_mr(A, 8);
    raw.write(&mut w, to.stag, to.iova, b"hello");
    raw.segment(&mut w, raw.untagged(Opcode::Immediate, 0, 1, 0, true), b"immediat");
    let header = raw.untagged(Opcode::ImmediateSolicited, 0, 2, 0, true);
    raw.segment(&mut w, header, &[0, 0, 0, 1, 0, 0, 0, 0]);
    let data = u64::from_be_bytes(*b"immediat");
    assert_eq!(
        w.completions(A),
        [
            format!("1 Receive 5 immediate {data:#x}"),
            "2 Receive solicited immediate 0x100000000".to_owned()
        ],
    );
    // A sends Immediate Data in the same way.
    w.post(A, &[Wr::write(3, &[], &to, 0).immediate(data)]);
    let said = raw.segments(&mut w);
    let Header::Tagged(write) = said[0].header else { panic!("{said:?}") };
    assert_eq!((said[0].opcode(), write.last, said.len()), (Opcode::Write, true, 2));
    assert_eq!(said[1].header, raw.untagged(Opcode::Immediate, 0, 1, 0, true));
    assert_eq!(said[1].payload, b"immediat");
    let kind = SendOpcode::from_u8(SendOpcode::WriteImmediate as u8);
    assert_eq!(kind.map(SendOpcode::parameters), Some(1));
}
