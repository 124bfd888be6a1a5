//! Applies the faults of `tests/conformance/mutations.toml` and `tests/conformance/promises/` to a
//! copy of the tree, one after the other, and checks that the named tests detect them.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::Parser;
use rnic_tests::conformance::{self, Mutation, NOTICED, Notice, Record};
use serde::Serialize;

/// Time limit of a test run in seconds. Longer than the deadlines in the tests (180 s), so that a
/// test that waits in vain fails by name.
const DEADLINE: &str = "240";

/// Target name for the loom models of a library.
const LOOM: &str = "loom";

#[derive(Parser)]
struct Args {
    /// Only faults with this text in their file, source, requirements or promise.
    only: Option<String>,
    /// Only faults that have not been detected here yet.
    #[arg(long)]
    new: bool,
    /// Top of the repository.
    #[arg(long, default_value_os_t = conformance::root())]
    root: PathBuf,
}

#[derive(Serialize)]
struct Notices<'a> {
    notice: &'a [Notice],
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(unnoticed) => {
            eprintln!("mutate: {unnoticed} faults were not noticed");
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("mutate: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the number of undetected faults.
fn run(args: &Args) -> Result<usize, Box<dyn Error>> {
    let record = Record::read(&args.root)?;
    let chosen: Vec<&Mutation> = record
        .mutations
        .iter()
        .filter(|m| !(args.new && record.notice_of(m).is_some()))
        .filter(|m| args.only.as_ref().is_none_or(|part| concerns(m, part)))
        .collect();
    let copy = Copy::of(&args.root)?;
    copy.pass(&chosen)?;
    let mut noticed = record.noticed.clone();
    noticed.retain(|n| record.mutations.iter().any(|m| n.is_of(m)));
    let mut unnoticed = 0;
    for (n, m) in chosen.iter().enumerate() {
        noticed.retain(|n| !n.is_of(m));
        let outcome = copy.with(m, || copy.test(&m.package, &m.target, &m.tests))??;
        let by = match outcome {
            Outcome::Passed => Vec::new(),
            Outcome::Endless => vec!["the deadline".into()],
            // A fault may also end the whole process.
            Outcome::Failed(by) if by.is_empty() => vec!["the end of the process".into()],
            Outcome::Failed(by) => by,
        };
        let told = if by.is_empty() { "NOT NOTICED".into() } else { by.join(", ") };
        println!("{}/{} {} {}: {told}", n + 1, chosen.len(), m.broken(), m.file);
        if by.is_empty() {
            unnoticed += 1;
        } else {
            let file = m.file.clone();
            let from = m.from.clone();
            let to = m.to.clone();
            noticed.push(Notice { file, from, to, by });
        }
        noticed.sort_by_key(|n| record.mutations.iter().position(|m| n.is_of(m)));
        let text = toml::to_string(&Notices { notice: &noticed })?;
        std::fs::write(args.root.join(NOTICED), text)?;
    }
    Ok(unnoticed)
}

fn may_be_missing(e: std::io::Error) -> std::io::Result<()> {
    if e.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(e) }
}

fn concerns(m: &Mutation, part: &str) -> bool {
    m.file.contains(part) || m.from.contains(part) || m.broken().contains(part)
}

/// Result of a test run.
enum Outcome {
    Passed,
    Failed(Vec<String>),
    Endless,
}

/// A copy of the tree with its own build directory. Both are kept for the next run.
struct Copy {
    tree: PathBuf,
    target: PathBuf,
}

impl Copy {
    /// Updates the copy. Unchanged files keep their timestamps, so that cargo does not rebuild
    /// them.
    fn of(root: &Path) -> Result<Copy, Box<dyn Error>> {
        let base = root.join("target/mutations");
        let copy = Copy { tree: base.join("tree"), target: base.join("target") };
        let listed = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(root)
            .output()?;
        let listed = String::from_utf8(listed.stdout)?;
        let names: BTreeSet<&str> = listed.split_terminator('\0').collect();
        copy.forget_others(&names)?;
        for name in names {
            let from = root.join(name);
            let to = copy.tree.join(name);
            // `git ls-files` still lists a deleted file until the deletion is staged.
            let Ok(new) = std::fs::read(&from) else {
                std::fs::remove_file(&to).or_else(may_be_missing)?;
                continue;
            };
            if std::fs::read(&to).ok().is_none_or(|old| old != new) {
                std::fs::create_dir_all(to.parent().unwrap_or(&copy.tree))?;
                std::fs::copy(&from, &to)?;
            }
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

    /// Checks that the tests pass without a fault.
    fn pass(&self, chosen: &[&Mutation]) -> Result<(), Box<dyn Error>> {
        let mut all: BTreeMap<(&str, &str), BTreeSet<String>> = BTreeMap::new();
        for m in chosen {
            all.entry((&m.package, &m.target)).or_default().extend(m.tests.iter().cloned());
        }
        for ((package, target), tests) in all {
            let tests: Vec<_> = tests.into_iter().collect();
            match self.test(package, target, &tests)? {
                Outcome::Passed => {}
                Outcome::Failed(by) => {
                    return Err(format!("tests fail without any fault: {by:?}").into());
                }
                Outcome::Endless => {
                    return Err(format!("tests hang without any fault: {tests:?}").into());
                }
            }
        }
        Ok(())
    }

    /// Calls `act` while the fault is in the copy.
    fn with<T>(&self, m: &Mutation, act: impl FnOnce() -> T) -> Result<T, Box<dyn Error>> {
        let file = self.tree.join(&m.file);
        let right = std::fs::read_to_string(&file)?;
        if right.matches(&m.from).count() != 1 {
            return Err(format!("{}: `{}` does not occur exactly once", m.file, m.from).into());
        }
        std::fs::write(&file, right.replace(&m.from, &m.to))?;
        let done = act();
        std::fs::write(&file, right)?;
        Ok(done)
    }

    fn test(
        &self,
        package: &str,
        target: &str,
        tests: &[String],
    ) -> Result<Outcome, Box<dyn Error>> {
        let mut chosen = vec!["test", "--offline", "--profile", "mutants"];
        chosen.extend(match package {
            // With the features of the programs that these tests build and run.
            "rnic-tests" => vec!["--workspace"],
            package => vec!["-p", package],
        });
        chosen.extend(match target {
            "lib" | LOOM => vec!["--lib"],
            name => vec!["--test", name],
        });
        let build = self.cargo("cargo", target).args(&chosen).arg("--no-run").output()?;
        if !build.status.success() {
            let why = String::from_utf8_lossy(&build.stderr);
            return Err(format!("{package} {target} does not build:\n{why}").into());
        }
        // `timeout` ends its whole process group, including processes that the tests have started.
        let mut run = self.cargo("timeout", target);
        run.args(["--kill-after=5", DEADLINE, "cargo"]).args(&chosen).arg("--").args(tests);
        // A file, not a pipe: a program that a fault leaves running would hold the pipe open.
        let output = self.target.with_extension("said");
        let ended = run.stdout(File::create(&output)?).stderr(Stdio::null()).status()?;
        let said = String::from_utf8_lossy(&std::fs::read(&output)?).into_owned();
        if matches!(ended.code(), Some(124 | 137) | None) {
            return Ok(Outcome::Endless);
        }
        let names = |end: &str| -> Vec<String> {
            let of = |line: &str| Some(line.strip_prefix("test ")?.strip_suffix(end)?.to_owned());
            said.lines().filter_map(of).collect()
        };
        let failed = names(" ... FAILED");
        if !ended.success() {
            Ok(Outcome::Failed(failed))
        } else if names(" ... ok").is_empty() {
            Err(format!("{package} {target} has no tests like {tests:?}").into())
        } else {
            Ok(Outcome::Passed)
        }
    }

    /// Returns a command that builds or runs a target. Loom models are built separately, because
    /// they replace the atomics of the standard library.
    fn cargo(&self, program: &str, target: &str) -> Command {
        let mut command = self.command(program);
        if target == LOOM {
            command
                .env("RUSTFLAGS", "--cfg loom")
                .env("CARGO_TARGET_DIR", self.target.with_extension("loom"));
        }
        command
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(&self.tree)
            .env("CARGO_TARGET_DIR", &self.target)
            .env_remove("CI")
            .stdin(Stdio::null());
        command
    }
}
