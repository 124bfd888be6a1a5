//! Tests three workers that apply commands at different times, against an oracle of the memory that
//! may and must be accessible.
//!
//! Commands reach each worker in order and late. A change is settled, and a withdrawal
//! acknowledged, when all workers have applied it. After the acknowledgement the withdrawn memory
//! must not be accessible at any time.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::device::Memory;
use crate::device::stag::bind::WINDOW_RIGHTS;
use crate::device::stag::{Principal, StagChange, StagKind, StagTable};
use crate::device::window::{BindFault, BindRequest, WindowCount};
use rnic_abi::shm::Mapping;
use rnic_abi::types::{Access, MrId, MwId, PdId, WindowKind};

const WORKERS: usize = 3;
const QPS: usize = 4;
const REGIONS: usize = 3;
const LENGTH: u64 = 40;
const SESSION: SessionId = SessionId(1);
const PD: PdId = PdId(2);

fn worker_of(qp: usize) -> usize {
    qp % WORKERS
}

fn principal(qp: usize) -> Principal {
    Principal { session: SESSION, pd: PD, qp: QpId(qp as u32) }
}

fn iova(region: usize) -> u64 {
    0x1000 * (region as u64 + 1)
}

fn offset(region: usize) -> usize {
    region * 100
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Bind { qp: usize, window: usize, region: usize, at: u64, len: u64, rights: u32, old_key: bool },
    Invalidate { qp: usize, window: usize, by_peer: bool },
    InvalidateRegion { qp: usize, region: usize },
    Dealloc { window: usize },
    Dereg { region: usize },
    DestroyQp { qp: usize },
    Carry { worker: usize },
}

fn op() -> impl Strategy<Value = Op> {
    let qp = 0..QPS;
    let window = 0usize..4;
    let region = 0..REGIONS;
    prop_oneof![
        6 => (qp.clone(), window.clone(), region.clone(), 0u64..LENGTH + 2, 0u64..LENGTH,
              0u32..8, prop_oneof![9 => Just(false), 1 => Just(true)])
            .prop_map(|(qp, window, region, at, len, rights, old_key)| {
                let rights = if rights < 6 { 6 } else { rights };
                Op::Bind { qp, window, region, at, len, rights, old_key }
            }),
        2 => (qp.clone(), window.clone(), any::<bool>())
            .prop_map(|(qp, window, by_peer)| Op::Invalidate { qp, window, by_peer }),
        1 => (qp.clone(), region.clone())
            .prop_map(|(qp, region)| Op::InvalidateRegion { qp, region }),
        1 => window.prop_map(|window| Op::Dealloc { window }),
        1 => region.prop_map(|region| Op::Dereg { region }),
        1 => qp.prop_map(|qp| Op::DestroyQp { qp }),
        12 => (0..WORKERS).prop_map(|worker| Op::Carry { worker }),
    ]
}

/// A command to a worker.
#[derive(Clone)]
enum Command {
    Change(StagChange),
    Revoke(Stag),
    Remove(Arc<Window>),
}

/// The action after all workers have applied a command.
enum Then {
    /// Settles the change for which the QP waits.
    Settle(StagChange, usize),
    Answer,
    Close(usize),
}

/// The memory to which an STag was bound.
#[derive(Clone, Copy, Debug)]
struct Grant {
    region: usize,
    at: u64,
    len: u64,
    access: Access,
    qp: Option<usize>,
}

struct Rig {
    tables: [StagTable; WORKERS],
    queues: [VecDeque<(usize, Command)>; WORKERS],
    open: BTreeMap<usize, (usize, Then)>,
    next: usize,
    windows: Vec<Arc<Window>>,
    counts: Vec<Arc<WindowCount>>,
    /// QPs that wait for a change.
    held: [bool; QPS],
    destroyed: [bool; QPS],
    /// Memory that each STag may access until its withdrawal is acknowledged.
    may: BTreeMap<Stag, Grant>,
    /// STag by which each window must be accessible, except while a change is in progress.
    must: [Option<Stag>; 4],
    /// Changes and removals in progress, by window.
    unsettled: [u32; 4],
    regions: [bool; REGIONS],
}

