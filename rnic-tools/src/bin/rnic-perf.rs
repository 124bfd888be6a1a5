//! Measures an RNIC beside raw TCP and memcpy; see `rnic-perf --help`.

fn main() -> std::process::ExitCode {
    rnic_tools::perf::main()
}
