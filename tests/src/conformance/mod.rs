//! Which test shows which requirement of RFC 5044, RFC 5041 and RFC 5040.
//!
//! The requirements are data (`tests/conformance/requirements.toml`). Each is either cited by tests,
//! with a line `//= ID` above the test, or excepted with a reason (`exceptions.toml`). That tests
//! which cite can fail is shown by faults put into the code by hand (`mutations.toml`) and by
//! mutating whole modules (`scores.toml`). What the project promises beyond the RFCs (shared memory,
//! privileges, programs) has faults of its own (`promises/`). [`Record::faults`] says what is missing,
//! [`render`] writes `docs/conformance.md`.

mod citations;
mod data;
mod faults;
mod report;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use citations::Citation;
pub use data::{Exception, Kind, Level, Mutation, Notice, Requirement, Score, Survivor};
pub use report::render;

/// Where the report goes, from the top of the repository.
pub const REPORT: &str = "docs/conformance.md";
/// Where it is kept what noticed the faults, from the top of the repository.
pub const NOTICED: &str = "tests/conformance/noticed.toml";

/// Faults that break requirements.
const MUTATIONS: &str = "mutations.toml";
/// Faults that break what the project promises beyond them: a file per subject.
const PROMISES: &str = "promises";

/// Packages whose tests may cite.
const PACKAGES: [&str; 5] = ["rnic-core", "rnic-client", "rnic-tools", "rnicd", "tests"];

/// Everything that is known of the requirements.
#[derive(Debug)]
pub struct Record {
    /// In the order of the RFCs.
    pub requirements: Vec<Requirement>,
    /// Those that no test cites.
    pub exceptions: Vec<Exception>,
    /// Faults put in by hand.
    pub mutations: Vec<Mutation>,
    /// What noticed them when they were last put in.
    pub noticed: Vec<Notice>,
    /// Modules mutated as a whole.
    pub scores: Vec<Score>,
    /// Tests by the requirement they cite.
    pub citations: BTreeMap<String, Vec<Citation>>,
    /// Citations that stand beside no test, and other misuse.
    misplaced: Vec<String>,
    root: PathBuf,
}

/// Why the record cannot be read.
#[derive(Debug)]
pub struct Unreadable {
    file: PathBuf,
    why: String,
}

impl std::fmt::Display for Unreadable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.file.display(), self.why)
    }
}

impl std::error::Error for Unreadable {}

impl Record {
    /// Reads data and sources below the top of the repository.
    ///
    /// # Errors
    ///
    /// A file that is not there or not what it should be.
    pub fn read(root: &Path) -> Result<Record, Unreadable> {
        let data = root.join("tests/conformance");
        let mut found = citations::Found::default();
        for package in PACKAGES {
            found.search(root, &root.join(package))?;
        }
        let mut mutations: Vec<Mutation> = data::read(&data.join(MUTATIONS))?;
        for file in files_of(&data.join(PROMISES))? {
            mutations.extend(data::read::<Mutation>(&file)?);
        }
        Ok(Record {
            requirements: data::read(&data.join("requirements.toml"))?,
            exceptions: data::read(&data.join("exceptions.toml"))?,
            mutations,
            noticed: data::read(&root.join(NOTICED))?,
            scores: data::read(&data.join("scores.toml"))?,
            citations: found.citations,
            misplaced: found.misplaced,
            root: root.into(),
        })
    }

    /// The tests that cite a requirement.
    #[must_use]
    pub fn tests_of(&self, id: &str) -> &[Citation] {
        self.citations.get(id).map_or(&[], Vec::as_slice)
    }

    /// The exception that names a requirement.
    #[must_use]
    pub fn exception_of(&self, id: &str) -> Option<&Exception> {
        self.exceptions.iter().find(|e| e.ids.iter().any(|i| i == id))
    }

    /// What noticed a fault, if it was put in and noticed.
    #[must_use]
    pub fn notice_of(&self, mutation: &Mutation) -> Option<&Notice> {
        self.noticed.iter().find(|n| n.is_of(mutation))
    }
}

/// The top of the repository this was built from.
#[must_use]
pub fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).to_owned()
}

/// The files of a folder, by name.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>, Unreadable> {
    let unreadable = |e: std::io::Error| Unreadable { file: folder.into(), why: e.to_string() };
    let entries = std::fs::read_dir(folder).map_err(unreadable)?;
    let mut files: Vec<PathBuf> =
        entries.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>().map_err(unreadable)?;
    files.sort();
    Ok(files)
}

fn read_text(file: &Path) -> Result<String, Unreadable> {
    std::fs::read_to_string(file).map_err(|e| Unreadable { file: file.into(), why: e.to_string() })
}
