//! `rnicctl profile`: lists and prints profiles, and makes one from the output of `ibv_devinfo -v`.
//! The commands need no daemon.

mod devinfo;

use std::error::Error;
use std::fs::File;
use std::io::{Read, stdin};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use rnicd::config::Profile;
use serde::Serialize;

use crate::cli::print;

/// A command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// The built-in profiles.
    List,
    /// Print a profile as TOML, as a start for one of your own.
    Show {
        /// Name of a built-in profile, or path of a file, which is checked.
        name: String,
    },
    /// Print the profile of an adapter, from the output of `ibv_devinfo -v -d NAME`.
    FromDevinfo {
        /// File with the output, or `-` for standard input.
        file: PathBuf,
    },
}

/// Runs a command.
///
/// # Errors
///
/// The file, line and key that is wrong.
pub fn run(command: &Command, json: bool) -> Result<(), Box<dyn Error>> {
    let text = match command {
        Command::List => list(json)?,
        Command::Show { name } => show(name)?,
        Command::FromDevinfo { file } => devinfo::profile(&name_of(file), &read(file)?)?,
    };
    print(&text).map(drop)
}

/// A built-in profile, for `--json`.
#[derive(Serialize)]
struct Row {
    name: &'static str,
    about: &'static str,
}

fn list(json: bool) -> Result<String, Box<dyn Error>> {
    let rows = Profile::BUILT_IN.iter().map(|(name, text)| {
        let about = text.lines().next().unwrap_or_default();
        Row { name, about: about.trim_start_matches("# ") }
    });
    let rows: Vec<Row> = rows.collect();
    if json {
        return Ok(serde_json::to_string_pretty(&rows)? + "\n");
    }
    let lines = rows.iter().map(|row| format!("{:<7} {}\n", row.name, row.about));
    Ok(lines.collect())
}

fn show(name: &str) -> Result<String, Box<dyn Error>> {
    let text = Profile::text(name)?;
    Profile::parse(name, &text)?;
    Ok(text)
}

fn name_of(file: &Path) -> String {
    if is_stdin(file) { "standard input".to_owned() } else { file.display().to_string() }
}

fn is_stdin(file: &Path) -> bool {
    file.as_os_str() == "-"
}

/// Reads at most [`LONGEST`] bytes of a file.
fn read(file: &Path) -> Result<String, String> {
    let source: std::io::Result<Box<dyn Read>> = if is_stdin(file) {
        Ok(Box::new(stdin()))
    } else {
        File::open(file).map(|f| Box::new(f) as _)
    };
    let mut text = String::new();
    let done = source.and_then(|source| source.take(LONGEST).read_to_string(&mut text));
    done.map_err(|error| format!("cannot read {}: {error}", name_of(file)))?;
    Ok(text)
}

/// More than the output for any adapter.
const LONGEST: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_a_sentence_for_each_profile() {
        let text = list(false).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(text.lines().count(), Profile::BUILT_IN.len());
        assert!(text.lines().all(|line| line.ends_with('.')), "{text}");
        let json = list(true).unwrap_or_else(|e| panic!("{e}"));
        assert!(json.contains("\"name\": \"mlx5\""), "{json}");
    }

    #[test]
    fn shown_profile_is_the_text_of_the_file() {
        let text = show("rxe").unwrap_or_else(|e| panic!("{e}"));
        assert!(text.contains("\nmax_cqe = 32767\n"), "{text}");
        let said = show("none").err().map(|e| e.to_string());
        assert!(said.is_some_and(|said| said.contains("no profile \"none\"")));
    }
}
