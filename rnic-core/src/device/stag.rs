//! Steering tag tables, which resolve (STag, offset, length) to memory.
//!
//! Each worker owns a [`StagTable`] as plain data. Memory is accessible only through
//! [`StagTable::local`] or [`StagTable::remote`], or, for a series of requests, through a
//! [`RecentStag`](super::RecentStag). They check the access and return a [`Target`] that borrows
//! the table, so a check cannot outlive the next change to the table.

mod bind;
mod change;
mod entry;
mod fault;
mod hash;
mod windows;

use std::collections::HashMap;
use std::sync::Arc;

pub use self::change::StagChange;
pub use self::entry::{Principal, StagEntry, StagKind};
pub use self::fault::{InvalidateFault, LocalFault, RemoteFault};
use self::hash::{StagHash, shrink_sparse};
use self::windows::Windows;
use super::copier::Copier;
use super::memory::{Memory, Target};
use super::window::Window;
use rnic_abi::types::{Access, QpId, Scope, SessionId, Stag};

/// A worker's copy of all STags, as plain data.
#[derive(Default)]
pub struct StagTable {
    /// Regions and bound windows.
    entries: HashMap<u32, StagEntry, StagHash>,
    windows: Windows,
}

impl StagTable {
    /// Adds or replaces a region or a bound window. Does not add a window that has been
    /// deallocated.
    //= DDP-8.3-1, DDP-8.3-2, DDP-8.3.1-4, DDP-8.3.1-5, RDMAP-8.1.1-4, RDMAP-8.1.1-5
    pub fn install(&mut self, entry: StagEntry) {
        if let StagKind::Window(binding) = &entry.kind
            && !self.windows.note_bound(&entry, binding)
        {
            return;
        }
        self.entries.insert(entry.stag.0, entry);
    }

    /// Removes a region or the entry of a window. Returns true if it was present.
    //= DDP-8.3-1, DDP-8.3-2, DDP-8.3.1-4, DDP-8.3.1-5, RDMAP-8.1.1-4, RDMAP-8.1.1-5
    pub fn revoke(&mut self, stag: Stag) -> bool {
        self.remove(stag).is_some()
    }

    fn remove(&mut self, stag: Stag) -> Option<StagEntry> {
        let entry = self.entries.remove(&stag.0)?;
        if matches!(entry.kind, StagKind::Window(_)) {
            self.windows.note_unbound(&entry);
        }
        shrink_sparse(&mut self.entries);
        Some(entry)
    }

    /// Removes all entries and windows of a session.
    pub fn revoke_session(&mut self, session: SessionId) {
        self.entries.retain(|_, e| e.session != session);
        shrink_sparse(&mut self.entries);
        self.windows.forget_session(session);
    }

    /// Adds a window, so that it can be bound.
    pub fn add_window(&mut self, window: Arc<Window>) {
        self.windows.add(window);
    }

    /// Removes a window and its entry.
    pub fn remove_window(&mut self, window: &Window) {
        if let Some(bound) = self.windows.remove(window) {
            self.remove(bound);
        }
    }

    /// Applies a change requested by a QP of this or another worker.
    pub fn change(&mut self, change: &StagChange) {
        if let Some(stag) = change.revoke {
            self.revoke(stag);
        }
        if let Some(entry) = &change.install {
            self.install(entry.clone());
        }
    }

    /// Unbinds a type 2 window. Afterwards it gives no access, and can be bound again.
    fn unbind(&mut self, stag: Stag) {
        let Some(entry) = self.remove(stag) else { return };
        if let StagKind::Window(binding) = &entry.kind
            && let Some(window) = self.windows.find(stag)
        {
            window.unbound(binding);
        }
    }

    /// Unbinds all windows that a QP has bound. Called when the QP has ended.
    pub fn unbind_all_of(&mut self, qp: QpId) {
        for stag in self.windows.take_of(qp) {
            self.unbind(stag);
        }
    }

    /// Returns the entry of a region or bound window, for information only. Access to memory is
    /// through `local` and `remote` of this type or of [`RecentStag`](super::RecentStag).
    pub fn get(&self, stag: Stag) -> Option<&StagEntry> {
        self.entries.get(&stag.0)
    }

