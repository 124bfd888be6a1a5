//! Arenas of one session: memory for its queues, allocated by the daemon on demand.
//!
//! The first arena begins with a header page and one doorbell page per worker (`docs/abi.md`).
//! Further arenas hold only queues. Once the client has an arena, it lives as long as the session.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_abi::abi::ABI_VERSION;
use rnic_abi::abi::control::{NewArena, QueueLocation, Refusal};
use rnic_abi::abi::queue::{
    ARENA_MAGIC, CACHE_LINE, PAGE, QueueKind, QueueShape, arena_header, doorbell_offset,
};
use rnic_abi::shm::Mapping;
use rnic_abi::shm::queue::QueueMemory;
use rnic_abi::shm::ruled_calls::RuledCalls;
use rnic_abi::types::SessionId;

use super::extents::Extents;
use crate::resource::ledger::{Account, Charge, Kind};
use crate::resource::numbers::Doorbell;
use crate::resource::refuse;
use crate::system;

/// Memory for a session's queues.
pub struct Arenas {
    session: SessionId,
    account: Arc<Account>,
    list: Vec<Arc<Arena>>,
}

/// An arena. It lives as long as the session lists it or a queue uses it.
struct Arena {
    number: u32,
    mapping: Arc<Mapping>,
    extents: Mutex<Extents>,
    _charge: Charge,
}

/// Memory of a queue, freed on drop.
#[must_use = "a dropped place is freed at once"]
pub struct QueuePlace {
    arena: Arc<Arena>,
    offset: usize,
    shape: QueueShape,
}

/// Memory for queues that are created together.
pub struct Room<const N: usize> {
    /// In the order of the requested shapes.
    pub places: [QueuePlace; N],
    /// The arena that was created for them, if any.
    pub made: Option<Made>,
}

/// A new arena that the client does not have yet. Unless it is [kept](Arenas::keep), the arena is
/// removed when this value and all queues in it are dropped.
pub struct Made {
    arena: Arc<Arena>,
    descriptor: OwnedFd,
}

impl QueuePlace {
    /// Returns the location for the client.
    pub fn location(&self) -> QueueLocation {
        // Arenas are shorter than 4 GiB.
        QueueLocation { arena: self.arena.number, offset: self.offset as u32, shape: self.shape }
    }

    /// Writes the queue's header and empties its ring.
    pub fn format(
        &self,
        kind: QueueKind,
        owner: u32,
        doorbell: &Doorbell,
    ) -> Result<QueueMemory, Refusal> {
        let mapping = self.arena.mapping.clone();
        QueueMemory::format(mapping, self.offset, kind, self.shape, owner, doorbell.index())
            .map_err(|e| refuse::system("cannot create the queue", &e))
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        self.arena.extents.lock().release(self.offset, self.shape.bytes());
    }
}

impl Arenas {
    /// Returns the length of the first arena in bytes.
    pub fn first_length(workers: u32) -> usize {
        (doorbell_offset(workers) + FIRST_ROOM).next_multiple_of(PAGE)
    }

    /// Creates the first arena with its header. `charge` is the charge for it.
    pub fn open(
        session: SessionId,
        account: &Arc<Account>,
        charge: Charge,
        workers: u32,
        generation: u64,
        features: u64,
    ) -> std::io::Result<(Self, OwnedFd)> {
        let len = Arenas::first_length(workers);
        let (mapping, descriptor) = Mapping::create_arena(&name(session, 0), len)?;
        let shape = u64::from(ABI_VERSION) | u64::from(workers) << 16 | u64::from(session.0) << 32;
        for (offset, word) in [
            (arena_header::MAGIC, ARENA_MAGIC),
            (arena_header::SHAPE, shape),
            (arena_header::GENERATION, generation),
            (arena_header::FEATURES, features),
        ] {
            mapping.store_u64(offset, word).map_err(std::io::Error::other)?;
        }
        let extents = Mutex::new(Extents::new(doorbell_offset(workers), len));
        let first = Arena { number: 0, mapping, extents, _charge: charge };
        let list = vec![Arc::new(first)];
        Ok((Arenas { session, account: account.clone(), list }, descriptor))
    }

    /// Returns the mapping of the first arena, which contains the doorbells.
    pub fn first(&self) -> Option<&Arc<Mapping>> {
        self.list.first().map(|a| &a.mapping)
    }

    /// Publishes which library calls have fault rules, as bits of `LibraryCall`s.
    pub fn set_ruled_calls(&self, calls: u64) {
        let opened = self.first().and_then(|first| RuledCalls::new(first.clone()).ok());
        if let Some(word) = opened {
            word.set(calls);
        }
    }

    /// Finds memory for queues, in a new arena if necessary.
    pub fn room<const N: usize>(&self, shapes: [QueueShape; N]) -> Result<Room<N>, Refusal> {
        if let Some(places) = places(self.list.iter(), shapes) {
            return Ok(Room { places, made: None });
        }
        let len = self.next_length(&shapes);
        let charge = self.account.charge(Kind::ArenaBytes, len as u64)?;
        let made = self.make(len, charge)?;
        let places = places(self.list.iter().chain([&made.arena]), shapes);
        let places = places.ok_or_else(|| refuse::system("cannot place the queues", &"no room"))?;
        Ok(Room { places, made: Some(made) })
    }

