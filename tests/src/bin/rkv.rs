//! `rkv`, built with the tests.

fn main() -> std::process::ExitCode {
    rnic_client::programs::rkv::main()
}
