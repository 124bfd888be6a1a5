//! Maps the requirements of RFC 5044, RFC 5041, RFC 5040 and RFC 7306 to the code that implements
//! them and the tests that verify it.
//!
//! The requirements are data (`tests/conformance/requirements.toml`). Each is either cited by
//! tests, with a line `//= ID` above the test, or excepted with a reason (`exceptions.toml`). Each
//! tested MUST and MUST NOT is also cited by the production code that implements it, in the same
//! way, or holds by construction, with a reason (`implementation.toml`). Manual faults
//! (`mutations.toml`) and mutation of whole modules (`scores.toml`) show that the citing tests can
//! fail. Promises beyond the RFCs (shared memory, privileges, programs) have their own faults
//! (`promises/`). [`Record::faults`] lists gaps, [`summary()`] writes `docs/conformance.md`, and
//! [`report()`] writes the long page with tests and lines.

mod citations;
mod data;
mod faults;
mod report;
mod summary;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use citations::{Citation, Line};
pub use data::{
    Construction, Exception, Kind, Level, Mutation, Notice, Requirement, Score, Survivor, Uncited,
};
pub use report::report;
pub use summary::summary;

/// Path of the summary, from the root of the repository.
pub const SUMMARY: &str = "docs/conformance.md";
/// Path of the report, from the root of the repository. It contains line numbers, so it is not
/// committed.
pub const REPORT: &str = "target/conformance.md";
/// File that records which tests detected the faults, from the root of the repository. It exists
/// after a run of `mutate` and is not committed.
pub const NOTICED: &str = "target/noticed.toml";

/// Faults that break requirements.
const MUTATIONS: &str = "mutations.toml";
/// Faults that break promises beyond the RFCs, one file per subject.
const PROMISES: &str = "promises";

/// The package that contains only tests and their support code.
const TESTS: &str = "tests";

/// The RFCs, from the lowest layer up.
const LAYERS: [(u16, &str); 4] =
    [(5044, "MPA"), (5041, "DDP"), (5040, "RDMAP"), (7306, "RDMAP extensions")];

/// All data about the requirements.
#[derive(Debug)]
pub struct Record {
    /// All requirements, in the order of the RFCs.
    pub requirements: Vec<Requirement>,
    /// Requirements that no test cites.
    pub exceptions: Vec<Exception>,
    /// Requirements that hold without a line of production code.
    pub constructions: Vec<Construction>,
    /// Requirements that production code does not cite yet.
    pub uncited: Vec<Uncited>,
    /// Manual faults.
    pub mutations: Vec<Mutation>,
    /// The tests that detected the faults in the last runs here.
    pub noticed: Vec<Notice>,
    /// Modules mutated as a whole.
    pub scores: Vec<Score>,
    /// Tests by the requirement they cite.
    pub citations: BTreeMap<String, Vec<Citation>>,
    /// Lines of production code by the requirement they cite.
    pub lines: BTreeMap<String, Vec<Line>>,
    /// Citations without a test or code below them, and other misuse.
    misplaced: Vec<String>,
    root: PathBuf,
}

/// A file of the record that cannot be read or parsed.
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
    /// Reads the data files and the sources below the root of the repository.
    ///
    /// # Errors
    ///
    /// If a file is missing or malformed.
    pub fn read(root: &Path) -> Result<Record, Unreadable> {
        let data = root.join("tests/conformance");
        let mut found = citations::Found::default();
        let packages = data::packages(root)?;
        let production: Vec<PathBuf> =
            packages.iter().filter(|p| *p != TESTS).map(|p| Path::new(p).join("src")).collect();
        found.search(root, &packages, &production)?;
        let implementation = data.join("implementation.toml");
        let noticed = root.join(NOTICED);
        let mut mutations: Vec<Mutation> = data::read(&data.join(MUTATIONS))?;
        for file in files_of(&data.join(PROMISES))? {
            mutations.extend(data::read::<Mutation>(&file)?);
        }
        Ok(Record {
            requirements: data::read(&data.join("requirements.toml"))?,
            exceptions: data::read(&data.join("exceptions.toml"))?,
            constructions: data::read(&implementation)?,
            uncited: data::read(&implementation)?,
            mutations,
            noticed: if noticed.exists() { data::read(&noticed)? } else { Vec::new() },
            scores: data::read(&data.join("scores.toml"))?,
            citations: found.tests,
            lines: found.lines,
            misplaced: found.misplaced,
            root: root.into(),
        })
    }

    /// Returns the tests that cite a requirement.
    #[must_use]
    pub fn tests_of(&self, id: &str) -> &[Citation] {
        self.citations.get(id).map_or(&[], Vec::as_slice)
    }

    /// Returns the lines of production code that cite a requirement.
    #[must_use]
    pub fn lines_of(&self, id: &str) -> &[Line] {
        self.lines.get(id).map_or(&[], Vec::as_slice)
    }

    /// Returns the reason why a requirement holds without a citing line of production code.
    #[must_use]
    pub fn construction_of(&self, id: &str) -> Option<&Construction> {
        self.constructions.iter().find(|c| c.ids.iter().any(|i| i == id))
    }

    /// Returns true if production code must cite a requirement: a MUST or MUST NOT that is tested.
    #[must_use]
    pub fn is_to_be_implemented(&self, requirement: &Requirement) -> bool {
        requirement.level.is_absolute() && !self.tests_of(&requirement.id).is_empty()
    }

    /// Returns the exception for a requirement.
    #[must_use]
    pub fn exception_of(&self, id: &str) -> Option<&Exception> {
        self.exceptions.iter().find(|e| e.ids.iter().any(|i| i == id))
    }

    /// Returns the notice for a fault, if tests have detected it.
    #[must_use]
    pub fn notice_of(&self, mutation: &Mutation) -> Option<&Notice> {
        self.noticed.iter().find(|n| n.is_of(mutation))
    }
}

/// Returns the root of the repository this was built from.
#[must_use]
pub fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).to_owned()
}

/// Returns the files of a directory, sorted by name.
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
