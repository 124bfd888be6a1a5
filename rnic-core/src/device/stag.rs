//! Steering tags: issuing them, and turning (STag, offset, length) into memory.
//!
//! [`StagAllocator`] lives with the resource manager and issues values that a peer cannot guess
//! (RFC 5042 section 8.1.1); each worker owns a [`StagTable`] as plain data. The only way to memory is
//! [`StagTable::local`] or [`StagTable::remote`]: they check, and hand out a [`Target`] that borrows
//! the table, so no check can outlive the next change of the table.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::memory::{Memory, Target};
use super::mover::Mover;
use super::window::{Known, Names, StagChange};
use crate::types::{Access, MrId, PdId, QpId, Scope, SessionId, Stag};

// ---------------------------------------------------------------------------------------------
// Issuing

/// Issues STags: a keyed permutation of a 24-bit slot number, then an 8-bit key.
///
/// Slots are reused first-in first-out and only after [`REUSE_AFTER`] others, with the key advanced; a
/// slot whose 256 keys are used up is retired. 0 and `0xFFFF_FFFF` are never issued.
pub struct StagAllocator {
    permutation: Permutation,
    fresh: u32,
    free: VecDeque<FreeSlot>,
    issued: HashMap<u32, FreeSlot>,
}

/// Slots that must be free before the one freed first is used again.
pub const REUSE_AFTER: usize = 4096;
const SLOTS: u32 = 1 << 24;

#[derive(Clone, Copy)]
struct FreeSlot {
    slot: u32,
    key: u8,
    keys_left: u16,
}

/// Every slot is in use or retired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no STag is left")]
pub struct StagsExhausted;

impl StagAllocator {
    /// An allocator whose sequence depends on 32 random octets only.
    pub fn new(seed: [u8; 32]) -> Self {
        StagAllocator {
            permutation: Permutation::new(seed),
            fresh: 0,
            free: VecDeque::new(),
            issued: HashMap::new(),
        }
    }

    /// Issues an STag that is not in use and was not for a long time.
    pub fn allocate(&mut self) -> Result<Stag, StagsExhausted> {
        loop {
            let mut entry = if self.free.len() > REUSE_AFTER || self.fresh == SLOTS {
                self.free.pop_front().ok_or(StagsExhausted)?
            } else {
                let slot = self.fresh;
                self.fresh += 1;
                FreeSlot { slot, key: self.permutation.first_key(slot), keys_left: 256 }
            };
            let stag = self.permutation.apply(entry.slot) << 8 | u32::from(entry.key);
            entry.key = entry.key.wrapping_add(1);
            entry.keys_left -= 1;
            if stag == 0 || stag == u32::MAX {
                self.give_back(entry);
                continue;
            }
            self.issued.insert(stag, entry);
            return Ok(Stag(stag));
        }
    }

    /// Issues an STag of which every key is usable, for a window whose keys others choose.
    pub fn allocate_for_window(&mut self) -> Result<Stag, StagsExhausted> {
        loop {
            let stag = self.allocate()?;
            // Keys of these two would reach the values that are never issued.
            if stag.0 >> 8 != 0 && stag.0 >> 8 != SLOTS - 1 {
                return Ok(stag);
            }
            self.release(stag);
        }
    }

    /// Takes back a window's STag, whose last key was `last`: the next one to be issued follows that.
    pub fn release_window(&mut self, issued: Stag, last: Stag) {
        if let Some(entry) = self.issued.get_mut(&issued.0) {
            entry.key = (last.0 as u8).wrapping_add(1);
        }
        self.release(issued);
    }

    /// Takes back an STag that was issued; anything else is ignored.
    pub fn release(&mut self, stag: Stag) {
        if let Some(entry) = self.issued.remove(&stag.0) {
            self.give_back(entry);
        }
    }

    fn give_back(&mut self, entry: FreeSlot) {
        if entry.keys_left > 0 {
            self.free.push_back(entry);
        }
    }
}

/// A keyed permutation of 24-bit numbers: a Feistel network of eight rounds over two halves of 12.
struct Permutation {
    round_keys: [u64; 8],
    key_key: u64,
}