impl Rig {
    fn new() -> Self {
        let (mapping, _fd) = Mapping::create_arena("windows", 4096).unwrap();
        let mut tables: [StagTable; WORKERS] = Default::default();
        let counts: Vec<_> = (0..REGIONS).map(|_| Arc::new(WindowCount::default())).collect();
        for (region, count) in counts.iter().enumerate() {
            let write = if region == 1 { Access::empty() } else { Access::LOCAL_WRITE };
            for table in &mut tables {
                table.install(StagEntry {
                    stag: Stag((region as u32 + 1) << 8),
                    kind: StagKind::Region(count.clone()),
                    mr: MrId(region as u32),
                    session: SESSION,
                    pd: PD,
                    scope: if region == 2 { Scope::Qp(QpId(0)) } else { Scope::Pd },
                    access: write | Access::MW_BIND,
                    iova: iova(region),
                    length: LENGTH,
                    memory: Memory::Shared { mapping: mapping.clone(), offset: offset(region) },
                });
            }
        }
        let windows: Vec<Arc<Window>> = (0..4u32)
            .map(|n| {
                let kind = if n < 2 { WindowKind::Type1 } else { WindowKind::Type2 };
                Arc::new(Window::new(MwId(n), SESSION, PD, kind, Stag((n + 16) << 8 | 0xF0)))
            })
            .collect();
        for table in &mut tables {
            windows.iter().for_each(|window| table.add_window(window.clone()));
        }
        Rig {
            tables,
            queues: Default::default(),
            open: BTreeMap::new(),
            next: 0,
            windows,
            counts,
            held: [false; QPS],
            destroyed: [false; QPS],
            may: BTreeMap::new(),
            must: [None; 4],
            unsettled: [0; 4],
            regions: [true; REGIONS],
        }
    }

    fn order(&mut self, command: &Command, then: Then) {
        self.next += 1;
        for queue in &mut self.queues {
            queue.push_back((self.next, command.clone()));
        }
        self.open.insert(self.next, (WORKERS, then));
    }

    fn carry(&mut self, worker: usize) {
        let Some((ticket, command)) = self.queues[worker].pop_front() else { return };
        let table = &mut self.tables[worker];
        match &command {
            Command::Change(change) => table.change(change),
            Command::Revoke(stag) => {
                table.revoke(*stag);
            }
            Command::Remove(window) => table.remove_window(window),
        }
        let (left, _) = self.open.get_mut(&ticket).unwrap();
        *left -= 1;
        if *left > 0 {
            return;
        }
        match self.open.remove(&ticket).unwrap().1 {
            Then::Answer => {}
            Then::Settle(change, qp) => {
                change.settle();
                self.held[qp] = false;
                if let Some((window, _)) = &change.window {
                    self.unsettled[window.id().0 as usize] -= 1;
                }
                if let Some(stag) = change.revoke {
                    self.may.remove(&stag);
                }
            }
            Then::Close(window) => {
                self.windows[window].close();
                self.unsettled[window] -= 1;
                self.must[window] = None;
                let of = index(self.windows[window].view().0);
                self.may.retain(|stag, _| super::index(*stag) != of);
            }
        }
    }

