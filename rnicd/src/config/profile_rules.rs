//! Fault rules of a profile: the styles in which its device reports completions and events.

use std::fmt;

use rnic_abi::faults::{Action, FaultRule};

/// Rules of a profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProfileRules(Vec<FaultRule>);

impl ProfileRules {
    /// Parses the rules. A profile has no rule about requests that fail, nor about single programs.
    pub(super) fn new(written: Vec<String>) -> Result<Self, String> {
        let mut rules = Vec::new();
        for text in written {
            let parsed = FaultRule::parse_all(&text).map_err(|e| format!("{text:?}: {e}"))?;
            for rule in parsed {
                let is_style = matches!(
                    rule.action,
                    Action::HoldCompletion { .. } | Action::HoldEvent { .. } | Action::ExtraEvent
                );
                if !is_style {
                    let why = "a profile has hold-completion, hold-event and extra-event only";
                    return Err(format!("{text:?}: do={}: {why}", rule.action_name));
                }
                if rule.select.user.is_some() || !rule.select.selects_all_programs() {
                    return Err(format!("{text:?}: a profile selects no users or programs"));
                }
                rules.push(rule);
            }
        }
        if rules.len() > MAX_RULES {
            return Err(format!("has more than {MAX_RULES} rules"));
        }
        Ok(ProfileRules(rules))
    }

    /// Returns the rules in their order.
    pub fn iter(&self) -> impl Iterator<Item = &FaultRule> {
        self.0.iter()
    }
}

impl fmt::Display for ProfileRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<_> = self.0.iter().map(|rule| rule.text.as_str()).collect();
        f.write_str(&texts.join("; "))
    }
}

/// Maximum number of rules. Each completion is compared with the rules.
const MAX_RULES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(texts: &[&str]) -> Result<ProfileRules, String> {
        ProfileRules::new(texts.iter().map(|text| (*text).to_owned()).collect())
    }

    #[test]
    fn a_profile_has_rules_of_style_only() {
        let rules = parse(&["do=hold-completion  by=1ms flushed=true", "do=extra-event every=2"]);
        let shown = rules.unwrap().to_string();
        assert_eq!(shown, "do=hold-completion by=1ms flushed=true; do=extra-event every=2");
        for (text, error) in [
            ("do=lose-completion", "do=lose-completion: a profile has hold-completion, hold-event"),
            ("do=fail errno=EIO", "do=fail: a profile has"),
            ("do=hold-event by=1ms pid=1", "a profile selects no users or programs"),
            ("do=hold-event by=1ms user=any", "a profile selects no users or programs"),
            ("do=hold-event", "do=hold-event needs by"),
        ] {
            let found = parse(&[text]).unwrap_err();
            assert!(found.contains(error) && found.contains(text), "{text}: {found}");
        }
        assert!(parse(&["do=extra-event"; 16]).is_ok() && parse(&["do=extra-event"; 17]).is_err());
    }
}
