//! `[log]`

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use super::checker::Checker;
use super::error::ConfigError;
use super::file;

/// `[log]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// Filter of `tracing`; default `info`. `RUST_LOG` overrides it.
    pub level: String,
}

impl Default for Log {
    fn default() -> Self {
        Log { level: "info".to_owned() }
    }
}

impl Checker<'_> {
    /// Checks `[log]` and fills in what the file does not say.
    pub(super) fn log(&self, s: file::LogSection) -> Result<Log, ConfigError> {
        let check = |level: &String| {
            if level.len() > MOST_FILTER {
                return Err(format!("must have at most {MOST_FILTER} bytes"));
            }
            log_filter(level).map(drop)
        };
        let level = self.checked(s.level, Log::default().level, check)?;
        // It has just been checked.
        Ok(Log { level: log_filter(&level).unwrap_or(level) })
    }
}

/// What an administrator wrote of what is to be logged, as `tracing` takes it. A word that stands
/// alone must be a level: `tracing` would take any other for the name of a module, and log nothing
/// else. Without a word that stands alone, errors of what is not named are logged all the same.
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
        .map_err(|e| format!("is no log filter like \"info\" or \"rnicd=debug\": {e}"))?;
    Ok(filter)
}

fn level(word: &str) -> Result<LevelFilter, String> {
    named(word).parse().map_err(|_| {
        format!(
            "is no log filter like \"info\" or \"rnicd=debug\": {word:?} is none of the levels off, \
             error, warn, info, debug and trace, and a module needs one (\"{word}=debug\")"
        )
    })
}

/// A level by its other name.
fn named(level: &str) -> &str {
    match level.eq_ignore_ascii_case("warning") {
        true => "warn",
        false => level,
    }
}

/// Bytes of a filter: every line that is logged is compared with each of its parts.
const MOST_FILTER: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_word_silences_the_log_but_off() {
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
            assert!(why.starts_with("is no log filter like"), "{why}");
        }
        assert!(log_filter("verbose").unwrap_err().contains("\"verbose\" is none of the levels"));
    }
}
