//! iSCSI over RDMA (iSER): a target of tgt, and initiators of libiscsi.

use std::sync::PoisonError;
use std::time::Instant;

use rnic_tests::{DEADLINE, Process, installed};

use crate::ALONE;
use crate::case::{Group, Setting};
use crate::stage::{CLIENT, SERVER, Stage};

/// Initiators, and a text that each must print.
pub const INITIATORS: [(&str, &str); 3] = [
    ("iscsi-inq", "Product:VIRTUAL-DISK"),
    ("iscsi-readcapacity16", "Total size:16777216"),
    ("iscsi-perf -m 4 -b 64 -t 1", "finished."),
];

const TARGET: &str = "iqn.2026-01.test:disk";
const INITIATOR: &str = "iqn.2026-01.test:initiator";

/// Bytes of the disk.
const DISK: u64 = 16 << 20;

/// The group for [`Stage::new`].
const GROUP: Group = Group {
    program: "tgtd",
    package: "tgt",
    manner: "",
    devices: "rnicd1",
    config: "",
    cases: &[],
};

/// Runs `tgtadm` on the target.
fn administer(stage: &Stage, words: &str) -> Process {
    stage.start(SERVER, &format!("{} tgtadm -C 1 --lld iser {words}", control(stage)))
}

/// Returns the command prefix with the control socket of the target.
fn control(stage: &Stage) -> String {
    format!("env TGT_IPC_SOCKET={}", stage.folder(SERVER).join("control").display())
}

/// Starts the target with one disk.
fn start(stage: &Stage) -> Process {
    let disk = stage.folder(SERVER).join("disk");
    let size = format!("truncate --size {DISK} {}", disk.display());
    stage.start(SERVER, &size).succeed();
    let mut target = stage
        .start(SERVER, &format!("{} tgtd -f -C 1 --iser port=3260,pool_sz_mb=64", control(stage)));
    let deadline = Instant::now() + DEADLINE;
    while !administer(stage, "--op show --mode target").finish().0.success() {
        assert!(!target.has_ended() && Instant::now() < deadline, "{:?}", target.killed());
    }
    for words in [
        format!("--op new --mode target --tid 1 -T {TARGET}"),
        format!("--op new --mode logicalunit --tid 1 --lun 1 -b {}", disk.display()),
        // It accepts an initiator only if both its address and its name are bound.
        "--op bind --mode target --tid 1 -I ALL".to_owned(),
        format!("--op bind --mode target --tid 1 -Q {INITIATOR}"),
    ] {
        administer(stage, &words).succeed();
    }
    target
}

fn initiators_read(setting: Setting) {
    if !installed("iscsi-perf", "libiscsi-bin") {
        return;
    }
    let Some(stage) = Stage::new(setting, &GROUP) else { return };
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = stage.read_figures();
    let target = start(&stage);
    let url = format!("iser://{}:3260/{TARGET}/1", stage.side(SERVER).ip());
    for (program, text) in INITIATORS {
        let words = format!("{program} -i {INITIATOR} {url}");
        let lines = stage.start(CLIENT, &words).succeed();
        assert!(lines.iter().any(|line| line.contains(text)), "{program}: {lines:#?}");
    }
    // It ends by itself only when all targets are deleted.
    target.kill();
    stage.is_empty();
    drop(alone);
    let after = stage.read_figures();
    if let Err(why) = stage.went_over(64 * 512, &before, &after) {
        panic!("{why}");
    }
}

in_each_setting!(initiators_read);
