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
        let only = action.only_verb();
        let other = select.verb.filter(|verb| only.is_some_and(|only| only != *verb));
        select.verb = only.or(select.verb);
        // Posting is the only verb with an opcode.
        let posts = select.verb == Some(Verb::POST_SEND);
        let has_effect = |key: &str| key == "opcode" && posts || has_effect(key, point);
        let set = [
            ("opcode", select.opcode.is_some()),
            ("verb", select.verb.is_some()),
            ("mr", select.mr.is_some()),
            ("flushed", select.flushed),
        ];
        let unused = set.into_iter().find(|(key, is_set)| *is_set && !has_effect(key));
        let unused = match point {
            Point::Setting if !trigger.selects_all() => Some("a number, probability or limit"),
            // A device changes as a whole.
            Point::Once if matches!(action, Action::Change { .. }) => {
                unused.map(|(key, _)| key).or(select.object_key())
            }
            _ => unused.map(|(key, _)| key),
        };
        let unused = unused.or(other.map(|_| "verb"));
        if let Some(key) = words.left().or(unused) {
            let own = keys_of(action_name).iter();
            let all = own.chain(select::KEYS).chain(trigger::KEYS);
            let all = all.filter(|known| **known != key && has_effect(known));
            return Err(FaultError::Unknown {
                key: key.to_owned(),
                action: action_name,
                keys: all.copied().collect::<Vec<_>>().join(", "),
            });
        }
        Ok(FaultRule { name, select, trigger, action, point, action_name, text })
    }
}

/// Returns true if a key of selectors or triggers has an effect in rules of this occasion.
fn has_effect(key: &str, point: Point) -> bool {
    match key {
        "opcode" => !matches!(point, Point::Verb | Point::Fpdu | Point::CmMessage | Point::Setting),
        "verb" => matches!(point, Point::Verb | Point::Once),
        "mr" => point == Point::Message,
        "flushed" => {
            matches!(point, Point::Completion | Point::CompletionEvent | Point::QuietCompletion)
        }
        "nth" | "every" | "probability" | "limit" => point != Point::Setting,
        _ => true,
    }
}
