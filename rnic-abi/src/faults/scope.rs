//! Checks that each selector and trigger of a rule has an effect. A selector must belong to the
//! objects of the rule's occasions, or to the objects that its effect concerns.

use super::action::{Action, Point, keys_of};
use super::error::FaultError;
use super::event::Element;
use super::object::Object;
use super::select::{self, Selector};
use super::trigger;
use super::verb::Verb;

impl Point {
    /// Returns the kind of object of an occasion, and its description in errors. A rule without a
    /// verb can select requests by any key of a QP.
    fn object(self, verb: Option<Verb>) -> (Object, String) {
        let (object, text) = match self {
            Point::Request => (Object::Request, "send requests"),
            Point::Message => (Object::Message, "messages"),
            Point::Receive => (Object::Receive, "Sends that need a receive"),
            Point::Completion | Point::CompletionEvent | Point::QuietCompletion => {
                (Object::Completion, "completions")
            }
            Point::Fpdu => (Object::Qp, "FPDUs"),
            Point::CmMessage => (Object::Qp, "messages of the connection manager"),
            Point::Setting => (Object::Qp, "settings"),
            Point::Once => (Object::None, "effects"),
            Point::Verb => {
                let text = verb.map_or("the daemon", Verb::name);
                return (verb.map_or(Object::Qp, Verb::object), format!("requests of {text}"));
            }
        };
        (object, text.to_owned())
    }
}

impl Action {
    /// Returns the kind of object that the effect concerns, in addition to that of the occasion.
    pub fn object(self) -> Object {
        match self {
            Action::Stop { .. }
            | Action::Disconnect
            | Action::QpFatal
            | Action::CqFatal
            | Action::SrqFatal => Object::Qp,
            Action::Event { event } => match event.element() {
                Element::Qp | Element::Cq | Element::Srq => Object::Qp,
                Element::Port | Element::Device => Object::Device,
            },
            Action::PortDown { .. } | Action::Change { .. } | Action::DeviceFatal => Object::Device,
            _ => Object::None,
        }
    }
}

/// The parts of a rule that determine which keys have an effect.
pub(super) struct Scope<'a> {
    /// The rule for errors, such as `do=fail verb=reg_mr`.
    pub rule: String,
    pub action: Action,
    pub action_name: &'static str,
    pub point: Point,
    pub select: &'a Selector,
    /// The verb in the text of the rule. Without one, `select` contains the action's own verb.
    pub verb: Option<Verb>,
}

