//! The tests of rdma-core, which are written in Python over libibverbs and librdmacm (pyverbs).
//!
//! Python's unittest succeeds even if it skips everything, so each test must report "ok" itself.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::PoisonError;
use std::time::Duration;

use rnic_tests::apart::{Apart, Side};
use rnic_tests::verbs::BOTH_DEVICES;
use rnic_tests::{DEADLINE, Daemon, PATHS, Process, built, omit, on_path};
use tempfile::TempDir;

use crate::ALONE;
use crate::figures::Metrics;

/// The Debian package.
pub const PACKAGE: &str = "python3-pyverbs";

/// The Python of Debian's packages, which need not be the first one in the path.
const PYTHON: &str = "/usr/bin/python3";

/// Folders of the tests in either package.
const TESTS: [&str; 2] = ["/usr/share/doc/rdma-core/tests", "/usr/share/doc/python3-pyverbs/tests"];

/// Runs the tests and prints the outcome of each.
const RUNNER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/verbs/run_pyverbs.py");

/// An additional test program of this project.
const EXTENDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/verbs/extended.py");

/// A program that meets fault rules.
const FAULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/verbs/faults.py");

/// Time limit for all tests of a class together.
const PATIENCE: Duration = DEADLINE;

/// Tests of one class, which run in one process.
pub struct Class {
    /// Module and class.
    pub name: &'static str,
    /// Names of tests that pass.
    pub passes: &'static [&'static str],
    /// Tests that do not pass, by reason.
    pub fails: &'static [Fails],
    /// Minimum number of payload bytes that the daemon must place.
    pub bytes: u64,
}

/// Tests that do not pass.
pub struct Fails {
    /// Their names.
    pub tests: &'static [&'static str],
    /// Outcome that unittest reports.
    pub outcome: Outcome,
    /// Reason.
    pub why: &'static str,
}

/// Outcome of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It passed.
    Ok,
    /// It was skipped because the device lacks a feature.
    Skipped,
}

impl Outcome {
    /// The name that `run_pyverbs.py` prints.
    pub const fn word(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::Skipped => "skipped",
        }
    }
}

const fn skipped(tests: &'static [&'static str], why: &'static str) -> Fails {
    Fails { tests, outcome: Outcome::Skipped, why }
}

const NO_DEVICE_MEMORY: &str = "the device has no device memory";
const NO_MULTICAST: &str = "iWARP has no multicast";
const NO_XRC: &str = "the device has no XRC QPs";
const NO_DATAGRAMS: &str = "the device has no UD or raw packet QPs";
const NO_RAW_PACKETS: &str = "the device has no raw packet QPs";
const NO_ATOMIC_WRITE: &str = "RFC 7306 has no atomic Write of eight bytes";
const FULL_GIDS: &str = "it queries an empty entry of the GID table, which is full";

/// Classes and the devices that they run on.
pub const RUNS: [(&[&str], &[Class]); 3] =
    [(&["rnicd0", "rnicd1"], BOTH), (&["rnicd0"], CONNECTED), (&["rnicd1"], WIRED)];

/// Classes with the same results on both devices.
const BOTH: &[Class] = &[
    Class {
        name: "test_cq.CQAPITest",
        passes: &["test_create_cq", "test_create_cq_bad_flow", "test_create_cq_with_comp_channel"],
        fails: &[],
        bytes: 0,
    },
    Class {
        name: "test_cqex.CQEXAPITest",
        passes: &["test_create_cq_ex", "test_create_cq_ex_bad_flow"],
        fails: &[],
        bytes: 0,
    },
    Class {
        name: "test_device.DeviceTest",
        passes: &[
            "test_dev_list",
            "test_open_dev",
            "test_phys_port_cnt_ex",
            "test_query_device",
            "test_query_device_ex",
            "test_query_gid",
            "test_query_gid_ex",
            "test_query_gid_table",
            "test_query_gid_table_bad_flow",
            "test_query_pkey",
            "test_query_port",
            "test_query_port_bad_flow",
        ],
        fails: &[skipped(&["test_query_gid_ex_bad_flow"], FULL_GIDS)],
        bytes: 0,
    },
    Class {
        name: "test_pd.PDTest",
        passes: &[
            "test_alloc_pd",
            "test_dealloc_pd",
            "test_destroy_pd_twice",
            "test_multiple_pd_creation",
        ],
        fails: &[],
        bytes: 0,
    },
];

