//! Writes `docs/conformance.md`, or checks it: which test shows which requirement.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use rnic_tests::conformance::{self, REPORT, Record};

#[derive(Parser)]
struct Args {
    /// Write nothing; fail if the report is stale or a requirement has neither test nor exception.
    #[arg(long)]
    check: bool,
    /// Top of the repository.
    #[arg(long, default_value_os_t = conformance::root())]
    root: PathBuf,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let record = match Record::read(&args.root) {
        Ok(record) => record,
        Err(e) => {
            eprintln!("conformance: {e}");
            return ExitCode::FAILURE;
        }
    };
    let mut faults = record.faults();
    let (file, report) = (args.root.join(REPORT), conformance::render(&record));
    if args.check {
        if std::fs::read_to_string(&file).ok().is_none_or(|old| old != report) {
            faults.push(format!("{REPORT} is stale: run this without --check"));
        }
    } else if let Err(e) = std::fs::write(&file, report) {
        faults.push(format!("{}: {e}", file.display()));
    }
    for fault in &faults {
        eprintln!("conformance: {fault}");
    }
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
