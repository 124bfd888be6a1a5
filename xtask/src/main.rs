//! `cargo xtask`: generates the manual pages, completions and list of crates of a release.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use xtask::{Failure, completions, crates, manual};

/// Generates manual pages, completions and lists of crates for releases of rnicd.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    /// Write the manual pages.
    Manual {
        /// Directory for the pages; `man1`, `man5` and `man8` are created in it.
        #[arg(default_value = "docs/man")]
        folder: PathBuf,
    },
    /// Write the completions for bash, zsh and fish.
    Completions {
        /// Directory for the completions, with the layout of `/usr/share`.
        folder: PathBuf,
    },
    /// Print the crates that a release for a target contains, as CycloneDX.
    Crates {
        /// Target triple, such as `x86_64-unknown-linux-gnu`.
        #[arg(long)]
        target: String,
    },
}

fn main() -> ExitCode {
    let done: Result<(), Failure> = match Task::parse() {
        Task::Manual { folder } => manual::write(&folder),
        Task::Completions { folder } => completions::write(&folder),
        Task::Crates { target } => crates::list(&target).map(|list| print!("{list}")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("cargo xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}
