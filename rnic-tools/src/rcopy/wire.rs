//! What the two sides say to each other. All fields are little-endian.
//!
//! | what | where | bytes |
//! | --- | --- | --- |
//! | [`Offer`] | private data of the connection request | magic 5, version 1, size 8, chunk 4, chunks 2, name |
//! | [`Grant`] | private data of the reply | magic 5, version 1, chunk 4, chunks 2, region 20 |
//! | [`refusal`] | private data of a rejection | magic 5, version 1, text |
//! | [`Message`] | Sends | kind 1, then the fields in the order of the enum |

use rnic_client::RemoteMr;

use super::name::{Cut, FileName, NameError};
use super::{Digest, MAX_CHUNK, MAX_CHUNKS};
use crate::fields::Fields;

/// What the sender would like to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) size: u64,
    pub(super) chunk: u32,
    pub(super) chunks: u16,
    /// Not checked yet: a refused name is answered in words.
    pub(super) name: Result<FileName, NameError>,
}

/// Where the receiver would like to have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grant {
    /// Bytes of one place of the ring.
    pub(super) chunk: u32,
    /// Places of the ring.
    pub(super) chunks: u16,
    pub(super) ring: RemoteMr,
}

/// A message after the connection stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Sender: this chunk, numbered from 0, is in its place and has this many bytes.
    Filled { index: u64, length: u32 },
    /// Sender: that was all.
    Finished { size: u64, digest: Digest },
    /// Receiver: so many chunks in all have been taken out of the ring.
    Credit { taken: u64 },
    /// Receiver: the file has its name.
    Stored { digest: Digest },
    /// Either: gives up.
    Abort { why: String },
}

/// Longest message, in bytes.
pub(super) const MAX_MESSAGE: usize = 256;
/// Longest text of a refusal or abort, in bytes.
const MAX_TEXT: usize = 250;
const MAGIC: &[u8] = b"rcopy";
const VERSION: u8 = 1;

impl Offer {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut b = hello();
        b.extend(self.size.to_le_bytes());
        b.extend(self.chunk.to_le_bytes());
        b.extend(self.chunks.to_le_bytes());
        if let Ok(name) = &self.name {
            b.extend(name.as_str().as_bytes());
        }
        b
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut f = greeted(bytes)?;
        let offer = (|| {
            Some(Offer {
                size: f.u64()?,
                chunk: f.u32()?,
                chunks: f.u16()?,
                name: FileName::from_bytes(f.rest()),
            })
        })();
        let offer = offer.ok_or("the offer is cut short")?;
        check_ring(offer.chunk, offer.chunks)?;
        Ok(offer)
    }
}

impl Grant {
    pub(super) fn to_bytes(self) -> Vec<u8> {
        let mut b = hello();
        b.extend(self.chunk.to_le_bytes());
        b.extend(self.chunks.to_le_bytes());
        b.extend(self.ring.to_bytes());
        b
    }

    /// Reads the answer to an offer; a ring larger than was offered makes no sense.
    pub(super) fn parse(bytes: &[u8], offer: &Offer) -> Result<Self, String> {
        let mut f = greeted(bytes)?;
        let grant = (|| {
            let (chunk, chunks) = (f.u32()?, f.u16()?);
            let ring = RemoteMr::from_bytes(f.bytes(RemoteMr::LEN)?)?;
            f.end()?;
            Some(Grant { chunk, chunks, ring })
        })();
        let grant = grant.ok_or("the grant has a wrong length")?;
        check_ring(grant.chunk, grant.chunks)?;
        if grant.chunk > offer.chunk || grant.chunks > offer.chunks {
            return Err("the grant is larger than the offer".to_owned());
        }
        let bytes = u64::from(grant.chunk) * u64::from(grant.chunks);
        if grant.ring.len != bytes || grant.ring.addr.checked_add(bytes).is_none() {
            return Err(format!("a ring of {bytes} bytes in {} of them", grant.ring.len));
        }
        Ok(grant)
    }
}

/// Private data for a rejection that the sender shows to its user; cut to 250 bytes.
pub fn refusal(why: &str) -> Vec<u8> {
    let mut b = hello();
    b.extend(why.floor_char_boundary_at(MAX_TEXT).as_bytes());
    b
}

/// The text of a rejection, if it is one of `rcopy`.
pub(super) fn parse_refusal(bytes: &[u8]) -> Option<String> {
    greeted(bytes).ok().map(|mut f| String::from_utf8_lossy(f.rest()).into_owned())
}

impl Message {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut b = Vec::with_capacity(MAX_MESSAGE);
        b.push(self.kind());
        match self {
            Message::Filled { index, length } => {
                b.extend(index.to_le_bytes());
                b.extend(length.to_le_bytes());
            }
            Message::Finished { size, digest } => {
                b.extend(size.to_le_bytes());
                b.extend(digest.0);
            }
            Message::Credit { taken } => b.extend(taken.to_le_bytes()),
            Message::Stored { digest } => b.extend(digest.0),
            Message::Abort { why } => b.extend(why.floor_char_boundary_at(MAX_TEXT).as_bytes()),
        }
        b
    }

    /// `None` for anything that is not exactly one message.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let mut f = Fields(bytes);
        let message = match f.u8()? {
            FILLED => Message::Filled { index: f.u64()?, length: f.u32()? },
            FINISHED => Message::Finished { size: f.u64()?, digest: Digest(f.chunk()?) },
            CREDIT => Message::Credit { taken: f.u64()? },
            STORED => Message::Stored { digest: Digest(f.chunk()?) },
            ABORT => {
                let why = String::from_utf8_lossy(f.rest()).into_owned();
                Message::Abort { why }
            }
            _ => return None,
        };
        f.end()?;
        Some(message)
    }

    fn kind(&self) -> u8 {
        match self {
            Message::Filled { .. } => FILLED,
            Message::Finished { .. } => FINISHED,
            Message::Credit { .. } => CREDIT,
            Message::Stored { .. } => STORED,
            Message::Abort { .. } => ABORT,
        }
    }
}

