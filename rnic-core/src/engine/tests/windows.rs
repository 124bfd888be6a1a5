//! Memory windows: the access that they grant, the end of that access, and invalid requests.

use std::ops::Range;

use super::rc::linked;
use super::requests::{Mr, Wr};
use super::world::{A, B, QpShape, Wiring, World};
use crate::device::Window;
use crate::device::window::BindRequest;
use crate::engine::EngineCommand;
use WindowKind::{Type1, Type2};
use rnic_abi::abi::queue::SendFlags;
use rnic_abi::types::{Access, QpState, Scope, Stag, WindowKind};

const BOTH: [WindowKind; 2] = [Type1, Type2];
const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Creates a region that allows windows and has no remote rights.
fn region(w: &mut World, qp: usize) -> Mr {
    w.mr(qp, 100, Access::LOCAL_WRITE | Access::MW_BIND)
}

/// Returns a bind to a range of a region, with the next key.
pub(super) fn to(window: &Window, region: &Mr, range: Range<u64>, access: Access) -> BindRequest {
    let (present, _) = window.view();
    BindRequest {
        window: present,
        new: Stag(present.0 & !0xFF | present.0.wrapping_add(1) & 0xFF),
        address: region.iova + range.start,
        length: range.end - range.start,
        lkey: region.stag.0,
        access: access.bits(),
    }
}

/// Returns a bind that unbinds a window of type 1.
fn to_nothing(window: &Window, region: &Mr) -> BindRequest {
    to(window, region, 0..0, Access::empty())
}

/// Returns the region as a peer sees it through a window bound like this.
fn seen(bind: &BindRequest, region: &Mr) -> Mr {
    let zero_based = bind.access & Access::ZERO_BASED.bits() != 0;
    let iova = if zero_based { 0 } else { bind.address };
    Mr { stag: bind.new, iova, len: bind.length as usize, ..region.clone() }
}

/// Binds a window to the QP's region. Returns the region as the peer sees it.
fn bound(w: &mut World, qp: usize, window: &Window, region: &Mr, range: Range<u64>) -> Mr {
    let bind = to(window, region, range, REMOTE);
    w.post(qp, &[Wr::bind(900, &bind)]);
    assert_eq!(w.completions(qp), ["900 BindMw"]);
    seen(&bind, region)
}

/// Connects QP 0 with 1, and 2 with 3, of two apps on one host. QPs 0 and 2 belong to one app. They
/// are on workers 0 and 1, their peers on worker 2.
fn two_pairs() -> World {
    let mut w = World::new(&[3]);
    let a = w.app(0);
    let b = w.app(0);
    let cq_a = w.cq(a, 64);
    let cq_b = w.cq(b, 64);
    for pair in 0..2 {
        w.qp(a, cq_a, cq_a, QpShape::default());
        w.qp(b, cq_b, cq_b, QpShape::default());
        w.connect_on(2 * pair, pair, 2 * pair + 1, 2, Wiring::tcp());
    }
    w.settle();
    for qp in [0, 1] {
        w.events(qp);
    }
    w
}

#[test]
fn a_zero_based_window_counts_from_its_start() {
    for kind in BOTH {
        let mut w = World::connected(Wiring::tcp());
        let region = region(&mut w, B);
        let window = w.window(B, kind);
        let bind = to(&window, &region, 40..50, REMOTE | Access::ZERO_BASED);
        w.post(B, &[Wr::bind(1, &bind)]);
        let open = seen(&bind, &region);
        assert_eq!(open.iova, 0);
        w.post(A, &[Wr::write(2, &[], &open, 9).inline(b"x")]);
        assert_eq!(region.bytes()[49], b'x');
        w.post(A, &[Wr::write(3, &[], &open, 10).inline(b"x")]);
        assert!(w.events(A)[0].starts_with("terminated by peer 1/1/01"));
        // With a zero-based region the address is an offset as well.
        let mut w = World::connected(Wiring::tcp());
        let access = Access::LOCAL_WRITE | Access::MW_BIND | Access::ZERO_BASED;
        let region = w.mr_at(B, 100, access, rnic_abi::types::Scope::Pd, 0);
        let window = w.window(B, kind);
        let open = bound(&mut w, B, &window, &region, 40..50);
        assert_eq!(open.iova, 40);
        w.post(A, &[Wr::write(2, &[], &open, 0).inline(b"x")]);
        assert_eq!(region.bytes()[40], b'x');
    }
}