    fn apply(&mut self, op: Op) {
        let ready = |rig: &Rig, qp: usize| !rig.held[qp] && !rig.destroyed[qp];
        match op {
            Op::Carry { worker } => self.carry(worker),
            Op::Bind { qp, window, region, at, len, rights, old_key } => {
                if !ready(self, qp) {
                    return;
                }
                let kind = self.windows[window].kind();
                let present = Stag(self.windows[window].view().0.0 ^ u32::from(old_key));
                let new = Stag(present.0 & !0xFF | present.0.wrapping_add(1) & 0xFF);
                let request = BindRequest {
                    window: present,
                    new,
                    address: iova(region) + at,
                    length: len,
                    lkey: (region as u32 + 1) << 8,
                    access: rights,
                };
                let access = Access::from_bits_truncate(rights);
                let unbind = kind == WindowKind::Type1 && len == 0;
                let sound = at + len <= LENGTH
                    && WINDOW_RIGHTS.contains(access)
                    && len > 0
                    && (region != 1 || !access.contains(Access::REMOTE_WRITE))
                    && (region != 2 || qp == 0 && kind == WindowKind::Type2);
                let bound = self.tables[worker_of(qp)].bind(principal(qp), &request);
                if !sound && !unbind || old_key {
                    assert!(bound.is_err(), "{op:?} {bound:?}");
                }
                let Ok(change) = bound else { return };
                if !unbind {
                    assert!(self.regions[region], "{op:?}: bound to a withdrawn region");
                    let qp = (kind == WindowKind::Type2).then_some(qp);
                    self.may.insert(new, Grant { region, at, len, access, qp });
                }
                self.must[window] = (!unbind).then_some(new);
                if let Some(change) = change {
                    self.held[qp] = true;
                    self.unsettled[window] += 1;
                    self.order(&Command::Change(change.clone()), Then::Settle(change, qp));
                }
            }
            Op::Invalidate { qp, window, by_peer } => {
                if !ready(self, qp) {
                    return;
                }
                let stag = self.windows[window].view().0;
                let table = &mut self.tables[worker_of(qp)];
                let done = if by_peer {
                    table.invalidate_by_peer(principal(qp), stag).is_ok()
                } else {
                    let done = table.invalidate_by_owner(principal(qp), stag);
                    assert!(!matches!(done, Ok(Some(_))), "a window changes at once");
                    done.is_ok()
                };
                let own = self.may.get(&stag).is_some_and(|g| g.qp == Some(qp));
                assert!(own || !done, "{op:?}: not its own");
                if done {
                    self.may.remove(&stag);
                    self.must[window] = None;
                }
            }
            Op::InvalidateRegion { qp, region } => {
                if !ready(self, qp) {
                    return;
                }
                let stag = Stag((region as u32 + 1) << 8);
                let done = self.tables[worker_of(qp)].invalidate_by_owner(principal(qp), stag);
                if let Ok(change) = done {
                    self.expect_free(region);
                    self.regions[region] = false;
                    if let Some(change) = change {
                        self.held[qp] = true;
                        self.order(&Command::Change(change.clone()), Then::Settle(change, qp));
                    }
                }
            }
            Op::Dealloc { window } => {
                if self.tables.iter().any(|t| t.windows.known.contains_key(&(window as u32 + 16))) {
                    self.unsettled[window] += 1;
                    let removed = self.windows[window].clone();
                    self.order(&Command::Remove(removed), Then::Close(window));
                }
            }
            Op::Dereg { region } => match self.counts[region].withdraw() {
                Ok(()) => {
                    self.expect_free(region);
                    self.regions[region] = false;
                    let stag = Stag((region as u32 + 1) << 8);
                    self.order(&Command::Revoke(stag), Then::Answer);
                }
                Err(bound) => assert!(bound as usize <= 2 * self.windows.len()),
            },
            Op::DestroyQp { qp } => {
                self.destroyed[qp] = true;
                self.tables[worker_of(qp)].unbind_all_of(QpId(qp as u32));
                self.may.retain(|_, grant| grant.qp != Some(qp));
                for must in &mut self.must {
                    if must.is_some_and(|stag| !self.may.contains_key(&stag)) {
                        *must = None;
                    }
                }
            }
        }
    }

    /// Checks that no window is bound to a withdrawn region.
    fn expect_free(&self, region: usize) {
        for (n, window) in self.windows.iter().enumerate() {
            if self.unsettled[n] == 0
                && let Some(stag) = self.must[n]
            {
                assert_ne!(self.may[&stag].region, region, "{:?} is still bound", window.view());
            }
        }
        for table in &self.tables {
            let left = table.entries.values().filter(|e| matches!(e.kind, StagKind::Window(_)));
            for entry in left.filter(|e| e.mr == MrId(region as u32)) {
                // A sleeping worker may have the entry until it applies the command.
                assert!(!self.may.contains_key(&entry.stag), "{} is reachable", entry.stag);
            }
        }
    }

    /// Checks that each STag accesses at most its memory, and all of it where it must.
    fn check(&self) {
        for n in 0..self.windows.len() as u32 {
            for key in 0..=0xFF {
                let stag = Stag((n + 16) << 8 | key);
                for qp in 0..QPS {
                    self.check_one(stag, qp, n as usize);
                }
            }
        }
    }

