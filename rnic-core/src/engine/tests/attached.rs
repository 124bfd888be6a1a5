//! Regions of attached memory: read when the data are sent, unmapped during a request, or gone with
//! their process.

use std::process::{Command, Stdio};
use std::sync::Arc;

use super::requests::{Mr, Wr};
use super::world::{A, B, MemoryKind, QpShape, Wiring, World, own_address_space};
use crate::device::Memory;
use rnic_abi::shm::{AddressSpace, Mapping};
use rnic_abi::types::{Access, QpState, Scope};

/// Installs a region of `len` bytes at this address of an address space.
pub(super) fn region(
    w: &mut World,
    qp: usize,
    space: Arc<AddressSpace>,
    address: u64,
    len: usize,
) -> Mr {
    let (mapping, _fd) = Mapping::create_shared_buffer(len).unwrap();
    let memory = Memory::Attached { space, address };
    let iova = 0x5000_0000;
    let (stag, windows) = w.install(qp, memory, len, Access::all(), Scope::Pd, iova);
    Mr { stag, iova, len, mapping, windows }
}

/// Installs a region at an address that is not mapped.
fn unmapped(w: &mut World, qp: usize, moved: bool) -> Mr {
    if !moved {
        return region(w, qp, own_address_space(), 8, 5000);
    }
    let (mapping, _fd) = Mapping::create_shared_buffer(5000).unwrap();
    let memory = Memory::ThroughCopier { copier: w.copier(qp), address: 8 };
    let iova = 0x5000_0000;
    let (stag, windows) = w.install(qp, memory, 5000, Access::all(), Scope::Pd, iova);
    Mr { stag, iova, len: 5000, mapping, windows }
}

/// Installs a region of a process that has ended.
pub(super) fn gone(w: &mut World, qp: usize) -> Mr {
    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let path = format!("/proc/{}/mem", child.id());
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let space = AddressSpace::adopt(file.into(), child.id() as i32).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    region(w, qp, space, 0x40_0000, 5000)
}

#[test]
fn every_operation_on_attached_memory() {
    for wiring in Wiring::all() {
        use MemoryKind::{Attached, Shared, ThroughCopier};
        for (source, sink) in [
            (Attached, Attached),
            (Attached, Shared),
            (Shared, Attached),
            (ThroughCopier, ThroughCopier),
            (ThroughCopier, Attached),
            (Shared, ThroughCopier),
        ] {
            let mut w = World::connected(wiring);
            let len = 150_001;
            w.kind = source;
            let a = w.any_mr(A, len);
            w.kind = sink;
            let b = w.any_mr(B, len);
            let bytes = a.pattern(1);
            w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
            assert_eq!(b.bytes(), bytes, "{wiring:?}");
            b.fill(0);
            w.recv(B, 9, &[b.sge(0..100_000), b.sge(100_000..len)]);
            let list = [a.sge(0..1), a.sge(1..1), a.sge(1..70_000), a.sge(70_000..len)];
            w.post(A, &[Wr::send(2, &list)]);
            assert_eq!(w.completions(B), ["9 Receive 150001"]);
            assert_eq!(b.bytes(), bytes);
            a.fill(0);
            w.post(A, &[Wr::read(3, a.all(), &b, 0)]);
            w.post(A, &[Wr::write(4, &[], &b, 9).inline(b"end")]);
            let done = ["1 RdmaWrite", "2 Send", "3 RdmaRead 150001", "4 RdmaWrite"];
            assert_eq!(w.completions(A), done);
            assert_eq!(a.bytes(), bytes, "{wiring:?}");
            assert_eq!(&b.bytes()[9..12], b"end");
        }
    }
}

#[test]
fn attached_memory_is_not_sent_in_place() {
    let mut w = World::connected(Wiring::tcp().with(|o| o.crc = false));
    w.kind = MemoryKind::Attached;
    let a = w.any_mr(A, 1 << 20);
    let b = w.any_mr(B, 1 << 20);
    w.kind = MemoryKind::Shared;
    let shared = w.any_mr(A, 20_000);
    let bytes = a.pattern(1);
    w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
    w.post(A, &[Wr::write(2, &[shared.all(), a.sge(20_000..40_000)], &b, 0)]);
    w.post(A, &[Wr::read(3, shared.all(), &b, 20_000)]);
    assert_eq!(w.completions(A), ["1 RdmaWrite", "2 RdmaWrite", "3 RdmaRead 20000"]);
    assert_eq!(b.bytes()[20_000..], bytes[20_000..]);
    assert_eq!(shared.bytes(), bytes[20_000..40_000]);
    assert_eq!(w.shared_bytes, 0);
}

