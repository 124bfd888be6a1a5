//! A copy of the tree with its own build directories.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rnic_tests::conformance::Mutation;
use serde::Deserialize;

use super::weave::FAULT;

/// Time limit of a test run in seconds. Longer than the deadlines in the tests (180 s), so that a
/// test whose deadline passes fails and is reported by name.
const DEADLINE: &str = "240";

/// Target name for the loom models of a library.
pub const LOOM: &str = "loom";

/// The profile of all builds.
const PROFILE: &str = "mutants";

/// Result of a test run.
pub enum Outcome {
    /// All tests passed.
    Passed,
    /// Tests with these names failed. No name if the process ended early.
    Failed(Vec<String>),
    /// The run exceeded [`DEADLINE`].
    Endless,
}

/// A test program.
pub struct Program {
    path: PathBuf,
    /// The directory of its package.
    package: PathBuf,
}

/// Test programs by package and target.
pub type Programs = BTreeMap<(String, String), Program>;

/// A place at which the compiler reports an error.
pub struct CompileError {
    /// Path from the root of the repository.
    pub file: String,
    /// Line number, from 1.
    pub line: usize,
    /// Message of the compiler.
    pub text: String,
}

/// A copy of the tree and its build directories, which are kept for the next run.
pub struct Copy {
    root: PathBuf,
    tree: PathBuf,
    target: PathBuf,
}

impl Copy {
    /// Updates the copy. Unchanged files keep their timestamps, so that cargo does not rebuild
    /// them.
    pub fn of(root: &Path) -> Result<Copy, Box<dyn Error>> {
        let root = root.canonicalize()?;
        let base = root.join("target/mutations");
        let (tree, target) = (base.join("tree"), base.join("target"));
        let copy = Copy { root, tree, target };
        let listed = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(&copy.root)
            .output()?;
        let listed = String::from_utf8(listed.stdout)?;
        let names: BTreeSet<&str> = listed.split_terminator('\0').collect();
        copy.forget_others(&names)?;
        for name in names {
            copy.restore(name)?;
        }
        Ok(copy)
    }

    /// Removes files that have left the tree. Otherwise a moved module would exist twice.
    fn forget_others(&self, names: &BTreeSet<&str>) -> Result<(), Box<dyn Error>> {
        let mut folders = vec![self.tree.clone()];
        while let Some(folder) = folders.pop() {
            let Ok(entries) = std::fs::read_dir(&folder) else { continue };
            for entry in entries {
                let path = entry?.path();
                if path.is_dir() {
                    folders.push(path);
                } else if !path
                    .strip_prefix(&self.tree)?
                    .to_str()
                    .is_some_and(|name| names.contains(name))
                {
                    std::fs::remove_file(&path)?;
                }
            }
        }
        Ok(())
    }

    /// Makes a file of the copy equal to the original.
    pub fn restore(&self, name: &str) -> std::io::Result<()> {
        let (from, to) = (self.root.join(name), self.tree.join(name));
        // `git ls-files` still lists a deleted file until the deletion is staged.
        let Ok(new) = std::fs::read(&from) else {
            return std::fs::remove_file(&to).or_else(may_be_missing);
        };
        if std::fs::read(&to).ok().is_none_or(|old| old != new) {
            std::fs::create_dir_all(to.parent().unwrap_or(&self.tree))?;
            std::fs::copy(&from, &to)?;
        }
        Ok(())
    }

    /// Returns the text of a file in the tree.
    pub fn original(&self, name: &str) -> Result<String, Box<dyn Error>> {
        std::fs::read_to_string(self.root.join(name)).map_err(|e| format!("{name}: {e}").into())
    }

    /// Writes a file of the copy. An equal file keeps its timestamp.
    pub fn write(&self, name: &str, text: &str) -> std::io::Result<()> {
        let file = self.tree.join(name);
        if std::fs::read(&file).ok().is_none_or(|old| old != text.as_bytes()) {
            std::fs::write(file, text)?;
        }
        Ok(())
    }