impl Permutation {
    fn new(seed: [u8; 32]) -> Self {
        // Expand the seed: each round key depends on all 32 octets.
        let word =
            |i: usize| u64::from_le_bytes(seed[i * 8..i * 8 + 8].try_into().unwrap_or([0; 8]));
        let mut state = word(0);
        let mut next = |round: usize| {
            for i in 0..4 {
                state = mix(state ^ word(i).rotate_left(round as u32 * 7 + 1));
            }
            state
        };
        Permutation { round_keys: std::array::from_fn(&mut next), key_key: next(8) }
    }

    fn apply(&self, slot: u32) -> u32 {
        let (mut l, mut r) = (slot >> 12 & 0xFFF, slot & 0xFFF);
        for k in self.round_keys {
            (l, r) = (r, l ^ (mix(k ^ u64::from(r)) as u32 & 0xFFF));
        }
        l << 12 | r
    }

    fn first_key(&self, slot: u32) -> u8 {
        mix(self.key_key ^ u64::from(slot)) as u8
    }
}

/// A bijective mixer with full avalanche (the finaliser of SplitMix64).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

// ---------------------------------------------------------------------------------------------
// Resolving

/// A memory region, or a window bound to one, as a worker knows it.
#[derive(Clone)]
pub struct StagEntry {
    /// Its STag.
    pub stag: Stag,
    /// What it is.
    pub names: Names,
    /// The region's handle.
    pub mr: MrId,
    /// Owner; only the owner may use it locally.
    pub session: SessionId,
    /// Domain.
    pub pd: PdId,
    /// Who may use it from the wire.
    pub scope: Scope,
    /// Rights.
    pub access: Access,
    /// First address, for local elements and remote offsets alike.
    pub iova: u64,
    /// Octets; `iova + length` is below 2^64.
    pub length: u64,
    /// Memory it names, `length` octets.
    pub memory: Memory,
}

/// Why a local key does not serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocalFault {
    /// No such key, or it is another session's, domain's or QP's.
    #[error("no such local key")]
    InvalidKey,
    /// The region does not allow local writing.
    #[error("the region may not be written")]
    NoRight,
    /// The range leaves the region.
    #[error("outside the region")]
    Bounds,
    /// Windows are bound to the region that is to be invalidated.
    #[error("windows are bound to the region")]
    HasWindows,
}

/// Why a remote STag does not serve a message; the checks of RFC 5041 section 7.1 and RFC 5040
/// section 7.2, in the order in which they are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteFault {
    /// No such STag, or it is not enabled.
    #[error("invalid STag")]
    InvalidStag,
    /// Another domain's, or limited to another stream.
    #[error("STag not associated with this stream")]
    NotAssociated,
    /// The region lacks the remote right.
    #[error("access rights violation")]
    NoRight,
    /// Offset plus length reaches 2^64.
    #[error("tagged offset wraps")]
    Wrap,
    /// The range leaves the region.
    #[error("base or bounds violation")]
    Bounds,
}

/// Why an STag cannot be invalidated by the peer (RFC 5040 section 5.3, codes 09 of both types).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidateFault {
    /// Unknown, or not associated with the stream: a protection error.
    NotAssociated,
    /// Associated, but shared by the domain, or a region with windows bound to it: an operation
    /// error.
    Shared,
}

/// The identity under which a QP uses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Principal {
    /// Owner of the QP.
    pub session: SessionId,
    /// Its domain.
    pub pd: PdId,
    /// The QP.
    pub qp: QpId,
}

/// A worker's copy of all STags, as plain data.
#[derive(Default)]
pub struct StagTable {
    pub(super) entries: HashMap<u32, StagEntry, BuildHasherDefault<StagHasher>>,
    /// Windows, bound or not, by the 24 bits of their STag that stay.
    pub(super) windows: HashMap<u32, Known, BuildHasherDefault<StagHasher>>,
    /// Windows that only one QP uses, by that QP.
    pub(super) of_qps: HashMap<QpId, BTreeSet<Stag>>,
}

impl StagTable {
    /// Adds or replaces a region or a bound window. A window that has been taken back meanwhile is
    /// not added.
    pub fn install(&mut self, entry: StagEntry) {
        if let Names::Window(binding) = &entry.names
            && !self.note_bound(&entry, binding)
        {
            return;
        }
        self.entries.insert(entry.stag.0, entry);
    }

    /// Removes a region or the entry of a window; whether it was there.
    pub fn revoke(&mut self, stag: Stag) -> bool {
        self.remove(stag).is_some()
    }

