//! Which code does what RFC 5044, RFC 5041, RFC 5040 and RFC 7306 require, and which test shows it.
//!
//! The requirements are data (`tests/conformance/requirements.toml`). Each is either cited by
//! tests, with a line `//= ID` above the test, or excepted with a reason (`exceptions.toml`). Each
//! MUST and MUST NOT that is tested is cited also by the production code that does it, in the same
//! way, or holds by construction, with a reason (`implementation.toml`). That tests which cite can
//! fail is shown by faults put into the code by hand (`mutations.toml`) and by mutating whole
//! modules (`scores.toml`). What the project promises beyond the RFCs (shared memory, privileges,
//! programs) has faults of its own (`promises/`). [`Record::faults`] says what is missing,
//! [`summary()`] writes `docs/conformance.md`, and [`report()`] the long page that names tests and
//! lines.

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

/// Where the summary stands, from the top of the repository.
pub const SUMMARY: &str = "docs/conformance.md";
/// Where the report goes, from the top of the repository. It names lines, so it is not kept.
pub const REPORT: &str = "target/conformance.md";
/// Where it is kept what noticed the faults, from the top of the repository.
pub const NOTICED: &str = "tests/conformance/noticed.toml";

/// Faults that break requirements.
const MUTATIONS: &str = "mutations.toml";
/// Faults that break what the project promises beyond them: a file per subject.
const PROMISES: &str = "promises";

/// The package that has nothing but tests, and what they need.
const TESTS: &str = "tests";

/// The RFCs, from the lowest layer up.
const LAYERS: [(u16, &str); 4] =
    [(5044, "MPA"), (5041, "DDP"), (5040, "RDMAP"), (7306, "RDMAP extensions")];

/// Everything that is known of the requirements.
#[derive(Debug)]
pub struct Record {
    /// In the order of the RFCs.
    pub requirements: Vec<Requirement>,
    /// Those that no test cites.
    pub exceptions: Vec<Exception>,
    /// Those that hold without a line of production code.
    pub constructions: Vec<Construction>,
    /// Those whose production code does not cite them yet.
    pub uncited: Vec<Uncited>,
    /// Faults put in by hand.
    pub mutations: Vec<Mutation>,
    /// What noticed them when they were last put in.
    pub noticed: Vec<Notice>,
    /// Modules mutated as a whole.
    pub scores: Vec<Score>,
    /// Tests by the requirement they cite.
    pub citations: BTreeMap<String, Vec<Citation>>,
    /// Lines of production code by the requirement they cite.
    pub lines: BTreeMap<String, Vec<Line>>,
    /// Citations that stand beside neither test nor code, and other misuse.
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
        let packages = data::packages(root)?;
        let production: Vec<PathBuf> =
            packages.iter().filter(|p| *p != TESTS).map(|p| Path::new(p).join("src")).collect();
        found.search(root, &packages, &production)?;
        let implementation = data.join("implementation.toml");
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
            noticed: data::read(&root.join(NOTICED))?,
            scores: data::read(&data.join("scores.toml"))?,
            citations: found.tests,
            lines: found.lines,
            misplaced: found.misplaced,
            root: root.into(),
        })
    }

    /// The tests that cite a requirement.
    #[must_use]
    pub fn tests_of(&self, id: &str) -> &[Citation] {
        self.citations.get(id).map_or(&[], Vec::as_slice)
    }

    /// The lines of production code that cite a requirement.
    #[must_use]
    pub fn lines_of(&self, id: &str) -> &[Line] {
        self.lines.get(id).map_or(&[], Vec::as_slice)
    }

    /// Why no line of production code cites a requirement and none has to.
    #[must_use]
    pub fn construction_of(&self, id: &str) -> Option<&Construction> {
        self.constructions.iter().find(|c| c.ids.iter().any(|i| i == id))
    }

    /// Whether a requirement has to be found in production code: it leaves no choice and applies.
    #[must_use]
    pub fn is_to_be_implemented(&self, requirement: &Requirement) -> bool {
        requirement.level.is_absolute() && !self.tests_of(&requirement.id).is_empty()
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
