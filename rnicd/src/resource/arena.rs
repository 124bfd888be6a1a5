//! Arenas of one session: memory for its queues, made by the daemon as it is needed.
//!
//! The first arena begins with a header page and one doorbell page per worker (`docs/abi.md`);
//! further ones hold queues from their first byte. An arena that the client was told of lives as long
//! as its session.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rnic_core::abi::ABI_VERSION;
use rnic_core::abi::control::{NewArena, QueueLocation, Refusal};
use rnic_core::abi::queue::{
    ARENA_MAGIC, CACHE_LINE, PAGE, QueueShape, arena_header, doorbell_offset,
};
use rnic_core::shm::Mapping;
use rnic_core::types::SessionId;

use super::extents::Extents;
use crate::system;

/// Memory of a session's queues.
#[derive(Default)]
pub struct Arenas {
    list: Vec<Arena>,
}

struct Arena {
    mapping: Arc<Mapping>,
    extents: Extents,
}

/// Where a queue lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the arena.
    pub arena: u32,
    /// Bytes from its start.
    pub offset: usize,
    /// Shape of the queue.
    pub shape: QueueShape,
}

impl Place {
    /// As the client is told.
    pub fn location(&self) -> QueueLocation {
        // Arenas are shorter than 4 GiB.
        QueueLocation { arena: self.arena, offset: self.offset as u32, shape: self.shape }
    }
}

/// An arena that has just been made: what to tell the client, and its descriptor.
pub type Made = (NewArena, OwnedFd);

impl Arenas {
    /// Bytes of the first arena.
    pub fn first_length(workers: u32) -> usize {
        (doorbell_offset(workers) + FIRST_ROOM).next_multiple_of(PAGE)
    }

    /// Makes the first arena, with its header.
    pub fn open(
        session: SessionId,
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
        let extents = Extents::new(doorbell_offset(workers), len);
        Ok((Arenas { list: vec![Arena { mapping, extents }] }, descriptor))
    }

    /// The mapping of the first arena, in which the doorbells are.
    pub fn first(&self) -> Option<&Arc<Mapping>> {
        self.list.first().map(|a| &a.mapping)
    }

    /// The mapping of an arena in which a place was given.
    pub fn mapping(&self, place: &Place) -> Option<&Arc<Mapping>> {
        self.list.get(place.arena as usize).map(|a| &a.mapping)
    }

    /// Bytes of a further arena for these queues. Grows with what there is, so that the number
    /// of arenas stays small, but not beyond `room` unless the queues need it.
    pub fn next_length(&self, shapes: &[QueueShape], room: u64) -> usize {
        // Queues are bounded to some hundred MiB by the limits on their depth.
        let need: usize = shapes.iter().map(|s| s.bytes().next_multiple_of(CACHE_LINE)).sum();
        let need = need.next_multiple_of(PAGE);
        let have: usize = self.list.iter().map(|a| a.mapping.len()).sum();
        let generous = have.clamp(GROW_LEAST, GROW_MOST).max(need);
        if generous as u64 <= room { generous } else { need }
    }

    /// Makes a further arena.
    pub fn grow(&mut self, session: SessionId, len: usize) -> Result<Made, Refusal> {
        // Wanted lengths are page multiples far below 4 GiB.
        let (number, length) = (self.list.len() as u32, len as u32);
        let (mapping, descriptor) = Mapping::create_arena(&name(session, number), len)
            .map_err(|e| system::refusal("cannot allocate memory for queues", &e))?;
        self.list.push(Arena { mapping, extents: Extents::new(0, len) });
        Ok((NewArena { arena: number, length }, descriptor))
    }

    /// Takes back the arena that was made last, of which the client was not told: its bytes.
    pub fn shrink(&mut self, made: &Made) -> u64 {
        debug_assert_eq!(made.0.arena as usize + 1, self.list.len(), "the last one made");
        self.list.pop().map_or(0, |arena| arena.mapping.len() as u64)
    }

    /// Gives each queue a place, or none of them.
    pub fn place(&mut self, shapes: &[QueueShape]) -> Option<Vec<Place>> {
        let mut places = Vec::with_capacity(shapes.len());
        for shape in shapes {
            let found = self.list.iter_mut().enumerate().find_map(|(n, arena)| {
                let offset = arena.extents.allocate(shape.bytes())?;
                Some(Place { arena: n as u32, offset, shape: *shape })
            });
            match found {
                Some(place) => places.push(place),
                None => {
                    places.iter().for_each(|place| self.release(place));
                    return None;
                }
            }
        }
        Some(places)
    }

    /// Gives a place back.
    pub fn release(&mut self, place: &Place) {
        if let Some(arena) = self.list.get_mut(place.arena as usize) {
            arena.extents.release(place.offset, place.shape.bytes());
        }
    }
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