/// The data are not read when the request is posted, so later changes to the buffer are sent.
#[test]
fn attached_memory_is_read_when_sent() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.kind = MemoryKind::Attached;
        let a = w.any_mr(A, 300_000);
        let b = w.any_mr(B, 300_000);
        a.fill(1);
        w.push(A, &[Wr::write(1, &[a.all()], &b, 0)]);
        a.fill(2);
        w.settle();
        assert_eq!(b.bytes(), vec![2; 300_000], "{wiring:?}");
    }
    // TCP takes only the first bytes for now.
    let mut w = World::connected(Wiring::tcp());
    w.kind = MemoryKind::Attached;
    let a = w.any_mr(A, 300_000);
    let b = w.any_mr(B, 300_000);
    a.fill(1);
    w.links[0].pipes[0].window = 10_000;
    w.links[0].pipes[0].latency = 1_000;
    w.push(A, &[Wr::write(1, &[a.all()], &b, 0)]);
    w.round();
    a.fill(2);
    w.settle();
    assert_eq!(w.completions(A), ["1 RdmaWrite"]);
    let got = b.bytes();
    assert_eq!((got[0], got[299_999]), (1, 2));
}

/// Returns the completions and the last event of both ends.
fn outcome(w: &mut World) -> Vec<String> {
    let mut found = Vec::new();
    for end in [A, B] {
        found.extend(w.completions(end));
        found.extend(w.events(end).pop());
        assert_eq!(w.state(end), QpState::Error);
    }
    assert!(w.misbehaved.is_empty());
    found
}

#[test]
fn an_unmapped_range_fails_its_request() {
    for (wiring, moved) in Wiring::both().into_iter().flat_map(|w| [(w, false), (w, true)]) {
        let case = |post: &dyn Fn(&mut World, &Mr, &Mr), bad_end: usize| {
            let mut w = World::connected(wiring);
            let bad = unmapped(&mut w, bad_end, moved);
            let good = w.any_mr(1 - bad_end, 5000);
            post(&mut w, &bad, &good);
            w.settle();
            assert!(w.detached.is_empty());
            assert_eq!(good.bytes(), vec![0; 5000], "{wiring:?}");
            outcome(&mut w)
        };
        // The source of a local request.
        let found = case(&|w, bad, good| w.push(A, &[Wr::write(1, &[bad.all()], good, 0)]), A);
        let expected =
            ["1 RdmaWrite LocalProtection", "terminated 0/0/00", "terminated by peer 0/0/00"];
        assert_eq!(found, expected, "{wiring:?}");
        let send = |w: &mut World, bad: &Mr, good: &Mr| {
            w.recv(B, 7, &[good.all()]);
            w.push(A, &[Wr::send(1, &[bad.all()])]);
        };
        let expected = [
            "1 Send LocalProtection",
            "terminated 0/0/00",
            "7 Receive WrFlush",
            "terminated by peer 0/0/00",
        ];
        assert_eq!(case(&send, A), expected, "{wiring:?}");
        // The source of a peer's Read.
        let read = |w: &mut World, bad: &Mr, good: &Mr| {
            w.push(A, &[Wr::read(1, good.all(), bad, 0)]);
        };
        let expected = ["1 RdmaRead WrFlush", "terminated by peer 0/0/00", "terminated 0/0/00"];
        assert_eq!(case(&read, B), expected, "{wiring:?}");
        // The sink of a peer's Write.
        let write = |w: &mut World, bad: &Mr, good: &Mr| {
            w.push(A, &[Wr::write(1, &[good.all()], bad, 0)]);
        };
        let expected = ["1 RdmaWrite", "terminated by peer 1/0/00", "terminated 1/0/00"];
        assert_eq!(case(&write, B), expected, "{wiring:?}");
        // A receive.
        let send = |w: &mut World, bad: &Mr, good: &Mr| {
            w.recv(B, 7, &[bad.all()]);
            w.push(A, &[Wr::send(1, &[good.all()])]);
        };
        let expected = [
            "1 Send",
            "terminated by peer 0/0/00",
            "7 Receive LocalProtection",
            "terminated 0/0/00",
        ];
        assert_eq!(case(&send, B), expected, "{wiring:?}");
        // The sink of a local Read.
        let read = |w: &mut World, bad: &Mr, good: &Mr| {
            w.push(A, &[Wr::read(1, bad.all(), good, 0)]);
        };
        let expected =
            ["1 RdmaRead LocalAccess 1/0/00", "terminated 1/0/00", "terminated by peer 1/0/00"];
        assert_eq!(case(&read, A), expected, "{wiring:?}");
    }
}