/// Classes for the iWARP device.
const CONNECTED: &[Class] = &[
    Class {
        name: "test_qp.QPTest",
        passes: &[
            "test_create_rc_qp_ex_no_attr",
            "test_create_rc_qp_ex_with_attr",
            "test_create_rc_qp_no_attr",
            "test_create_rc_qp_with_attr",
            "test_query_rc_qp",
        ],
        fails: &[skipped(
            &[
                "test_create_raw_qp_ex_no_attr",
                "test_create_raw_qp_ex_with_attr",
                "test_create_raw_qp_ex_with_illegal_caps_max_recv_sge",
                "test_create_raw_qp_ex_with_illegal_caps_max_recv_wr",
                "test_create_raw_qp_ex_with_illegal_caps_max_send_sge",
                "test_create_raw_qp_ex_with_illegal_caps_max_send_wr",
                "test_create_raw_qp_no_attr",
                "test_create_raw_qp_with_attr",
                "test_create_uc_qp_ex_no_attr",
                "test_create_uc_qp_ex_with_attr",
                "test_create_uc_qp_no_attr",
                "test_create_uc_qp_with_attr",
                "test_create_ud_qp_ex_no_attr",
                "test_create_ud_qp_ex_with_attr",
                "test_create_ud_qp_no_attr",
                "test_create_ud_qp_with_attr",
                "test_modify_ud_qp",
                "test_query_data_in_order",
                "test_query_raw_qp",
                "test_query_uc_qp",
                "test_query_ud_qp",
            ],
            NO_DATAGRAMS,
        )],
        bytes: 0,
    },
    Class {
        name: "test_device.DMTest",
        passes: &[],
        fails: &[skipped(
            &[
                "test_create_dm",
                "test_destroy_dm",
                "test_create_dm_bad_flow",
                "test_destroy_dm_bad_flow",
                "test_dm_write",
                "test_dm_write_bad_flow",
                "test_dm_read",
                "test_multi_process_alloc_dm",
            ],
            NO_DEVICE_MEMORY,
        )],
        bytes: 0,
    },
    Class {
        name: "test_device.SharedDMTest",
        passes: &[],
        fails: &[skipped(&["test_import_dm"], NO_DEVICE_MEMORY)],
        bytes: 0,
    },
    Class { name: "test_mr.MRTest", passes: &["test_reg_mr_bad_flags"], fails: &[], bytes: 0 },
    Class { name: "test_mr.MWTest", passes: &["test_reg_mw_wrong_type"], fails: &[], bytes: 0 },
    Class {
        name: "test_mr.DeviceMemoryAPITest",
        passes: &[],
        fails: &[skipped(
            &["test_create_dm_mr", "test_dm_bad_access", "test_dm_bad_registration"],
            NO_DEVICE_MEMORY,
        )],
        bytes: 0,
    },
    Class {
        name: "test_fork.ForkAPITest",
        passes: &["test_is_fork_initialized"],
        fails: &[],
        bytes: 0,
    },
    Class {
        name: "test_rdmacm.CMTestCase",
        passes: &[
            "test_rdmacm_sync_traffic",
            "test_rdmacm_async_traffic",
            "test_rdmacm_async_reject_traffic",
            "test_rdmacm_async_traffic_external_qp",
            "test_rdmacm_async_read",
            "test_rdmacm_async_write",
            "test_rdmacm_async_udp_traffic",
        ],
        fails: &[skipped(
            &[
                "test_rdmacm_async_multicast_traffic",
                "test_rdmacm_async_ex_multicast_traffic",
                "test_rdmacm_async_ex_leave_multicast_traffic",
            ],
            NO_MULTICAST,
        )],
        // Four times ten messages in each direction, and ten Reads, of 1 KiB; Writes on one path.
        bytes: 4 * 2 * 10 * 1024 + 10 * 1024,
    },
];

