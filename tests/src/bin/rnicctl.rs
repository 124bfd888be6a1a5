//! `rnicctl`, built with the tests.

fn main() -> std::process::ExitCode {
    rnicd::cli::ctl::main()
}
