//! Arenas of one session: memory for its queues, made by the daemon as it is needed.
//!
//! The first arena begins with a header page and one doorbell page per worker (`docs/abi.md`);
//! further ones hold queues from their first byte. An arena that the client was told of lives as
//! long as its session.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_core::abi::ABI_VERSION;
use rnic_core::abi::control::{NewArena, QueueLocation, Refusal};
use rnic_core::abi::queue::{
    ARENA_MAGIC, CACHE_LINE, PAGE, QueueKind, QueueShape, arena_header, doorbell_offset,
};
use rnic_core::shm::Mapping;
use rnic_core::shm::queue::QueueMemory;
use rnic_core::types::SessionId;

use super::extents::Extents;
use crate::resource::ledger::{Account, Charge, Kind};
use crate::resource::numbers::Doorbell;
use crate::resource::refuse;
use crate::system;

/// Memory of a session's queues.
pub struct Arenas {
    session: SessionId,
    account: Arc<Account>,
    list: Vec<Arc<Arena>>,
}

/// One arena, as long as the session has it or a queue lies in it.
struct Arena {
    number: u32,
    mapping: Arc<Mapping>,
    extents: Mutex<Extents>,
    _charge: Charge,
}

/// Where a queue lies. Given back when it is dropped.
#[must_use = "what is dropped is given back at once"]
pub struct QueuePlace {
    arena: Arc<Arena>,
    offset: usize,
    shape: QueueShape,
}

/// Places for queues that are made together.
pub struct Room<const N: usize> {
    /// In the order of the shapes that were asked for.
    pub places: [QueuePlace; N],
    /// The arena that had to be made for them.
    pub made: Option<Made>,
}

/// An arena that has just been made, of which the client does not know yet. It is gone when this is
/// dropped and nothing lies in it, unless it is [kept](Arenas::keep).
pub struct Made {
    arena: Arc<Arena>,
    descriptor: OwnedFd,
}

impl QueuePlace {
    /// As the client is told.
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
            .map_err(|e| refuse::system("cannot make the queue", &e))
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        self.arena.extents.lock().release(self.offset, self.shape.bytes());
    }
}

impl Arenas {
    /// Bytes of the first arena.
    pub fn first_length(workers: u32) -> usize {
        (doorbell_offset(workers) + FIRST_ROOM).next_multiple_of(PAGE)
    }

    /// Makes the first arena, with its header, for which the session has been charged.
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

    /// The mapping of the first arena, in which the doorbells are.
    pub fn first(&self) -> Option<&Arc<Mapping>> {
        self.list.first().map(|a| &a.mapping)
    }

    /// Finds places for queues, in a new arena if need be.
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

    /// Keeps an arena, if one was made: what to tell the client, and the descriptor that goes with
    /// it.
    pub fn keep(&mut self, made: Option<Made>) -> (Option<NewArena>, Vec<OwnedFd>) {
        let Some(Made { arena, descriptor }) = made else { return (None, Vec::new()) };
        debug_assert_eq!(arena.number as usize, self.list.len(), "one room at a time");
        // Arenas are shorter than 4 GiB.
        let told = NewArena { arena: arena.number, length: arena.mapping.len() as u32 };
        self.list.push(arena);
        (Some(told), vec![descriptor])
    }

    /// Bytes of a further arena for these queues. Grows with what there is, so that the number
    /// of arenas stays small, but not beyond the limits unless the queues need it.
    fn next_length(&self, shapes: &[QueueShape]) -> usize {
        // Queues are bounded to some hundred MiB by the limits on their depth.
        let need: usize = shapes.iter().map(|s| s.bytes().next_multiple_of(CACHE_LINE)).sum();
        let need = need.next_multiple_of(PAGE);
        let have: usize = self.list.iter().map(|a| a.mapping.len()).sum();
        let generous = have.clamp(GROW_LEAST, GROW_MOST).max(need);
        match generous as u64 <= self.account.room(Kind::ArenaBytes) {
            true => generous,
            false => need,
        }
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

/// Gives each queue a place, or none of them.
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

/// Bytes for queues in the first arena: a few QPs of usual depth.
const FIRST_ROOM: usize = 48 << 10;
/// A further arena has at least so many bytes, if the limits allow.
const GROW_LEAST: usize = 256 << 10;
/// A further arena has no more bytes than this unless one queue needs them.
const GROW_MOST: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::resource::capacity::Capacity;
    use crate::resource::ledger::Ledger;
    use crate::resource::policy::{Identity, Policy};

    #[test]
    fn an_arena_that_is_not_kept_is_gone_with_its_charge() {
        let config = Config::default();
        let ledger = Ledger::new(&config.limits, &Capacity::derive(&config, 1 << 20, 1));
        let who = Identity { uid: 1000, gids: Vec::new(), foreign: false };
        let account = ledger.open(Policy::new(&config).rights(&who));
        let first = account.charge(Kind::ArenaBytes, 1).unwrap_or_else(|e| panic!("{e}"));
        let opened = Arenas::open(SessionId(1), &account, first, 1, 0, 0);
        let (mut arenas, _) = opened.unwrap_or_else(|e| panic!("{e}"));
        // More than the first arena has room for.
        let shape = QueueShape::completion(4096);
        let room = |arenas: &Arenas| arenas.room([shape]).unwrap_or_else(|e| panic!("{e}"));
        let refused = room(&arenas);
        assert!(refused.made.is_some() && account.used(Kind::ArenaBytes) > 1);
        drop(refused);
        assert_eq!(account.used(Kind::ArenaBytes), 1);
        let Room { places: [place], made } = room(&arenas);
        let (told, descriptors) = arenas.keep(made);
        assert_eq!(told.map(|told| told.arena), Some(1), "the number was free again");
        let charged = account.used(Kind::ArenaBytes);
        assert!(descriptors.len() == 1 && charged > 1);
        let offset = place.location().offset;
        drop(place);
        let again = room(&arenas);
        assert!(again.made.is_none(), "what was given back serves the next queue");
        assert_eq!(again.places[0].location().offset, offset);
        assert_eq!(account.used(Kind::ArenaBytes), charged);
        drop((again, arenas));
        assert_eq!(account.used(Kind::ArenaBytes), 0);
    }
}
