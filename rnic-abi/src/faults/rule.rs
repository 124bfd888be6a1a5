//! Whole rules.

use super::MAX_RULE_LEN;
use super::action::{Action, Point, keys_of};
use super::error::FaultError;
use super::name::FaultName;
use super::select::{self, Selector};
use super::trigger::{self, Trigger};
use super::verb::Verb;
use super::words::{Words, split};

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// Name, if the text has one.
    pub name: Option<FaultName>,
    /// Objects and operations concerned.
    pub select: Selector,
    /// Occasions with an effect.
    pub trigger: Trigger,
    /// Effect.
    pub action: Action,
    /// Occasion at which the rule is evaluated.
    pub point: Point,
    /// Name of the action.
    pub action_name: &'static str,
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

    /// Parses a rule from keys and values, as a table of a TOML file has them.
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

    fn of_words(mut words: Words) -> Result<Self, FaultError> {
        let text = words.text();
        if text.len() > MAX_RULE_LEN {
            return Err(FaultError::TooLong(text.len()));
        }
        let name = words.parse("name", FaultName::parse)?;
        let (action, action_name) = Action::take(&mut words)?;
        let mut select = Selector::take(&mut words)?;
        let trigger = Trigger::take(&mut words)?;
        let point = match action.point() {
            Point::Once if select.verb.is_some() => Point::Verb,
            Point::Once if select.opcode.is_some() => Point::Request,
            point => point,
        };
        if matches!(action, Action::Reject { .. } | Action::Unreachable { .. }) {
            select.verb = Some(Verb::CONNECT);
        }
        let unused = match point {
            Point::Verb => select.opcode.is_some().then_some("opcode"),
            Point::Fpdu if select.opcode.is_some() => Some("opcode"),
            _ => select.verb.is_some().then_some("verb"),
        };
        let unused = match point {
            Point::Setting if !trigger.selects_all() => Some("a number, probability or limit"),
            Point::Setting if select.opcode.is_some() => Some("opcode"),
            _ => unused,
        };
        if let Some(key) = words.left().or(unused) {
            let own = keys_of(action_name).iter();
            let all = own.chain(select::KEYS).chain(trigger::KEYS).filter(|known| **known != key);
            return Err(FaultError::Unknown {
                key: key.to_owned(),
                action: action_name,
                keys: all.copied().collect::<Vec<_>>().join(", "),
            });
        }
        Ok(FaultRule { name, select, trigger, action, point, action_name, text })
    }
}