    pub(super) fn remove(&mut self, stag: Stag) -> Option<StagEntry> {
        let entry = self.entries.remove(&stag.0)?;
        if matches!(entry.names, Names::Window(_)) {
            self.note_unbound(&entry);
        }
        Some(entry)
    }

    /// Removes everything a session owns.
    pub fn revoke_session(&mut self, session: SessionId) {
        self.entries.retain(|_, e| e.session != session);
        self.forget_windows_of(session);
    }

    /// A region or bound window by its STag, to be talked about; memory is reached by `local` and
    /// `remote` alone.
    pub fn get(&self, stag: Stag) -> Option<&StagEntry> {
        self.entries.get(&stag.0)
    }

    /// Regions and bound windows known.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether all memory of these STags is shared memory, which the kernel can send from where it
    /// lies.
    pub fn all_shared(&self, mut stags: impl Iterator<Item = Stag>) -> bool {
        stags.all(|stag| {
            let entry = self.entries.get(&stag.0);
            entry.is_none_or(|e| matches!(e.memory, Memory::Segment { .. }))
        })
    }

    /// Whether this is the STag of a bound window, which is no local key.
    pub fn is_window(&self, stag: Stag) -> bool {
        self.entries.get(&stag.0).is_some_and(|e| matches!(e.names, Names::Window(_)))
    }

    /// The mover that alone reaches the memory of an STag.
    pub fn mover_of(&self, stag: Stag) -> Option<Arc<Mover>> {
        match &self.entries.get(&stag.0)?.memory {
            Memory::Moved { mover, .. } => Some(mover.clone()),
            Memory::Segment { .. } | Memory::Attached { .. } => None,
        }
    }

    /// Resolves a local element. `write` asks for the right to write it.
    pub fn local(
        &self,
        who: Principal,
        lkey: u32,
        addr: u64,
        len: u32,
        write: bool,
    ) -> Result<Target<'_>, LocalFault> {
        let e = self.entries.get(&lkey).ok_or(LocalFault::InvalidKey)?;
        let is_region = matches!(e.names, Names::Region(_));
        if !is_region || e.session != who.session || e.pd != who.pd || !in_scope(e, who.qp) {
            return Err(LocalFault::InvalidKey);
        }
        if write && !e.access.contains(Access::LOCAL_WRITE) {
            return Err(LocalFault::NoRight);
        }
        e.range(addr, u64::from(len)).ok_or(LocalFault::Bounds)
    }

    /// Resolves a range that a peer names, asking for `right`.
    pub fn remote(
        &self,
        who: Principal,
        stag: Stag,
        to: u64,
        len: u64,
        right: Access,
    ) -> Result<Target<'_>, RemoteFault> {
        let e = self.entries.get(&stag.0).ok_or(RemoteFault::InvalidStag)?;
        if e.pd != who.pd || !in_scope(e, who.qp) {
            return Err(RemoteFault::NotAssociated);
        }
        if !e.access.contains(right) {
            return Err(RemoteFault::NoRight);
        }
        to.checked_add(len).ok_or(RemoteFault::Wrap)?;
        e.range(to, len).ok_or(RemoteFault::Bounds)
    }

    /// Whether the peer of `who` may invalidate `stag` (RFC 5040 section 8.1.1: only if it is limited
    /// to that stream).
    pub fn may_invalidate(&self, who: Principal, stag: Stag) -> Result<(), InvalidateFault> {
        let e = self.entries.get(&stag.0).ok_or(InvalidateFault::NotAssociated)?;
        match e.scope {
            Scope::Qp(qp) if qp == who.qp && e.pd == who.pd => Ok(()),
            Scope::Pd if e.pd == who.pd => Err(InvalidateFault::Shared),
            _ => Err(InvalidateFault::NotAssociated),
        }
    }

    /// Invalidates an STag for the peer of `who`: a region or a window of that QP alone.
    pub fn invalidate_by_peer(
        &mut self,
        who: Principal,
        stag: Stag,
    ) -> Result<(), InvalidateFault> {
        self.may_invalidate(who, stag)?;
        match self.entries.get(&stag.0).map(|e| &e.names) {
            Some(Names::Region(windows)) => {
                windows.withdraw().map_err(|_| InvalidateFault::Shared)?;
                self.revoke(stag);
            }
            Some(Names::Window(_)) => self.unbind(stag),
            None => {}
        }
        Ok(())
    }

    /// Invalidates an STag for `who` itself: a region without windows, or a window of type 2. What
    /// has to happen on every worker before it is done is returned: nothing if only `who` uses it and
    /// no mover does.
    pub fn invalidate_by_owner(
        &mut self,
        who: Principal,
        stag: Stag,
    ) -> Result<Option<StagChange>, LocalFault> {
        let e = self.entries.get(&stag.0).ok_or(LocalFault::InvalidKey)?;
        if e.session != who.session || e.pd != who.pd || !in_scope(e, who.qp) {
            return Err(LocalFault::InvalidKey);
        }
        let mover = self.mover_of(stag);
        match (&e.names, e.scope) {
            (Names::Window(_), Scope::Qp(_)) => self.unbind(stag),
            // Unbound by a bind of no octets, as in the verbs.
            (Names::Window(_), Scope::Pd) => return Err(LocalFault::InvalidKey),
            (Names::Region(windows), scope) => {
                windows.withdraw().map_err(|_| LocalFault::HasWindows)?;
                if scope == Scope::Pd {
                    let revoke = Some(stag);
                    return Ok(Some(StagChange { revoke, mover, ..StagChange::default() }));
                }
                self.revoke(stag);
            }
        }
        // Nothing changes elsewhere, but a copy may be under way here.
        Ok(mover.map(|mover| StagChange { mover: Some(mover), ..StagChange::default() }))
    }
}

