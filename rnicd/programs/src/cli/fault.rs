//! `rnicctl fault` and `rnicd exec --faults`: fault rules, on the command line and in files.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use rnic_abi::abi::control::{Diagnosis, FaultRow, MAX_MESSAGE};
use rnic_client::faults::{FaultError, FaultRule};
use rnic_client::{Context, Error};
use serde::Deserialize;

use super::ctl;

/// Subcommands of `rnicctl fault`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Set rules for the sessions of this user, until they are cleared or the daemon ends.
    ///
    /// A rule is `do=ACTION` with arguments, selectors and a trigger: `rnicctl fault add
    /// do=complete status=retry-exc-err opcode=send nth=3`. A wrong word is answered with the words
    /// that exist. Administrators select other users with `user=UID` or `user=any`.
    Add {
        /// Words of one rule, or several rules separated by `;`.
        #[arg(value_name = "KEY=VALUE", required_unless_present = "file")]
        words: Vec<String>,
        /// Set the rules of a TOML file: a table `[[fault]]` for each, with the same keys.
        #[arg(long, value_name = "FILE", conflicts_with = "words")]
        file: Option<PathBuf>,
    },
    /// The rules, with the numbers of occasions and of faults so far.
    List,
    /// Clear a rule, or all rules of this user (administrators: of all users).
    Clear {
        /// Name of the rule.
        name: Option<String>,
    },
    /// Faults so far, newest first.
    Log,
}

/// Error in a file of rules.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read.
    #[error("cannot read {path}: {error}", path = path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The file is not TOML, or has other tables.
    #[error("{path}: {error}", path = path.display())]
    Toml {
        /// Path of the file.
        path: PathBuf,
        /// Error with the line.
        error: Box<toml::de::Error>,
    },
    /// A rule is invalid.
    #[error("{path}: fault {number}: {error}", path = path.display())]
    Rule {
        /// Path of the file.
        path: PathBuf,
        /// Number of the table in the file, from 1.
        number: usize,
        /// The error.
        error: Box<FaultError>,
    },
}

/// Runs a subcommand.
pub fn run(
    command: &Command,
    context: &Context,
    json: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    match command {
        Command::Add { words, file } => {
            match file {
                Some(path) => set(context, &read(path)?)?,
                None => context.set_faults(&words.join(" "))?,
            }
            ctl::done(json)
        }
        Command::List => ctl::list::<FaultRow>(context, json),
        Command::Clear { name } => {
            context.clear_faults(name.as_deref())?;
            ctl::done(json)
        }
        Command::Log => {
            let mut records = context.rows::<Diagnosis>()?;
            records.retain(|record| record.rule.starts_with("injected by fault "));
            ctl::print_rows(json, &records)
        }
    }
}

/// A file of rules.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    fault: Vec<toml::Table>,
}

/// Reads the rules of a TOML file. Returns the text of each.
pub fn read(path: &Path) -> Result<Vec<String>, FileError> {
    let read = |error| FileError::Read { path: path.to_owned(), error };
    let text = std::fs::read_to_string(path).map_err(read)?;
    let parsed = toml::from_str(&text);
    let File { fault } = parsed
        .map_err(|error| FileError::Toml { path: path.to_owned(), error: Box::new(error) })?;
    let rules = fault.into_iter().zip(1..).map(|(table, number)| {
        let pairs = table.into_iter().map(|(key, value)| {
            let value = match value {
                toml::Value::String(text) => text,
                other => other.to_string(),
            };
            (key, value)
        });
        let rule = FaultRule::of_pairs(pairs);
        let failed =
            |error| FileError::Rule { path: path.to_owned(), number, error: Box::new(error) };
        rule.map(|rule| rule.text).map_err(failed)
    });
    rules.collect()
}

/// Sets rules, in as few messages as possible.
pub fn set(context: &Context, rules: &[String]) -> Result<(), Error> {
    let mut text = String::new();
    for rule in rules {
        if text.len() + rule.len() > MAX_MESSAGE / 2 {
            context.set_faults(&std::mem::take(&mut text))?;
        }
        text += rule;
        text.push('\n');
    }
    if text.is_empty() { Ok(()) } else { context.set_faults(&text) }
}