    /// Returns the compiler errors in the packages of these targets.
    pub fn check(&self, targets: &BTreeSet<&str>) -> Result<Vec<CompileError>, Box<dyn Error>> {
        #[derive(Deserialize)]
        struct Line {
            message: Option<Message>,
        }
        #[derive(Deserialize)]
        struct Message {
            level: String,
            rendered: String,
            spans: Vec<Span>,
        }
        #[derive(Deserialize)]
        struct Span {
            file_name: String,
            line_start: usize,
            is_primary: bool,
        }
        let mut errors = Vec::new();
        for loom in kinds(targets) {
            let checked = self
                .cargo("cargo", loom)
                .args(["check", "--offline", "--keep-going", "--message-format=json"])
                .args(["--profile", PROFILE])
                .args(packages(loom))
                .args(chosen(targets, loom))
                .output()?;
            let before = errors.len();
            for line in checked.stdout.split(|b| *b == b'\n') {
                let Ok(Line { message: Some(message) }) = serde_json::from_slice(line) else {
                    continue;
                };
                let primary = message.spans.into_iter().find(|span| span.is_primary);
                if let (Some(span), "error") = (primary, message.level.as_str()) {
                    let Span { file_name: file, line_start: line, .. } = span;
                    errors.push(CompileError { file, line, text: message.rendered });
                }
            }
            if !checked.status.success() && errors.len() == before {
                return Err(String::from_utf8_lossy(&checked.stderr).into());
            }
        }
        Ok(errors)
    }

    /// Builds the test programs of these targets, and the programs and libraries that they start.
    pub fn build(&self, targets: &BTreeSet<&str>) -> Result<Programs, Box<dyn Error>> {
        let mut programs = Programs::new();
        for loom in kinds(targets) {
            self.build_tests(packages(loom), targets, loom, &mut programs)?;
        }
        if targets.iter().any(|target| *target != LOOM) {
            self.build_programs()?;
        }
        Ok(programs)
    }

    /// Builds the test program for one fault, only in the package of the fault if that suffices.
    pub fn build_for(&self, m: &Mutation) -> Result<Programs, Box<dyn Error>> {
        let (targets, loom) = ([m.target.as_str()].into(), m.target == LOOM);
        let mut programs = Programs::new();
        match m.package.as_str() {
            // With the features of the programs that these tests start.
            "rnic-tests" => self.build_tests(packages(loom), &targets, loom, &mut programs)?,
            package => self.build_tests(vec!["-p", package], &targets, loom, &mut programs)?,
        }
        if !["lib", LOOM].contains(&m.target.as_str()) {
            self.build_programs()?;
        }
        Ok(programs)
    }

    fn build_tests(
        &self,
        packages: Vec<&str>,
        targets: &BTreeSet<&str>,
        loom: bool,
        programs: &mut Programs,
    ) -> Result<(), Box<dyn Error>> {
        let built = self
            .cargo("cargo", loom)
            .args(["test", "--offline", "--no-run", "--message-format=json"])
            .args(["--profile", PROFILE])
            .args(packages)
            .args(chosen(targets, loom))
            .stderr(Stdio::inherit())
            .output()?;
        if !built.status.success() {
            return Err("the tests do not build".into());
        }
        self.add_programs(&built.stdout, loom, programs)
    }

    /// Builds the programs and libraries that tests start.
    fn build_programs(&self) -> Result<(), Box<dyn Error>> {
        // With benches, dependencies have the features that they have in tests.
        let built = self
            .cargo("cargo", false)
            .args(["build", "--offline", "--workspace", "--profile", PROFILE])
            .args(["--lib", "--bins", "--examples", "--benches"])
            .status()?;
        if built.success() { Ok(()) } else { Err("the programs do not build".into()) }
    }

