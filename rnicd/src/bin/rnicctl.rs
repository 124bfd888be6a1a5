//! Asks the daemon what it knows, and tells it what administrators want.

use std::process::ExitCode;

fn main() -> ExitCode {
    rnicd::cli::ctl::main()
}
