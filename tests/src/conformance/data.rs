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
    /// From the most binding to the least.
    pub const ALL: [Level; 5] =
        [Level::Must, Level::MustNot, Level::Should, Level::ShouldNot, Level::May];

    /// Whether it leaves no choice.
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

/// One requirement.
#[derive(Clone, Debug, Deserialize)]
pub struct Requirement {
    /// Layer, section, number.
    pub id: String,
    /// Number of the RFC.
    pub rfc: u16,
    /// Section of the RFC.
    pub section: String,
    /// How binding it is.
    pub level: Level,
    /// Whom it binds.
    pub role: String,
    /// What it demands.
    pub text: String,
}

/// Who answers for what no test of ours shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Kernel TCP leaves no room for it.
    Transport,
    /// The operating system.
    Host,
    /// Who configures and runs the daemon.
    Administrator,
    /// The program above the verbs.
    Application,
    /// Nobody: a permission that is not used.
    Unused,
    /// Nobody: nothing that could be done or left undone.
    Definition,
}

impl Kind {
    /// In the order of the report.
    pub const ALL: [Kind; 6] = [
        Kind::Transport,
        Kind::Host,
        Kind::Administrator,
        Kind::Application,
        Kind::Unused,
        Kind::Definition,
    ];

    /// A heading.
    #[must_use]
    pub fn heading(self) -> &'static str {
        match self {
            Kind::Transport => "Kernel TCP leaves no room for it",
            Kind::Host => "The operating system's",
            Kind::Administrator => "The administrator's",
            Kind::Application => "The application's",
            Kind::Unused => "Permissions that are not used",
            Kind::Definition => "Nothing that could be done or left undone",
        }
    }
}

/// Requirements that no test cites, and why that is right.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exception {
    /// Of requirements.
    pub ids: Vec<String>,
    /// Who answers for them.
    pub kind: Kind,
    /// For somebody who doubts it.
    pub reason: String,
}

/// Requirements that hold although no line of production code does what they ask for.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Construction {
    /// Of requirements.
    pub ids: Vec<String>,
    /// What makes them hold, for somebody who looks for the line.
    pub reason: String,
}

/// Requirements whose production code does not cite them yet.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Uncited {
    /// The folder in which the code is.
    pub folder: String,
    /// Of requirements.
    pub ids: Vec<String>,
}

/// A fault to be put into the code by hand.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mutation {
    /// The requirements it breaks; none if what it breaks is a promise of ours alone.
    #[serde(default)]
    pub ids: Vec<String>,
    /// The promise it breaks, in words, where no requirement says it.
    #[serde(default)]
    pub breaks: Option<String>,
    /// Where it goes, from the top of the repository.
    pub file: String,
    /// Text that occurs there exactly once.
    pub from: String,
    /// What takes its place.
    pub to: String,
    /// Whose tests have to notice.
    pub package: String,
    /// `lib`, `loom` (the models of the library) or the name of an integration test.
    pub target: String,
    /// Filters of test names.
    pub tests: Vec<String>,
}

/// What noticed a fault.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Notice {
    /// As of the [`Mutation`].
    pub file: String,
    /// As of the [`Mutation`].
    pub from: String,
    /// As of the [`Mutation`].
    pub to: String,
    /// Tests that failed; or, in words, what else came of it.
    pub by: Vec<String>,
}

impl Mutation {
    /// What it breaks, for people: ids of requirements, or words.
    #[must_use]
    pub fn broken(&self) -> String {
        let ids = (!self.ids.is_empty()).then(|| self.ids.join(", "));
        ids.or_else(|| self.breaks.clone()).unwrap_or_default()
    }
}

impl Notice {
    /// Whether it is of this fault.
    #[must_use]
    pub fn is_of(&self, m: &Mutation) -> bool {
        (&self.file, &self.from, &self.to) == (&m.file, &m.from, &m.to)
    }
}

/// A module mutated as a whole, by `cargo-mutants`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Score {
    /// Path from the top of the repository.
    pub module: String,
    /// Mutants that compiled and were tested.
    pub tested: u32,
    /// Those that a test noticed, by failing or by not ending.
    pub noticed: u32,
    /// Those that no test noticed, with why.
    #[serde(default)]
    pub survivors: Vec<Survivor>,
}

/// Mutants that nothing noticed.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Survivor {
    /// What was changed, where.
    pub mutants: Vec<String>,
    /// How many they are.
    pub count: u32,
    /// Why nothing can notice, or what it would take.
    pub why: String,
}

/// A kind of table in the files.
pub(super) trait Table: DeserializeOwned {
    /// Its key.
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

/// All tables of one kind in a file.
pub(super) fn read<T: Table>(file: &Path) -> Result<Vec<T>, Unreadable> {
    let unreadable = |why: String| Unreadable { file: file.into(), why };
    let mut all: toml::Table =
        toml::from_str(&read_text(file)?).map_err(|e| unreadable(e.to_string()))?;
    let tables = all.remove(T::KEY).unwrap_or_else(|| toml::Value::Array(Vec::new()));
    tables.try_into().map_err(|e: toml::de::Error| unreadable(e.to_string()))
}

/// The packages of the workspace, all of whose tests may cite.
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
