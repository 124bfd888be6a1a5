//! Counts the instructions of an operation with valgrind's callgrind.
//!
//! Times vary between runs and machines. Instruction counts do not, so a change that costs ten
//! instructions is visible even while other programs use the CPUs. This program runs itself under
//! callgrind, once for each subject, because the memory of earlier subjects would change the
//! addresses of later ones, and with them the instruction counts of copies. Only code called by
//! [`counted_runs`] is counted.

use std::path::Path;
use std::process::{Command, ExitCode};

use crate::{Run, Subject};

/// Option for counting instructions instead of measuring time.
pub(crate) const OPTION: &str = "--instructions";
/// Option with which this program runs itself under callgrind, followed by the name of a subject.
pub(crate) const INSIDE: &str = "--under-callgrind";

/// Number of counted runs. An earlier run, which is not counted, allocates all memory.
const RUNS: u64 = 16;

/// Counts the instructions of all subjects and prints a table.
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

/// Runs a subject under callgrind.
pub(crate) fn run(subject: &Subject) {
    let mut run = (subject.prepare)();
    run();
    counted_runs(&mut run);
}

/// Calls `run` [`RUNS`] times. Callgrind selects this function by its name, so no other function
/// name may contain this one.
#[inline(never)]
fn counted_runs(run: &mut Run) {
    for _ in 0..RUNS {
        run();
    }
}

/// Runs this program under callgrind for one subject. Returns the number of instructions of all
/// counted runs.
fn count(name: &str) -> Result<u64, String> {
    let me = std::env::current_exe()
        .map_err(|e| format!("cannot find the path of this program: {e}"))?;
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("callgrind.out");
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--toggle-collect=*counted_runs*"])
        .arg(format!("--callgrind-out-file={}", file.display()))
        .arg(me)
        .args([INSIDE, name])
        .output()
        .map_err(|e| format!("cannot run valgrind (Debian package valgrind): {e}"))?;
    if !output.status.success() {
        return Err(format!("{}\n{}", output.status, String::from_utf8_lossy(&output.stderr)));
    }
    match total(&file)? {
        0 => Err("callgrind counted no instructions in `counted_runs`".to_owned()),
        total => Ok(total),
    }
}

/// Returns the total number of instructions in a callgrind output file.
fn total(file: &Path) -> Result<u64, String> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let total = text.lines().find_map(|line| line.strip_prefix("totals: "));
    let total = total.and_then(|number| number.trim().parse().ok());
    total.ok_or_else(|| format!("{} has no total", file.display()))
}
