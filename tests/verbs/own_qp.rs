//! Programs that create QPs apart from the rdma_cm IDs that connect them.

use std::path::Path;
use std::process::Command;

use rnic_tests::verbs::BOTH_DEVICES;
use rnic_tests::{Daemon, Process, built};

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/verbs/own_qp.c");

#[test]
fn qp_stored_in_an_id_connects() {
    let daemon = Daemon::start("");
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let program = scratch.path().join("own_qp");
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Werror", "-o"]).args([&program, Path::new(SOURCE)]);
    for library in ["libibverbs.so.1", "librdmacm.so.1"] {
        cc.arg(built::libraries().join(library));
    }
    Process::start(cc).succeed();
    let mut command = Command::new("timeout");
    command.arg("60").arg(&program);
    command.env("LD_LIBRARY_PATH", built::libraries()).env("RNIC_SOCKET", daemon.socket());
    command.env("RNIC_DEVICES", BOTH_DEVICES);
    let said = Process::start(command).succeed();
    assert_eq!(said, ["done"]);
    daemon.is_empty();
}
