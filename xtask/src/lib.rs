//! Makes the parts of a release that are neither programs nor libraries: manual pages and
//! completions, from the declarations of command lines and configuration keys, and the list of the
//! crates.

use std::io;
use std::path::{Path, PathBuf};

pub mod completions;
mod config_page;
pub mod crates;
pub mod manual;

/// Reason why a file was not written.
#[derive(Debug, thiserror::Error)]
#[error("{}: {error}", path.display())]
pub struct Failure {
    path: PathBuf,
    error: io::Error,
}

impl Failure {
    /// Adds the path to an error of the system.
    fn at(path: &Path) -> impl Fn(io::Error) -> Failure {
        let path = path.to_owned();
        move |error| Failure { path: path.clone(), error }
    }
}

/// A program of the project.
struct Program {
    command: clap::Command,
    /// Section of the manual: 1 for users, 8 for administrators.
    section: &'static str,
    /// Related pages.
    see_also: &'static [&'static str],
}

/// Returns the programs that have a manual page and completions.
fn programs() -> [Program; 5] {
    [
        Program {
            command: rnicd_programs::cli::command(),
            section: "8",
            see_also: &["rnicctl(8)", "rnic-run(1)", "rnicd.toml(5)"],
        },
        Program {
            command: rnicd_programs::cli::ctl::command(),
            section: "8",
            see_also: &["rnicd(8)", "rnicd.toml(5)"],
        },
        Program {
            command: rnic_run::command(),
            section: "1",
            see_also: &["rnicd(8)", "rnicctl(8)", "rnic-copy(1)", "rnic-perf(1)"],
        },
        Program {
            command: rnic_tools::copy::command(),
            section: "1",
            see_also: &["rnicd(8)", "rnic-perf(1)"],
        },
        Program {
            command: rnic_tools::perf::command(),
            section: "1",
            see_also: &["rnicd(8)", "rnic-copy(1)"],
        },
    ]
}
