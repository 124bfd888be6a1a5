//! Which selectors and triggers a rule can have: those of the objects that its occasions name, and
//! of the objects that its effect concerns.

use super::action::{Action, Point, keys_of};
use super::error::FaultError;
use super::event::Element;
use super::opcode::Opcode;
use super::select::{self, Selector};
use super::trigger;
use super::verb::Verb;

/// Object that an occasion names, or that an effect concerns. Its keys select it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Object {
    /// None, or whole sessions.
    None,
    /// A protection domain.
    Pd,
    /// A CQ.
    Cq,
    /// The address of a peer.
    Peer,
    /// A device with its port, as a whole.
    Device,
    /// A QP.
    Qp,
    /// A send request of a QP.
    Request,
    /// A message of the peer.
    Message,
    /// A message of the peer that needs a receive.
    Receive,
    /// A completion.
    Completion,
}

impl Object {
    /// Returns the keys that select the object.
    pub fn keys(self) -> &'static [&'static str] {
        match self {
            Object::None => &[],
            Object::Pd => &["pd"],
            Object::Cq => &["cq"],
            Object::Peer => &["peer"],
            Object::Device => &["device", "port"],
            Object::Qp => &["device", "port", "pd", "qp", "cq", "peer"],
            Object::Request | Object::Receive => {
                &["device", "port", "pd", "qp", "cq", "peer", "opcode"]
            }
            Object::Message => &["device", "port", "pd", "qp", "cq", "peer", "opcode", "mr"],
            Object::Completion => {
                &["device", "port", "pd", "qp", "cq", "peer", "opcode", "flushed"]
            }
        }
    }

    /// Returns the values of `opcode` that select the object. Only some messages access memory
    /// with a remote key (`mr`).
    fn opcodes(self, mr: bool) -> &'static [Opcode] {
        use Opcode::*;
        match self {
            Object::Message if mr => &[Write, Read, Atomic],
            Object::Message => &[Send, Write, Read, Atomic],
            Object::Receive => &[Send],
            Object::Request => &[Send, Write, Read, Atomic, BindMw, LocalInv],
            _ => &[Send, Write, Read, Atomic, BindMw, LocalInv, Recv],
        }
    }
}

impl Point {
    /// Returns the object of an occasion, with the text of an error. A rule without a verb can
    /// select the requests about any QP or protection domain.
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
    /// Returns the object that the effect concerns, in addition to that of the occasion.
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

/// The parts of a rule that decide which keys have an effect.
pub(super) struct Scope<'a> {
    /// The rule for errors, such as `do=fail verb=reg_mr`.
    pub rule: String,
    pub action: Action,
    pub action_name: &'static str,
    pub point: Point,
    pub select: &'a Selector,
    /// The verb of the text, which may not be that of the action.
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
                Some(Verb::ACCEPT) => Some("a program that rejects has no choice".to_owned()),
                _ => None,
            },
            // Such a rule takes place at requests.
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
