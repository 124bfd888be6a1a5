//! Messages of `rkv`. All fields are little-endian.
//!
//! | message | carried in | fields and their bytes |
//! | --- | --- | --- |
//! | greeting | private data of the connection request | magic 3, version 1 |
//! | [`Table`] | private data of the reply | magic 3, version 1, slots 8, probes 4, longest key 2, longest value 4, region 20 |
//! | [`Request`] | Sends of the client | operation 1, bytes of the key 2, key, value |
//! | [`Reply`] | Sends of the server, one per request | outcome 1, version 8 |

use rnic_client::RemoteMr;

use super::layout::Geometry;
use crate::fields::Fields;

/// Location and geometry of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) geometry: Geometry,
    pub(super) region: RemoteMr,
}

/// A request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request<'a> {
    Put { key: &'a [u8], value: &'a [u8] },
    Delete { key: &'a [u8] },
}

/// Result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// Done; the entry now has this version.
    Done { version: u64 },
    /// The key to delete does not exist.
    Absent,
    /// No slot is free for the key.
    Full,
    /// The length of the key or of the value is wrong.
    Length,
}

const MAGIC: &[u8] = b"rkv";
const VERSION: u8 = 1;

/// Returns the first message of a client.
pub(super) fn greeting() -> Vec<u8> {
    let mut b = MAGIC.to_vec();
    b.push(VERSION);
    b
}

/// Checks the first message of a client.
pub(super) fn check_greeting(bytes: &[u8]) -> Result<(), String> {
    let f = parse_header(bytes)?;
    f.end().ok_or_else(|| "the greeting is too long".to_owned())
}

impl Table {
    pub(super) fn to_bytes(self) -> Vec<u8> {
        let Geometry { slots, probes, max_key, max_value } = self.geometry;
        let mut b = greeting();
        b.extend(slots.to_le_bytes());
        b.extend(probes.to_le_bytes());
        b.extend(max_key.to_le_bytes());
        b.extend(max_value.to_le_bytes());
        b.extend(self.region.to_bytes());
        b
    }

    /// Parses the server's reply. The limits of [`Geometry`] bound the memory that a client
    /// allocates for it.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut f = parse_header(bytes)?;
        let table = (|| {
            let geometry = Geometry {
                slots: f.u64()?,
                probes: f.u32()?,
                max_key: f.u16()?,
                max_value: f.u32()?,
            };
            let region = RemoteMr::from_bytes(f.bytes(RemoteMr::LEN)?)?;
            f.end()?;
            Some(Table { geometry, region })
        })();
        let table = table.ok_or("the table description has a wrong length")?;
        table.geometry.check()?;
        if !table.geometry.fits(table.region) {
            return Err(format!(
                "a table of {} bytes in a region of {}",
                table.geometry.bytes(),
                table.region.len
            ));
        }
        Ok(table)
    }
}

impl<'a> Request<'a> {
    /// Returns the maximum length of a request in bytes.
    pub(super) fn max(geometry: Geometry) -> u32 {
        3 + u32::from(geometry.max_key) + geometry.max_value
    }

    /// Encodes the request. The length of the key must fit 16 bits; callers check the geometry.
    pub(super) fn to_bytes(self) -> Vec<u8> {
        let (operation, key, value) = match self {
            Request::Put { key, value } => (PUT, key, value),
            Request::Delete { key } => (DELETE, key, &[][..]),
        };
        let mut b = vec![operation];
        b.extend((key.len() as u16).to_le_bytes());
        b.extend(key);
        b.extend(value);
        b
    }

    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let mut f = Fields(bytes);
        let operation = f.u8()?;
        let length = f.u16()?;
        let key = f.bytes(length.into())?;
        let value = f.rest();
        match operation {
            PUT => Some(Request::Put { key, value }),
            DELETE if value.is_empty() => Some(Request::Delete { key }),
            _ => None,
        }
    }
}