#[test]
fn an_ended_address_space_is_reported() {
    for wiring in Wiring::both() {
        for (end, wr) in [(A, 0), (B, 1), (B, 2)] {
            let mut w = World::connected(wiring);
            let bad = gone(&mut w, end);
            let good = w.any_mr(1 - end, 5000);
            let (wr, expected) = match wr {
                0 => (
                    Wr::write(1, &[bad.all()], &good, 0),
                    ["1 RdmaWrite LocalProtection", "terminated 0/0/00"],
                ),
                1 => (
                    Wr::write(1, &[good.all()], &bad, 0),
                    ["1 RdmaWrite", "terminated by peer 1/0/00"],
                ),
                // As if the region had been deregistered.
                _ => (
                    Wr::read(1, good.all(), &bad, 0),
                    ["1 RdmaRead RemoteAccess 0/1/00", "terminated by peer 0/1/00"],
                ),
            };
            w.post(A, &[wr]);
            let session = w.apps[end].session;
            assert_eq!(w.detached, [session], "{wiring:?}");
            let found = outcome(&mut w);
            let said = |n: usize| found[n].starts_with(expected[n]);
            assert!(said(0) && said(1), "{found:?} over {wiring:?}");
        }
    }
}

/// Returns a pair in which A writes to B and only a copier can access the memory at one end. No job
/// has been answered yet.
fn under_way(wiring: Wiring, source: bool) -> (World, Mr, Mr) {
    let mut w = World::connected(wiring);
    w.answer_copies = false;
    let kinds = [MemoryKind::ThroughCopier, MemoryKind::Shared];
    w.kind = kinds[usize::from(!source)];
    let a = w.any_mr(A, 100_000);
    w.kind = kinds[usize::from(source)];
    let b = w.any_mr(B, 100_000);
    w.kind = MemoryKind::Shared;
    a.pattern(1);
    w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
    (w, a, b)
}

#[test]
fn only_the_qp_of_a_copy_waits() {
    for wiring in Wiring::both() {
        for source in [true, false] {
            let (mut w, a, b) = under_way(wiring, source);
            assert_eq!(w.copy_jobs.len(), 1, "one copy job");
            let app_a = w.qps[A].app;
            let app_b = w.qps[B].app;
            let c = w.qp(app_a, 0, 0, QpShape::default());
            let d = w.qp(app_b, 0, 0, QpShape::default());
            w.connect(c, d, wiring);
            w.settle();
            let from = w.any_mr(c, 1000);
            let to = w.any_mr(d, 1000);
            let bytes = from.pattern(2);
            w.post(c, &[Wr::write(2, &[from.all()], &to, 0)]);
            assert_eq!(to.bytes(), bytes);
            let done = w.completions(A);
            assert!(done.contains(&"2 RdmaWrite".to_owned()), "{done:?}");
            if source {
                // The job reads the data that are present when it runs.
                a.fill(7);
                assert_eq!(done, ["2 RdmaWrite"], "nothing completes before it is sent");
            }
            w.answer_copies = true;
            w.settle();
            assert_eq!(b.bytes(), a.bytes(), "{wiring:?}");
            assert!(w.copy_jobs.is_empty());
        }
    }
}

/// The end of the stream also waits for a copier.
#[test]
fn nothing_overtakes_a_copy() {
    for wiring in Wiring::both() {
        let (mut w, a, b) = under_way(wiring, false);
        let to = w.any_mr(B, 100);
        w.recv(B, 7, &[to.all()]);
        w.push(A, &[Wr::send(2, &[a.sge(0..100)])]);
        w.disconnect(A);
        assert_eq!(w.completions(B), [""; 0]);
        assert_eq!(w.events(B), [""; 0]);
        while !w.copy_jobs.is_empty() {
            assert_eq!(w.completions(B), [""; 0]);
            assert_eq!(w.copy_jobs.len(), 1);
            w.run_copy_job();
            w.settle();
        }
        assert_eq!(b.bytes(), a.bytes(), "{wiring:?}");
        assert_eq!(w.completions(B), ["7 Receive 100"]);
        assert_eq!(w.completions(A), ["1 RdmaWrite", "2 Send"]);
        assert_eq!(w.events(B), ["peer closed"]);
        w.disconnect(B);
        assert_eq!([w.events(A), w.events(B)], [["disconnected"]; 2]);
    }
}

