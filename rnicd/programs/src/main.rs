//! The binary of the daemon.

use std::process::ExitCode;

fn main() -> ExitCode {
    rnicd_programs::cli::main()
}
