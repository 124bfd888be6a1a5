//! Compares an RNIC with the limits of its machine; see `rnic-bench --help`.

fn main() -> std::process::ExitCode {
    rnic_bench::main()
}
