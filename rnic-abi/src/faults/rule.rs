//! Parsing of whole rules.

use super::MAX_RULE_LEN;
use super::action::{Action, Point};
use super::error::FaultError;
use super::name::FaultName;
use super::object::Object;
use super::reject::private_data;
use super::scope::Scope;
use super::select::{self, Selector};
use super::trigger::{self, Trigger};
use super::words::{Words, split};

/// A valid rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// Name, if the text has one.
    pub name: Option<FaultName>,
    /// Users, programs, objects and operations to which the rule applies.
    pub select: Selector,
    /// Occasions with an effect.
    pub trigger: Trigger,
    /// Effect.
    pub action: Action,
    /// Occasion at which the rule is evaluated.
    pub point: Point,
    /// Name of the action.
    pub action_name: &'static str,
    /// Private data of a rejection.
    pub data: Vec<u8>,
    /// The text, in one line.
    pub text: String,
}

impl FaultRule {
    /// Parses rules separated by `;` or line breaks.
    ///
    /// # Errors
    ///
    /// The first error.
    pub fn parse_all(text: &str) -> Result<Vec<Self>, FaultError> {
        split(text)?.into_iter().map(Self::of_words).collect()
    }

    /// Parses a rule from keys and values, such as those of a TOML table.
    ///
    /// # Errors
    ///
    /// The first error.
    pub fn of_pairs(pairs: impl IntoIterator<Item = (String, String)>) -> Result<Self, FaultError> {
        let mut words = Words::default();
        for (key, value) in pairs {
            words.add(key, value)?;
        }
        Self::of_words(words)
    }

    /// Returns the selector of the objects that the effect concerns. If that is a device or port as
    /// a whole, the keys of other objects only select the request at which the effect occurs, so
    /// they are removed.
    pub fn concerned(&self) -> Selector {
        let select = self.select.clone();
        if self.action.object() == Object::Device {
            return Selector { pd: None, qp: None, cq: None, peer: None, ..select };
        }
        select
    }

    fn of_words(mut words: Words) -> Result<Self, FaultError> {
        let text = words.text();
        if text.len() > MAX_RULE_LEN {
            return Err(FaultError::TooLong(text.len()));
        }
        let name = words.parse("name", FaultName::parse)?;
        let mut keys = words.known(&[&["reason"]]);
        let (action, action_name) = Action::take(&mut words)?;
        let data = match action {
            Action::Reject { .. } => words.parse("data", private_data)?.unwrap_or_default(),
            _ => Vec::new(),
        };
        keys.extend(words.known(&[select::KEYS, trigger::KEYS]));
        let mut select = Selector::take(&mut words)?;
        let trigger = Trigger::take(&mut words)?;
        let point = match action.point() {
            Point::Once if select.verb.is_some() => Point::Verb,
            Point::Once if select.opcode.is_some() => Point::Request,
            point => point,
        };
        let verb = select.verb;
        select.verb = verb.or(action.verbs().first().copied());
        let of_verb = verb.map_or_else(String::new, |verb| format!(" verb={}", verb.name()));
        let named = name.map_or_else(String::new, |name| format!(" name={name}"));
        let rule = format!("do={action_name}{of_verb}{named}");
        let scope = Scope { rule, action, action_name, point, select: &select, verb };
        if let Some(key) = words.left() {
            return Err(scope.no_effect(key, None));
        }
        scope.check(&keys)?;
        Ok(FaultRule { name, select, trigger, action, point, action_name, data, text })
    }
}