#[test]
fn a_window_has_only_its_bound_rights() {
    for kind in BOTH {
        let outcome = |access: Access, write: bool| {
            let mut w = World::connected(Wiring::direct());
            let region = region(&mut w, B);
            let window = w.window(B, kind);
            let bind = to(&window, &region, 0..10, access);
            w.post(B, &[Wr::bind(1, &bind)]);
            let open = seen(&bind, &region);
            let sink = w.any_mr(A, 1);
            let wr = if write {
                Wr::write(2, &[], &open, 0).inline(b"x")
            } else {
                Wr::read(2, sink.all(), &open, 0)
            };
            w.post(A, &[wr]);
            let events = w.events(A);
            let code = events.first().and_then(|e| e.strip_prefix("terminated by peer "));
            code.map_or("ok".to_owned(), |code| code[..6].to_owned())
        };
        assert_eq!(outcome(Access::REMOTE_READ, true), "1/1/00");
        assert_eq!(outcome(Access::REMOTE_READ, false), "ok");
        assert_eq!(outcome(Access::REMOTE_WRITE, true), "ok");
        assert_eq!(outcome(Access::REMOTE_WRITE, false), "0/1/02");
        assert_eq!(outcome(Access::empty(), false), "0/1/02");
    }
}

/// Posts one bind that must fail, in its own world.
fn refused(kind: WindowKind, what: &str, make: impl Fn(&mut World, &Window, &Mr) -> BindRequest) {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let region = region(&mut w, A);
        let window = w.window(A, kind);
        let before = window.view();
        let bind = make(&mut w, &window, &region);
        w.post(A, &[Wr::bind(1, &bind), Wr::send(2, &[])]);
        let completions = w.completions(A);
        assert_eq!(completions, ["1 BindMw MwBind", "2 Send WrFlush"], "{kind:?}: {what}");
        assert!(w.events(A)[0].starts_with("terminated 0/0/00"), "{what}");
        assert_eq!(w.state(A), QpState::Error);
        assert_eq!(window.view(), before, "{kind:?}: {what}");
        assert_eq!(w.dereg(A, &region), Ok(()), "{kind:?}: {what}");
    }
}

#[test]
fn a_window_gives_no_more_than_its_region() {
    for kind in BOTH {
        let with = |range: Range<u64>, access: Access| {
            move |_: &mut World, window: &Window, region: &Mr| {
                to(window, region, range.clone(), access)
            }
        };
        refused(kind, "one byte after the end", with(90..101, REMOTE));
        refused(kind, "after the end", with(100..101, REMOTE));
        refused(kind, "everything", with(0..u64::MAX, REMOTE));
        refused(kind, "one byte before", |_, window, region| BindRequest {
            address: region.iova - 1,
            ..to(window, region, 0..2, REMOTE)
        });
        refused(kind, "wrap", |_, window, region| BindRequest {
            address: u64::MAX,
            ..to(window, region, 0..2, REMOTE)
        });
        for access in [Access::LOCAL_WRITE, Access::MW_BIND] {
            refused(kind, "rights", with(0..10, REMOTE | access));
        }
        refused(kind, "unknown rights", with(0..10, Access::from_bits_retain(1 << 20)));
        refused(kind, "no MW_BIND", |w, window, _| {
            let region = w.any_mr(A, 100);
            to(window, &region, 0..10, REMOTE)
        });
        refused(kind, "no LOCAL_WRITE", |w, window, _| {
            let region = w.mr(A, 100, Access::MW_BIND);
            to(window, &region, 0..10, REMOTE)
        });
        refused(kind, "no LOCAL_WRITE for atomics", |w, window, _| {
            let region = w.mr(A, 100, Access::MW_BIND);
            to(window, &region, 0..10, Access::REMOTE_ATOMIC)
        });
    }
}