    /// Adds the programs that cargo reports, one JSON object per line.
    fn add_programs(
        &self,
        report: &[u8],
        loom: bool,
        programs: &mut Programs,
    ) -> Result<(), Box<dyn Error>> {
        #[derive(Deserialize)]
        struct Artifact {
            executable: Option<PathBuf>,
            manifest_path: PathBuf,
            target: Target,
        }
        #[derive(Deserialize)]
        struct Target {
            name: String,
            kind: Vec<String>,
        }
        #[derive(Deserialize)]
        struct Manifest {
            package: Package,
        }
        #[derive(Deserialize)]
        struct Package {
            name: String,
        }
        for line in report.split(|b| *b == b'\n') {
            let Ok(Artifact { executable: Some(path), manifest_path, target }) =
                serde_json::from_slice(line)
            else {
                continue;
            };
            let manifest: Manifest = toml::from_str(&std::fs::read_to_string(&manifest_path)?)?;
            let name = match target.kind.iter().map(String::as_str).next() {
                Some("test") => target.name,
                Some("bin" | "example" | "bench") | None => continue,
                Some(_) if loom => LOOM.into(),
                Some(_) => "lib".into(),
            };
            let package = manifest_path.parent().unwrap_or(&self.tree).into();
            programs.insert((manifest.package.name, name), Program { path, package });
        }
        Ok(())
    }

    /// Runs the tests of a program with these filters while a fault is active.
    pub fn test(
        &self,
        programs: &Programs,
        m: &Mutation,
        tests: &[String],
        fault: usize,
    ) -> Result<Outcome, Box<dyn Error>> {
        let Mutation { package, target, .. } = m;
        let program = programs
            .get(&(package.clone(), target.clone()))
            .ok_or_else(|| format!("{package} has no tests {target}"))?;
        // A file, not a pipe: a program that a fault leaves running would hold the pipe open.
        let output = self.target.with_file_name(format!("output-{fault}"));
        // `timeout` ends its whole process group, including processes that the tests have started.
        let ended = self
            .cargo("timeout", target == LOOM)
            .args(["--kill-after=5", DEADLINE])
            .arg(&program.path)
            .args(tests)
            .current_dir(&program.package)
            .env(FAULT, fault.to_string())
            .env("RNIC_BIN", self.target.join(PROFILE))
            .env("CARGO_MANIFEST_DIR", &program.package)
            .stdout(File::create(&output)?)
            .stderr(Stdio::null())
            .status()?;
        let text = String::from_utf8_lossy(&std::fs::read(&output)?).into_owned();
        std::fs::remove_file(output)?;
        if matches!(ended.code(), Some(124 | 137) | None) {
            return Ok(Outcome::Endless);
        }
        let names = |end: &str| -> Vec<String> {
            let of = |line: &str| Some(line.strip_prefix("test ")?.strip_suffix(end)?.to_owned());
            text.lines().filter_map(of).collect()
        };
        if !ended.success() {
            Ok(Outcome::Failed(names(" ... FAILED")))
        } else if names(" ... ok").is_empty() {
            Err(format!("{package} {target} has no tests like {tests:?}").into())
        } else {
            Ok(Outcome::Passed)
        }
    }

    /// Returns a command in the copy. Loom models are built separately, because they replace the
    /// atomics of the standard library.
    fn cargo(&self, program: &str, loom: bool) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(&self.tree)
            .env("CARGO_TARGET_DIR", &self.target)
            .env_remove("CI")
            .stdin(Stdio::null());
        if loom {
            command
                .env("RUSTFLAGS", "--cfg loom")
                .env("CARGO_TARGET_DIR", self.target.with_extension("loom"));
        }
        command
    }
}

fn may_be_missing(e: std::io::Error) -> std::io::Result<()> {
    if e.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(e) }
}

/// Returns the builds that these targets need: false is the ordinary build, true the loom build.
fn kinds(targets: &BTreeSet<&str>) -> Vec<bool> {
    let of = |loom: bool| targets.iter().any(|target| (*target == LOOM) == loom);
    [false, true].into_iter().filter(|loom| of(*loom)).collect()
}

/// Returns cargo's package options. The ordinary build needs all packages, so that features are
/// unified as in a workspace build; only `rnic-abi` has loom models.
fn packages(loom: bool) -> Vec<&'static str> {
    if loom { vec!["-p", "rnic-abi"] } else { vec!["--workspace"] }
}

/// Returns cargo's options that choose the targets.
fn chosen<'a>(targets: &BTreeSet<&'a str>, loom: bool) -> Vec<&'a str> {
    let mut chosen = Vec::new();
    if loom || targets.contains("lib") {
        chosen.push("--lib");
    }
    for target in targets.iter().filter(|t| !loom && !["lib", LOOM].contains(t)) {
        chosen.extend(["--test", target]);
    }
    chosen
}
