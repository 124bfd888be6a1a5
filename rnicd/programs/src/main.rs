//! The binary of the daemon.

use std::process::ExitCode;

fn main() -> ExitCode {
    rnicd::cli::main()
}
