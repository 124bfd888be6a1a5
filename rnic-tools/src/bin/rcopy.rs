//! Copies files to other processes and hosts by RDMA Write; see `rcopy --help`.

fn main() -> std::process::ExitCode {
    rnic_tools::rcopy::main()
}
