//! Rules that repeat or lose rdma_cm events.

use super::error::FaultError;
use super::names::{Names, listed};
use super::words::Words;

/// Kind of event, with the number of `rdma_cm_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmEventKind(u32);

impl CmEventKind {
    /// `RDMA_CM_EVENT_CONNECT_REQUEST`. It is not repeated, because both events would create the
    /// same id.
    pub const CONNECT_REQUEST: CmEventKind = CmEventKind(4);

    /// Returns the kind with this number, or `None` if rules do not support it.
    pub fn of_number(number: u32) -> Option<Self> {
        KINDS.iter().find(|(_, known)| *known == number).map(|(_, number)| CmEventKind(*number))
    }

    /// Returns the name, `RDMA_CM_EVENT_ESTABLISHED` without `RDMA_CM_EVENT_`.
    pub fn name(self) -> String {
        let found = KINDS.iter().find(|(_, number)| *number == self.0);
        found.map_or_else(String::new, |(name, _)| name.to_uppercase().replace('-', "_"))
    }
}

/// All events except those of multicast groups and `RDMA_CM_EVENT_ADDR_CHANGE`, which rnicd never
/// raises.
const KINDS: Names<u32> = &[
    ("addr-resolved", 0),
    ("addr-error", 1),
    ("route-resolved", 2),
    ("route-error", 3),
    ("connect-request", 4),
    ("connect-response", 5),
    ("connect-error", 6),
    ("unreachable", 7),
    ("rejected", 8),
    ("established", 9),
    ("disconnected", 10),
    ("device-removal", 11),
    ("timewait-exit", 15),
];

/// Effect of a rule on an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmEventEffect {
    /// The program never gets the event. No device may do this.
    Drop,
    /// The program gets the event twice.
    Duplicate,
}

impl CmEventEffect {
    /// Returns true if the effect is possible for events of this kind.
    pub fn applies_to(self, kind: CmEventKind) -> bool {
        self == CmEventEffect::Drop || kind != CmEventKind::CONNECT_REQUEST
    }

    /// Removes the kind of event and the effect. Returns `None` as the kind for all events.
    pub(super) fn take(words: &mut Words) -> Result<(Option<CmEventKind>, Self), FaultError> {
        let effect = words.parse("effect", |value| match value {
            "drop" => Ok(CmEventEffect::Drop),
            "duplicate" => Ok(CmEventEffect::Duplicate),
            _ => Err("needs drop or duplicate".to_owned()),
        })?;
        let missing = FaultError::Missing { action: "cm-event", key: "effect" };
        let effect = effect.ok_or(missing)?;
        let kind = words.parse("type", |value| {
            match listed(KINDS, value, "rdma-cm-event-").map(CmEventKind) {
                Ok(kind) if !effect.applies_to(kind) => {
                    Err("cannot be duplicated, because both events would create the same id".into())
                }
                kind => kind,
            }
        })?;
        Ok((kind, effect))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::tests::parse_one;
    use crate::faults::{Action, FaultRule, Point};

    fn parse(text: &str) -> Result<FaultRule, String> {
        parse_one(&format!("do={text}"))
    }

    #[test]
    fn events_of_rdma_cm_are_named_as_in_c() {
        for (name, number) in KINDS {
            let c = format!("RDMA_CM_EVENT_{}", name.to_uppercase().replace('-', "_"));
            for name in [*name, &c] {
                let rule = parse(&format!("cm-event effect=drop type={name}")).unwrap();
                let Action::CmEvent { kind: Some(kind), effect } = rule.action else { panic!() };
                assert_eq!((rule.point, effect), (Point::Verb, CmEventEffect::Drop));
                assert_eq!(CmEventKind::of_number(*number), Some(kind));
                assert_eq!(format!("RDMA_CM_EVENT_{}", kind.name()), c);
            }
        }
        assert_eq!(CmEventKind::of_number(12), None);
        let rule = parse("cm-event effect=duplicate peer=::1 nth=2").unwrap();
        let duplicate = CmEventEffect::Duplicate;
        assert_eq!(rule.action, Action::CmEvent { kind: None, effect: duplicate });
        assert_eq!(rule.select.verb.unwrap().name(), "rdma_cm_event");
        for (text, error) in [
            ("cm-event", "do=cm-event needs effect"),
            ("cm-event effect=lose", "effect=lose: needs drop or duplicate"),
            ("cm-event effect=drop type=x", "type=x: needs one of addr-resolved, addr-error, "),
            (
                "cm-event effect=duplicate type=connect-request",
                "type=connect-request: cannot be duplicated, because both events",
            ),
            ("cm-event effect=drop qp=1", "qp has no effect with do=cm-event, because"),
            (
                "fail errno=EIO verb=rdma_cm_event",
                "verb has no effect with do=fail verb=rdma_cm_event, because an event cannot fail",
            ),
        ] {
            let found = parse(text).unwrap_err();
            assert!(found.starts_with(error), "{text}: {found}");
        }
    }
}
