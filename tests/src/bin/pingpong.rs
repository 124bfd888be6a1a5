//! `pingpong`, built with the tests.

fn main() -> std::process::ExitCode {
    rnic_tools::pingpong::main()
}
