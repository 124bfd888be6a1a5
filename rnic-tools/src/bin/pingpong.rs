//! Sends messages back and forth, checks and times them; see `pingpong --help`.

fn main() -> std::process::ExitCode {
    rnic_tools::pingpong::main()
}
