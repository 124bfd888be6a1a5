//! Suggestions for unknown options.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};

/// Parses the arguments of this process. Prints usage errors and exits with status 2.
pub fn parse<Cli: Parser>() -> Cli {
    Cli::try_parse().unwrap_or_else(|error| with_tip::<Cli>(error).exit())
}

/// Adds the long options with the same initial to the error about an unknown short option. `clap`
/// itself makes suggestions only for long options.
pub fn with_tip<Cli: CommandFactory>(mut error: clap::Error) -> clap::Error {
    let command = Cli::command();
    let unknown = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(unknown)) if error.kind() == ErrorKind::UnknownArgument => {
            unknown
        }
        _ => return error,
    };
    let Some(initial) = unknown.strip_prefix('-').filter(|rest| !rest.starts_with('-')) else {
        return error;
    };
    let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let long = shown.filter_map(|argument| argument.get_long());
    let meant = long.filter(|long| long.get(..1) == initial.get(..1));
    let meant: Vec<String> = meant.map(|long| format!("--{long}")).collect();
    if !meant.is_empty() {
        error.insert(ContextKind::SuggestedArg, ContextValue::Strings(meant));
    }
    error
}