#[test]
fn a_window_binds_only_within_its_domain() {
    for kind in BOTH {
        refused(kind, "another's region", |w, window, _| {
            let region = region(w, B);
            to(window, &region, 0..10, REMOTE)
        });
        refused(kind, "no region", |_, window, region| BindRequest {
            lkey: 0xDEAD_BEEF,
            ..to(window, region, 0..10, REMOTE)
        });
        refused(kind, "a region that has been invalidated", |w, window, _| {
            let region = region(w, A);
            w.post(A, &[Wr::local_invalidate(5, region.stag)]);
            w.completions(A);
            to(window, &region, 0..10, REMOTE)
        });
        refused(kind, "a region that is being deregistered", |w, window, _| {
            let region = region(w, A);
            region.windows.withdraw().unwrap();
            to(window, &region, 0..10, REMOTE)
        });
        refused(kind, "another's window", |w, _, region| {
            let window = w.window(B, kind);
            to(&window, region, 0..10, REMOTE)
        });
        refused(kind, "no window", |_, window, region| BindRequest {
            window: Stag(window.view().0.0 ^ 0x5A5A_0000),
            new: Stag(window.view().0.0 ^ 0x5A5A_0001),
            ..to(window, region, 0..10, REMOTE)
        });
        refused(kind, "a deallocated window", |w, _, region| {
            let window = w.window(A, kind);
            let bind = to(&window, region, 0..10, REMOTE);
            w.remove_window(A, &window);
            bind
        });
        refused(kind, "not its current key", |_, window, region| BindRequest {
            window: Stag(window.view().0.0 ^ 2),
            ..to(window, region, 0..10, REMOTE)
        });
        refused(kind, "a key of another STag", |_, window, region| BindRequest {
            new: Stag(window.view().0.0 ^ 0x100),
            ..to(window, region, 0..10, REMOTE)
        });
        refused(kind, "a window as the region", |w, window, region| {
            let other = w.window(A, Type1);
            let open = bound(w, A, &other, region, 0..10);
            let bind = to(window, &open, 0..10, REMOTE);
            // The binding must not prevent the removal of the region.
            w.remove_window(A, &other);
            bind
        });
    }
    refused(Type1, "the same key", |_, window, region| BindRequest {
        new: window.view().0,
        ..to(window, region, 0..10, REMOTE)
    });
    refused(Type2, "no bytes", |_, window, region| to(window, region, 0..0, REMOTE));
    refused(Type1, "a region limited to one QP", |w, window, _| {
        let region = w.own_mr(A, 100, Access::LOCAL_WRITE | Access::MW_BIND);
        to(window, &region, 0..10, REMOTE)
    });
}

#[test]
fn a_bind_with_extra_fields_is_malformed() {
    for what in 0..3 {
        let mut w = World::connected(Wiring::direct());
        let region = region(&mut w, A);
        let window = w.window(A, Type1);
        let mut wr = Wr::bind(1, &to(&window, &region, 0..10, REMOTE));
        match what {
            0 => wr.sges = vec![region.all()],
            1 => wr.header.remote_addr = 1,
            _ => wr = wr.inline(b"x"),
        }
        w.post(A, &[wr]);
        assert_eq!(w.completions(A), ["1 BindMw LocalQpOperation"]);
        assert_eq!(window.view().1, None);
    }
    // Other operations have no parameters.
    let mut w = World::connected(Wiring::direct());
    let mut wr = Wr::send(1, &[]);
    wr.header.params[1] = 1;
    w.post(A, &[wr]);
    assert_eq!(w.completions(A), ["1 Send LocalQpOperation"]);
}

/// As in the kernel (`rxe_check_bind_mw`). For iWARP no RFC forbids it.
#[test]
fn a_roce_qp_binds_no_zero_based_region() {
    for (wiring, kind) in Wiring::both().into_iter().flat_map(|w| BOTH.map(|k| (w, k))) {
        for roce in [true, false] {
            let mut w = if roce { linked(wiring) } else { World::connected(wiring) };
            let access = Access::LOCAL_WRITE | Access::MW_BIND | Access::ZERO_BASED;
            let zero_based = w.mr_at(A, 100, access, Scope::Pd, 0);
            let window = w.window(A, kind);
            w.post(A, &[Wr::bind(1, &to(&window, &zero_based, 0..10, REMOTE))]);
            let status = if roce { "1 BindMw MwBind" } else { "1 BindMw" };
            assert_eq!(w.completions(A), [status], "{wiring:?} {kind:?}");
            assert_eq!(window.view().1.is_none(), roce, "{wiring:?} {kind:?}");
        }
    }
}