    /// Returns the number of regions and bound windows.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if there is no region and no bound window.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns true if all memory of these STags is shared memory, from which the kernel can send
    /// in place.
    pub fn all_shared(&self, mut stags: impl Iterator<Item = Stag>) -> bool {
        stags.all(|stag| {
            let entry = self.entries.get(&stag.0);
            entry.is_none_or(|e| matches!(e.memory, Memory::Shared { .. }))
        })
    }

    /// Returns true if this is the STag of a bound window, which is not a valid local key.
    pub fn is_window(&self, stag: Stag) -> bool {
        self.entries.get(&stag.0).is_some_and(|e| matches!(e.kind, StagKind::Window(_)))
    }

    /// Returns true if this is the STag of a region that `principal` may use and that is shared by
    /// its domain.
    pub fn is_ordinary_region(&self, principal: Principal, stag: Stag) -> bool {
        let owned = |e: &&StagEntry| e.session == principal.session && e.pd == principal.pd;
        let entry = self.entries.get(&stag.0).filter(owned);
        entry.is_some_and(|e| matches!((&e.kind, e.scope), (StagKind::Region(_), Scope::Pd)))
    }

    /// Returns the copier, if the memory of this STag can be accessed only by a copier.
    pub fn copier_of(&self, stag: Stag) -> Option<Arc<Copier>> {
        match &self.entries.get(&stag.0)?.memory {
            Memory::ThroughCopier { copier, .. } => Some(copier.clone()),
            Memory::Shared { .. } | Memory::Attached { .. } => None,
        }
    }