/// Classes for the RoCE device.
const WIRED: &[Class] = &[
    Class {
        name: "test_qp.QPTest",
        passes: &[
            "test_create_raw_qp_ex_with_illegal_caps_max_recv_sge",
            "test_create_raw_qp_ex_with_illegal_caps_max_recv_wr",
            "test_create_raw_qp_ex_with_illegal_caps_max_send_sge",
            "test_create_raw_qp_ex_with_illegal_caps_max_send_wr",
            "test_create_rc_qp_ex_no_attr",
            "test_create_rc_qp_ex_with_attr",
            "test_create_rc_qp_no_attr",
            "test_create_rc_qp_with_attr",
            "test_create_uc_qp_ex_no_attr",
            "test_create_uc_qp_ex_with_attr",
            "test_create_uc_qp_no_attr",
            "test_create_uc_qp_with_attr",
            "test_create_ud_qp_ex_no_attr",
            "test_create_ud_qp_ex_with_attr",
            "test_create_ud_qp_no_attr",
            "test_create_ud_qp_with_attr",
            "test_modify_ud_qp",
            "test_query_data_in_order",
            "test_query_rc_qp",
            "test_query_uc_qp",
            "test_query_ud_qp",
        ],
        fails: &[skipped(
            &[
                "test_create_raw_qp_ex_no_attr",
                "test_create_raw_qp_ex_with_attr",
                "test_create_raw_qp_no_attr",
                "test_create_raw_qp_with_attr",
                "test_query_raw_qp",
            ],
            NO_RAW_PACKETS,
        )],
        bytes: 0,
    },
    Class {
        name: "test_addr.AHTest",
        passes: &["test_create_ah", "test_create_ah_roce", "test_destroy_ah"],
        fails: &[],
        bytes: 0,
    },
    Class {
        name: "test_atomic.AtomicTest",
        passes: &[
            "test_atomic_cmp_and_swap",
            "test_atomic_fetch_and_add",
            "test_atomic_invalid_lkey",
            "test_atomic_invalid_mr_access",
            "test_atomic_invalid_qp_access",
            "test_atomic_invalid_rkey",
            "test_atomic_non_aligned_addr",
        ],
        fails: &[skipped(
            &["test_xrc_atomic_cmp_and_swap", "test_xrc_atomic_fetch_and_add"],
            NO_XRC,
        )],
        bytes: 2 * 10 * 8,
    },
    Class { name: "test_cq.CQTest", passes: &["test_resize_cq"], fails: &[], bytes: 0 },
    Class {
        name: "test_cq_events.CqEventsTestCase",
        passes: &["test_cq_events_rc", "test_cq_events_ud"],
        fails: &[],
        bytes: 4 * 10 * 1024,
    },
    Class {
        name: "test_cqex.CqExTestCase",
        passes: &["test_rc_traffic_cq_ex", "test_ud_traffic_cq_ex"],
        fails: &[skipped(&["test_xrc_traffic_cq_ex"], NO_XRC)],
        bytes: 4 * 10 * 1024,
    },
    Class {
        name: "test_mr.MRTest",
        passes: &[
            "test_mr_rereg_access",
            "test_mr_rereg_access_bad_flow",
            "test_mr_rereg_addr",
            "test_mr_rereg_pd",
            "test_reg_mr_bad_flags",
        ],
        fails: &[],
        bytes: 4 * 10 * 1024,
    },
    Class {
        name: "test_mr.MWTest",
        passes: &[
            "test_invalidate_mw_type1",
            "test_mw_type1",
            "test_mw_type2",
            "test_mw_type2_invalidate_dealloc",
            "test_mw_type2_invalidate_local",
            "test_mw_type2_invalidate_remote",
            "test_reg_mw_wrong_type",
        ],
        fails: &[],
        bytes: 5 * 10 * 1024,
    },
    Class {
        name: "test_qpex.QpExTestCase",
        passes: &[
            "test_full_rq_bad_flow",
            "test_post_receive_qp_state_bad_flow",
            "test_post_send_qp_state_bad_flow",
            "test_qp_ex_rc_atomic_cmp_swp",
            "test_qp_ex_rc_atomic_fetch_add",
            "test_qp_ex_rc_bind_mw",
            "test_qp_ex_rc_rdma_read",
            "test_qp_ex_rc_rdma_read_zero_size",
            "test_qp_ex_rc_rdma_write",
            "test_qp_ex_rc_rdma_write_imm",
            "test_qp_ex_rc_rdma_write_zero_length",
            "test_qp_ex_rc_send",
            "test_qp_ex_rc_send_imm",
            "test_qp_ex_ud_send",
            "test_qp_ex_ud_send_imm",
            "test_qp_ex_ud_zero_size",
            "test_rq_with_larger_sgl_bad_flow",
        ],
        fails: &[
            skipped(&["test_qp_ex_rc_atomic_write"], NO_ATOMIC_WRITE),
            skipped(&["test_qp_ex_xrc_send", "test_qp_ex_xrc_send_imm"], NO_XRC),
        ],
        bytes: 4 * 10 * 1024,
    },
    Class {
        name: "test_relaxed_ordering.RoTestCase",
        passes: &["test_ro_rc_traffic", "test_ro_ud_traffic"],
        fails: &[skipped(&["test_ro_xrc_traffic"], NO_XRC)],
        bytes: 4 * 10 * 1024,
    },
];

/// Tests that run only on the direct path, and the reason.
pub const DIRECT_ONLY: (&str, &[&str], &str) = (
    "test_rdmacm.CMTestCase",
    &["test_rdmacm_async_write"],
    "it expects the bytes of a completed Write at the peer, which iWARP does not guarantee (RFC 5040 \
     section 5.5): over TCP they may still be in flight",
);

