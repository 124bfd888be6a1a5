//! Copies files to other processes and hosts by RDMA Write; see `rcopy --help`.

fn main() -> std::process::ExitCode {
    rnic_client::programs::rcopy::main()
}
