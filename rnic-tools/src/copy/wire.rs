//! Messages of `rnic-copy`. All fields are little-endian.
//!
//! | message | carried in | fields and their bytes |
//! | --- | --- | --- |
//! | [`Offer`] | private data of the connection request | magic 5, version 1, size 8, chunk 4, chunks 2, name |
//! | [`Grant`] | private data of the reply | magic 5, version 1, chunk 4, chunks 2, region 20 |
//! | [`refusal`] | private data of a rejection | magic 5, version 1, text |
//! | [`Message`] | Sends | kind 1, then the fields in the order of the enum |

use rnic_client::RemoteMr;

use super::name::{Cut, FileName, NameError};
use super::{Digest, MAX_CHUNK, MAX_CHUNKS};
use crate::fields::Fields;

/// The sender's proposal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) size: u64,
    pub(super) chunk: u32,
    pub(super) chunks: u16,
    /// An invalid name is kept, so that the rejection can contain the reason.
    pub(super) name: Result<FileName, NameError>,
}

/// The receiver's reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grant {
    /// Size of a chunk in bytes.
    pub(super) chunk: u32,
    /// Number of chunks in the ring.
    pub(super) chunks: u16,
    pub(super) ring: RemoteMr,
}

/// A message on the established connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Sender: the chunk with this index, from 0, is in the ring and has this length in bytes.
    Filled { index: u64, length: u32 },
    /// Sender: all chunks have been sent.
    Finished { size: u64, digest: Digest },
    /// Receiver: total number of chunks taken out of the ring.
    Credit { taken: u64 },
    /// Receiver: the file has been stored.
    Stored { digest: Digest },
    /// Either side: gives up.
    Abort { why: String },
}

/// Maximum length of a message in bytes.
pub(super) const MAX_MESSAGE: usize = 256;
/// Maximum length of the text in a rejection or abort, in bytes.
const MAX_TEXT: usize = 250;
const MAGIC: &[u8] = b"rcopy";
const VERSION: u8 = 1;

impl Offer {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut b = header();
        b.extend(self.size.to_le_bytes());
        b.extend(self.chunk.to_le_bytes());
        b.extend(self.chunks.to_le_bytes());
        if let Ok(name) = &self.name {
            b.extend(name.as_str().as_bytes());
        }
        b
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut f = parse_header(bytes)?;
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
        let mut b = header();
        b.extend(self.chunk.to_le_bytes());
        b.extend(self.chunks.to_le_bytes());
        b.extend(self.ring.to_bytes());
        b
    }

    /// Parses the reply to an offer. The ring must not be larger than offered.
    pub(super) fn parse(bytes: &[u8], offer: &Offer) -> Result<Self, String> {
        let mut f = parse_header(bytes)?;
        let grant = (|| {
            let chunk = f.u32()?;
            let chunks = f.u16()?;
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
            return Err(format!("a ring of {bytes} bytes in a region of {}", grant.ring.len));
        }
        Ok(grant)
    }
}

/// Returns private data for a rejection that the sender shows to its user, truncated to 250 bytes.
pub fn refusal(why: &str) -> Vec<u8> {
    let mut b = header();
    b.extend(why.floor_char_boundary_at(MAX_TEXT).as_bytes());
    b
}

/// Returns the text of a rejection by `rnic-copy`, or `None` for other private data.
pub(super) fn parse_refusal(bytes: &[u8]) -> Option<String> {
    parse_header(bytes).ok().map(|mut f| String::from_utf8_lossy(f.rest()).into_owned())
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

    /// Parses exactly one message. Returns `None` for anything else.
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

fn header() -> Vec<u8> {
    let mut b = MAGIC.to_vec();
    b.push(VERSION);
    b
}

fn parse_header(bytes: &[u8]) -> Result<Fields<'_>, String> {
    let mut f = Fields(bytes);
    f.expect(MAGIC).ok_or("the peer does not run rnic-copy")?;
    match f.u8() {
        Some(VERSION) => Ok(f),
        version => Err(format!("the peer has rnic-copy version {version:?} instead of {VERSION}")),
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
    fn offers_and_grants_round_trip() {
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
        // Without a name, or with half a character, the offer is valid but the name is not.
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
    fn the_longest_offer_fits_the_private_data() {
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
    fn other_protocols_and_versions_are_refused() {
        let mut other = offer().to_bytes();
        other[5] = 9;
        assert!(Offer::parse(&other).unwrap_err().contains("version"));
        let e = Offer::parse(b"GET / HTTP/1.1");
        assert_eq!(e, Err("the peer does not run rnic-copy".to_owned()));
        assert_eq!(parse_refusal(b"no"), None);
        assert_eq!(parse_refusal(&refusal("full")), Some("full".to_owned()));
    }

    #[test]
    fn messages_round_trip_and_fit() {
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