/// Tests that do not run, by module or class, and the reasons. For a class that is also listed
/// above, this means its other tests.
pub const NOT_RUN: &[(&[&str], &str)] = &[
    (
        &["test_parent_domain", "test_shared_pd"],
        "parent domains and objects of another process; they skip themselves",
    ),
    (&["test_flow", "test_rss_traffic"], "raw packets, which the device does not support"),
    (
        &["test_odp", "test_tag_matching", "test_mr.DeviceMemoryTest"],
        "on-demand paging, tag matching and device memory, which the device does not support; they \
         skip themselves",
    ),
    (
        &["test_cuda_dmabuf", "test_mr.DmaBufMRTest", "test_mr.DmaBufTestCase"],
        "graphics card memory; skipped without such a card",
    ),
    (&["test_efa*", "test_mlx5*"], "features of these devices"),
];

#[test]
fn between_processes_of_one_daemon() {
    runs("direct");
}

#[test]
fn between_processes_of_one_daemon_over_tcp() {
    runs("tcp");
}

/// Behaviour that rdma-core's own tests leave to chance or do not test.
#[test]
fn extended_qps_refuse_unsupported_operations() {
    let Some(tests) = tests() else { return };
    let Some(apart) = Apart::available() else { return };
    let stage = Stage::new("direct", tests, apart);
    let said = stage.ends(stage.python(EXTENDED));
    assert!(said.iter().any(|line| line == "done"), "{}", said.join("\n"));
}

/// Device, rule for the second of two Reads, and its status (docs/fault-examples.md).
const FAULTED: [(&str, &str, &str); 4] = [
    ("rnicd0", "complete status=rem-access-err", "IBV_WC_REM_ACCESS_ERR"),
    ("rnicd0", "refuse as=invalid-request", "IBV_WC_REM_OP_ERR"),
    ("rnicd1", "complete status=rem-access-err", "IBV_WC_REM_ACCESS_ERR"),
    ("rnicd1", "refuse as=invalid-request", "IBV_WC_REM_INV_REQ_ERR"),
];

/// A completion, a verb and an asynchronous event, all injected by fault rules.
#[test]
fn faults_are_raised_as_exceptions() {
    for path in PATHS {
        let Some(tests) = tests() else { return };
        let Some(apart) = Apart::available() else { return };
        let stage = Stage::new(path, tests, apart);
        for (device, rule, status) in FAULTED {
            let mut command = stage.python(FAULTS);
            let rules = format!(
                "do={rule} opcode=read nth=2; \
                 do=event event=client-reregister device={device} opcode=read nth=1; \
                 do=fail errno=ENOMEM verb=reg_mr nth=2"
            );
            command.args([device, Side::A.ip(), status]).env("RNIC_FAULTS", rules);
            let said = stage.ends(command);
            let is_done = said.iter().any(|line| line == "done");
            assert!(is_done, "{rule} on {device}, {path}: {}", said.join("\n"));
        }
    }
}

/// A new module of rdma-core must not be overlooked.
#[test]
fn every_module_is_accounted_for() {
    let Some(tests) = tests() else { return };
    let accounted = |module: &str| {
        let run = RUNS.into_iter().flat_map(|(_, classes)| classes);
        let run = run.map(|class| class.name);
        let not_run = NOT_RUN.iter().flat_map(|(names, _)| names.iter().copied());
        run.chain(not_run).any(|name| match name.strip_suffix('*') {
            Some(start) => module.starts_with(start),
            None => name.split('.').next() == Some(module),
        })
    };
    for file in std::fs::read_dir(tests.path()).expect("a readable copy of the tests") {
        let file = file
            .expect("a readable copy of the tests")
            .file_name()
            .into_string()
            .expect("UTF-8 names");
        let module = file.trim_end_matches(".py");
        assert!(!module.starts_with("test_") || accounted(module), "{module}");
    }
}

fn runs(path: &'static str) {
    let Some(tests) = tests() else { return };
    let Some(apart) = Apart::available() else { return };
    let stage = Stage::new(path, tests, apart);
    let mut wrong = Vec::new();
    for (devices, classes) in RUNS {
        for device in devices {
            wrong.extend(classes.iter().filter_map(|class| stage.run(device, class).err()));
        }
    }
    assert!(wrong.is_empty(), "{path}\n{}", wrong.join("\n"));
}

