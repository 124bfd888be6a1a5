//! Filters of the log.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Checks and converts `log.level`.
pub(super) fn check(level: String) -> Result<String, String> {
    if level.len() > MAX_FILTER_LEN {
        return Err(format!("must have at most {MAX_FILTER_LEN} bytes"));
    }
    log_filter(&level)
}

/// Converts an administrator's filter to one for `tracing`. A directive without a target must be a
/// level: `tracing` would treat any other word as a module and log nothing else. If there is no
/// such level, all other modules log errors.
pub fn log_filter(text: &str) -> Result<String, String> {
    let mut directives = Vec::new();
    let mut general = false;
    for directive in text.split(',').map(str::trim).filter(|d| !d.is_empty()) {
        let plain = !directive.contains(['[', ']', '{', '}', '"']);
        match directive.rsplit_once('=') {
            None if plain => {
                directives.push(level(directive)?.to_string());
                general = true;
            }
            Some((target, of_it)) if plain => directives.push(format!("{target}={}", named(of_it))),
            _ => directives.push(directive.to_owned()),
        }
    }
    if !general {
        directives.insert(0, "error".to_owned());
    }
    let filter = directives.join(",");
    EnvFilter::try_new(&filter)
        .map_err(|e| format!("is not a log filter like \"info\" or \"rnicd=debug\": {e}"))?;
    Ok(filter)
}

fn level(word: &str) -> Result<LevelFilter, String> {
    named(word).parse().map_err(|_| {
        format!(
            "is not a log filter like \"info\" or \"rnicd=debug\": {word:?} is not a level (off, \
             error, warn, info, debug, trace); a module needs a level (\"{word}=debug\")"
        )
    })
}

/// Replaces `warning`, an alias, with `warn`.
fn named(level: &str) -> &str {
    if level.eq_ignore_ascii_case("warning") { "warn" } else { level }
}

/// Maximum bytes of a filter. Every log line is compared with each of its directives.
const MAX_FILTER_LEN: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_off_silences_the_log() {
        for (written, filter) in [
            ("info", "info"),
            ("warning", "warn"),
            ("Warning", "warn"),
            ("WARN", "warn"),
            ("off", "off"),
            ("info,rnicd::control=debug", "info,rnicd::control=debug"),
            ("info, rnicd::control=warning", "info,rnicd::control=warn"),
            ("rnicd=debug", "error,rnicd=debug"),
            ("", "error"),
        ] {
            assert_eq!(log_filter(written), Ok(filter.to_owned()), "{written:?}");
        }
        for wrong in ["verbose", "warnings", "rnicd", "info,rnicd", "a=b=c", "rnicd=loud"] {
            let why = log_filter(wrong).unwrap_err();
            assert!(why.starts_with("is not a log filter like"), "{why}");
        }
        assert!(log_filter("verbose").unwrap_err().contains("\"verbose\" is not a level (off, "));
    }
}
