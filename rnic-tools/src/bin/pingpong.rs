//! Sends messages there and back, checks them and times them; see `pingpong --help`.

fn main() -> std::process::ExitCode {
    rnic_tools::pingpong::main()
}
