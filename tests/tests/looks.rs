//! Programs that look for RDMA devices in `/sys` and `/dev` find the daemon's devices.

use std::path::Path;
use std::process::Command;

use rnic_tests::{Daemon, Process, built, omit, verbs};

#[test]
fn every_path_call_finds_the_devices() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/looks.c", scratch.path()) else { return };
    let daemon = Daemon::start("");
    let mut command = verbs::command(&program, &daemon);
    command.env("LD_PRELOAD", built::libraries().join("librnic_preload.so"));
    command.env("RNIC_TREE", daemon.socket().with_file_name("rnicd.sock.tree"));
    assert_eq!(Process::start(command).succeed(), ["done"]);
}

#[test]
fn rnic_run_shows_the_devices() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/looks.c", scratch.path()) else { return };
    let tree = scratch.path().join("elsewhere");
    let daemon = Daemon::start(&format!("[device]\ntree = {tree:?}\n"));
    let mut command = Command::new(built::program("rnic-run"));
    command.args(["--no-start", "--lib-dir"]).arg(built::libraries()).arg(&program);
    command.env("RNIC_SOCKET", daemon.socket()).env("RNIC_DEVICES", "rnicd0,rnicd1");
    assert_eq!(Process::start(command).succeed(), ["done"]);
    // Without a tree, programs see the kernel's files.
    let daemon = Daemon::start("[device]\ntree = \"off\"\n");
    let mut command = Command::new(built::program("rnic-run"));
    command.args(["--no-start", "--lib-dir"]).arg(built::libraries());
    command.args(["sh", "-c", "echo \"${RNIC_TREE:-nowhere}\""]);
    command.env("RNIC_SOCKET", daemon.socket());
    assert_eq!(Process::start(command).succeed(), ["nowhere"]);
}

/// Returns `rnic-run` with options, for a running daemon.
fn rnic_run(daemon: &Daemon, options: &[&str]) -> Command {
    let mut command = Command::new(built::program("rnic-run"));
    command.args(["--no-start", "--lib-dir"]).arg(built::libraries()).args(options);
    command.env("RNIC_SOCKET", daemon.socket()).env_remove("RNIC_DEVICES");
    command.env_remove("LD_PRELOAD").env_remove("RNIC_TREE");
    command
}

/// Runs a shell script and returns its output.
fn shell(daemon: &Daemon, options: &[&str], script: &str) -> Vec<String> {
    let mut command = rnic_run(daemon, options);
    command.args(["bash", "-c", &format!("set -e; {script}")]);
    Process::start(command).succeed()
}

#[test]
fn later_devices_have_files() {
    let daemon = Daemon::start("");
    let ctl = built::program("rnicctl");
    let list = "ls /sys/class/infiniband; echo ${RNIC_DEVICES-all}";
    let script = format!("{list}; {ctl} device add later; {list}");
    assert_eq!(shell(&daemon, &[], &script), ["rnicd1", "all", "later", "rnicd1", "all"]);
}

const DEVICE: &str = "/sys/devices/rnicd/rnicd1/infiniband/rnicd1";

#[test]
fn tree_calls_behave_as_in_sysfs() {
    let scratch = tempfile::tempdir().unwrap();
    let program = scratch.path().join("sysfs");
    let mut compiler = Command::new("cc");
    compiler.args(["-Wall", "-Werror", "-o"]).arg(&program);
    compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sysfs.c"));
    assert!(compiler.status().expect("a C compiler").success());
    let daemon = Daemon::start("");
    let mut command = rnic_run(&daemon, &[]);
    command.arg(&program);
    assert_eq!(Process::start(command).succeed(), ["done"]);
}

#[test]
fn shell_and_tools_walk_in_the_tree() {
    let daemon = Daemon::start("");
    let folder = "/sys/class/infiniband";
    for (script, lines) in [
        (
            "cd /sys/class/infiniband/rnicd1; pwd; pwd -P; /bin/pwd",
            &[&*format!("{folder}/rnicd1"), DEVICE, DEVICE][..],
        ),
        ("readlink -f /sys/class/infiniband/rnicd1", &[DEVICE]),
        ("cat $(readlink -f /sys/class/infiniband/rnicd1)/node_type", &["1: CA"]),
        ("realpath /sys/class/infiniband/rnicd1/device", &["/sys/devices/rnicd/rnicd1"]),
        ("cd /sys/class/infiniband; realpath rnicd1; cat rnicd1/node_type", &[DEVICE, "1: CA"]),
        (
            "readlink /sys/class/infiniband/rnicd1",
            &["../../devices/rnicd/rnicd1/infiniband/rnicd1"],
        ),
        ("for d in /sys/class/infiniband/*; do echo $d; done", &["/sys/class/infiniband/rnicd1"]),
        ("test -d /sys/class/infiniband/rnicd1/; test -L /sys/class/infiniband/rnicd1", &[]),
        (
            "ls -l /sys/class/infiniband 2>&1 | grep -o 'rnicd1 ->.*\\|ls:.*'",
            &["rnicd1 -> ../../devices/rnicd/rnicd1/infiniband/rnicd1"],
        ),
        (
            "ls -lR /sys/class/infiniband/rnicd1/ports /dev/infiniband 2>&1 | grep -c ls: || true",
            &["0"],
        ),
        (
            "find /sys/class/infiniband/ /dev/infiniband | LC_ALL=C sort",
            &[
                "/dev/infiniband",
                "/dev/infiniband/rdma_cm",
                "/dev/infiniband/uverbs0",
                "/sys/class/infiniband/",
                "/sys/class/infiniband/rnicd1",
            ],
        ),
        (
            "find -L /sys/class/infiniband -maxdepth 2 -name node_type",
            &["/sys/class/infiniband/rnicd1/node_type"],
        ),
        (
            "cd /sys/class; ls infiniband; cd infiniband; test -d ../net; cat ../infiniband_verbs/uverbs0/ibdev",
            &["rnicd1", "rnicd1"],
        ),
        (
            "ls /sys/class/infiniband/../infiniband; test -d /sys/class/infiniband/../net",
            &["rnicd1"],
        ),
        ("cat /sys//class/./infiniband//rnicd1/node_type", &["1: CA"]),
        ("readlink /proc/self/cwd", &[&*std::env::current_dir().unwrap().to_string_lossy()]),
        (
            "cd /sys/class/infiniband/rnicd1/ports; readlink /proc/self/cwd",
            &[&*format!("{DEVICE}/ports")],
        ),
    ] {
        assert_eq!(shell(&daemon, &[], script), lines, "{script}");
    }
    if Command::new("ibstatus").arg("-h").output().is_err() {
        return omit("ibstatus is not installed (Debian package infiniband-diags)");
    }
    let status = shell(&daemon, &[], "ibstatus").join("\n");
    assert!(status.contains("'rnicd1'") && status.contains("ACTIVE"), "{status}");
    assert!(!status.contains("rnicd0"), "{status}");
}