/// The end of the peer's QP does not end the receive if the peer has finished sending.
#[test]
fn a_copy_completes_after_the_sender_is_gone() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.kind = MemoryKind::ThroughCopier;
        let into = w.any_mr(B, 100);
        w.answer_copies = false;
        w.recv(B, 7, &[into.all()]);
        w.recv(B, 8, &[into.all()]);
        w.post(A, &[Wr::send(1, &[]).inline(b"the last one")]);
        assert_eq!((w.completions(A), w.completions(B)), (vec!["1 Send".into()], vec![]));
        w.disconnect(A);
        w.destroy(A);
        w.answer_copies = true;
        w.settle();
        let received = ["7 Receive 12", "8 Receive WrFlush"];
        assert_eq!(w.completions(B), received, "{wiring:?}");
        assert_eq!(into.bytes()[..12], *b"the last one");
    }
}

#[test]
fn a_late_copy_job_ends_its_session() {
    for wiring in Wiring::both() {
        for source in [true, false] {
            let (mut w, ..) = under_way(wiring, source);
            let (owner, peer) = if source { (A, B) } else { (B, A) };
            let session = w.apps[w.qps[owner].app].session;
            w.recv(owner, 7, &[]);
            w.advance(std::time::Duration::from_millis(4999));
            assert!(w.misbehaved.is_empty());
            w.advance(std::time::Duration::from_millis(1));
            let said = "a copy of attached memory did not return in 5 s";
            assert_eq!(w.misbehaved, [(session, said.to_owned())]);
            // The late reply is ignored. No completion returns a buffer to the program before the
            // session ends.
            assert!(w.run_copy_job());
            w.settle();
            assert_eq!(w.misbehaved.len(), 1);
            let engine = w.qps[owner].engine;
            w.engines[engine].detach_session(session, w.now);
            w.settle();
            assert!(w.completions(owner).is_empty());
            assert_eq!(w.state(peer), QpState::Error);
        }
    }
}

#[test]
fn a_copy_for_a_destroyed_qp_is_ignored() {
    for wiring in Wiring::both() {
        for (source, gone) in [(true, A), (false, B), (true, B), (false, A)] {
            let (mut w, ..) = under_way(wiring, source);
            w.destroy(gone);
            w.answer_copies = true;
            w.settle();
            assert_eq!(w.state(A + B - gone), QpState::Error);
            assert!(w.copy_jobs.is_empty());
        }
    }
}

/// Messages are held, then written by a copier, and later messages wait for both.
#[test]
fn a_held_message_waits_for_the_copier() {
    for wiring in Wiring::all() {
        let rnr_timeout = Some(std::time::Duration::from_secs(10));
        let mut w = World::pair_with(wiring, QpShape { rnr_timeout, ..QpShape::default() }, 128);
        w.events(A);
        w.events(B);
        let from = w.any_mr(A, 150_000);
        let bytes = from.pattern(1);
        w.kind = MemoryKind::ThroughCopier;
        let into = w.any_mr(B, 150_000);
        let sizes = [5, 150_000, 0, 70_000, 1];
        let sends: Vec<Wr> =
            (0..).zip(sizes).map(|(n, len)| Wr::send(n, &[from.sge(0..len)])).collect();
        w.post(A, &sends);
        w.disconnect(A);
        w.answer_copies = false;
        for (n, len) in (0..).zip(sizes) {
            into.fill(0);
            assert!(w.copy_jobs.is_empty(), "held: {wiring:?}");
            w.recv(B, n, &[into.sge(0..len)]);
            w.settle();
            while !w.copy_jobs.is_empty() {
                assert_eq!((w.completions(B), w.events(B)), (vec![], vec![]));
                assert_eq!(w.copy_jobs.len(), 1);
                w.run_copy_job();
                w.settle();
            }
            let size = if len == 0 { String::new() } else { format!(" {len}") };
            assert_eq!(w.completions(B), [format!("{n} Receive{size}")]);
            assert_eq!(into.bytes()[..len], bytes[..len]);
        }
        assert_eq!(w.completions(A).len(), sizes.len());
        assert_eq!(w.events(B), ["peer closed"]);
        w.disconnect(B);
        assert_eq!([w.events(A), w.events(B)], [["disconnected"]; 2], "{wiring:?}");
        assert!(w.next_timeout().is_none());
        assert!(w.engines.iter().all(|e| e.kept_bytes() == 0));
    }
}

