//! Slots: their format, the interpretation of a copy, and the slots of a key.
//!
//! All fields are little-endian. A slot is `slot_size` bytes, a multiple of 64:
//!
//! | offset | bytes | field |
//! | --- | --- | --- |
//! | 0 | 8 | version: 0 never used, odd while the server writes, else even |
//! | 8 | 2 | bytes of the key; 0 for a deleted entry |
//! | 10 | 2 | zero |
//! | 12 | 4 | bytes of the value |
//! | 16 | 4 | CRC32C of bytes 0 to 16, the key and the value |
//! | 20 | 4 | zero |
//! | 24 | | key, then value |
//! | last 8 | 8 | version again |
//!
//! The server makes the first version odd, writes the rest with the new even version at the end,
//! and then makes the first version equal to it. An RDMA Read during such a write may copy the slot
//! in any order. The two versions detect nearly every mixture cheaply. The checksum, which covers
//! the version, detects the others, including copies during two successive writes.
//!
//! A key may be in any of `probes` slots, starting at its home slot. It is stored in the first slot
//! that is empty or deleted. A search ends at the first slot that was never used. Entries never
//! move.

use rnic_client::RemoteMr;

/// Size of a table and of its slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Number of slots.
    pub slots: u64,
    /// Number of slots in which a key may be, starting at its home slot.
    pub probes: u32,
    /// Maximum length of a key in bytes.
    pub max_key: u16,
    /// Maximum length of a value in bytes.
    pub max_value: u32,
}

/// Maximum of `max_key`.
pub const MAX_KEY: u16 = 4096;
/// Maximum of `max_value`.
pub const MAX_VALUE: u32 = 4 << 20;
/// Maximum of `probes`.
pub const MAX_PROBES: u32 = 1024;

impl Geometry {
    /// Checks the limits of a geometry. The error states the limit.
    pub fn check(self) -> Result<Self, String> {
        let Geometry { slots, probes, max_key, max_value } = self;
        if !(1..=MAX_KEY).contains(&max_key) {
            Err(format!("keys of {max_key} bytes; 1 to {MAX_KEY} are possible"))
        } else if max_value > MAX_VALUE {
            Err(format!("values of {max_value} bytes; 0 to {MAX_VALUE} are possible"))
        } else if !(1..=MAX_PROBES).contains(&probes) || u64::from(probes) > slots {
            Err(format!("{probes} probes of {slots} slots; 1 to {MAX_PROBES} are possible"))
        } else if slots.checked_mul(self.slot_size().into()).is_none() {
            Err(format!("{slots} slots exceed 2^64 bytes"))
        } else {
            Ok(self)
        }
    }

    /// Returns the size of a slot in bytes.
    pub fn slot_size(self) -> u32 {
        // Both lengths are bounded, so the sum is far below 2^32.
        (HEAD as u32 + u32::from(self.max_key) + self.max_value + TAIL as u32).next_multiple_of(64)
    }

    /// Returns the size of the table in bytes.
    pub fn bytes(self) -> u64 {
        self.slots.saturating_mul(self.slot_size().into())
    }

    /// Returns the offset of a slot in bytes.
    pub(super) fn at(self, slot: u64) -> u64 {
        slot * u64::from(self.slot_size())
    }

    /// Returns true if a region of a peer can hold the table.
    pub(super) fn fits(self, region: RemoteMr) -> bool {
        region.len == self.bytes() && region.addr.checked_add(region.len).is_some()
    }

    /// Returns the slots in which a key may be, in order.
    pub(super) fn candidates(self, key: &[u8]) -> impl Iterator<Item = u64> {
        let home = hash(key) % self.slots;
        (0..u64::from(self.probes)).map(move |n| (home + n) % self.slots)
    }
}

/// Content of a copied slot.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Slot<'a> {
    /// Never used; a search ends here.
    Empty,
    /// The entry was deleted; a search continues.
    Deleted { version: u64 },
    /// An entry with version, key and value.
    Entry { version: u64, key: &'a [u8], value: &'a [u8] },
    /// The copy is a mixture or was made during a write; read it again.
    Torn,
}