const FILLED: u8 = 1;
const FINISHED: u8 = 2;
const CREDIT: u8 = 3;
const STORED: u8 = 4;
const ABORT: u8 = 5;

fn hello() -> Vec<u8> {
    let mut b = MAGIC.to_vec();
    b.push(VERSION);
    b
}

fn greeted(bytes: &[u8]) -> Result<Fields<'_>, String> {
    let mut f = Fields(bytes);
    f.expect(MAGIC).ok_or("it is no rcopy")?;
    match f.u8() {
        Some(VERSION) => Ok(f),
        version => Err(format!("it speaks version {version:?} of rcopy, we speak {VERSION}")),
    }
}

fn check_ring(chunk: u32, chunks: u16) -> Result<(), String> {
    match (chunk, chunks) {
        (1..=MAX_CHUNK, 1..=MAX_CHUNKS) => Ok(()),
        _ => Err(format!("{chunks} chunks of {chunk} bytes are out of range")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rnic_client::Stag;

    fn offer() -> Offer {
        Offer { size: 1 << 40, chunk: 65536, chunks: 4, name: FileName::new("grüße") }
    }

    fn grant() -> Grant {
        let ring = RemoteMr { addr: 0x7000, len: 65536 * 4, rkey: Stag(0x1234) };
        Grant { chunk: 65536, chunks: 4, ring }
    }

    fn messages() -> Vec<Message> {
        vec![
            Message::Filled { index: 7, length: 9 },
            Message::Finished { size: u64::MAX, digest: Digest([3; 32]) },
            Message::Credit { taken: 1 << 33 },
            Message::Stored { digest: Digest([4; 32]) },
            Message::Abort { why: "no room".to_owned() },
        ]
    }

    #[test]
    fn offers_and_grants_come_back_as_they_were() {
        assert_eq!(Offer::parse(&offer().to_bytes()), Ok(offer()));
        assert_eq!(Grant::parse(&grant().to_bytes(), &offer()), Ok(grant()));
    }

    #[test]
    fn every_cut_of_a_greeting_is_refused() {
        let whole = offer().to_bytes();
        let fixed = whole.len() - "grüße".len();
        for n in 0..fixed {
            assert!(Offer::parse(&whole[..n]).is_err(), "{n}");
        }
        // Without a name, or with half a character, the offer is whole but the name is not.
        assert!(Offer::parse(&whole[..fixed]).unwrap().name.is_err());
        assert!(Offer::parse(&whole[..fixed + 3]).unwrap().name.is_err());
        let whole = grant().to_bytes();
        for n in 0..whole.len() {
            assert!(Grant::parse(&whole[..n], &offer()).is_err(), "{n}");
        }
        let long = [&whole[..], &[0]].concat();
        assert!(Grant::parse(&long, &offer()).is_err());
    }

    #[test]
    fn the_longest_offer_fits_the_private_data_of_rfc_6581() {
        let name = FileName::new(&"x".repeat(255));
        assert!(Offer { name, ..offer() }.to_bytes().len() <= 508);
        assert!(refusal(&"x".repeat(9999)).len() <= 508);
    }

    #[test]
    fn rings_out_of_range_are_refused() {
        for (chunk, chunks) in [(0, 4), (65536, 0), (MAX_CHUNK + 1, 4), (65536, MAX_CHUNKS + 1)] {
            assert!(Offer::parse(&Offer { chunk, chunks, ..offer() }.to_bytes()).is_err());
        }
        let larger = Offer { chunk: 65535, ..offer() };
        assert!(Grant::parse(&grant().to_bytes(), &larger).is_err());
        let mut short = grant();
        short.ring.len -= 1;
        assert!(Grant::parse(&short.to_bytes(), &offer()).is_err());
        let mut wraps = grant();
        wraps.ring.addr = u64::MAX - 5;
        assert!(Grant::parse(&wraps.to_bytes(), &offer()).is_err());
    }

    #[test]
    fn strangers_and_other_versions_are_told_apart() {
        let mut other = offer().to_bytes();
        other[5] = 9;
        assert!(Offer::parse(&other).unwrap_err().contains("version"));
        assert_eq!(Offer::parse(b"GET / HTTP/1.1"), Err("it is no rcopy".to_owned()));
        assert_eq!(parse_refusal(b"no"), None);
        assert_eq!(parse_refusal(&refusal("full")), Some("full".to_owned()));
    }

    #[test]
    fn messages_come_back_as_they_were_and_fit() {
        for m in messages() {
            let bytes = m.to_bytes();
            assert!(bytes.len() <= MAX_MESSAGE);
            assert_eq!(Message::parse(&bytes), Some(m));
        }
        let why = "é".repeat(400);
        assert!(Message::Abort { why }.to_bytes().len() <= MAX_MESSAGE);
    }

    #[test]
    fn cut_and_trailing_bytes_make_no_message() {
        for m in messages() {
            let bytes = m.to_bytes();
            if !matches!(m, Message::Abort { .. }) {
                for n in 0..bytes.len() {
                    assert_eq!(Message::parse(&bytes[..n]), None, "{m:?} {n}");
                }
                assert_eq!(Message::parse(&[&bytes[..], &[0]].concat()), None);
            }
        }
        assert_eq!(Message::parse(&[]), None);
        assert_eq!(Message::parse(&[0; 9]), None);
        assert_eq!(Message::parse(&[99; 9]), None);
    }
}
