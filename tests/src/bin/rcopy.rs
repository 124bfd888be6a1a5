//! `rcopy`, built with the tests.

fn main() -> std::process::ExitCode {
    rnic_tools::rcopy::main()
}
