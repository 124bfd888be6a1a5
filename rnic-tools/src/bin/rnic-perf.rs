//! Measures an RNIC and compares it with raw TCP and memcpy; see `rnic-perf --help`.

fn main() -> std::process::ExitCode {
    rnic_tools::perf::main()
}
