//! Checks fields of the file. Returns values, or errors with file and line.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use super::error::ConfigError;
use super::field::Field;
use super::units::{Span, SpanOrOff};

/// A file and its text, for the positions of errors.
pub(super) struct Checker<'a> {
    pub(super) file: &'a Path,
    pub(super) text: &'a str,
}

impl Checker<'_> {
    /// Returns an error about the text at byte `offset`.
    pub(super) fn wrong(&self, offset: usize, why: impl Into<String>) -> ConfigError {
        ConfigError::at(self.file, self.text, offset, why)
    }

    /// Returns a field's value if `check` accepts it, or the default if the file does not set it.
    pub(super) fn checked<T>(
        &self,
        field: Field<T>,
        default: T,
        check: impl Fn(&T) -> Result<(), String>,
    ) -> Result<T, ConfigError> {
        Ok(self.optional(field, check)?.unwrap_or(default))
    }

    pub(super) fn optional<T>(
        &self,
        field: Field<T>,
        check: impl Fn(&T) -> Result<(), String>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(field) = field else { return Ok(None) };
        check(field.get_ref())
            .map_err(|why| ConfigError::at(self.file, self.text, field.span().start, why))?;
        Ok(Some(field.into_inner()))
    }

    pub(super) fn number<T: PartialOrd + std::fmt::Display>(
        &self,
        field: Field<T>,
        default: T,
        range: RangeInclusive<T>,
    ) -> Result<T, ConfigError> {
        self.checked(field, default, |value| in_range(value, &range))
    }

    pub(super) fn optional_number<T: PartialOrd + std::fmt::Display>(
        &self,
        field: Field<T>,
        range: RangeInclusive<T>,
    ) -> Result<Option<T>, ConfigError> {
        self.optional(field, |value| in_range(value, &range))
    }

    pub(super) fn span(
        &self,
        field: Field<Span>,
        default: Duration,
        range: RangeInclusive<Duration>,
    ) -> Result<Duration, ConfigError> {
        let range = Span(*range.start())..=Span(*range.end());
        Ok(self.number(field, Span(default), range)?.0)
    }

    pub(super) fn span_or_off(
        &self,
        field: Field<SpanOrOff>,
        default: Option<Duration>,
        range: RangeInclusive<Duration>,
    ) -> Result<Option<Duration>, ConfigError> {
        let range = Span(*range.start())..=Span(*range.end());
        let check = |value: &SpanOrOff| match value.0 {
            Some(span) => in_range(&Span(span), &range).map_err(|why| format!("{why}, or \"off\"")),
            None => Ok(()),
        };
        Ok(self.checked(field, SpanOrOff(default), check)?.0)
    }

    pub(super) fn deadline(
        &self,
        field: Field<Span>,
        default: Duration,
    ) -> Result<Duration, ConfigError> {
        self.span(field, default, Duration::from_millis(10)..=SECOND * 3600)
    }
}

fn in_range<T: PartialOrd + std::fmt::Display>(
    value: &T,
    range: &RangeInclusive<T>,
) -> Result<(), String> {
    if range.contains(value) {
        Ok(())
    } else {
        Err(format!("must be from {} to {}", range.start(), range.end()))
    }
}

pub(super) const SECOND: Duration = Duration::from_secs(1);