impl<'a> Slot<'a> {
    /// Parses a copy of a slot without trusting any byte.
    pub(super) fn read(bytes: &'a [u8]) -> Slot<'a> {
        Self::whole(bytes).unwrap_or(Slot::Torn)
    }

    fn whole(bytes: &'a [u8]) -> Option<Slot<'a>> {
        let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
        let (body, tail) = rest.split_last_chunk::<TAIL>()?;
        let version = word(&head[..8]);
        if u64::from_le_bytes(*tail) != version || !version.is_multiple_of(2) {
            return None;
        }
        if version == 0 {
            return bytes.iter().all(|byte| *byte == 0).then_some(Slot::Empty);
        }
        let key_length = usize::from(u16::from_le_bytes([head[8], head[9]]));
        let value_length = u32::from_le_bytes([head[12], head[13], head[14], head[15]]);
        let (key, rest) = body.split_at_checked(key_length)?;
        let value = rest.get(..usize::try_from(value_length).ok()?)?;
        let sum = u32::from_le_bytes([head[16], head[17], head[18], head[19]]);
        if sum != checksum(&head[..16], key, value) {
            return None;
        }
        Some(match key {
            [] => Slot::Deleted { version },
            _ => Slot::Entry { version, key, value },
        })
    }
}

/// Returns version and key of a slot in the server's own table. `bytes` must be the first [`HEAD`]
/// bytes of the slot and at least `max_key` more.
pub(super) fn occupant(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
    let length = usize::from(u16::from_le_bytes([head[8], head[9]]));
    Some((word(&head[..8]), rest.get(..length)?))
}

/// Returns the bytes of a slot from offset 8 on. After writing them, the first word may become
/// `version`. Key and value must fit the geometry; an empty key marks the entry as deleted.
pub(super) fn write_rest(geometry: Geometry, version: u64, key: &[u8], value: &[u8]) -> Vec<u8> {
    let mut slot = vec![0; geometry.slot_size() as usize];
    slot[..8].copy_from_slice(&version.to_le_bytes());
    // The lengths fit: they are at most max_key and max_value, which have these types.
    slot[8..10].copy_from_slice(&(key.len() as u16).to_le_bytes());
    slot[12..16].copy_from_slice(&(value.len() as u32).to_le_bytes());
    let sum = checksum(&slot[..16], key, value);
    slot[16..20].copy_from_slice(&sum.to_le_bytes());
    let key_end = HEAD + key.len();
    let value_end = key_end + value.len();
    slot[HEAD..key_end].copy_from_slice(key);
    slot[key_end..value_end].copy_from_slice(value);
    let tail = slot.len() - TAIL;
    slot[tail..].copy_from_slice(&version.to_le_bytes());
    slot.drain(..8);
    slot
}

/// Size in bytes of the head of a slot, which is the offset of the key.
pub(super) const HEAD: usize = 24;
/// Size in bytes of the second version.
const TAIL: usize = 8;

fn checksum(head: &[u8], key: &[u8], value: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(head), key), value)
}

