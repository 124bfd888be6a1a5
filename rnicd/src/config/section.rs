//! Declarations of keys, with which `keys.rs` lists the sections of the file.
//!
//! A [`Key`] is the declaration of a key without its name and its text. `section!` makes a struct
//! with a field for each key, and implements [`Section`]: how keys are read, shown and reloaded.

use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::de::{DeserializeSeed, Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use rnic_abi::units::{Span, SpanOrOff};

/// A key with values of type `T`, written in the file as a `W`.
pub(super) struct Key<T, W = T> {
    /// Value if the file does not set the key.
    pub default: T,
    /// A reload does not change the value.
    pub at_start: bool,
    check: Box<dyn Fn(W) -> Result<T, String>>,
    show: Box<dyn Fn(&T) -> String>,
    text: Option<fn(&T) -> &'static str>,
}

impl<T, W> Key<T, W> {
    /// Declares a key by its default, a check that converts written values, and a function that
    /// formats values.
    pub fn new(
        default: T,
        check: impl Fn(W) -> Result<T, String> + 'static,
        show: impl Fn(&T) -> String + 'static,
    ) -> Self {
        let check = Box::new(check);
        Key { default, at_start: false, check, show: Box::new(show), text: None }
    }

    /// Makes reloads keep the value.
    pub fn at_start(self) -> Self {
        Key { at_start: true, ..self }
    }

    /// Explains each value with a text of its own.
    pub fn explained(self, text: fn(&T) -> &'static str) -> Self {
        Key { text: Some(text), ..self }
    }

    /// Returns the row for `check-config`.
    pub fn row(&self, section: &str, name: &str, value: &T, text: &str) -> Row {
        let text = self.text.map_or(text, |text| text(value));
        Row { key: format!("{section}.{name}"), value: (self.show)(value), text: text.to_owned() }
    }
}

impl<'de, T, W: Deserialize<'de>> DeserializeSeed<'de> for Key<T, W> {
    type Value = T;

    /// Reads and checks a value. `toml` adds the position of the value to errors.
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<T, D::Error> {
        (self.check)(W::deserialize(d)?).map_err(D::Error::custom)
    }
}

/// A key with its value and the meaning of the value.
pub(super) struct Row {
    /// The key with its section.
    pub key: String,
    /// The value, without quotes.
    pub value: String,
    /// Meaning of the value.
    pub text: String,
}

/// Declares `true` or `false`.
pub(super) fn flag(default: bool) -> Key<bool> {
    Key::new(default, Ok, bool::to_string)
}

/// Declares a number.
pub(super) fn number<T: PartialOrd + Display + 'static>(
    default: T,
    range: RangeInclusive<T>,
) -> Key<T> {
    Key::new(default, move |n| in_range(&n, &range).map(|()| n), T::to_string)
}

/// Declares a time.
pub(super) fn span(default: Duration, range: RangeInclusive<Duration>) -> Key<Duration, Span> {
    let range = Span(*range.start())..=Span(*range.end());
    let check = move |span: Span| in_range(&span, &range).map(|()| span.0);
    Key::new(default, check, |span| Span(*span).to_string())
}

/// Declares a time from 10 ms to an hour.
pub(super) fn deadline(default: Duration) -> Key<Duration, Span> {
    span(default, Duration::from_millis(10)..=SECOND * 3600)
}

/// Declares a time or `"off"`.
pub(super) fn span_or_off(
    default: Duration,
    range: RangeInclusive<Duration>,
) -> Key<Option<Duration>, SpanOrOff> {
    let range = Span(*range.start())..=Span(*range.end());
    let check = move |SpanOrOff(value)| match value {
        Some(span) => in_range(&Span(span), &range)
            .map(|()| value)
            .map_err(|why| format!("{why}, or \"off\"")),
        None => Ok(None),
    };
    Key::new(Some(default), check, |value| SpanOrOff(*value).to_string())
}

/// Declares one of several words.
pub(super) fn word<T: Copy + 'static>(
    default: T,
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> Key<T, String> {
    let check = move |text: String| {
        all.iter().copied().find(|word| name(*word) == text).ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|word| name(*word)).collect();
            format!("unknown variant `{text}`, expected {}", alternatives(&names))
        })
    };
    Key::new(default, check, move |word| name(*word).to_owned())
}

