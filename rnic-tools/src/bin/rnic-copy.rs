//! Copies files to other processes and hosts by RDMA Write; see `rnic-copy --help`.

fn main() -> std::process::ExitCode {
    rnic_tools::copy::main()
}
