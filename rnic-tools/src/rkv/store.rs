//! The server's table: the only place that writes slots.

use rnic_client::{Error, Mr};

use super::layout::{self, Geometry, HEAD};
use super::wire::{Reply, Request};

/// The table in a region of the server's own, which clients may read and nobody else may write.
pub(super) struct Store {
    region: Mr,
    geometry: Geometry,
    /// Where slots are looked at.
    buffer: Vec<u8>,
}

/// Who is in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Occupant {
    /// The slot was never used.
    Nobody,
    /// An entry that was deleted.
    Deleted { version: u64 },
    /// The key that is looked for.
    Key { version: u64 },
    /// An entry with another key than is looked for.
    Other,
}

/// Where a key is, or may go.
#[derive(Debug, PartialEq, Eq)]
enum Lookup {
    /// The key is in this slot.
    Found { slot: u64, version: u64 },
    /// The key is nowhere, and this slot is free.
    Free { slot: u64, version: u64 },
    /// The key is nowhere, and no slot is free.
    Full,
}

impl Store {
    /// An empty table; the region is zeroed and as large as the geometry says.
    pub(super) fn new(region: Mr, geometry: Geometry) -> Self {
        let buffer = vec![0; HEAD + usize::from(geometry.max_key)];
        Store { region, geometry, buffer }
    }

    /// Carries out what a client asked for.
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
            // No slot is shorter than this: the value and the second version come after it.
            region.read_at(geometry.at(slot), buffer)?;
            Ok::<_, Error>(Occupant::of(buffer, key))
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

impl Occupant {
    fn of(bytes: &[u8], key: &[u8]) -> Self {
        match layout::occupant(bytes) {
            Some((0, _)) => Occupant::Nobody,
            Some((version, [])) => Occupant::Deleted { version },
            Some((version, there)) if there == key => Occupant::Key { version },
            _ => Occupant::Other,
        }
    }
}

/// Looks for a key, or else for the first slot it may go into.
fn find<E>(
    geometry: Geometry,
    key: &[u8],
    mut look: impl FnMut(u64) -> Result<Occupant, E>,
) -> Result<Lookup, E> {
    let mut free = None;
    for slot in geometry.candidates(key) {
        match look(slot)? {
            Occupant::Key { version } => return Ok(Lookup::Found { slot, version }),
            // The key may still come behind a deleted entry.
            Occupant::Deleted { version } => {
                free.get_or_insert(Lookup::Free { slot, version });
            }
            Occupant::Nobody => {
                free.get_or_insert(Lookup::Free { slot, version: 0 });
                break;
            }
            Occupant::Other => {}
        }
    }
    Ok(free.unwrap_or(Lookup::Full))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    const GEOMETRY: Geometry = Geometry { slots: 16, probes: 3, max_key: 8, max_value: 8 };

    fn place(key: &[u8], slots: [Occupant; 3]) -> (usize, Lookup) {
        let mut looks = 0;
        let place = find(GEOMETRY, key, |_| {
            looks += 1;
            Ok::<_, Infallible>(slots[looks - 1])
        });
        (looks, place.unwrap_or(Lookup::Full))
    }

    #[test]
    fn keys_are_found_and_places_chosen_in_order() {
        use Occupant::*;
        let [a, b, c] = GEOMETRY.candidates(b"k").collect::<Vec<_>>()[..] else { panic!() };
        let (deleted, there) = (Deleted { version: 6 }, Key { version: 4 });
        let free = |slot, version| Lookup::Free { slot, version };
        let found = |slot| Lookup::Found { slot, version: 4 };
        for (slots, looks, expected) in [
            ([Nobody, there, there], 1, free(a, 0)),
            ([there, Nobody, Nobody], 1, found(a)),
            ([Other, there, Nobody], 2, found(b)),
            // A deleted entry neither ends the search nor is passed over for a new one.
            ([deleted, Other, there], 3, found(c)),
            ([Other, deleted, Nobody], 3, free(b, 6)),
            ([Other, deleted, deleted], 3, free(b, 6)),
            ([Other, Other, Nobody], 3, free(c, 0)),
            ([Other, Other, Other], 3, Lookup::Full),
        ] {
            assert_eq!(place(b"k", slots), (looks, expected), "{slots:?}");
        }
    }

    #[test]
    fn occupants_are_told_apart() {
        let slot = |version: u64, key: &[u8]| {
            let rest = layout::write_rest(GEOMETRY, version, key, b"value");
            let mut bytes = version.to_le_bytes().to_vec();
            bytes.extend(&rest[..HEAD + 8 - 8]);
            bytes
        };
        assert_eq!(Occupant::of(&[0; HEAD + 8], b"k"), Occupant::Nobody);
        assert_eq!(Occupant::of(&slot(4, b"k"), b"k"), Occupant::Key { version: 4 });
        assert_eq!(Occupant::of(&slot(4, b"kk"), b"k"), Occupant::Other);
        assert_eq!(Occupant::of(&slot(4, b""), b"k"), Occupant::Deleted { version: 4 });
    }
}
