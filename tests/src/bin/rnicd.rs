//! The daemon, built with the tests.

fn main() -> std::process::ExitCode {
    rnicd::cli::main()
}
