//! A key-value store whose GETs are RDMA Reads; see `rkv --help`.

fn main() -> std::process::ExitCode {
    rnic_tools::rkv::main()
}