#[test]
fn rebinding_type_2_needs_invalidation() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let region = region(&mut w, A);
        let window = w.window(A, Type2);
        let first = bound(&mut w, A, &window, &region, 0..10);
        let again = to(&window, &region, 0..10, REMOTE);
        let chosen = Stag(first.stag.0 & !0xFF | 0x77);
        let after = BindRequest { window: first.stag, new: chosen, ..again };
        w.post(A, &[Wr::local_invalidate(1, first.stag), Wr::bind(2, &after)]);
        assert_eq!(w.completions(A), ["1 LocalInvalidate", "2 BindMw"], "{wiring:?}");
        assert_eq!(window.view().0, chosen);
        let again = to(&window, &region, 0..10, REMOTE);
        w.post(A, &[Wr::bind(3, &again)]);
        assert_eq!(w.completions(A), ["3 BindMw MwBind"], "{wiring:?}");
        assert_eq!(window.view().0, chosen, "it is bound as before");
    }
}

#[test]
fn one_of_two_concurrent_type_2_binds_wins() {
    let mut w = two_pairs();
    let region = region(&mut w, 0);
    let window = w.window(0, Type2);
    let bind = to(&window, &region, 0..10, REMOTE);
    let other = BindRequest { new: Stag(bind.new.0 ^ 0x10), ..bind };
    w.push(0, &[Wr::bind(1, &bind)]);
    w.push(2, &[Wr::bind(2, &other)]);
    w.settle();
    let mut completions = w.completions(0);
    completions.sort();
    assert_eq!(completions, ["1 BindMw", "2 BindMw MwBind"]);
    assert_eq!(window.view().0, bind.new);
    assert_eq!(w.dereg(0, &region), Err(1), "counted once");
    // Destroying the QP that bound the window unbinds it.
    w.destroy(0);
    assert_eq!(window.view().1, None);
    assert_eq!(w.dereg(0, &region), Ok(()));
}

#[test]
fn a_type_1_bind_waits_for_every_worker() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.answer_changes = false;
        let region = region(&mut w, A);
        let window = w.window(A, Type1);
        w.recv(B, 7, &[]);
        let bind = to(&window, &region, 0..10, REMOTE);
        w.post(A, &[Wr::bind(1, &bind), Wr::send(2, &[])]);
        assert_eq!(w.completions(A), [""; 0]);
        assert_eq!(w.completions(B), [""; 0], "nothing overtakes it");
        assert_eq!(w.dereg(A, &region), Err(1), "the bind in progress counts");
        w.answer();
        w.settle();
        assert_eq!(w.completions(A), ["1 BindMw", "2 Send"], "{wiring:?}");
        assert_eq!(w.completions(B), ["7 Receive"]);
        assert_eq!(window.view().0, bind.new);
    }
}

#[test]
fn a_change_survives_its_qp() {
    for kill in [World::abort, World::destroy] {
        let mut w = two_pairs();
        w.answer_changes = false;
        let region = region(&mut w, 0);
        let window = w.window(0, Type1);
        let bind = to(&window, &region, 0..10, REMOTE);
        w.post(0, &[Wr::bind(1, &bind)]);
        // No other QP can bind the window during the change.
        w.post(2, &[Wr::bind(2, &bind)]);
        assert_eq!(w.completions(2), ["2 BindMw MwBind"]);
        kill(&mut w, 0);
        w.answer();
        w.settle();
        let (stag, to) = window.view();
        assert_eq!(stag, bind.new);
        assert!(to.is_some(), "it was bound, although no QP was notified");
        assert_eq!(w.dereg(0, &region), Err(1));
        w.remove_window(0, &window);
        assert_eq!(w.dereg(0, &region), Ok(()));
        assert!(w.engines.iter().all(|e| e.state.stags.is_empty()));
    }
}