    /// Adds a new arena, if one was created. Returns its description and descriptor for the client.
    pub fn keep(&mut self, made: Option<Made>) -> (Option<NewArena>, Vec<OwnedFd>) {
        let Some(Made { arena, descriptor }) = made else { return (None, Vec::new()) };
        debug_assert_eq!(arena.number as usize, self.list.len(), "the last new arena was kept");
        // Arenas are shorter than 4 GiB.
        let new_arena = NewArena { arena: arena.number, length: arena.mapping.len() as u32 };
        self.list.push(arena);
        (Some(new_arena), vec![descriptor])
    }

    /// Returns the length in bytes of a further arena for these queues. The length grows with the
    /// total length, so that the number of arenas stays small. If the limits do not allow that, the
    /// arena is just long enough for the queues.
    fn next_length(&self, shapes: &[QueueShape]) -> usize {
        // The limits on depth bound queues to a few hundred MiB.
        let need: usize = shapes.iter().map(|s| s.bytes().next_multiple_of(CACHE_LINE)).sum();
        let need = need.next_multiple_of(PAGE);
        let have: usize = self.list.iter().map(|a| a.mapping.len()).sum();
        let generous = have.clamp(GROW_LEAST, GROW_MOST).max(need);
        if generous as u64 <= self.account.room(Kind::ArenaBytes) { generous } else { need }
    }

    fn make(&self, len: usize, charge: Charge) -> Result<Made, Refusal> {
        let number = self.list.len() as u32;
        let (mapping, descriptor) = Mapping::create_arena(&name(self.session, number), len)
            .map_err(|e| system::refusal("cannot allocate memory for queues", &e))?;
        let extents = Mutex::new(Extents::new(0, len));
        let arena = Arc::new(Arena { number, mapping, extents, _charge: charge });
        Ok(Made { arena, descriptor })
    }
}

/// Allocates memory for all queues, or for none.
fn places<'a, const N: usize>(
    arenas: impl Iterator<Item = &'a Arc<Arena>> + Clone,
    shapes: [QueueShape; N],
) -> Option<[QueuePlace; N]> {
    let place = |shape: QueueShape| {
        arenas.clone().find_map(|arena| {
            let offset = arena.extents.lock().allocate(shape.bytes())?;
            Some(QueuePlace { arena: arena.clone(), offset, shape })
        })
    };
    let found: Vec<QueuePlace> = shapes.into_iter().map_while(place).collect();
    found.try_into().ok()
}

fn name(session: SessionId, number: u32) -> String {
    format!("rnicd-arena-{session}-{number}")
}

/// Bytes for queues in the first arena: enough for a few QPs of usual depth.
const FIRST_ROOM: usize = 48 << 10;
/// Minimum length of a further arena in bytes, if the limits allow it.
const GROW_LEAST: usize = 256 << 10;
/// Maximum length of a further arena in bytes, unless its queues need more.
const GROW_MOST: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::resource::capacity::Capacity;
    use crate::resource::ledger::Ledger;
    use crate::resource::policy::{Identity, Policy};

    #[test]
    fn dropped_arena_credits_its_charge() {
        let config = Config::default();
        let ledger = Ledger::new(&config, &Capacity::derive(&config, 1 << 20, 1));
        let who = Identity { uid: 1000, gids: Vec::new(), foreign: false };
        let account = ledger.open(Policy::new(&config).rights(&who));
        let first = account.charge(Kind::ArenaBytes, 1).unwrap_or_else(|e| panic!("{e}"));
        let opened = Arenas::open(SessionId(1), &account, first, 1, 0, 0);
        let (mut arenas, _) = opened.unwrap_or_else(|e| panic!("{e}"));
        // Larger than the first arena.
        let shape = QueueShape::completion(4096);
        let room = |arenas: &Arenas| arenas.room([shape]).unwrap_or_else(|e| panic!("{e}"));
        let refused = room(&arenas);
        assert!(refused.made.is_some() && account.amounts().of(Kind::ArenaBytes) > 1);
        drop(refused);
        assert_eq!(account.amounts().of(Kind::ArenaBytes), 1);
        let Room { places: [place], made } = room(&arenas);
        let (new_arena, descriptors) = arenas.keep(made);
        assert_eq!(new_arena.map(|new| new.arena), Some(1), "the number was free again");
        let charged = account.amounts().of(Kind::ArenaBytes);
        assert!(descriptors.len() == 1 && charged > 1);
        let offset = place.location().offset;
        drop(place);
        let again = room(&arenas);
        assert!(again.made.is_none(), "freed memory serves the next queue");
        assert_eq!(again.places[0].location().offset, offset);
        assert_eq!(account.amounts().of(Kind::ArenaBytes), charged);
        drop((again, arenas));
        assert_eq!(account.amounts().of(Kind::ArenaBytes), 0);
    }
}
