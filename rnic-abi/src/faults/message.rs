//! Messages of the connection manager of the RoCE device.

use std::time::Duration;

use super::error::FaultError;
use super::names::{Names, listed};
use super::words::Words;

/// Kind of message, by its attribute ID (IBTA specification, volume 1, sections 12.6 and 12.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageKind(u16);

impl MessageKind {
    /// REP, which accepts a connection.
    pub const REP: MessageKind = MessageKind(0x0013);

    /// Returns the kind with this attribute ID, or `None` for messages of other classes.
    pub fn of_attribute(id: u16) -> Option<Self> {
        KINDS.iter().find(|(_, known)| known.0 == id).map(|(_, kind)| *kind)
    }

    /// Returns the name, as in the specification.
    pub fn name(self) -> String {
        let found = KINDS.iter().find(|(_, kind)| *kind == self);
        found.map_or_else(String::new, |(name, _)| name.to_uppercase().replace('-', "_"))
    }
}

const KINDS: Names<MessageKind> = &[
    ("req", MessageKind(0x0010)),
    ("mra", MessageKind(0x0011)),
    ("rej", MessageKind(0x0012)),
    ("rep", MessageKind::REP),
    ("rtu", MessageKind(0x0014)),
    ("dreq", MessageKind(0x0015)),
    ("drep", MessageKind(0x0016)),
    ("sidr-req", MessageKind(0x0017)),
    ("sidr-rep", MessageKind(0x0018)),
];

/// Effect of a rule on a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageEffect {
    /// The message is not sent.
    Drop,
    /// The message is sent twice.
    Duplicate {
        /// Time from the first copy to the second.
        by: Duration,
    },
    /// The message is sent later. Messages after it do not wait.
    Delay {
        /// Delay.
        by: Duration,
    },
}

impl MessageEffect {
    /// Removes the effect. `by` without `effect` is a delay.
    pub(super) fn take(words: &mut Words) -> Result<Self, FaultError> {
        let by = words.time("by")?;
        let effect = words.parse("effect", |value| match (value, by) {
            ("drop", None) => Ok(MessageEffect::Drop),
            ("drop", Some(_)) => Err("cannot be combined with by".to_owned()),
            ("duplicate", by) => Ok(MessageEffect::Duplicate { by: by.unwrap_or_default() }),
            _ => Err("needs drop or duplicate".to_owned()),
        })?;
        let delay = by.map(|by| MessageEffect::Delay { by });
        effect.or(delay).ok_or(FaultError::Missing { action: "cm-message", key: "effect or by" })
    }
}

/// Removes the kind of message that a rule selects. Returns `None` for all messages.
pub(super) fn kind(words: &mut Words) -> Result<Option<MessageKind>, FaultError> {
    words.parse("type", |value| listed(KINDS, value, ""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::tests::parse_one;
    use crate::faults::{Action, FaultRule, Point};
    use crate::roce::connection::{self, Ids};
    use crate::roce::mad::{self, Exchange};
    use crate::types::QpId;

    fn parse(text: &str) -> Result<FaultRule, String> {
        parse_one(&format!("do=cm-message {text}"))
    }

    #[test]
    fn messages_are_dropped_duplicated_or_delayed() {
        let by = Duration::from_millis(5);
        for (text, name, effect) in [
            ("type=req effect=drop", "REQ", MessageEffect::Drop),
            (
                "type=sidr-rep effect=duplicate",
                "SIDR_REP",
                MessageEffect::Duplicate { by: Duration::ZERO },
            ),
            ("type=drep effect=duplicate by=5ms", "DREP", MessageEffect::Duplicate { by }),
            ("type=rtu by=5ms", "RTU", MessageEffect::Delay { by }),
            ("by=5ms", "", MessageEffect::Delay { by }),
        ] {
            let rule = parse(text).unwrap();
            let Action::CmMessage { kind, effect: found } = rule.action else { panic!("{rule:?}") };
            assert_eq!(kind.map_or_else(String::new, MessageKind::name), name, "{text}");
            assert_eq!((found, rule.point), (effect, Point::CmMessage), "{text}");
        }
        for (text, error) in [
            ("", "do=cm-message needs effect or by"),
            ("effect=lose", "effect=lose: needs drop or duplicate"),
            ("effect=drop by=1s", "effect=drop: cannot be combined with by"),
            (
                "type=lap effect=drop",
                "type=lap: needs one of req, mra, rej, rep, rtu, dreq, drep, sidr-req, sidr-rep",
            ),
        ] {
            assert_eq!(parse(text).unwrap_err(), error, "{text}");
        }
        for key in ["verb=rdma_accept", "opcode=send"] {
            let error = parse(&format!("effect=drop {key}")).unwrap_err();
            assert!(error.contains("has no effect with do=cm-message"), "{error}");
        }
    }

    #[test]
    fn kinds_have_the_attributes_of_messages() {
        let ids = Ids { exchange: Exchange { transaction: 1, id: 2 }, receiver: 3 };
        for (message, name) in [
            (ids.emit_ready(), "RTU"),
            (ids.emit_disconnect(QpId(4)), "DREQ"),
            (ids.emit_disconnected(), "DREP"),
        ] {
            assert!(connection::parse(&message).is_ok());
            let kind = MessageKind::of_attribute(mad::attribute(&message)).unwrap();
            assert_eq!(kind.name(), name);
        }
        assert_eq!(MessageKind::of_attribute(0x000F), None);
        assert_eq!(MessageKind::of_attribute(0x0019), None);
    }
}
