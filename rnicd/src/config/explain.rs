//! Text that explains the effective configuration, for `rnicd check-config`.

use std::fmt::Write;

use super::Config;
use super::in_force::InForce;
use super::section::Row;
use super::warnings::warnings;
use super::worst_case::worst_case;

/// Returns all values with their meaning, the rules, the worst-case memory and warnings. `unknown`
/// contains warnings about users and groups that do not exist.
pub fn explain(config: &Config, in_force: &InForce, unknown: &[String]) -> String {
    let mut out = String::new();
    for mut row in config.rows() {
        in_force.apply_to(&mut row);
        let Row { key, value, text } = row;
        // Writes to a String do not fail.
        let _ = writeln!(out, "{key:<35} {value:<14} {text}");
    }
    let rules = config.rule_sentences().into_iter().map(|(_, sentence)| sentence);
    paragraph(&mut out, "Rules:", rules);
    paragraph(&mut out, "Worst case, every limit reached at once:", worst_case(config, in_force));
    paragraph(&mut out, "Warnings:", warnings(config).into_iter().chain(unknown.iter().cloned()));
    out
}

/// Appends a heading and its lines. Appends nothing if there are no lines.
fn paragraph(out: &mut String, heading: &str, lines: impl IntoIterator<Item = String>) {
    let mut lines = lines.into_iter().peekable();
    if lines.peek().is_some() {
        let _ = writeln!(out, "\n{heading}");
    }
    for line in lines {
        let _ = writeln!(out, "  {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::super::kind::Kind;
    use super::*;

    /// Returns the values as written, for a machine with enough resources.
    fn as_written(config: &Config) -> InForce {
        let device = &config.limits.device;
        InForce {
            workers: config.engine.workers.unwrap_or(1),
            qps: device.count(Kind::Qps),
            startups: device.count(Kind::Startups),
            reason: String::new(),
            guid: config.device.guid,
        }
    }

    #[test]
    fn explanations_show_effective_values() {
        let mut config = Config::default();
        config.engine.workers = Some(3);
        let text = explain(&config, &as_written(&config), &[]);
        let key = |key: &str| text.lines().find(|l| l.split(' ').next() == Some(key));
        assert!(key("engine.workers").is_some_and(|l| l.contains(" 3 ")), "{text}");
        assert!(key("limits.session.qps").is_some_and(|l| l.contains("16384")), "{text}");
        assert!(text.contains("Worst case"), "{text}");
        assert!(text.contains("256.0 MiB for unsent FPDUs"), "{text}");
        assert!(text.contains("do not read: 1.5 MiB each, 24.0 GiB for one user"), "{text}");
    }

    #[test]
    fn rules_and_warnings_are_explained() {
        let text = "[limits.session]\nqps = 30000\ncqs = 1\n[[user]]\nwho = \"alice\"\n\
                    session = { qps = 4 }\ntrusted = true\n[[listen]]\nwho = \"@rdma\"\n\
                    address = \"10.0.0.0/8\"\nports = 7\n";
        let config = Config::parse(std::path::Path::new("t"), text);
        let config = config.unwrap_or_else(|e| panic!("{e}"));
        let said = explain(&config, &as_written(&config), &[]);
        for sentence in [
            "Sessions of user alice may have qps = 4 (instead of 30000).",
            "User alice is trusted: the daemon itself copies from and to attached memory.",
            "@rdma may listen on 10.0.0.0/8, port 7.",
            "limits.session.qps = 30000 is above limits.user.qps = 16384",
        ] {
            assert!(said.contains(sentence), "{sentence}\n{said}");
        }
    }

    #[test]
    fn lowered_limit_shows_the_reason() {
        let config = Config::default();
        let reason = "RLIMIT_NOFILE = 1024 leaves 600 for connections".to_owned();
        let in_force = InForce { workers: 1, qps: 600, startups: 120, reason, guid: None };
        let text = explain(&config, &in_force, &[]);
        assert!(text.contains("lowered: RLIMIT_NOFILE = 1024"), "{text}");
    }
}
