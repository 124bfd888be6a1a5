//! `rnic-run`.

fn main() -> std::process::ExitCode {
    rnic_run::main()
}
