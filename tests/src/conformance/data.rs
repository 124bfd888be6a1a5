//! The files of `tests/conformance`.

use std::fmt;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Unreadable, read_text};

/// How binding a requirement is (RFC 2119).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub enum Level {
    /// MUST, SHALL, REQUIRED.
    #[serde(rename = "MUST")]
    Must,
    /// MUST NOT, SHALL NOT.
    #[serde(rename = "MUST NOT")]
    MustNot,
    /// SHOULD, RECOMMENDED.
    #[serde(rename = "SHOULD")]
    Should,
    /// SHOULD NOT.
    #[serde(rename = "SHOULD NOT")]
    ShouldNot,
    /// MAY, OPTIONAL.
    #[serde(rename = "MAY")]
    May,
}

impl Level {
    /// All levels, from the most binding to the least.
    pub const ALL: [Level; 5] =
        [Level::Must, Level::MustNot, Level::Should, Level::ShouldNot, Level::May];

    /// Returns true if the level leaves no choice.
    #[must_use]
    pub fn is_absolute(self) -> bool {
        matches!(self, Level::Must | Level::MustNot)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Level::Must => "MUST",
            Level::MustNot => "MUST NOT",
            Level::Should => "SHOULD",
            Level::ShouldNot => "SHOULD NOT",
            Level::May => "MAY",
        })
    }
}

/// A requirement of an RFC.
#[derive(Clone, Debug, Deserialize)]
pub struct Requirement {
    /// Layer, section and number.
    pub id: String,
    /// Number of the RFC.
    pub rfc: u16,
    /// Section of the RFC.
    pub section: String,
    /// How binding the requirement is.
    pub level: Level,
    /// The party that it binds.
    pub role: String,
    /// Paraphrase of the requirement.
    pub text: String,
}

/// The party responsible for a requirement that no test covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Kernel TCP, which leaves no choice.
    Transport,
    /// The operating system.
    Host,
    /// The administrator of the daemon.
    Administrator,
    /// The program above the verbs.
    Application,
    /// None: a permission that is not used.
    Unused,
    /// None: a definition without an obligation.
    Definition,
}

impl Kind {
    /// All kinds, in the order of the report.
    pub const ALL: [Kind; 6] = [
        Kind::Transport,
        Kind::Host,
        Kind::Administrator,
        Kind::Application,
        Kind::Unused,
        Kind::Definition,
    ];

    /// Returns the heading of the kind in the report.
    #[must_use]
    pub fn heading(self) -> &'static str {
        match self {
            Kind::Transport => "Decided by kernel TCP",
            Kind::Host => "Up to the operating system",
            Kind::Administrator => "Up to the administrator",
            Kind::Application => "Up to the application",
            Kind::Unused => "Permissions that are not used",
            Kind::Definition => "Definitions without an obligation",
        }
    }
}

/// Requirements that no test cites, and the reason.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exception {
    /// IDs of the requirements.
    pub ids: Vec<String>,
    /// The responsible party.
    pub kind: Kind,
    /// The reason for the exception.
    pub reason: String,
}

/// Requirements that hold without a line of production code that implements them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Construction {
    /// IDs of the requirements.
    pub ids: Vec<String>,
    /// The reason why they hold.
    pub reason: String,
}

/// Requirements that their production code does not cite yet.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Uncited {
    /// Directory of the code.
    pub folder: String,
    /// IDs of the requirements.
    pub ids: Vec<String>,
}

/// A manually written fault.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mutation {
    /// The requirements it breaks. Empty if it breaks only a promise of this project.
    #[serde(default)]
    pub ids: Vec<String>,
    /// The promise it breaks, as prose, if no requirement covers it.
    #[serde(default)]
    pub breaks: Option<String>,
    /// File to change, from the root of the repository.
    pub file: String,
    /// Text to replace, which occurs exactly once in the file.
    pub from: String,
    /// Replacement text.
    pub to: String,
    /// The package with the tests that must detect the fault.
    pub package: String,
    /// `lib`, `loom` (the models of the library) or the name of an integration test.
    pub target: String,
    /// Filters of test names.
    pub tests: Vec<String>,
}

/// The tests that detected a fault.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Notice {
    /// As in [`Mutation`].
    pub file: String,
    /// As in [`Mutation`].
    pub from: String,
    /// As in [`Mutation`].
    pub to: String,
    /// Tests that failed, or a description of another outcome.
    pub by: Vec<String>,
}

impl Mutation {
    /// Returns the IDs of the broken requirements, or the broken promise.
    #[must_use]
    pub fn broken(&self) -> String {
        let ids = (!self.ids.is_empty()).then(|| self.ids.join(", "));
        ids.or_else(|| self.breaks.clone()).unwrap_or_default()
    }
}

impl Notice {
    /// Returns true if the notice belongs to this fault.
    #[must_use]
    pub fn is_of(&self, m: &Mutation) -> bool {
        (&self.file, &self.from, &self.to) == (&m.file, &m.from, &m.to)
    }
}

/// A module mutated as a whole by `cargo-mutants`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Score {
    /// Path from the root of the repository.
    pub module: String,
    /// Number of mutants that compiled and were tested.
    pub tested: u32,
    /// Number of mutants that a test detected by failing or by timing out.
    pub noticed: u32,
    /// Mutants that no test detected, with the reason.
    #[serde(default)]
    pub survivors: Vec<Survivor>,
}

/// Mutants that no test detected.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Survivor {
    /// Descriptions of the changes and their places.
    pub mutants: Vec<String>,
    /// Number of mutants.
    pub count: u32,
    /// Reason why no test can detect the changes, or a way to detect them.
    pub why: String,
}

/// A kind of table in the files.
pub(super) trait Table: DeserializeOwned {
    /// Key of the table array.
    const KEY: &'static str;
}

impl Table for Requirement {
    const KEY: &'static str = "requirement";
}

impl Table for Exception {
    const KEY: &'static str = "exception";
}

impl Table for Construction {
    const KEY: &'static str = "construction";
}

impl Table for Uncited {
    const KEY: &'static str = "uncited";
}

impl Table for Mutation {
    const KEY: &'static str = "mutation";
}

impl Table for Notice {
    const KEY: &'static str = "notice";
}

impl Table for Score {
    const KEY: &'static str = "score";
}

/// Reads all tables of this kind from a file.
pub(super) fn read<T: Table>(file: &Path) -> Result<Vec<T>, Unreadable> {
    let unreadable = |why: String| Unreadable { file: file.into(), why };
    let mut all: toml::Table =
        toml::from_str(&read_text(file)?).map_err(|e| unreadable(e.to_string()))?;
    let tables = all.remove(T::KEY).unwrap_or_else(|| toml::Value::Array(Vec::new()));
    tables.try_into().map_err(|e: toml::de::Error| unreadable(e.to_string()))
}

/// Returns the packages of the workspace. The tests of each package may cite requirements.
pub(super) fn packages(root: &Path) -> Result<Vec<String>, Unreadable> {
    #[derive(Deserialize)]
    struct Manifest {
        workspace: Workspace,
    }
    #[derive(Deserialize)]
    struct Workspace {
        members: Vec<String>,
    }
    let file = root.join("Cargo.toml");
    let manifest: Manifest =
        toml::from_str(&read_text(&file)?).map_err(|e| Unreadable { file, why: e.to_string() })?;
    Ok(manifest.workspace.members)
}