/// Declares a key that is not set by default. `check-config` then shows `unset`.
pub(super) fn optional<T: 'static>(
    unset: &'static str,
    check: impl Fn(&T) -> Result<(), String> + 'static,
    show: impl Fn(&T) -> String + 'static,
) -> Key<Option<T>, T> {
    let check = move |value| check(&value).map(|()| Some(value));
    Key::new(None, check, move |value| value.as_ref().map_or(unset.to_owned(), &show))
}

/// Returns an error with the range if it does not contain the value.
pub(super) fn in_range<T: PartialOrd + Display>(
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

/// A section of the file. `section!` implements it.
pub(super) trait Section: Default {
    /// Names of the keys, in the order of the file.
    const KEYS: &'static [&'static str];

    /// Reads the value of a key.
    fn set<'de, M: MapAccess<'de>>(&mut self, key: &str, map: &mut M) -> Result<(), M::Error>;

    /// Appends all rows.
    fn rows(&self, rows: &mut Vec<Row>);

    /// Keeps the running values that a reload does not change.
    fn keep(&mut self, running: &Self);
}

/// Declares a section: its name, its struct, and for each key the field, the [`Key`] and a text for
/// `check-config`.
macro_rules! section {
    (
        $(#[$about:meta])*
        $section:literal $struct:ident
        $($(#[$more:meta])* $key:ident: $type:ty = $declaration:expr, $text:literal;)*
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $struct {
            $(#[doc = $text] $(#[$more])* pub $key: $type,)*
        }

        impl Default for $struct {
            fn default() -> Self {
                $struct { $($key: $declaration.default,)* }
            }
        }

        impl Section for $struct {
            const KEYS: &'static [&'static str] = &[$(stringify!($key),)*];

            fn set<'de, M: MapAccess<'de>>(
                &mut self,
                key: &str,
                map: &mut M,
            ) -> Result<(), M::Error> {
                match key {
                    $(stringify!($key) => self.$key = map.next_value_seed($declaration)?,)*
                    _ => {}
                }
                Ok(())
            }

            fn rows(&self, rows: &mut Vec<Row>) {
                $(rows.push($declaration.row($section, stringify!($key), &self.$key, $text));)*
            }

            fn keep(&mut self, running: &Self) {
                $(if $declaration.at_start {
                    self.$key.clone_from(&running.$key);
                })*
            }
        }

        impl<'de> Deserialize<'de> for $struct {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                read(d)
            }
        }
    };
}
pub(super) use section;

/// Reads a section. Keys that it does not set have their defaults.
pub(super) fn read<'de, S: Section, D: Deserializer<'de>>(d: D) -> Result<S, D::Error> {
    struct Keys<S>(PhantomData<S>);

    impl<'de, S: Section> Visitor<'de> for Keys<S> {
        type Value = S;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a table")
        }

        fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<S, M::Error> {
            let mut section = S::default();
            while let Some(key) = map.next_key_seed(KnownKey(S::KEYS.to_vec()))? {
                section.set(key, &mut map)?;
            }
            Ok(section)
        }
    }

    d.deserialize_map(Keys(PhantomData))
}

/// Reads one of these keys. Another key is an error here, so that the error is located at the key
/// and not at its value.
pub(super) struct KnownKey(pub Vec<&'static str>);

impl<'de> DeserializeSeed<'de> for KnownKey {
    type Value = &'static str;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<&'static str, D::Error> {
        d.deserialize_identifier(self)
    }
}

impl Visitor<'_> for KnownKey {
    type Value = &'static str;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<&'static str, E> {
        self.0.iter().copied().find(|key| *key == text).ok_or_else(|| {
            let known = alternatives(&self.0);
            E::custom(format!("unknown field `{text}`, expected {known}"))
        })
    }
}

/// Lists the valid names, as serde does.
fn alternatives(names: &[&str]) -> String {
    match names {
        [only] => format!("`{only}`"),
        [one, other] => format!("`{one}` or `{other}`"),
        names => format!("one of `{}`", names.join("`, `")),
    }
}
