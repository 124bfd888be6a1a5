//! The server's table. Only this module writes slots.

use rnic_client::{Error, Mr};

use super::layout::{self, Geometry, HEAD};
use super::wire::{Reply, Request};

/// The table, in a region that clients may read and only the server may write.
pub(super) struct Store {
    region: Mr,
    geometry: Geometry,
    /// Buffer for the start of a slot.
    buffer: Vec<u8>,
}

/// State of a slot in the search for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotContent {
    /// Never used.
    Unused,
    /// A deleted entry.
    Deleted { version: u64 },
    /// An entry with this key.
    Key { version: u64 },
    /// An entry with another key.
    Other,
}

/// Position of a key, or a free slot for it.
#[derive(Debug, PartialEq, Eq)]
enum Lookup {
    /// The slot that contains the key.
    Found { slot: u64, version: u64 },
    /// The key does not exist, and this slot is free.
    Free { slot: u64, version: u64 },
    /// The key does not exist, and no slot is free.
    Full,
}

impl Store {
    /// Creates an empty table. The region must be zeroed and `geometry.bytes()` long.
    pub(super) fn new(region: Mr, geometry: Geometry) -> Self {
        let buffer = vec![0; HEAD + usize::from(geometry.max_key)];
        Store { region, geometry, buffer }
    }

    /// Carries out a request of a client.
    pub(super) fn apply(&mut self, request: Request<'_>) -> Result<Reply, Error> {
        let (key, value) = match request {
            Request::Put { key, value } => (key, Some(value)),
            Request::Delete { key } => (key, None),
        };
        let length_fits = (1..=usize::from(self.geometry.max_key)).contains(&key.len())
            && value.is_none_or(|v| v.len() <= self.geometry.max_value as usize);
        if !length_fits {
            return Ok(Reply::Length);
        }
        let Store { region, geometry, buffer } = self;
        let place = find(*geometry, key, |slot| {
            // Every slot is longer than the buffer: value and second version follow.
            region.read_at(geometry.at(slot), buffer)?;
            Ok::<_, Error>(SlotContent::of(buffer, key))
        })?;
        match (place, value) {
            (Lookup::Found { slot, version } | Lookup::Free { slot, version }, Some(value)) => {
                self.write(slot, version + 2, key, value)
            }
            (Lookup::Found { slot, version }, None) => self.write(slot, version + 2, &[], &[]),
            (Lookup::Free { .. } | Lookup::Full, None) => Ok(Reply::Absent),
            (Lookup::Full, Some(_)) => Ok(Reply::Full),
        }
    }

    fn write(&mut self, slot: u64, version: u64, key: &[u8], value: &[u8]) -> Result<Reply, Error> {
        let at = self.geometry.at(slot);
        let rest = layout::write_rest(self.geometry, version, key, value);
        self.region.store_u64(at, (version - 1).to_le())?;
        self.region.write_at(at + 8, &rest)?;
        self.region.store_u64(at, version.to_le())?;
        Ok(Reply::Done { version })
    }
}

impl SlotContent {
    fn of(bytes: &[u8], key: &[u8]) -> Self {
        match layout::occupant(bytes) {
            Some((0, _)) => SlotContent::Unused,
            Some((version, [])) => SlotContent::Deleted { version },
            Some((version, there)) if there == key => SlotContent::Key { version },
            _ => SlotContent::Other,
        }
    }
}

/// Searches for a key, or for the first free slot for it.
fn find<E>(
    geometry: Geometry,
    key: &[u8],
    mut look: impl FnMut(u64) -> Result<SlotContent, E>,
) -> Result<Lookup, E> {
    let mut free = None;
    for slot in geometry.candidates(key) {
        match look(slot)? {
            SlotContent::Key { version } => return Ok(Lookup::Found { slot, version }),
            // The key may be in a slot after the deleted entry.
            SlotContent::Deleted { version } => {
                free.get_or_insert(Lookup::Free { slot, version });
            }
            SlotContent::Unused => {
                free.get_or_insert(Lookup::Free { slot, version: 0 });
                break;
            }
            SlotContent::Other => {}
        }
    }
    Ok(free.unwrap_or(Lookup::Full))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    const GEOMETRY: Geometry = Geometry { slots: 16, probes: 3, max_key: 8, max_value: 8 };

    fn place(key: &[u8], slots: [SlotContent; 3]) -> (usize, Lookup) {
        let mut looks = 0;
        let place = find(GEOMETRY, key, |_| {
            looks += 1;
            Ok::<_, Infallible>(slots[looks - 1])
        });
        (looks, place.unwrap_or(Lookup::Full))
    }

    #[test]
    fn keys_are_found_and_places_chosen_in_order() {
        use SlotContent::*;
        let [a, b, c] = GEOMETRY.candidates(b"k").collect::<Vec<_>>()[..] else { panic!() };
        let deleted = Deleted { version: 6 };
        let there = Key { version: 4 };
        let free = |slot, version| Lookup::Free { slot, version };
        let found = |slot| Lookup::Found { slot, version: 4 };
        for (slots, looks, expected) in [
            ([Unused, there, there], 1, free(a, 0)),
            ([there, Unused, Unused], 1, found(a)),
            ([Other, there, Unused], 2, found(b)),
            // A deleted entry does not end the search, and can hold a new key.
            ([deleted, Other, there], 3, found(c)),
            ([Other, deleted, Unused], 3, free(b, 6)),
            ([Other, deleted, deleted], 3, free(b, 6)),
            ([Other, Other, Unused], 3, free(c, 0)),
            ([Other, Other, Other], 3, Lookup::Full),
        ] {
            assert_eq!(place(b"k", slots), (looks, expected), "{slots:?}");
        }
    }

    #[test]
    fn occupants_are_distinguished() {
        let slot = |version: u64, key: &[u8]| {
            let rest = layout::write_rest(GEOMETRY, version, key, b"value");
            let mut bytes = version.to_le_bytes().to_vec();
            bytes.extend(&rest[..HEAD + 8 - 8]);
            bytes
        };
        assert_eq!(SlotContent::of(&[0; HEAD + 8], b"k"), SlotContent::Unused);
        assert_eq!(SlotContent::of(&slot(4, b"k"), b"k"), SlotContent::Key { version: 4 });
        assert_eq!(SlotContent::of(&slot(4, b"kk"), b"k"), SlotContent::Other);
        assert_eq!(SlotContent::of(&slot(4, b""), b"k"), SlotContent::Deleted { version: 4 });
    }
}