/// Returns a copy of the tests, if they and pyverbs are installed.
fn tests() -> Option<TempDir> {
    let pyverbs = Command::new(PYTHON).args(["-c", "import pyverbs.device"]).output();
    if !pyverbs.is_ok_and(|output| output.status.success()) {
        omit(&format!("no pyverbs here: Debian package {PACKAGE}"));
        return None;
    }
    let Some(packed) = TESTS.iter().find(|dir| Path::new(dir).join("run_tests.py").is_file())
    else {
        omit(&format!("no {} here: Debian package {PACKAGE}, with documentation", TESTS[0]));
        return None;
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let unpack = "cp --recursive \"$1\"/. \"$2\" && gunzip --recursive \"$2\"";
    let mut command = Command::new("sh");
    command.args(["-c", unpack, "unpack", packed]).arg(dir.path());
    Process::start(command).succeed();
    // As in later versions of rdma-core, Sends get a second to complete before the resize.
    let path = dir.path().join("test_cq.py");
    let shrinks = "        # Decrease the CQ size to less";
    let test = std::fs::read_to_string(&path).expect("a readable copy of the tests");
    let patient = test.replace(shrinks, &format!("        __import__('time').sleep(1)\n{shrinks}"));
    std::fs::write(path, patient).expect("a readable copy of the tests");
    Some(dir)
}

/// The daemon and network namespace of a run.
struct Stage {
    path: &'static str,
    daemon: Daemon,
    tests: TempDir,
    /// Metrics file of the daemon.
    figures: PathBuf,
    /// Declared last, because it must be dropped after the daemon.
    apart: Apart,
}

impl Stage {
    fn new(path: &'static str, tests: TempDir, apart: Apart) -> Self {
        let figures = tests.path().join("figures");
        let metrics = format!("[metrics]\nfile = {figures:?}\ninterval = \"24h\"\n");
        let daemon = apart.daemon(Side::A, &format!("{}{metrics}", on_path(path)));
        Stage { path, daemon, tests, figures, apart }
    }

    /// Runs the tests of a class. Returns the failures as text.
    fn run(&self, device: &str, class: &Class) -> Result<(), String> {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let placed = || {
            let figures = Metrics::read(&self.daemon, &self.figures);
            figures.of("rnicd_placed_bytes_total")
        };
        let before = placed();
        let mut command = self.python(RUNNER);
        command.arg(self.tests.path()).args([device, Side::A.ip()]);
        command.args(class.tests(self.path).map(|(test, _)| full(class, test)));
        let said = self.ends(command);
        let placed = placed() - before;
        let mut wrong = Vec::new();
        for (test, wanted) in class.tests(self.path) {
            let line = format!("= {} {} ", wanted.word(), full(class, test));
            if !said.iter().any(|said| said.starts_with(&line)) {
                wrong.push(format!("not {}: {test}", wanted.word()));
            }
        }
        if placed < class.bytes {
            wrong.push(format!("{placed} bytes placed instead of {}", class.bytes));
        }
        if wrong.is_empty() {
            Ok(())
        } else {
            Err(format!("== {device} {}: {wrong:#?}\n{}", class.name, said.join("\n")))
        }
    }

    /// Builds a command that runs a Python program over our libraries.
    fn python(&self, program: &str) -> Command {
        let mut command = self.apart.on(Side::A);
        // timeout(1) also ends the program's children.
        command.args(["timeout", "--kill-after=5", &PATIENCE.as_secs().to_string()]);
        command.args([PYTHON, program]);
        command.env("LD_LIBRARY_PATH", built::libraries());
        command.env("RNIC_SOCKET", self.daemon.socket()).env("RNIC_LOG", "debug");
        command.env("RNIC_DEVICES", BOTH_DEVICES);
        command
    }

    /// Runs a program and returns its output. Waits until the daemon holds no objects of it.
    fn ends(&self, command: Command) -> Vec<String> {
        let mut process = Process::start(command);
        process.ends_within(PATIENCE + Duration::from_secs(10));
        let (_, said) = process.killed();
        self.daemon.is_empty();
        said
    }
}

impl Class {
    /// Returns the tests of this class that run on this path, and their expected outcomes.
    fn tests(&self, path: &str) -> impl Iterator<Item = (&'static str, Outcome)> {
        let everything = path == "direct" || self.name != DIRECT_ONLY.0;
        let passes = self.passes.iter().map(|&test| (test, Outcome::Ok));
        let fails = self.fails.iter();
        let fails = fails.flat_map(|fails| fails.tests.iter().map(|&test| (test, fails.outcome)));
        passes.chain(fails).filter(move |(test, _)| everything || !DIRECT_ONLY.1.contains(test))
    }
}

/// Returns a test's full name in unittest.
fn full(class: &Class, test: &str) -> String {
    format!("tests.{}.{test}", class.name)
}
