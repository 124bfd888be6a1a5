//! Shows the state of the daemon and runs administrator commands.

use std::process::ExitCode;

fn main() -> ExitCode {
    rnicd_programs::cli::ctl::main()
}