#[test]
fn a_window_removed_during_its_bind() {
    for late in [false, true] {
        let mut w = two_pairs();
        w.answer_changes = false;
        let region = region(&mut w, 0);
        let window = w.window(0, Type1);
        let bind = to(&window, &region, 0..10, REMOTE);
        w.post(0, &[Wr::bind(1, &bind)]);
        if late {
            // The change arrives after the removal of the window.
            w.remove_window(0, &window);
            w.answer();
        } else {
            // The window is removed before the replies arrive.
            let (_, _, change) = w.changes[0].clone();
            w.command_host(0, || EngineCommand::ChangeStags(change.clone()));
            w.remove_window(0, &window);
            w.answer();
        }
        w.settle();
        assert_eq!(window.view().1, None);
        assert_eq!(w.dereg(0, &region), Ok(()));
        assert!(w.engines.iter().all(|e| e.state.stags.is_empty()), "late: {late}");
    }
}

#[test]
fn a_peer_invalidates_only_windows_of_its_stream() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let region = region(&mut w, B);
        let window = w.window(B, Type2);
        let open = bound(&mut w, B, &window, &region, 0..10);
        w.recv(B, 7, &[]);
        w.post(
            A,
            &[Wr::write(1, &[], &open, 0).inline(b"x"), Wr::send_invalidate(2, &[], open.stag)],
        );
        let invalidated = format!("7 Receive invalidated {:#x}", open.stag.0);
        assert_eq!(w.completions(B), [invalidated], "{wiring:?}");
        assert_eq!(window.view(), (open.stag, None));
        assert_eq!(region.bytes()[0], b'x');
        // It may be bound again with a new key.
        let new = bound(&mut w, B, &window, &region, 5..6);
        w.post(A, &[Wr::write(3, &[], &new, 0).inline(b"y")]);
        assert_eq!(region.bytes()[5], b'y');
        w.recv(B, 8, &[]);
        w.post(A, &[Wr::send_invalidate(4, &[], open.stag)]);
        assert_eq!(w.completions(B), ["8 Receive RemoteInvalidRequest"]);
        assert!(w.events(B)[0].starts_with("terminated 0/1/09"), "{wiring:?}");

        for (what, code) in [("type 1", "0/2/09"), ("with windows", "0/2/09")] {
            let mut w = World::connected(wiring);
            let access = Access::LOCAL_WRITE | Access::MW_BIND;
            let shared = self::region(&mut w, B);
            let own = w.own_mr(B, 100, access);
            let stag = match what {
                "type 1" => {
                    let window = w.window(B, Type1);
                    bound(&mut w, B, &window, &shared, 0..10).stag
                }
                _ => {
                    let window = w.window(B, Type2);
                    bound(&mut w, B, &window, &own, 0..10);
                    own.stag
                }
            };
            w.recv(B, 7, &[]);
            w.post(A, &[Wr::send_invalidate(1, &[], stag)]);
            assert_eq!(w.completions(B), ["7 Receive RemoteInvalidRequest"], "{what}");
            assert!(w.events(B)[0].starts_with(&format!("terminated {code}")), "{what}");
        }
    }
}

/// As in the kernel (`rxe_invalidate_mr`). For iWARP, RFC 5040 leaves it to the program.
#[test]
fn a_roce_qp_invalidates_no_ordinary_region() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        let shared = region(&mut w, A);
        let window = w.window(A, Type2);
        let open = bound(&mut w, A, &window, &shared, 0..10);
        let own = w.own_mr(A, 8, Access::LOCAL_WRITE);
        w.post(A, &[Wr::local_invalidate(1, open.stag), Wr::local_invalidate(2, own.stag)]);
        assert_eq!(w.completions(A), ["1 LocalInvalidate", "2 LocalInvalidate"], "{wiring:?}");
        w.post(A, &[Wr::local_invalidate(3, shared.stag), Wr::send(4, &[])]);
        let done = w.completions(A);
        assert_eq!(done, ["3 LocalInvalidate LocalProtection", "4 Send WrFlush"], "{wiring:?}");
        assert!(w.diagnosis(A).text.contains("only be deregistered"), "{:?}", w.diagnosis(A).text);
        let engine = &w.engines[w.qps[A].engine];
        assert!(engine.state.stags.get(shared.stag).is_some(), "{wiring:?}: it stays valid");
    }
}