#[test]
fn python_walks_in_the_tree() {
    if Command::new("python3").arg("--version").output().is_err() {
        return omit("python3 is not installed");
    }
    let daemon = Daemon::start("");
    let text = "import glob, os, pathlib\n\
                folder = '/sys/class/infiniband'\n\
                print(os.listdir(folder), [at for at, _, _ in os.walk(folder)])\n\
                print(pathlib.Path(folder, 'rnicd1').resolve(), glob.glob(folder + '/*'))\n\
                os.chdir(folder + '/rnicd1')\n\
                print(os.getcwd(), os.path.realpath('ports/1'), open('node_type').read().strip())\n\
                print([names for _, names, _, _ in os.fwalk('ports/1')][0][0] != '')\n";
    let mut command = rnic_run(&daemon, &[]);
    command.args(["python3", "-c", text]);
    let folder = "/sys/class/infiniband";
    let expected = [
        format!("['rnicd1'] ['{folder}']"),
        format!("{DEVICE} ['{folder}/rnicd1']"),
        format!("{DEVICE} {DEVICE}/ports/1 1: CA"),
        "True".to_owned(),
    ];
    assert_eq!(Process::start(command).succeed(), expected);
}

#[test]
fn tree_has_the_devices_of_the_program() {
    let daemon = Daemon::start("");
    let script = "cd /sys/class; echo $(ls infiniband infiniband_verbs /dev/infiniband)";
    let of = |uverbs, name| {
        format!(
            "/dev/infiniband: rdma_cm uverbs{uverbs} infiniband: {name} \
             infiniband_verbs: abi_version uverbs{uverbs}"
        )
    };
    let both = "/dev/infiniband: rdma_cm uverbs0 uverbs1 infiniband: rnicd0 rnicd1 \
                infiniband_verbs: abi_version uverbs0 uverbs1";
    for (options, expected) in [
        (&[][..], &*of(0, "rnicd1")),
        (&["--devices", "rnicd0"], &of(1, "rnicd0")),
        (&["--devices", "rnicd0,rnicd1"], both),
    ] {
        assert_eq!(shell(&daemon, options, script), [expected], "{options:?}");
    }
    // Sets of several devices have files too, in any order. With an unknown name, all are shown.
    assert!(
        Command::new(built::program("rnicctl"))
            .env("RNIC_SOCKET", daemon.socket())
            .args(["device", "add", "third"])
            .status()
            .unwrap()
            .success()
    );
    let list = "ls /sys/class/infiniband";
    for (devices, expected) in [
        ("third,rnicd0", &["rnicd0", "third"][..]),
        (" rnicd1, third", &["rnicd1", "third"]),
        ("rnicd1,rnicd0,third", &["rnicd0", "rnicd1", "third"]),
        ("rnicd0,mlx5_0", &["rnicd0", "rnicd1", "third"]),
    ] {
        let script = format!("RNIC_DEVICES='{devices}' {list}");
        assert_eq!(shell(&daemon, &[], &script), expected, "{devices:?}");
    }
    let devices = ["--devices", "third,rnicd0"];
    assert_eq!(shell(&daemon, &devices, list), ["rnicd0", "third"]);
    let siw = Daemon::start("[wired]\nprofile = \"siw\"\n");
    assert_eq!(shell(&siw, &["--as", "siw"], script), [of(0, "rnicd0")]);
    // A device that does not exist has no files, just as verbs lists no such device.
    let other = "RNIC_DEVICES=mlx5_0 ls /sys/class/infiniband 2>&1 || echo none";
    assert!(shell(&daemon, &[], other).concat().ends_with("none"));
    let outside = "RNIC_DEVICES=../.. ls /sys/class/infiniband";
    assert_eq!(shell(&daemon, &[], outside), ["rnicd0", "rnicd1", "third"]);
}
