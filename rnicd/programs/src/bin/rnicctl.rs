//! Shows the state of the daemon and carries out commands of administrators.

use std::process::ExitCode;

fn main() -> ExitCode {
    rnicd::cli::ctl::main()
}