impl Reply {
    pub(super) fn to_bytes(self) -> [u8; 9] {
        let (outcome, version) = match self {
            Reply::Done { version } => (0, version),
            Reply::Absent => (1, 0),
            Reply::Full => (2, 0),
            Reply::Length => (3, 0),
        };
        let mut b = [outcome; 9];
        b[1..].copy_from_slice(&version.to_le_bytes());
        b
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let mut f = Fields(bytes);
        let outcome = f.u8()?;
        let version = f.u64()?;
        f.end()?;
        match (outcome, version) {
            (0, version) => Some(Reply::Done { version }),
            (1, 0) => Some(Reply::Absent),
            (2, 0) => Some(Reply::Full),
            (3, 0) => Some(Reply::Length),
            _ => None,
        }
    }
}

const PUT: u8 = 1;
const DELETE: u8 = 2;

fn parse_header(bytes: &[u8]) -> Result<Fields<'_>, String> {
    let mut f = Fields(bytes);
    f.expect(MAGIC).ok_or("the peer does not run rkv")?;
    match f.u8() {
        Some(VERSION) => Ok(f),
        version => Err(format!("the peer has rkv version {version:?} instead of {VERSION}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rnic_client::Stag;

    fn table() -> Table {
        let geometry = Geometry { slots: 8, probes: 3, max_key: 16, max_value: 100 };
        let region = RemoteMr { addr: 0, len: geometry.bytes(), rkey: Stag(7) };
        Table { geometry, region }
    }

    #[test]
    fn tables_round_trip_and_cuts_are_refused() {
        let bytes = table().to_bytes();
        assert_eq!(Table::parse(&bytes), Ok(table()));
        for n in 0..bytes.len() {
            assert!(Table::parse(&bytes[..n]).is_err(), "{n}");
        }
        assert!(Table::parse(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn invalid_tables_are_refused() {
        let mut t = table();
        t.region.len += 1;
        assert!(Table::parse(&t.to_bytes()).is_err());
        let mut t = table();
        t.region.addr = u64::MAX;
        assert!(Table::parse(&t.to_bytes()).is_err());
        let mut t = table();
        t.geometry.max_value = u32::MAX;
        assert!(Table::parse(&t.to_bytes()).is_err());
        let mut t = table();
        t.geometry.slots = u64::MAX;
        assert!(Table::parse(&t.to_bytes()).is_err());
    }

    #[test]
    fn greetings_are_checked() {
        assert_eq!(check_greeting(&greeting()), Ok(()));
        for wrong in [&b""[..], b"rk", b"rkv", b"rkv\x02", b"rkv\x01x", b"GET "] {
            assert!(check_greeting(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn requests_round_trip_and_cuts_are_refused() {
        let put = Request::Put { key: b"key", value: b"value" };
        assert_eq!(Request::parse(&put.to_bytes()), Some(put));
        let delete = Request::Delete { key: b"key" };
        let bytes = delete.to_bytes();
        assert_eq!(Request::parse(&bytes), Some(delete));
        for n in 0..bytes.len() {
            assert_eq!(Request::parse(&bytes[..n]), None);
        }
        assert_eq!(Request::parse(&[&bytes[..], &[0]].concat()), None);
        assert_eq!(Request::parse(b"\x09\x01\x00k"), None);
        // A length beyond the end of the message.
        assert_eq!(Request::parse(b"\x01\xFF\xFFk"), None);
    }

    #[test]
    fn replies_come_back_as_they_were() {
        for reply in [Reply::Done { version: 1 << 40 }, Reply::Absent, Reply::Full, Reply::Length] {
            let bytes = reply.to_bytes();
            assert_eq!(Reply::parse(&bytes), Some(reply));
            assert_eq!(Reply::parse(&bytes[..8]), None);
        }
        assert_eq!(Reply::parse(&[9; 9]), None);
        assert_eq!(Reply::parse(&[1; 9]), None);
    }
}
