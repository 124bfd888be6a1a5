//! Writes `docs/conformance.md` and `target/conformance.md`: the code that implements each
//! requirement and the tests that verify it. With `--check`, checks that nothing is missing.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use rnic_tests::conformance::{self, REPORT, Record, SUMMARY};

#[derive(Parser)]
struct Args {
    /// Do not write `docs/conformance.md`; fail if it is stale or a requirement lacks its test or
    /// its code.
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
    let mut write = |name: &str, text: String| {
        let file = args.root.join(name);
        let folder = file.parent().map_or(Ok(()), std::fs::create_dir_all);
        if let Err(e) = folder.and_then(|()| std::fs::write(&file, text)) {
            faults.push(format!("{}: {e}", file.display()));
        }
    };
    write(REPORT, conformance::report(&record));
    let summary = conformance::summary(&record);
    if !args.check {
        write(SUMMARY, summary);
    } else if std::fs::read_to_string(args.root.join(SUMMARY)).ok() != Some(summary) {
        faults.push(format!("{SUMMARY} is stale: run this without --check"));
    }
    for fault in &faults {
        eprintln!("conformance: {fault}");
    }
    for u in record.uncited.iter().filter(|u| !u.ids.is_empty()) {
        println!("{} in {} are not cited yet: {}", u.ids.len(), u.folder, u.ids.join(", "));
    }
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