/// 64-bit FNV-1a with a final mix, so that the low bits depend on every byte. Clients and servers
/// of all builds must use the same function. It does not resist keys chosen to collide, which only
/// waste space.
fn hash(key: &[u8]) -> u64 {
    let fnv = key
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    let mixed = (fnv ^ fnv >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed ^ mixed >> 33
}

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Geometry = Geometry { slots: 8, probes: 3, max_key: 16, max_value: 100 };

    fn slot(version: u64, key: &[u8], value: &[u8]) -> Vec<u8> {
        let mut bytes = version.to_le_bytes().to_vec();
        bytes.extend(write_rest(SMALL, version, key, value));
        bytes
    }

    #[test]
    fn a_slot_round_trips() {
        let bytes = slot(4, b"key", b"value");
        assert_eq!(bytes.len(), SMALL.slot_size() as usize);
        let entry = Slot::Entry { version: 4, key: b"key", value: b"value" };
        assert_eq!(Slot::read(&bytes), entry);
        assert_eq!(Slot::read(&slot(6, b"", b"")), Slot::Deleted { version: 6 });
        assert_eq!(Slot::read(&[0; 192]), Slot::Empty);
        let key = [7; 16];
        let value = [8; 100];
        let full = slot(2, &key, &value);
        assert_eq!(Slot::read(&full), Slot::Entry { version: 2, key: &key, value: &value });
    }

    /// Tests states that a reader can see while `new` is written over `old`: any of the 8-byte
    /// pieces new, with the first word odd, old or new.
    #[test]
    fn a_mixture_of_two_versions_is_torn() {
        let old = slot(4, b"key", &[b'o'; 90]);
        let new = slot(6, b"key", &[b'n'; 90]);
        let pieces = old.len() / 8;
        let mut random = 1_u64;
        let mut torn = 0;
        for round in 0..20_000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // Half of the rounds cut the slot in two, the others mix pieces at random.
            let mask = match round % 2 {
                0 => u64::MAX << ((random >> 33) % pieces as u64),
                _ => random >> 20,
            };
            let mut mixed = old.clone();
            for piece in 0..pieces {
                if mask >> piece & 1 == 1 {
                    mixed[piece * 8..][..8].copy_from_slice(&new[piece * 8..][..8]);
                }
            }
            match Slot::read(&mixed) {
                Slot::Entry { version: 4, .. } => assert_eq!(mixed, old),
                Slot::Entry { version: 6, .. } => assert_eq!(mixed, new),
                Slot::Torn => torn += 1,
                other => panic!("{other:?} of mask {mask:x}"),
            }
            mixed[..8].copy_from_slice(&5_u64.to_le_bytes());
            assert_eq!(Slot::read(&mixed), Slot::Torn);
        }
        assert!(torn > 15_000, "{torn}");
    }

    #[test]
    fn a_half_written_new_slot_is_torn() {
        let empty = vec![0; SMALL.slot_size() as usize];
        let new = slot(2, b"key", b"value");
        for cut in 0..=new.len() {
            let front = [&new[..cut], &empty[cut..]].concat();
            let back = [&empty[..cut], &new[cut..]].concat();
            for mixed in [front, back] {
                match Slot::read(&mixed) {
                    Slot::Torn => {}
                    Slot::Empty => assert_eq!(mixed, empty),
                    _ => assert_eq!(mixed, new),
                }
            }
        }
    }

    #[test]
    fn damaged_lengths_do_not_reach_outside() {
        let good = slot(4, b"key", b"value");
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                // Unused bytes and the bytes after the value are not covered.
                let used = at < 20 || (24..32).contains(&at) || at >= good.len() - TAIL;
                let read = Slot::read(&bad);
                let entry = Slot::Entry { version: 4, key: b"key", value: b"value" };
                assert_eq!(read, if used { Slot::Torn } else { entry }, "{at} {bit}");
            }
        }
        for n in 0..good.len() {
            let cut = Slot::read(&good[..n]);
            assert!(matches!(cut, Slot::Torn | Slot::Empty), "{n}: {cut:?}");
        }
    }

    #[test]
    fn geometries_are_checked() {
        assert_eq!(SMALL.check(), Ok(SMALL));
        assert_eq!(SMALL.slot_size(), 192);
        for wrong in [
            Geometry { slots: 0, ..SMALL },
            Geometry { slots: u64::MAX, ..SMALL },
            Geometry { slots: 2, ..SMALL },
            Geometry { probes: 0, ..SMALL },
            Geometry { probes: MAX_PROBES + 1, slots: 1 << 20, ..SMALL },
            Geometry { max_key: 0, ..SMALL },
            Geometry { max_key: MAX_KEY + 1, ..SMALL },
            Geometry { max_value: MAX_VALUE + 1, ..SMALL },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn candidates_wrap_and_are_as_many_as_probes() {
        for n in 0..100_u32 {
            let slots: Vec<_> = SMALL.candidates(&n.to_le_bytes()).collect();
            assert_eq!(slots.len(), 3);
            assert!(slots.windows(2).all(|w| w[1] == (w[0] + 1) % 8));
        }
        // Must not change: clients and servers of different builds must agree.
        assert_eq!(hash(b"key"), 0x65ff_fa96_0ea4_d92b);
    }
}