    fn check_one(&self, stag: Stag, qp: usize, window: usize) {
        let table = &self.tables[worker_of(qp)];
        if let Some(entry) = table.entries.get(&stag.0)
            && !self.may.contains_key(&stag)
        {
            // Allowed only while the worker has a command to apply.
            panic!("{stag} of {:?} remains on worker {}", entry.mr, worker_of(qp));
        }
        let Some(grant) = self.may.get(&stag).copied() else { return };
        let start = iova(grant.region) + grant.at;
        let base = if grant.access.contains(Access::ZERO_BASED) { 0 } else { start };
        let whole =
            table.remote(principal(qp), stag, base, grant.len, grant.access & !Access::ZERO_BASED);
        let its_own = grant.qp.is_none_or(|only| only == qp);
        if let Ok(target) = &whole {
            assert!(its_own, "{stag} serves QP {qp}");
            let at = target.shared().map(|(_, at, _)| at).unwrap();
            assert_eq!(at, offset(grant.region) + grant.at as usize);
            for (to, len) in
                [(base, grant.len + 1), (base.wrapping_sub(1), 1), (base + grant.len, 1)]
            {
                assert!(table.remote(principal(qp), stag, to, len, Access::empty()).is_err());
            }
            for right in [Access::REMOTE_READ, Access::REMOTE_WRITE] {
                let may = table.remote(principal(qp), stag, base, 1, right).is_ok();
                assert_eq!(may, grant.access.contains(right));
            }
        }
        let quiet = self.unsettled[window] == 0 && self.must[window] == Some(stag);
        assert!(!(quiet && its_own) || whole.is_ok(), "{stag} must serve QP {qp}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn withdrawn_memory_is_not_accessible(ops in prop::collection::vec(op(), 1..120)) {
        let mut rig = Rig::new();
        for op in ops {
            rig.apply(op);
            rig.check();
        }
        for worker in 0..WORKERS {
            while !rig.queues[worker].is_empty() {
                rig.carry(worker);
                rig.check();
            }
        }
        // Each region is held only by the windows bound to it.
        for region in 0..REGIONS {
            let bound = (0..4).filter(|n| {
                rig.must[*n].is_some_and(|stag| rig.may[&stag].region == region)
            });
            let expected = match bound.count() as u32 {
                0 => Ok(()),
                n => Err(n),
            };
            prop_assert_eq!(rig.counts[region].withdraw(), expected, "region {}", region);
        }
    }
}

#[test]
fn a_bind_keeps_owner_and_slot() {
    for slot in [0, 7, (1 << 24) - 1] {
        let present = Stag(slot << 8 | 5);
        let kind = WindowKind::Type1;
        let mut table = StagTable::default();
        table.add_window(Arc::new(Window::new(MwId(1), SESSION, PD, kind, present)));
        let unbind = |new| {
            let window = present;
            let access = 0;
            BindRequest { window, new, address: 0, length: 0, lkey: 0, access }
        };
        let renamed = unbind(Stag(present.0 + 1));
        for stranger in [
            Principal { session: SessionId(9), ..principal(0) },
            Principal { pd: PdId(9), ..principal(0) },
        ] {
            let refused = table.bind(stranger, &renamed).err();
            assert_eq!(refused, Some(BindFault::NoWindow), "{stranger:?}");
        }
        for reserved in [0, u32::MAX, present.0 ^ 1 << 8] {
            let refused = table.bind(principal(0), &unbind(Stag(reserved))).err();
            assert_eq!(refused, Some(BindFault::NewKey), "{reserved:#x} in slot {slot}");
        }
        let change = table.bind(principal(0), &renamed).unwrap().unwrap();
        assert_eq!(format!("{change:?}"), "revoke None, install None of window Some(MwId(1))");
    }
}

/// Returns a region in a shared buffer that `principal(0)` may bind windows to.
fn region(session: SessionId, pd: PdId) -> StagEntry {
    let (mapping, _fd) = Mapping::create_arena("test", 4096).expect("memory for the arena");
    StagEntry {
        stag: Stag(0x100),
        kind: StagKind::region(),
        mr: MrId(1),
        session,
        pd,
        scope: Scope::Pd,
        access: Access::MW_BIND | Access::LOCAL_WRITE,
        iova: 0,
        length: LENGTH,
        memory: Memory::Shared { mapping, offset: 0 },
    }
}

fn window_of(session: SessionId, id: u32) -> Arc<Window> {
    Arc::new(Window::new(MwId(id), session, PD, WindowKind::Type2, Stag((id + 16) << 8)))
}

#[test]
fn a_window_binds_to_regions_of_its_owner_only() {
    for (session, pd) in [(SessionId(9), PD), (SESSION, PdId(9)), (SESSION, PD)] {
        let mut table = StagTable::default();
        table.install(region(session, pd));
        table.add_window(window_of(SESSION, 1));
        let window = Stag(17 << 8);
        let new = Stag(window.0 + 1);
        let access = Access::REMOTE_READ.bits();
        let request = BindRequest { window, new, address: 0, length: 1, lkey: 0x100, access };
        let bound = table.bind(principal(0), &request).err();
        let own = (session, pd) == (SESSION, PD);
        assert_eq!(bound, (!own).then_some(BindFault::NoRegion), "{session} {pd}");
        if !own {
            continue;
        }
        assert_eq!(table.windows.known[&17].bound, Some(new));
        // Nothing of the binding remains.
        assert!(table.invalidate_by_owner(principal(0), new).is_ok());
        assert_eq!((table.windows.known[&17].bound, table.windows.of_qps.len()), (None, 0));
    }
}

#[test]
fn a_session_is_removed_with_its_windows() {
    let mut table = StagTable::default();
    table.add_window(window_of(SESSION, 1));
    table.add_window(window_of(SessionId(9), 2));
    table.windows.forget_session(SESSION);
    let left: Vec<MwId> = table.windows.known.values().map(|known| known.window.id()).collect();
    assert_eq!(left, [MwId(2)]);
}
