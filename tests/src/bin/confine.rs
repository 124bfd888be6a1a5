//! Installs seccomp filters, in the order of their names, and executes a program.
//!
//! Usage: `confine FILTERS PROGRAM...`, where FILTERS is a JSON file of the crate `seccompiler`.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(filters), Some(program)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: confine FILTERS PROGRAM...");
        return ExitCode::from(2);
    };
    let confined = || -> Result<(), Box<dyn std::error::Error>> {
        let file = std::fs::File::open(filters)?;
        let programs = seccompiler::compile_from_json(file, std::env::consts::ARCH.try_into()?)?;
        for filter in programs.into_iter().collect::<BTreeMap<_, _>>().values() {
            seccompiler::apply_filter(filter)?;
        }
        Ok(())
    };
    let error = match confined() {
        Ok(()) => Command::new(program).args(arguments).exec().into(),
        Err(error) => error,
    };
    eprintln!("confine: {error}");
    ExitCode::FAILURE
}
