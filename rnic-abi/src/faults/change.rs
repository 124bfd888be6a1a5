//! Temporary changes of devices and ports.

use super::error::FaultError;
use super::names::{Names, listed};
use super::words::{Words, decimal_or_hex};
use crate::roce::p_key::PARTITION;

/// Change of a device or of its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// An entry of the GID table vanishes, or all entries.
    Gids {
        /// Index of the entry as programs see it (`ibv_query_gid(3)`); `None` for all entries.
        index: Option<u16>,
    },
    /// Entry 0 of the P_Key table changes.
    PKey(u16),
    /// The speed of the link changes.
    Speed {
        /// `active_speed` of `ibv_query_port(3)`, if it changes.
        speed: Option<u8>,
        /// `active_width`, if it changes.
        width: Option<u8>,
    },
    /// The device is removed.
    Removal,
}

impl Change {
    /// Removes the arguments of an action that is a change. Returns `None` for other actions.
    pub(super) fn take(
        action: &'static str,
        words: &mut Words,
    ) -> Result<Option<Self>, FaultError> {
        Ok(Some(match action {
            "gid-change" => Change::Gids { index: words.number("index", 0, MAX_GID_INDEX)? },
            "pkey-change" => Change::PKey(words.parse("pkey", p_key)?.unwrap_or(OTHER_PARTITION)),
            "speed-change" => {
                let speed = words.parse("speed", |value| code(SPEEDS, value))?;
                let width = words.parse("width", |value| code(WIDTHS, value))?;
                if speed.is_none() && width.is_none() {
                    return Err(FaultError::Missing { action, key: "speed or width" });
                }
                Change::Speed { speed, width }
            }
            "device-removal" => Change::Removal,
            _ => return Ok(None),
        }))
    }
}

/// Parses a valid P_Key: the partition 0 does not exist (IBTA specification, volume 1, section
/// 10.9.2).
fn p_key(text: &str) -> Result<u16, String> {
    let key = decimal_or_hex(text).and_then(|key| u16::try_from(key).ok());
    let valid = key.filter(|key| key & PARTITION != 0);
    valid.ok_or_else(|| "needs a P_Key, as in 0x8001, with a partition other than 0".to_owned())
}

/// Parses a name or a code of the table. Returns the code.
fn code(names: Names<u8>, text: &str) -> Result<u8, String> {
    let number = text.parse().ok().filter(|code| names.iter().any(|(_, known)| known == code));
    number.map_or_else(|| listed(names, text, ""), Ok)
}

/// Speeds of a lane (`active_speed`), by their names in the file `rate`.
const SPEEDS: Names<u8> = &[
    ("sdr", 1),
    ("ddr", 2),
    ("qdr", 4),
    ("fdr10", 8),
    ("fdr", 16),
    ("edr", 32),
    ("hdr", 64),
    ("ndr", 128),
];

/// Numbers of lanes (`active_width`).
const WIDTHS: Names<u8> = &[("1x", 1), ("4x", 2), ("8x", 4), ("12x", 8), ("2x", 16)];

/// Maximum index of a GID in verbs (`sgid_index`).
const MAX_GID_INDEX: u16 = 255;
/// A partition other than the default one.
const OTHER_PARTITION: u16 = 0x8001;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::faults::tests::parse_one;
    use crate::faults::{Action, Point};

    #[test]
    fn changes_have_their_arguments() {
        let speed = |speed, width| Change::Speed { speed, width };
        for (text, change) in [
            ("do=gid-change", Change::Gids { index: None }),
            ("do=gid-change index=255", Change::Gids { index: Some(255) }),
            ("do=pkey-change", Change::PKey(0x8001)),
            ("do=pkey-change pkey=0x7fff", Change::PKey(0x7FFF)),
            ("do=pkey-change pkey=1", Change::PKey(1)),
            ("do=speed-change speed=EDR", speed(Some(32), None)),
            ("do=speed-change speed=128 width=2X", speed(Some(128), Some(16))),
            ("do=speed-change width=8", speed(None, Some(8))),
            ("do=device-removal", Change::Removal),
        ] {
            let rule = parse_one(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(rule.action, Action::Change { change, time: None }, "{text}");
            assert_eq!(rule.point, Point::Once, "{text}");
            let rule = parse_one(&format!("{text} for=2s verb=modify_qp qp=3"));
            let rule = rule.unwrap_or_else(|error| panic!("{text}: {error}"));
            let time = Some(Duration::from_secs(2));
            assert_eq!((rule.action, rule.point), (Action::Change { change, time }, Point::Verb));
        }
    }

    #[test]
    fn errors_of_changes() {
        for (text, error) in [
            ("do=gid-change index=256", "index=256: needs a whole number from 0 to 255"),
            ("do=pkey-change pkey=0x8000", "pkey=0x8000: needs a P_Key, as in 0x8001"),
            ("do=pkey-change pkey=65536", "pkey=65536: needs a P_Key, as in 0x8001"),
            ("do=speed-change", "do=speed-change needs speed or width"),
            ("do=speed-change speed=3", "speed=3: needs one of sdr, ddr, qdr, fdr10, fdr, edr"),
            ("do=speed-change width=3x", "width=3x: needs one of 1x, 4x, 8x, 12x, 2x"),
            (
                "do=gid-change peer=::1",
                "peer has no effect with do=gid-change, because it concerns a device as a whole;",
            ),
            ("do=device-removal index=1", "index has no effect with do=device-removal"),
        ] {
            let found = parse_one(text).expect_err(text);
            assert!(found.starts_with(error), "{text}: {found}");
        }
    }
}
