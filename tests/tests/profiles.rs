//! Profiles: the values that programs see, requests above a maximum, and the output of
//! `ibv_devinfo -v` as a profile.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rnic_client::Context;
use rnic_tests::{Daemon, Process, built, omit, ports, verbs};

/// A profile with low maxima and its own error numbers.
const SMALL: &str = r#"
device = "small0"
atomic_cap = "none"
max_mr_size = 1000
max_qp = 5
max_qp_wr = 100
max_sge = 3
max_inline_data = 33
max_cq = 6
max_cqe = 12
max_mr = 7
max_pd = 8
max_mw = 9
max_ah = 10
max_srq = 4
max_srq_wr = 50
max_srq_sge = 2
[errno]
max_qp = "EOVERFLOW"
max_cq = "EOVERFLOW"
max_pd = "ENOSPC"
max_ah = "EAGAIN"
"#;

/// Starts a daemon with a profile.
fn daemon(profile: &str) -> Daemon {
    let port = ports::unused_port();
    Daemon::start(&format!("[wired]\nprofile = {profile:?}\nport = {port}\n"))
}

/// Returns the output of `ibv_devinfo -v` for the device of a profile.
fn devinfo(daemon: &Daemon, device: &str) -> String {
    let mut command = verbs::command(Path::new("ibv_devinfo"), daemon);
    command.args(["-v", "-d", device]).env("RNIC_DEVICES", device);
    Process::start(command).succeed().join("\n")
}

fn has_devinfo() -> bool {
    let found = Command::new("ibv_devinfo").arg("--help").output().is_ok();
    if !found {
        omit("no ibv_devinfo here: Debian package ibverbs-utils");
    }
    found
}

/// Returns a text with single spaces between its words.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Runs `rnicctl profile`. Returns the exit status and the output.
fn rnicctl(arguments: &[&str], input: &str) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("input");
    fs::write(&file, input).unwrap();
    let mut command = Command::new(built::program("rnicctl"));
    command.arg("profile").args(arguments).stdin(fs::File::open(&file).unwrap());
    let output = command.stdout(Stdio::piped()).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

#[test]
fn maxima_of_a_file_are_obeyed() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/roce_limits.c", scratch.path()) else { return };
    let file = scratch.path().join("small.toml");
    fs::write(&file, SMALL).unwrap();
    let daemon = daemon(file.to_str().unwrap());
    let device = Context::open_at(daemon.socket()).unwrap().device().unwrap();
    assert_eq!((device.max_qps, device.max_wr_depth, device.max_srq_wr), (5, 100, 50));
    let mut command = verbs::command(&program, &daemon);
    command.env("INLINE", "33").env_remove("RNIC_DEVICES");
    command.envs([("QPs", "75"), ("CQs", "75"), ("PDs", "28"), ("AHs", "11")]);
    let said = Process::start(command).succeed();
    assert_eq!(said.last().map(String::as_str), Some("done"), "{said:#?}");
    assert!(said[0].starts_with("12 CQEs, 100 requests, 3 SGEs"), "{said:#?}");
    let mut why = Command::new(built::program("rnicctl"));
    let why = why.arg("--socket").arg(daemon.socket()).arg("why").output().unwrap();
    let why = words(&String::from_utf8(why.stdout).unwrap());
    let refused = format!("profile {}: max_qp = 5, asked for 6", file.display());
    assert!(why.contains(&refused), "{refused}\n{why}");
    daemon.is_empty();
}

#[test]
fn devinfo_shows_the_profile() {
    if !has_devinfo() {
        return;
    }
    let shown = devinfo(&daemon("mlx5"), "mlx5_0");
    let shown: Vec<String> = shown.lines().map(words).collect();
    for line in [
        "fw_ver: 22.36.1010",
        "vendor_id: 0x02c9",
        "vendor_part_id: 4125",
        "max_qp_rd_atom: 16",
        "local_ca_ack_delay: 16",
        "gid_tbl_len: 255",
        // Capabilities.
        "RC_RNR_NAK_GEN",
        "PORT_ACTIVE_EVENT",
        "SYS_IMAGE_GUID",
        // The limits of the daemon are lower.
        "max_qp_wr: 16384",
        "max_sge: 16",
    ] {
        assert!(shown.iter().any(|own| own == line), "{line}: {shown:#?}");
    }
    let gid = |index: usize, kind: &str| {
        let index = format!("GID[ {index}]:");
        shown.iter().any(|line| line.starts_with(&index) && line.ends_with(kind))
    };
    assert!(gid(0, "RoCE v1") && gid(1, "RoCE v2"), "{shown:#?}");
}

#[test]
fn a_profile_round_trips_through_devinfo() {
    if !has_devinfo() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (profile, device) in [
        ("rnicd", "rnicd1"),
        ("rxe", "rxe0"),
        ("siw", "rnicd0"),
        ("mlx5", "mlx5_0"),
        ("mlx4", "mlx4_0"),
        ("irdma", "irdma0"),
    ] {
        let before = devinfo(&daemon(profile), device);
        let (code, text) = rnicctl(&["from-devinfo", "-"], &before);
        assert_eq!(code, Some(0), "{text}");
        let file = dir.path().join(format!("{profile}.toml"));
        fs::write(&file, &text).unwrap();
        let after = devinfo(&daemon(file.to_str().unwrap()), device);
        assert_eq!(before, after, "{text}");
    }
}

#[test]
fn profile_commands_need_no_daemon() {
    let (code, list) = rnicctl(&["list"], "");
    assert!(code == Some(0) && list.contains("mlx5    NVIDIA ConnectX-6 Dx"), "{list}");
    let (code, text) = rnicctl(&["show", "siw"], "");
    assert!(code == Some(0) && text.contains("\nmax_sge = 6\n"), "{text}");
    for (arguments, input, why) in [
        (["show", "mlx9"], "", "no profile \"mlx9\"; known are rnicd, rxe"),
        (["show", "/nonexistent"], "", "/nonexistent: No such file"),
        (["from-devinfo", "-"], "x: y\n", "standard input: no line begins with \"hca_id:\""),
        (["from-devinfo", "/nonexistent"], "", "cannot read /nonexistent: No such file"),
    ] {
        let (code, said) = rnicctl(&arguments, input);
        assert!(code == Some(1) && said.contains(why), "{arguments:?}: {said}");
    }
}

/// `rnic-run --as` gives each profile a socket of its own.
#[test]
fn rnicctl_names_the_sockets_of_profiles() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["rnicd-rxe-0a1b2c3d.sock", "rnicd-rxe-0a1b2c3d.log", "other.sock"] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    let mut command = Command::new(built::program("rnicctl"));
    let socket = folder.path().join("rnicd.sock");
    let output = command.arg("status").env("RNIC_SOCKET", &socket).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let [first, hint] = lines[..] else { panic!("{text}") };
    assert!(first.starts_with("rnicctl: no RNIC daemon: "), "{text}");
    let there = folder.path().join("rnicd-rxe-0a1b2c3d.sock");
    assert_eq!(hint, format!("rnicctl: there is also RNIC_SOCKET={}", there.display()));
    assert_eq!(output.status.code(), Some(3));
}