    /// Resolves a local SGE. If `write` is true, the region must allow local writes.
    pub fn local(
        &self,
        principal: Principal,
        lkey: u32,
        addr: u64,
        len: u32,
        write: bool,
    ) -> Result<Target<'_>, LocalFault> {
        let entry = self.entries.get(&lkey).ok_or(LocalFault::InvalidKey)?;
        entry.local(principal, addr, len, write)
    }

    /// Resolves a range in a peer's request. The entry must have `right`.
    pub fn remote(
        &self,
        principal: Principal,
        stag: Stag,
        to: u64,
        len: u64,
        right: Access,
    ) -> Result<Target<'_>, RemoteFault> {
        //= DDP-7.1-11, RDMAP-7.2-7
        let entry = self.entries.get(&stag.0).ok_or(RemoteFault::InvalidStag)?;
        entry.remote(principal, to, len, right)
    }

    /// Checks that the peer of `principal` may invalidate `stag`: only if the STag is limited to
    /// that stream (RFC 5040 section 8.1.1).
    pub fn may_invalidate(&self, principal: Principal, stag: Stag) -> Result<(), InvalidateFault> {
        //= RDMAP-7.2-4
        let e = self.entries.get(&stag.0).ok_or(InvalidateFault::NotAssociated)?;
        match e.scope {
            //= RDMAP-5.3-13, RDMAP-7.2-5
            Scope::Qp(qp) if qp == principal.qp && e.pd == principal.pd => Ok(()),
            //= RDMAP-8.1.1-7
            Scope::Pd if e.pd == principal.pd => Err(InvalidateFault::Shared),
            _ => Err(InvalidateFault::NotAssociated),
        }
    }

    /// Invalidates an STag for the peer of `principal`: a region or window limited to that QP.
    pub fn invalidate_by_peer(
        &mut self,
        principal: Principal,
        stag: Stag,
    ) -> Result<(), InvalidateFault> {
        self.may_invalidate(principal, stag)?;
        match self.entries.get(&stag.0).map(|e| &e.kind) {
            Some(StagKind::Region(windows)) => {
                windows.withdraw().map_err(|_| InvalidateFault::Shared)?;
                self.revoke(stag);
            }
            Some(StagKind::Window(_)) => self.unbind(stag),
            None => {}
        }
        Ok(())
    }

    /// Invalidates an STag for `principal`: a region without windows, or a type 2 window. Returns
    /// the change that every worker must apply first, or `None` if only `principal` uses the STag
    /// and no copier accesses its memory.
    pub fn invalidate_by_owner(
        &mut self,
        principal: Principal,
        stag: Stag,
    ) -> Result<Option<StagChange>, LocalFault> {
        let e = self.entries.get(&stag.0).ok_or(LocalFault::InvalidKey)?;
        if e.session != principal.session || e.pd != principal.pd || !e.serves(principal.qp) {
            return Err(LocalFault::InvalidKey);
        }
        let copier = self.copier_of(stag);
        match (&e.kind, e.scope) {
            (StagKind::Window(_), Scope::Qp(_)) => self.unbind(stag),
            // A type 1 window is unbound by a bind of length 0, as in verbs.
            (StagKind::Window(_), Scope::Pd) => return Err(LocalFault::InvalidKey),
            (StagKind::Region(windows), scope) => {
                windows.withdraw().map_err(|_| LocalFault::HasWindows)?;
                if scope == Scope::Pd {
                    let revoke = Some(stag);
                    return Ok(Some(StagChange { revoke, copier, ..StagChange::default() }));
                }
                self.revoke(stag);
            }
        }
        // No other worker is affected, but a copier may have a copy in progress.
        Ok(copier.map(|copier| StagChange { copier: Some(copier), ..StagChange::default() }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use rnic_abi::shm::Mapping;
    use rnic_abi::types::{MrId, PdId};

    /// Model of a region as a set of bytes.
    #[derive(Clone, Debug)]
    struct Plain {
        session: u32,
        pd: u32,
        only: Option<u32>,
        access: Access,
        iova: u64,
        length: u64,
    }

    impl Plain {
        /// Returns true if all bytes of `at..at + len`, as integers without wrapping, are in the
        /// region.
        fn holds(&self, at: u64, len: u64) -> bool {
            let at = u128::from(at);
            let len = u128::from(len);
            let from = u128::from(self.iova);
            let to = from + u128::from(self.length);
            at >= from && at + len <= to
        }
    }

    fn plain() -> impl Strategy<Value = Plain> {
        let iova = prop_oneof![Just(0), 0u64..300, (u64::MAX - 300)..u64::MAX - 100, any::<u64>()];
        (0u32..2, 0u32..2, prop::option::of(0u32..3), 0u32..64, iova, 0u64..100).prop_map(
            |(session, pd, only, access, iova, length)| Plain {
                session,
                pd,
                only,
                access: Access::from_bits_truncate(access),
                iova,
                length: length.min(u64::MAX - iova),
            },
        )
    }

    proptest! {
        /// Compares the table's results with those for sets of bytes.
        #[test]
        fn resolving_agrees_with_sets_of_bytes(
            regions in prop::collection::vec(plain(), 1..6),
            asks in prop::collection::vec(
                (0usize..8, 0u32..2, 0u32..2, 0u32..3, any::<i8>(), prop_oneof![
                    0u64..120, Just(u64::from(u32::MAX)), 0u64..=u64::from(u32::MAX)]), 1..40),
        ) {
            let (mapping, _fd) = Mapping::create_arena("oracle", 4096).unwrap();
            let mut table = StagTable::default();
            for (n, p) in (1u32..).zip(&regions) {
                table.install(StagEntry {
                    stag: Stag(n << 8),
                    kind: StagKind::region(),
                    mr: MrId(n),
                    session: SessionId(p.session),
                    pd: PdId(p.pd),
                    scope: p.only.map_or(Scope::Pd, |q| Scope::Qp(QpId(q))),
                    access: p.access,
                    iova: p.iova,
                    length: p.length,
                    memory: Memory::Shared {
                        mapping: mapping.clone(),
                        offset: n as usize * 200,
                    },
                });
            }
            for (n, session, pd, qp, shift, len) in asks {
                let principal = Principal { session: SessionId(session), pd: PdId(pd), qp: QpId(qp) };
                let stag = Stag((n as u32 + 1) << 8);
                let region = regions.get(n);
                let base = region.map_or(0, |r| r.iova);
                let at = base.wrapping_add_signed(i64::from(shift));
                let scoped = |r: &Plain| r.pd == pd && r.only.is_none_or(|only| only == qp);
                for right in [Access::REMOTE_READ, Access::REMOTE_WRITE] {
                    let expected = match region {
                        None => Err(RemoteFault::InvalidStag),
                        Some(r) if !scoped(r) => Err(RemoteFault::NotAssociated),
                        Some(r) if !r.access.contains(right) => Err(RemoteFault::NoRight),
                        Some(_) if u128::from(at) + u128::from(len) >= 1 << 64 =>
                            Err(RemoteFault::Wrap),
                        Some(r) if !r.holds(at, len) => Err(RemoteFault::Bounds),
                        Some(r) => Ok((n + 1) * 200 + (at - r.iova) as usize),
                    };
                    let found = table.remote(principal, stag, at, len, right);
                    prop_assert_eq!(found.map(|t| t.shared().map_or(0, |s| s.1)), expected);
                    if let Ok(t) = found {
                        prop_assert_eq!(t.len() as u64, len);
                        prop_assert!(t.part(1, t.len()).is_none());
                        prop_assert!(t.part(u64::MAX, 0).is_none());
                        let whole = t.part(0, t.len()).and_then(|p| p.shared());
                        prop_assert_eq!(whole.map(|s| s.1), t.shared().map(|s| s.1));
                    }
                }
                for write in [false, true] {
                    let short = len as u32;
                    let expected = match region {
                        Some(r) if r.session == session && scoped(r) => {
                            if write && !r.access.contains(Access::LOCAL_WRITE) {
                                Err(LocalFault::NoRight)
                            } else if r.holds(at, u64::from(short)) {
                                Ok((n + 1) * 200 + (at - r.iova) as usize)
                            } else {
                                Err(LocalFault::Bounds)
                            }
                        }
                        _ => Err(LocalFault::InvalidKey),
                    };
                    let found = table.local(principal, stag.0, at, short, write);
                    prop_assert_eq!(found.map(|t| t.shared().map_or(0, |s| s.1)), expected);
                }
                let expected = match region {
                    Some(r) if r.pd == pd && r.only == Some(qp) => Ok(()),
                    Some(r) if r.pd == pd && r.only.is_none() => Err(InvalidateFault::Shared),
                    _ => Err(InvalidateFault::NotAssociated),
                };
                prop_assert_eq!(table.may_invalidate(principal, stag), expected);
            }
        }
    }

    fn entry(stag: Stag, scope: Scope, memory: Memory) -> StagEntry {
        StagEntry {
            stag,
            kind: StagKind::region(),
            mr: MrId(1),
            session: SessionId(1),
            pd: PdId(1),
            scope,
            access: Access::REMOTE_READ,
            iova: 0,
            length: 100,
            memory,
        }
    }

    #[test]
    fn a_region_is_invalidated_by_its_owner_alone() {
        let principal =
            |session, pd, qp| Principal { session: SessionId(session), pd: PdId(pd), qp: QpId(qp) };
        let (mapping, _fd) = Mapping::create_arena("test", 4096).unwrap();
        let memory = Memory::Shared { mapping, offset: 0 };
        let mut table = StagTable::default();
        let [shared, own] = [Stag(0x100), Stag(0x200)];
        table.install(entry(shared, Scope::Pd, memory.clone()));
        table.install(entry(own, Scope::Qp(QpId(1)), memory));
        assert!(!table.is_empty() && table.len() == 2);
        for (stranger, stag) in [
            (principal(2, 1, 1), shared),
            (principal(1, 2, 1), shared),
            (principal(2, 1, 1), own),
            (principal(1, 2, 1), own),
            (principal(1, 1, 2), own),
        ] {
            let refused = table.invalidate_by_owner(stranger, stag);
            assert!(matches!(refused, Err(LocalFault::InvalidKey)), "{refused:?}");
        }
        let alone = table.invalidate_by_owner(principal(1, 1, 1), own);
        assert!(matches!(alone, Ok(None)) && table.get(own).is_none(), "{alone:?}");
        let everywhere = table.invalidate_by_owner(principal(1, 1, 2), shared).unwrap().unwrap();
        assert_eq!((everywhere.revoke, everywhere.copier.is_some()), (Some(shared), false));
    }

    /// A copier may have a copy in progress, for any scope of the STag.
    #[test]
    fn invalidation_waits_for_the_copier() {
        for scope in [Scope::Pd, Scope::Qp(QpId(1))] {
            let copier = Copier::new(SessionId(1), 1);
            let mut table = StagTable::default();
            table.install(entry(
                Stag(0x100),
                scope,
                Memory::ThroughCopier { copier, address: 4096 },
            ));
            let principal = Principal { session: SessionId(1), pd: PdId(1), qp: QpId(1) };
            let change = table.invalidate_by_owner(principal, Stag(0x100)).unwrap().unwrap();
            assert!(change.copier.is_some(), "{scope:?}");
        }
    }
}