#[test]
fn a_window_is_not_a_local_key() {
    for (kind, n) in BOTH.into_iter().flat_map(|k| (0..5).map(move |n| (k, n))) {
        let mut w = World::connected(Wiring::direct());
        let region = region(&mut w, A);
        let window = w.window(A, kind);
        let open = bound(&mut w, A, &window, &region, 0..10);
        let theirs = w.any_mr(B, 100);
        let (wr, name) = match n {
            0 => (Wr::write(1, &[open.sge(0..5)], &theirs, 0), "RdmaWrite"),
            1 => (Wr::send(1, &[open.sge(0..5)]), "Send"),
            2 => (Wr::read(1, open.sge(0..5), &theirs, 0), "RdmaRead"),
            3 => (Wr::read_invalidate(1, open.sge(0..5), &theirs, 0), "RdmaRead"),
            _ => (Wr::read_invalidate(1, open.sge(0..0), &theirs, 0), "RdmaRead"),
        };
        w.post(A, &[wr]);
        assert_eq!(w.completions(A), [format!("1 {name} LocalProtection")]);
        assert!(window.view().1.is_some());
        // Nor for receives.
        let mut w = World::connected(Wiring::direct());
        let region = self::region(&mut w, B);
        let window = w.window(B, kind);
        let open = bound(&mut w, B, &window, &region, 0..10);
        w.recv(B, 7, &[open.sge(0..5)]);
        w.post(A, &[Wr::send(1, &[]).inline(b"abc")]);
        assert_eq!(w.completions(B), ["7 Receive LocalProtection"]);
    }
}

/// Removes access by a window while Writes through it are in progress.
type Taking = fn(&mut World, &Window, &Mr);

#[test]
fn nothing_is_placed_after_an_unbind() {
    fn unbind(w: &mut World, window: &Window, region: &Mr) {
        w.push(B, &[Wr::bind(5, &to_nothing(window, region))]);
    }
    fn bind_elsewhere(w: &mut World, window: &Window, region: &Mr) {
        w.push(B, &[Wr::bind(5, &to(window, region, 0..1, Access::REMOTE_READ))]);
    }
    fn invalidate(w: &mut World, window: &Window, _: &Mr) {
        w.push(B, &[Wr::local_invalidate(5, window.view().0)]);
    }
    let ways: [(WindowKind, Taking); 3] =
        [(Type1, unbind), (Type1, bind_elsewhere), (Type2, invalidate)];
    for (wiring, (kind, take)) in Wiring::both().into_iter().flat_map(|w| ways.map(|t| (w, t))) {
        for rounds in 0..10 {
            let mut w = World::connected(wiring);
            let len = 50_000;
            let from = w.any_mr(A, len);
            from.fill(0xAB);
            let target = w.mr(B, len, Access::LOCAL_WRITE | Access::MW_BIND);
            let window = w.window(B, kind);
            let open = bound(&mut w, B, &window, &target, 0..len as u64);
            w.push(A, &[1, 2, 3].map(|id| Wr::write(id, &[from.all()], &open, 0)));
            for _ in 0..rounds {
                w.round();
            }
            take(&mut w, &window, &target);
            let mut limit = 1000;
            while w.completions(B).is_empty() {
                limit -= 1;
                assert!(limit > 0, "never unbound");
                w.round();
            }
            target.fill(0);
            w.settle();
            assert_eq!(target.bytes(), vec![0; len], "{wiring:?} after {rounds} rounds");
        }
    }
}

#[test]
fn a_fenced_bind_waits_for_reads() {
    let (mut w, mut raw) = World::raw();
    let sink = w.any_mr(A, 1);
    let region = region(&mut w, A);
    let window = w.window(A, Type2);
    let bind = Wr::bind(2, &to(&window, &region, 0..10, REMOTE)).with(SendFlags::FENCE);
    w.post(A, &[Wr::read(1, sink.all(), &sink, 0), bind]);
    assert_eq!(window.view().1, None);
    raw.response(&mut w, sink.stag, sink.iova, b"x", true);
    assert_eq!(w.completions(A), ["1 RdmaRead 1", "2 BindMw"]);
}
