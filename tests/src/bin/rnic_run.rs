//! `rnic-run`, built with the tests.

fn main() -> std::process::ExitCode {
    rnic_run::main()
}
