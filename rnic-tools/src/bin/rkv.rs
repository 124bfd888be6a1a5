//! A key-value store with GETs by RDMA Read; see `rkv --help`.

fn main() -> std::process::ExitCode {
    rnic_tools::rkv::main()
}
