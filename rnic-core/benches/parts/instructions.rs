//! How many instructions an operation takes, as valgrind's callgrind counts them.
//!
//! Times differ from run to run and from machine to machine; these do not, so a change that costs
//! ten instructions is seen even where others use the CPUs. This program runs itself under
//! callgrind, once for each subject: what was measured before has memory, and by where the rest
//! lies copies take more instructions or fewer. Only what [`counted_runs`] calls is counted.

use std::path::Path;
use std::process::{Command, ExitCode};

use crate::{Run, Subject};

/// What has instructions counted instead of time.
pub(crate) const OPTION: &str = "--instructions";
/// What this program is given when it runs under callgrind, before the name of a subject.
pub(crate) const INSIDE: &str = "--under-callgrind";

/// Runs that are counted, after one that is not: it has all memory there and all vectors grown.
const RUNS: u64 = 16;

/// Counts, and prints a table.
pub(crate) fn report(subjects: &[Subject]) -> ExitCode {
    println!("{:32}{:>14}{:>12}", "instructions", "per operation", "operations");
    for subject in subjects {
        let name = subject.full_name();
        match count(&name) {
            Ok(count) => {
                let operations = RUNS * subject.operations;
                let each = count as f64 / operations as f64;
                println!("{name:32}{each:>14.1}{operations:>12}");
            }
            Err(why) => {
                eprintln!("{name}: {why}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// What is counted.
pub(crate) fn run(subject: &Subject) {
    let mut run = (subject.prepare)();
    run();
    counted_runs(&mut run);
}

/// Callgrind finds it by its name, so no other function may have this in its own.
#[inline(never)]
fn counted_runs(run: &mut Run) {
    for _ in 0..RUNS {
        run();
    }
}

/// Runs this program under callgrind for one subject; the instructions of all its runs.
fn count(name: &str) -> Result<u64, String> {
    let me = std::env::current_exe().map_err(|e| format!("this program's own path: {e}"))?;
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("callgrind.out");
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--toggle-collect=*counted_runs*"])
        .arg(format!("--callgrind-out-file={}", file.display()))
        .arg(me)
        .args([INSIDE, name])
        .output()
        .map_err(|e| format!("valgrind (Debian package valgrind) cannot be run: {e}"))?;
    if !output.status.success() {
        return Err(format!("{}\n{}", output.status, String::from_utf8_lossy(&output.stderr)));
    }
    match total(&file)? {
        0 => Err("callgrind has not found what to count".to_owned()),
        total => Ok(total),
    }
}

/// Instructions in a file of callgrind's.
fn total(file: &Path) -> Result<u64, String> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let total = text.lines().find_map(|line| line.strip_prefix("totals: "));
    let total = total.and_then(|number| number.trim().parse().ok());
    total.ok_or_else(|| format!("{} has no total", file.display()))
}
