//! Changes between two configurations, by key, for the log of a reload.

use std::collections::HashMap;
use std::fmt;

use super::Config;

/// A changed key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The key, or the name of a rule.
    pub key: String,
    /// Value before the change, empty if there was no value.
    pub before: String,
    /// Value after the change, empty if there is no value.
    pub now: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_none = |text: &str| if text.is_empty() { "(none)".to_owned() } else { text.into() };
        write!(f, "{}: {} -> {}", self.key, or_none(&self.before), or_none(&self.now))
    }
}

/// Returns all differences in the order of the file.
pub fn changes(before: &Config, now: &Config) -> Vec<Change> {
    let mut all: Vec<Change> = Vec::new();
    // Index of each key in `all`: a file may have tens of thousands of rules.
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut place = |all: &mut Vec<Change>, key: &str| {
        *places.entry(key.to_owned()).or_insert_with(|| {
            all.push(Change { key: key.to_owned(), before: String::new(), now: String::new() });
            all.len() - 1
        })
    };
    for (key, value) in rows(now) {
        let at = place(&mut all, &key);
        append(&mut all[at].now, &value);
    }
    for (key, value) in rows(before) {
        let at = place(&mut all, &key);
        append(&mut all[at].before, &value);
    }
    all.retain(|change| change.before != change.now);
    all
}

/// Appends a further value of a key that has several.
fn append(values: &mut String, value: &str) {
    if !values.is_empty() {
        values.push(' ');
    }
    values.push_str(value);
}

/// Returns the configured values, not those that this machine lowers, and the rules.
fn rows(config: &Config) -> impl Iterator<Item = (String, String)> {
    config.rows().into_iter().map(|row| (row.key, row.value)).chain(config.rule_sentences())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_keys_and_rules_are_listed() {
        let parse = |text: &str| {
            Config::parse(std::path::Path::new("t"), text).unwrap_or_else(|e| panic!("{e}"))
        };
        let before = parse("[limits]\nqps = 7\n[[user]]\nwho = \"alice\"\ntrusted = true\n");
        let now = parse("[limits]\nqps = 9\n[[pd]]\nname = \"p\"\nusers = [\"bob\"]\n");
        let texts: Vec<String> = changes(&before, &now).iter().map(ToString::to_string).collect();
        assert_eq!(texts.len(), 3, "{texts:?}");
        assert_eq!(texts[0], "limits.qps: 7 -> 9");
        assert!(texts[1].starts_with("pd.p: (none) -> bob may share"), "{texts:?}");
        assert!(texts[2].starts_with("user.alice: User alice is trusted"), "{texts:?}");
        assert!(texts[2].ends_with("-> (none)"), "{texts:?}");
        assert_eq!(changes(&now, &now), []);
    }
}