pub(super) fn in_scope(e: &StagEntry, qp: QpId) -> bool {
    match e.scope {
        Scope::Pd => true,
        Scope::Qp(only) => only == qp,
    }
}

impl StagEntry {
    /// Octets from its start to `addr`, if it has `len` octets from there on.
    pub(super) fn offset_of(&self, addr: u64, len: u64) -> Option<usize> {
        let from = addr.checked_sub(self.iova)?;
        // from + len <= length, which is the length of a piece of memory, hence a usize.
        (from.checked_add(len)? <= self.length).then_some(from as usize)
    }

    fn range(&self, addr: u64, len: u64) -> Option<Target<'_>> {
        let from = self.offset_of(addr, len)?;
        Some(self.memory.target(from as u64, len as usize, self.session))
    }
}

/// STags are a keyed permutation already; one multiplication spreads them over the table's control
/// bits.
#[derive(Default)]
pub(super) struct StagHasher(u64);

impl Hasher for StagHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u32(u32::from(*b));
        }
    }

    fn write_u32(&mut self, n: u32) {
        self.0 = (self.0.rotate_left(5) ^ u64::from(n)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::shm::Mapping;

    /// What a region is, as a set of octets; everything else follows.
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
        /// Whether the octets `at..at + len` are all its own, one by one as integers without end.
        fn holds(&self, at: u64, len: u64) -> bool {
            let (at, len) = (u128::from(at), u128::from(len));
            let (from, to) =
                (u128::from(self.iova), u128::from(self.iova) + u128::from(self.length));
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
        /// Every answer of the table against the plain set of octets.
        #[test]
        fn resolving_agrees_with_sets_of_octets(
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
                    names: Names::region(),
                    mr: MrId(n),
                    session: SessionId(p.session),
                    pd: PdId(p.pd),
                    scope: p.only.map_or(Scope::Pd, |q| Scope::Qp(QpId(q))),
                    access: p.access,
                    iova: p.iova,
                    length: p.length,
                    memory: Memory::Segment {
                        mapping: mapping.clone(),
                        offset: n as usize * 200,
                    },
                });
            }
            for (n, session, pd, qp, shift, len) in asks {
                let who = Principal { session: SessionId(session), pd: PdId(pd), qp: QpId(qp) };
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
                    let found = table.remote(who, stag, at, len, right);
                    prop_assert_eq!(found.map(|t| t.shared().map_or(0, |s| s.1)), expected);
                    if let Ok(t) = found {
                        prop_assert_eq!(t.len() as u64, len);
                        prop_assert!(t.part(1, t.len()).is_none());
                        prop_assert!(t.part(u64::MAX, 0).is_none());
                        prop_assert_eq!(t.part(0, t.len()).and_then(|p| p.shared()).map(|s| s.1), t.shared().map(|s| s.1));
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
                    let found = table.local(who, stag.0, at, short, write);
                    prop_assert_eq!(found.map(|t| t.shared().map_or(0, |s| s.1)), expected);
                }
                let expected = match region {
                    Some(r) if r.pd == pd && r.only == Some(qp) => Ok(()),
                    Some(r) if r.pd == pd && r.only.is_none() => Err(InvalidateFault::Shared),
                    _ => Err(InvalidateFault::NotAssociated),
                };
                prop_assert_eq!(table.may_invalidate(who, stag), expected);
            }
        }
    }

    #[test]
    fn permutation_is_one_to_one() {
        let p = Permutation::new([7; 32]);
        let mut seen = vec![false; SLOTS as usize];
        for slot in 0..SLOTS {
            let x = p.apply(slot) as usize;
            assert!(!seen[x], "slot {slot} collides");
            seen[x] = true;
        }
    }

    fn entry(stag: Stag, scope: Scope, memory: Memory) -> StagEntry {
        StagEntry {
            stag,
            names: Names::region(),
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
        let who =
            |session, pd, qp| Principal { session: SessionId(session), pd: PdId(pd), qp: QpId(qp) };
        let (mapping, _fd) = Mapping::create_arena("test", 4096).unwrap();
        let memory = Memory::Segment { mapping, offset: 0 };
        let mut table = StagTable::default();
        let [shared, own] = [Stag(0x100), Stag(0x200)];
        table.install(entry(shared, Scope::Pd, memory.clone()));
        table.install(entry(own, Scope::Qp(QpId(1)), memory));
        assert!(!table.is_empty() && table.len() == 2);
        for (stranger, stag) in [
            (who(2, 1, 1), shared),
            (who(1, 2, 1), shared),
            (who(2, 1, 1), own),
            (who(1, 2, 1), own),
            (who(1, 1, 2), own),
        ] {
            let refused = table.invalidate_by_owner(stranger, stag);
            assert!(matches!(refused, Err(LocalFault::InvalidKey)), "{refused:?}");
        }
        let alone = table.invalidate_by_owner(who(1, 1, 1), own);
        assert!(matches!(alone, Ok(None)) && table.get(own).is_none(), "{alone:?}");
        let everywhere = table.invalidate_by_owner(who(1, 1, 2), shared).unwrap().unwrap();
        assert_eq!((everywhere.revoke, everywhere.mover.is_some()), (Some(shared), false));
    }

    /// A copy may be under way in memory that only a mover reaches, whoever uses the STag.
    #[test]
    fn invalidating_what_a_mover_reaches_waits_for_it() {
        for scope in [Scope::Pd, Scope::Qp(QpId(1))] {
            let mover = Mover::new(SessionId(1), 1);
            let mut table = StagTable::default();
            table.install(entry(Stag(0x100), scope, Memory::Moved { mover, address: 4096 }));
            let who = Principal { session: SessionId(1), pd: PdId(1), qp: QpId(1) };
            let change = table.invalidate_by_owner(who, Stag(0x100)).unwrap().unwrap();
            assert!(change.mover.is_some(), "{scope:?}");
        }
    }

    #[test]
    fn hashes_fill_both_ends_of_a_word() {
        let hash = |n: u32| {
            let mut hasher = StagHasher::default();
            hasher.write_u32(n);
            hasher.finish()
        };
        let mut a = StagAllocator::new([6; 32]);
        let hashes: Vec<u64> = (0..1000).map(|_| hash(a.allocate().unwrap().0)).collect();
        // Those of a hash table's buckets, and those of its control octets.
        let low: HashSet<u64> = hashes.iter().map(|h| h & 0xFF).collect();
        let high: HashSet<u64> = hashes.iter().map(|h| h >> 57).collect();
        assert!(low.len() > 200 && high.len() > 100, "{} {}", low.len(), high.len());
        // Octets one by one, each of which counts.
        let all: HashSet<u64> = (0..=255u8)
            .map(|n| {
                let mut hasher = StagHasher::default();
                hasher.write(&[1, n, 2]);
                hasher.finish()
            })
            .collect();
        assert_eq!(all.len(), 256);
    }

    /// Against values of another program for the same seed; those of the mixer are the ones that
    /// are published for SplitMix64 from 0.
    #[test]
    fn permutation_and_first_keys_are_the_ones_meant() {
        assert_eq!(mix(0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(mix(0x9E37_79B9_7F4A_7C15), 0x6E78_9E6A_A1B9_65F4);
        let p = Permutation::new(std::array::from_fn(|i| i as u8));
        for (slot, permuted, key) in [
            (0, 0x30_BF6E, 0xA8),
            (1, 0x92_193F, 0x86),
            (0x12_3456, 0x4D_B4DB, 0xE0),
            (0xFF_FFFF, 0x25_29FD, 0x7F),
        ] {
            assert_eq!((p.apply(slot), p.first_key(slot)), (permuted, key), "{slot:#x}");
        }
    }

    #[test]
    fn ten_thousand_stags_are_distinct_and_spread() {
        let mut a = StagAllocator::new([1; 32]);
        let stags: Vec<u32> = (0..10_000).map(|_| a.allocate().unwrap().0).collect();
        assert_eq!(stags.iter().collect::<HashSet<_>>().len(), stags.len());
        for sixteenth in 0..16u32 {
            let n = stags.iter().filter(|s| **s >> 28 == sixteenth).count();
            assert!((400..900).contains(&n), "{n} STags begin with {sixteenth:x}");
        }
        let steps: HashSet<u32> = stags.windows(2).map(|w| w[1].wrapping_sub(w[0])).collect();
        assert!(steps.len() > 9_900, "a step repeats");
    }

    #[test]
    fn a_freed_stag_comes_back_late_and_never_the_same() {
        let mut a = StagAllocator::new([2; 32]);
        let first = a.allocate().unwrap();
        a.release(first);
        let mut seen = HashSet::from([first.0]);
        for _ in 0..3 * REUSE_AFTER {
            let s = a.allocate().unwrap();
            assert!(seen.insert(s.0), "{s} was issued twice");
            a.release(s);
        }
        assert!(seen.iter().any(|s| s >> 8 == first.0 >> 8 && *s != first.0), "slot never reused");
    }

    #[test]
    fn a_slot_waits_for_exactly_so_many_others() {
        let reused = |free: usize| {
            let mut a = StagAllocator::new([2; 32]);
            let all: Vec<Stag> = (0..free).map(|_| a.allocate().unwrap()).collect();
            all.iter().for_each(|stag| a.release(*stag));
            a.allocate().unwrap().0 >> 8 == all[0].0 >> 8
        };
        let seen = [REUSE_AFTER, REUSE_AFTER + 1, REUSE_AFTER + 2].map(reused);
        assert_eq!(seen, [false, true, true]);
    }

    #[test]
    fn keys_that_others_choose_reach_no_reserved_value() {
        let mut a = StagAllocator::new([5; 32]);
        let slot_of = |wanted| (0..SLOTS).find(|s| a.permutation.apply(*s) == wanted).unwrap();
        let slots = [slot_of(0), slot_of(SLOTS - 1), slot_of(77)];
        a.fresh = SLOTS;
        for slot in slots {
            a.give_back(FreeSlot { slot, key: 5, keys_left: 256 });
        }
        let issued = a.allocate_for_window().unwrap();
        assert_eq!(issued, Stag(77 << 8 | 5));
        // Somebody has counted it up; the next one begins behind that.
        a.release_window(issued, Stag(77 << 8 | 9));
        assert_eq!(a.allocate_for_window(), Ok(Stag(77 << 8 | 10)));
        // The other two are good for regions.
        let rest = [a.allocate(), a.allocate()].map(|stag| stag.unwrap().0 >> 8);
        assert_eq!(rest, [0, SLOTS - 1]);
    }

    #[test]
    fn a_slot_is_retired_when_its_keys_are_used_up() {
        let mut a = StagAllocator::new([3; 32]);
        a.give_back(FreeSlot { slot: 5, key: 9, keys_left: 0 });
        assert!(a.free.is_empty());
    }

    #[test]
    fn reserved_values_are_never_issued() {
        let mut a = StagAllocator::new([4; 32]);
        let zero = (0..SLOTS).find(|s| a.permutation.apply(*s) == 0).unwrap();
        for _ in 0..=REUSE_AFTER {
            a.give_back(FreeSlot { slot: zero, key: 0, keys_left: 1 });
        }
        a.fresh = SLOTS;
        assert_eq!(a.allocate(), Err(StagsExhausted));
    }
}
