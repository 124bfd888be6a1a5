//! Splits rules into words `KEY=VALUE`, and parses the values.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use super::error::FaultError;
use crate::units::Span;

/// Keys with values, in the order of the text.
#[derive(Clone, Debug, Default)]
pub(super) struct Words(Vec<(String, String)>);

/// Splits a text into rules. A value with blanks or `;` is quoted: `command="my program"`.
pub(super) fn split(text: &str) -> Result<Vec<Words>, FaultError> {
    let mut rules = Vec::new();
    let mut words = Words::default();
    let mut word = String::new();
    let mut quoted = false;
    // The additional character ends the last rule.
    for c in text.chars().chain(['\n']) {
        match c {
            '"' => quoted = !quoted,
            _ if quoted && c != '\n' => word.push(c),
            _ if quoted => return Err(FaultError::Unquoted(word)),
            ';' | '\n' => {
                words.push(std::mem::take(&mut word))?;
                if !words.0.is_empty() {
                    rules.push(std::mem::take(&mut words));
                }
            }
            _ if c.is_whitespace() => words.push(std::mem::take(&mut word))?,
            _ => word.push(c),
        }
    }
    Ok(rules)
}

impl Words {
    fn push(&mut self, word: String) -> Result<(), FaultError> {
        if word.is_empty() {
            return Ok(());
        }
        let Some((key, value)) = word.split_once('=') else {
            return Err(FaultError::NoValue(word));
        };
        self.add(key.to_owned(), value.to_owned())
    }

    /// Adds a key. Refuses characters with which [`split`] could not parse the text of the rule
    /// again.
    pub(super) fn add(&mut self, key: String, value: String) -> Result<(), FaultError> {
        let is_special = |c: char| c == '"' || c.is_control();
        if key.contains(is_special) || value.contains(is_special) {
            return Err(FaultError::Special(format!("{key}={value}")));
        }
        if self.0.iter().any(|(known, _)| *known == key) {
            return Err(FaultError::Twice(key));
        }
        self.0.push((key, value));
        Ok(())
    }

    /// Removes a key and returns its value.
    pub(super) fn take(&mut self, key: &str) -> Option<String> {
        let at = self.0.iter().position(|(known, _)| known == key)?;
        Some(self.0.remove(at).1)
    }

    /// Removes a key and returns its parsed value. The error of `parse` states the valid values.
    pub(super) fn parse<T>(
        &mut self,
        key: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, FaultError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        match parse(&value) {
            Ok(parsed) => Ok(Some(parsed)),
            Err(why) => Err(FaultError::Value { key: key.to_owned(), value, why }),
        }
    }

    /// Removes a key and returns its value, a whole number within the range.
    pub(super) fn number<T: Copy + Display + FromStr + PartialOrd>(
        &mut self,
        key: &str,
        from: T,
        to: T,
    ) -> Result<Option<T>, FaultError> {
        self.parse(key, |value| {
            let range = || format!("needs a whole number from {from} to {to}");
            let number = value.parse().map_err(|_| range())?;
            if (from..=to).contains(&number) { Ok(number) } else { Err(range()) }
        })
    }

    /// Removes a key and returns its value, a time with a unit.
    pub(super) fn time(&mut self, key: &str) -> Result<Option<Duration>, FaultError> {
        self.parse(key, |value| Span::parse(value).map(|span| span.0))
    }

    /// Returns the keys of the text that are in one of the tables.
    pub(super) fn known(&self, tables: &[&[&'static str]]) -> Vec<&'static str> {
        let all = tables.iter().copied().flatten().copied();
        all.filter(|key| self.0.iter().any(|(known, _)| known == key)).collect()
    }

    /// Returns a key that has not been taken, if any.
    pub(super) fn left(&self) -> Option<&str> {
        self.0.first().map(|(key, _)| key.as_str())
    }

    /// Returns the text of the words.
    pub(super) fn text(&self) -> String {
        let word = |(key, value): &(String, String)| {
            let needs_quotes = value.contains(|c: char| c.is_whitespace() || c == ';');
            if needs_quotes { format!("{key}=\"{value}\"") } else { format!("{key}={value}") }
        };
        self.0.iter().map(word).collect::<Vec<_>>().join(" ")
    }
}

/// Parses the value of a key that is true or false.
pub(super) fn yes(text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| "needs true or false".to_owned())
}

/// Parses a number, in hexadecimal after `0x`.
pub(super) fn decimal_or_hex(text: &str) -> Option<u32> {
    let hex = text.strip_prefix("0x").map(|digits| u32::from_str_radix(digits, 16));
    hex.unwrap_or_else(|| text.parse()).ok()
}
