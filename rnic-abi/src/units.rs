//! Sizes and times with units, as administrators write them: `"64MiB"`, `"5s"`.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// A number of bytes, written as an integer and one of `B`, `KiB`, `MiB`, `GiB`, `TiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl Size {
    /// Parses a size. The error explains the format.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (number, unit) = split(text)?;
        let factor = SIZE_UNITS.iter().find(|(name, _)| *name == unit).map(|(_, f)| *f);
        let factor = factor.ok_or_else(|| {
            format!(
                "{text:?} has no known unit; sizes are written like \"64MiB\" \
                 (B, KiB, MiB, GiB, TiB)"
            )
        })?;
        number.checked_mul(factor).map(Size).ok_or_else(|| format!("{text:?} is too large"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, factor) = SIZE_UNITS
            .iter()
            .rev()
            .find(|(_, factor)| self.0 >= *factor && self.0.is_multiple_of(*factor))
            .unwrap_or(&SIZE_UNITS[0]);
        write!(f, "{}{unit}", self.0 / factor)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        Size::parse(&text).map_err(serde::de::Error::custom)
    }
}

/// A span of time, written as an integer and one of `us`, `ms`, `s`, `min`, `h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

impl Span {
    /// Parses a time. The error explains the format.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (number, unit) = split(text)?;
        let micros = SPAN_UNITS.iter().find(|(name, _)| *name == unit).map(|(_, f)| *f);
        let micros = micros.ok_or_else(|| {
            format!("{text:?} has no known unit; times are written like \"5s\" (us, ms, s, min, h)")
        })?;
        let total = number.checked_mul(micros).ok_or_else(|| format!("{text:?} is too long"))?;
        Ok(Span(Duration::from_micros(total)))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_micros();
        let (unit, factor) = SPAN_UNITS
            .iter()
            .rev()
            .map(|(unit, factor)| (unit, u128::from(*factor)))
            .find(|(_, factor)| micros >= *factor && micros.is_multiple_of(*factor))
            .unwrap_or((&"us", 1));
        write!(f, "{}{unit}", micros / factor)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        Span::parse(&text).map_err(serde::de::Error::custom)
    }
}

/// A span of time, or `"off"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanOrOff(pub Option<Duration>);

impl fmt::Display for SpanOrOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(span) => Span(span).fmt(f),
            None => f.write_str("off"),
        }
    }
}

impl<'de> Deserialize<'de> for SpanOrOff {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        match text.as_str() {
            "off" => Ok(SpanOrOff(None)),
            _ => Span::parse(&text)
                .map(|span| SpanOrOff(Some(span.0)))
                .map_err(|why| serde::de::Error::custom(format!("{why}, or \"off\""))),
        }
    }
}

fn split(text: &str) -> Result<(u64, &str), String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number = number
        .parse()
        .map_err(|_| format!("{text:?} does not start with a whole number that fits 64 bits"))?;
    Ok((number, unit.trim_start()))
}

const SIZE_UNITS: [(&str, u64); 5] =
    [("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

const SPAN_UNITS: [(&str, u64); 5] =
    [("us", 1), ("ms", 1_000), ("s", 1_000_000), ("min", 60_000_000), ("h", 3_600_000_000)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_need_a_unit_and_print_the_largest() {
        assert_eq!(Size::parse("64MiB"), Ok(Size(64 << 20)));
        assert_eq!(Size::parse("3 KiB"), Ok(Size(3 << 10)));
        assert_eq!(Size::parse("0B"), Ok(Size(0)));
        for bad in ["64", "MiB", "", "64MB", "-1MiB", "1.5GiB", "99999999999999999999B", "64mib"] {
            assert!(Size::parse(bad).is_err(), "{bad}");
        }
        assert!(Size::parse("16777216TiB").unwrap_err().contains("too large"));
        for text in ["64MiB", "1536B", "3KiB", "1TiB", "0B"] {
            assert_eq!(Size::parse(text).map(|s| s.to_string()), Ok(text.to_owned()));
        }
    }

    #[test]
    fn spans_need_a_unit_and_print_the_largest() {
        assert_eq!(Span::parse("5s"), Ok(Span(Duration::from_secs(5))));
        assert_eq!(Span::parse("50us"), Ok(Span(Duration::from_micros(50))));
        for bad in ["5", "s", "5sec", "", "1.5s", "18446744073709551615h"] {
            assert!(Span::parse(bad).is_err(), "{bad}");
        }
        for text in ["5s", "50us", "1500ms", "2min", "1h", "0us"] {
            assert_eq!(Span::parse(text).map(|s| s.to_string()), Ok(text.to_owned()));
        }
    }
}