/// Windows of one QP and of the domain, on memory that a copier is writing.
#[test]
fn unbinding_waits_for_the_copier() {
    use crate::device::window::BindRequest;
    use rnic_abi::types::{Stag, WindowKind};
    for (wiring, kind) in Wiring::both()
        .into_iter()
        .flat_map(|w| [WindowKind::Type1, WindowKind::Type2].map(|k| (w, k)))
    {
        let mut w = World::connected(wiring);
        w.kind = MemoryKind::ThroughCopier;
        let region = w.mr(B, 100, Access::LOCAL_WRITE | Access::MW_BIND);
        let window = w.window(B, kind);
        let bind = |present: Stag, length| BindRequest {
            window: present,
            new: Stag(present.0 & !0xFF | present.0.wrapping_add(1) & 0xFF),
            address: region.iova,
            length,
            lkey: region.stag.0,
            access: if length > 0 { Access::REMOTE_WRITE.bits() } else { 0 },
        };
        let bound = bind(window.view().0, 100);
        w.post(B, &[Wr::bind(1, &bound)]);
        assert_eq!(w.completions(B), ["1 BindMw"]);
        let seen = Mr { stag: bound.new, ..region.clone() };
        w.answer_copies = false;
        w.post(A, &[Wr::write(2, &[], &seen, 0).inline(b"first"), Wr::write(3, &[], &seen, 50)]);
        assert_eq!(w.copy_jobs.len(), 1);
        let taken_back = match kind {
            WindowKind::Type1 => Wr::bind(4, &bind(bound.new, 0)),
            WindowKind::Type2 => Wr::local_invalidate(4, bound.new),
        };
        w.post(B, &[taken_back]);
        assert_eq!(w.completions(B), [""; 0], "{wiring:?} {kind:?}");
        w.run_copy_job();
        w.settle();
        assert_eq!(w.completions(B).len(), 1, "{wiring:?} {kind:?}");
        assert_eq!(region.bytes()[..5], *b"first");
        w.post(A, &[Wr::write(5, &[], &seen, 0).inline(b"late")]);
        assert!(w.copy_jobs.is_empty());
        assert!(w.events(A)[0].starts_with("terminated by peer 1/1/00"));
    }
}

/// A receive is flushed only after the copier has written its buffer.
#[test]
fn a_flush_waits_for_the_copier() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.kind = MemoryKind::ThroughCopier;
        let into = w.any_mr(B, 100);
        w.answer_copies = false;
        w.recv(B, 1, &[into.all()]);
        w.recv(B, 2, &[into.all()]);
        w.post(A, &[Wr::send(1, &[]).inline(b"under way")]);
        w.abort(B);
        assert_eq!((w.state(B), w.completions(B)), (QpState::Error, vec![]), "{wiring:?}");
        assert_eq!(w.events(B), [""; 0]);
        w.run_copy_job();
        w.settle();
        assert_eq!(w.completions(B), ["1 Receive WrFlush", "2 Receive WrFlush"], "{wiring:?}");
        assert_eq!(w.events(B), ["aborted"]);
    }
}

/// A QP of the direct path is destroyed while its peer still waits for a copier. The QP that uses
/// its slot next must not be affected.
#[test]
fn a_deferred_end_spares_the_next_qp() {
    let (mut w, _a, b) = under_way(Wiring::direct(), false);
    let lone = w.any_mr(B, 100);
    let app_a = w.qps[A].app;
    let app_b = w.qps[B].app;
    while w.completions(A).is_empty() {
        assert!(w.run_copy_job());
        w.settle();
    }
    // The last segment is being written. Nothing is left to send.
    assert_eq!(w.copy_jobs.len(), 1);
    w.destroy(A);
    let c = w.qp(app_a, 0, 0, QpShape::default());
    let d = w.qp(app_b, 0, 0, QpShape::default());
    w.connect(c, d, Wiring::direct());
    w.settle();
    w.events(c);
    w.events(d);
    w.post(B, &[Wr::send(9, &[lone.sge(0..4)])]);
    w.answer_copies = true;
    w.settle();
    assert_eq!(b.bytes().len(), 100_000);
    assert_eq!(w.state(B), QpState::Error);
    assert_eq!([w.state(c), w.state(d)], [QpState::Rts; 2]);
    assert_eq!(w.events(c), [""; 0]);
    assert_eq!(w.completions(c), [""; 0]);
}