impl Scope<'_> {
    /// Returns an error for a key without effect, and for an opcode that no occasion has.
    pub(super) fn check(&self, keys: &[&'static str]) -> Result<(), FaultError> {
        for key in keys {
            if let Some(why) = self.why_not(key) {
                return Err(self.no_effect(key, Some(why)));
            }
        }
        let (object, text) = self.point.object(self.select.verb);
        let opcodes = object.opcodes(self.select.mr.is_some());
        let Some(opcode) = self.select.opcode.filter(|opcode| !opcodes.contains(opcode)) else {
            return Ok(());
        };
        let names = opcodes.iter().map(|opcode| opcode.name()).collect::<Vec<_>>().join(", ");
        let with = if self.select.mr.is_some() { " with a remote key" } else { "" };
        Err(FaultError::Value {
            key: "opcode".to_owned(),
            value: opcode.name().to_owned(),
            why: format!("with {}, {text}{with} have one of {names}", self.rule),
        })
    }

    /// Returns the error of a key without effect.
    pub(super) fn no_effect(&self, key: &str, why: Option<String>) -> FaultError {
        let own = keys_of(self.action_name).iter();
        let all = own.chain(select::KEYS).chain(trigger::KEYS);
        let all = all.filter(|known| **known != key && self.why_not(known).is_none());
        FaultError::Unknown {
            key: key.to_owned(),
            rule: self.rule.clone(),
            why: why.map_or_else(String::new, |why| format!(", because {why}")),
            keys: all.copied().collect::<Vec<_>>().join(", "),
        }
    }

    /// Returns the reason if the verb of the text has no effect.
    fn why_not_verb(&self) -> Option<String> {
        let verbs = self.action.verbs();
        if self.verb.is_some_and(|verb| verbs.contains(&verb)) {
            return None;
        }
        if !verbs.is_empty() {
            let names = verbs.iter().map(|verb| verb.name()).collect::<Vec<_>>().join(" or ");
            return Some(format!("its verb is {names}"));
        }
        match self.point {
            Point::Verb | Point::Once => {
                let fails = matches!(self.action, Action::Fail { .. });
                let is_event = fails && self.verb == Some(Verb::CM_EVENT);
                is_event.then(|| "an event cannot fail".to_owned())
            }
            point => Some(format!("{} have no verb", point.object(None).1)),
        }
    }

    /// Returns the reason if a key has no effect.
    fn why_not(&self, key: &str) -> Option<String> {
        let has_occasions = match self.point {
            Point::Once => Some("it takes place once, unless it has a verb or an opcode"),
            Point::Setting => Some("it is a setting without occasions"),
            _ => None,
        };
        match key {
            "nth" | "every" | "limit" => has_occasions.map(str::to_owned),
            "probability" => {
                has_occasions.filter(|_| self.point == Point::Setting).map(str::to_owned)
            }
            "verb" => self.why_not_verb(),
            "reason" => match self.select.verb {
                Some(Verb::ACCEPT) => Some("rdma_reject always sends reason 28".to_owned()),
                _ => None,
            },
            // The opcode selects requests as the occasions of such a rule.
            "opcode" if self.point == Point::Once => None,
            "device" | "port" | "pd" | "qp" | "cq" | "mr" | "peer" | "opcode" | "flushed" => {
                let (object, text) = self.point.object(self.select.verb);
                let of_effect = self.action.object();
                let has = object.keys().contains(&key) || of_effect.keys().contains(&key);
                (!has).then(|| match (self.point, of_effect) {
                    (Point::Once, Object::Device) => "it concerns a device as a whole".to_owned(),
                    (Point::Once, Object::None) => "it concerns whole sessions".to_owned(),
                    _ => format!("{text} have no {key}"),
                })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::faults::FaultRule;

    fn error(text: &str) -> String {
        FaultRule::parse_all(text).expect_err(text).to_string()
    }

    #[test]
    fn errors_of_keys_without_effect() {
        for (text, expected) in [
            ("do=stop status=fatal-err", "status has no effect with do=stop;"),
            ("do=stop colour=red name=x", "colour has no effect with do=stop name=x;"),
            ("do=complete status=fatal-err for=1s", "for has no effect with do=complete;"),
        ] {
            let error = error(text);
            assert!(error.starts_with(&format!("{expected} its keys are ")), "{text}: {error}");
        }
        for (text, key, why) in [
            ("do=complete status=fatal-err", "verb=reg_mr", "send requests have no verb"),
            ("do=complete status=fatal-err", "mr=1", "send requests have no mr"),
            ("do=complete status=fatal-err", "flushed=true", "send requests have no flushed"),
            ("do=fail errno=EIO verb=reg_mr", "opcode=send", "requests of reg_mr have no opcode"),
            ("do=fail errno=EIO verb=reg_mr", "device=x", "requests of reg_mr have no device"),
            ("do=fail errno=EIO verb=reg_mr", "port=1", "requests of reg_mr have no port"),
            ("do=fail errno=EIO verb=reg_mr", "qp=1", "requests of reg_mr have no qp"),
            ("do=fail errno=EIO verb=reg_mr", "peer=::1", "requests of reg_mr have no peer"),
            ("do=fail errno=EIO verb=query_port", "pd=1", "requests of query_port have no pd"),
            (
                "do=fail errno=EIO verb=post_recv",
                "opcode=recv",
                "requests of post_recv have no opcode",
            ),
            ("do=fail errno=EIO", "mr=1", "requests of the daemon have no mr"),
            ("do=addr-error", "qp=1", "requests of rdma_resolve_addr have no qp"),
            ("do=reject", "opcode=send", "requests of rdma_connect have no opcode"),
            ("do=reject", "verb=reg_mr", "its verb is rdma_connect or rdma_accept"),
            ("do=addr-error", "verb=rdma_resolve_route", "its verb is rdma_resolve_addr"),
            ("do=fail errno=EIO", "verb=rdma_cm_event", "an event cannot fail"),
            ("do=corrupt-crc", "opcode=send", "FPDUs have no opcode"),
            ("do=cm-message effect=drop", "mr=1", "messages of the connection manager have no mr"),
            ("do=disconnect verb=reg_mr", "opcode=send", "requests of reg_mr have no opcode"),
            ("do=link delay=1ms", "opcode=send", "settings have no opcode"),
            ("do=link delay=1ms", "verb=reg_mr", "settings have no verb"),
            ("do=link delay=1ms", "nth=1", "it is a setting without occasions"),
            ("do=link delay=1ms", "every=2", "it is a setting without occasions"),
            ("do=link delay=1ms", "probability=1%", "it is a setting without occasions"),
            ("do=link delay=1ms", "limit=1", "it is a setting without occasions"),
            ("do=port-down", "qp=1", "it concerns a device as a whole"),
            ("do=event event=port-err", "cq=1", "it concerns a device as a whole"),
            ("do=end-session", "device=x", "it concerns whole sessions"),
            ("do=stop", "nth=2", "it takes place once, unless it has a verb or an opcode"),
            ("do=stop", "mr=2", "effects have no mr"),
        ] {
            let verb = text.split_once(" verb=").or(key.split_once("verb="));
            let of_verb = verb.map_or_else(String::new, |(_, verb)| format!(" verb={verb}"));
            let error = error(&format!("{text} {key}"));
            let rule = text.split(' ').next().unwrap();
            let key = key.split('=').next().unwrap();
            let expected =
                format!("{key} has no effect with {rule}{of_verb}, because {why}; its keys");
            assert!(error.starts_with(&expected), "{text}: {error}");
        }
        assert_eq!(
            error("do=stop status=fatal-err"),
            "status has no effect with do=stop; its keys are for, device, port, pd, qp, cq, peer, \
             user, pid, command, verb, opcode, after, probability, seed"
        );
    }

    /// A key of the request or of the objects of the effect is accepted.
    #[test]
    fn keys_of_requests_and_effects_are_accepted() {
        for text in [
            "do=fail errno=EIO qp=1 pd=2 cq=3 peer=::1 device=x",
            "do=fail errno=EIO verb=reg_mr pd=1",
            "do=fail errno=EIO verb=rdma_reject peer=::1",
            "do=fail errno=EIO verb=resize_cq cq=1",
            "do=reject peer=::1 device=x qp=1",
            "do=stop verb=reg_mr qp=3",
            "do=stop opcode=send nth=3 qp=3",
            "do=port-down verb=reg_mr device=x nth=3",
            "do=port-down opcode=write qp=3",
            "do=end-session verb=modify_qp qp=3",
            "do=stop verb=destroy_cq qp=3",
            "do=refuse as=access-error mr=1 opcode=read",
            "do=rnr opcode=send",
        ] {
            FaultRule::parse_all(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        }
    }

    #[test]
    fn errors_of_opcodes_without_occasion() {
        for (text, expected) in [
            (
                "do=complete status=fatal-err opcode=recv",
                "opcode=recv: with do=complete, send requests have one of send, write, read, atomic, \
             bind-mw, local-inv",
            ),
            (
                "do=refuse as=access-error opcode=bind-mw",
                "opcode=bind-mw: with do=refuse, messages have one of send, write, read, atomic",
            ),
            (
                "do=terminate code=1/2/00 opcode=send mr=5",
                "opcode=send: with do=terminate, messages with a remote key have one of write, read, \
                 atomic",
            ),
            (
                "do=rnr opcode=write",
                "opcode=write: with do=rnr, Sends that need a receive have one of send",
            ),
            (
                "do=fail errno=EIO verb=post_send opcode=recv",
                "opcode=recv: with do=fail verb=post_send, requests of post_send have one of send, \
                 write, read, atomic, bind-mw, local-inv",
            ),
        ] {
            assert_eq!(error(text), expected, "{text}");
        }
    }
}
