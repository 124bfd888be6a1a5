//! `rnicctl system`: installation below a directory, and in a container made of bind mounts.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rnic_tests::{built, copy_files, omit, output_text};
use rustix::process::geteuid;
use serde_json::Value;
use tempfile::TempDir;

/// A folder with an unpacked archive and a root.
struct Place {
    folder: TempDir,
}

impl Place {
    /// Creates an archive in which only `rnicctl` is a program. The other files are text.
    fn new() -> Self {
        let place = Place::with(&["rnicctl"]);
        for name in ["bin/rnicd", "bin/rnic-run"] {
            fs::write(place.at("archive").join(name), format!("{name} 1\n")).unwrap();
        }
        for name in LIBRARIES {
            fs::write(place.at("archive/lib/rnicd").join(name), format!("{name} 1\n")).unwrap();
        }
        place
    }

    /// Creates an archive with these programs and no libraries.
    fn with(programs: &[&str]) -> Self {
        let folder = TempDir::with_prefix("rnic-system-").unwrap();
        let place = Place { folder };
        fs::set_permissions(place.folder.path(), Permissions::from_mode(0o755)).unwrap();
        for name in ["root", "archive/bin", "archive/lib/rnicd"] {
            fs::create_dir_all(place.at(name)).unwrap();
        }
        for name in programs {
            copy_files(built::program(name), &place.at("archive/bin").join(name));
        }
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns a path below the root.
    fn root(&self, name: &str) -> PathBuf {
        self.at("root").join(name)
    }

    /// Creates a file below the root.
    fn file(&self, name: &str, text: &str) {
        let path = self.root(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn system(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(self.at("archive/bin/rnicctl"));
        command.arg("system").args(arguments).arg("--root").arg(self.at("root"));
        command.output().unwrap()
    }

    fn succeeds(&self, arguments: &[&str]) -> String {
        let output = self.system(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", output_text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    fn fails(&self, arguments: &[&str]) -> String {
        let output = self.system(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", output_text(&output));
        output_text(&output)
    }

    /// Returns all files of the root with type, mode and content.
    fn snapshot(&self) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
        let mut all = BTreeMap::new();
        add_to(&mut all, &self.at("root"));
        all
    }
}

fn add_to(all: &mut BTreeMap<PathBuf, (u32, Vec<u8>)>, folder: &Path) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let found = fs::symlink_metadata(&path).unwrap();
        let content = if found.is_symlink() {
            fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
        } else if found.is_dir() {
            add_to(all, &path);
            Vec::new()
        } else {
            fs::read(&path).unwrap()
        };
        all.insert(path, (found.mode(), content));
    }
}

const LIBRARIES: [&str; 3] = ["libibverbs.so.1", "librdmacm.so.1", "librnic_preload.so"];
const USERS: &str = "root:x:0:0:root:/root:/bin/sh\nlast:x:999:999::/:/bin/sh\n";

#[test]
fn uninstall_restores_the_root() {
    let place = Place::new();
    // The second file lacks its last newline.
    place.file("etc/passwd", USERS);
    place.file("etc/group", "root:x:0:\nlast:x:999:");
    fs::create_dir_all(place.root("usr/local/bin")).unwrap();
    symlink("local", place.root("usr/other")).unwrap();
    let before = place.snapshot();
    let plan = place.succeeds(&["install", "--commands", "--dry-run"]);
    assert_eq!(place.snapshot(), before, "--dry-run has changed something");
    for line in ["/usr/local/bin/rnicd from ", "/usr/local/sbin/modprobe -> ../bin/rnicctl"] {
        assert!(plan.contains(line), "{plan}");
    }
    place.succeeds(&["install", "--commands", "--allow", "everyone"]);
    let text = |name: &str| fs::read_to_string(place.root(name)).unwrap();
    assert_eq!(text("etc/ld.so.conf.d/00-rnicd.conf"), "/usr/local/lib/rnicd\n");
    assert_eq!(text("etc/group"), "root:x:0:\nlast:x:999:\nrnicd:*:998:\n");
    assert!(
        text("etc/passwd").starts_with(USERS) && text("etc/passwd").contains("\nrnicd:*:998:998:")
    );
    assert!(text("etc/rnicd/rnicd.toml").contains("mode = \"0666\""));
    assert!(text("usr/lib/systemd/system/rnicd.socket").contains("SocketMode=0666"));
    let unit = text("usr/lib/systemd/system/rnicd.service");
    assert!(
        unit.contains("ExecStart=/usr/local/bin/rnicd run") && !unit.contains("/usr/bin/rnicd")
    );
    for name in ["lib/rnicd/bin/rdma", "lib/rnicd/bin/modprobe", "sbin/rmmod", "bin/rdma"] {
        let program = fs::canonicalize(place.root("usr/local").join(name)).unwrap();
        assert_eq!(program, fs::canonicalize(place.root("usr/local/bin/rnicctl")).unwrap());
    }
    let mode = |name: &str| fs::metadata(place.root(name)).unwrap().mode() & 0o7777;
    assert_eq!((mode("usr/local/bin/rnicd"), mode("usr/local/lib/rnicd")), (0o755, 0o755));
    assert_eq!(mode("usr/local/lib/rnicd/libibverbs.so.1"), 0o644);
    assert!(place.succeeds(&["status"]).contains("installed"));
    // An administrator may add members.
    place.file("etc/group", &text("etc/group").replace("rnicd:*:998:", "rnicd:*:998:alice"));
    place.succeeds(&["uninstall"]);
    assert_eq!(place.snapshot(), before);
    assert!(place.fails(&["uninstall"]).contains("is not installed here"));
}

#[test]
fn files_of_others_are_never_replaced() {
    let place = Place::new();
    place.file("usr/local/bin/rnic-run", "of the administrator\n");
    place.file("etc/ld.so.conf.d/00-rnicd.conf", "/opt\n");
    symlink("elsewhere", place.root("usr/local/bin/rdma")).unwrap();
    let before = place.snapshot();
    let text = place.fails(&["install", "--commands"]);
    for name in ["/usr/local/bin/rnic-run", "/usr/local/bin/rdma", "/00-rnicd.conf"] {
        assert!(text.contains(name), "{name}: {text}");
    }
    assert_eq!(place.snapshot(), before);
    // Equal files and any configuration are used, and left in place.
    place.file("usr/local/bin/rnic-run", "bin/rnic-run 1\n");
    place.file("etc/ld.so.conf.d/00-rnicd.conf", "/usr/local/lib/rnicd\n");
    place.file("etc/rnicd/rnicd.toml", "[control]\nmode = \"0600\"\n");
    let before = place.snapshot();
    let text = place.succeeds(&["install"]);
    assert!(text.contains("kept       /etc/rnicd/rnicd.toml"), "{text}");
    place.succeeds(&["uninstall"]);
    assert_eq!(place.snapshot(), before);
}

#[test]
fn second_install_is_an_upgrade() {
    let place = Place::new();
    place.file("etc/passwd", USERS);
    place.file("etc/group", "root:x:0:\n");
    let before = place.snapshot();
    place.succeeds(&["install", "--commands"]);
    fs::write(place.at("archive/bin/rnicd"), "bin/rnicd 2\n").unwrap();
    fs::remove_file(place.at("archive/bin/rnic-run")).unwrap();
    place.succeeds(&["install", "--allow", "everyone"]);
    let exists = |name: &str| place.root(name).exists();
    let text = |name: &str| fs::read_to_string(place.root(name)).unwrap();
    assert_eq!(text("usr/local/bin/rnicd"), "bin/rnicd 2\n");
    assert!(text("etc/rnicd/rnicd.toml").contains("0666"));
    assert!(!exists("usr/local/bin/rnic-run") && !exists("usr/local/sbin"));
    assert_eq!(text("etc/group").matches("rnicd").count(), 1);
    // The installed program can install itself again, and keeps a changed configuration.
    place.file("etc/rnicd/rnicd.toml", "# changed\n");
    let own = place.root("usr/local/bin/rnicctl");
    let mut again = Command::new(own);
    again.args(["system", "install", "--root"]).arg(place.at("root"));
    let output = again.output().unwrap();
    assert!(
        output.status.success() && output_text(&output).contains("kept "),
        "{}",
        output_text(&output)
    );
    // Changed files stay, with an error.
    let text = place.fails(&["uninstall"]);
    assert!(text.contains("/etc/rnicd/rnicd.toml (changed since it was installed)"), "{text}");
    fs::remove_dir_all(place.root("etc/rnicd")).unwrap();
    assert_eq!(place.snapshot(), before);
}

#[test]
fn failed_installation_is_undone() {
    let place = Place::new();
    place.file("etc/passwd", USERS);
    place.file("etc/group", "root:x:0:\n");
    place.file("etc/rnicd/other", "");
    if geteuid().is_root() {
        // The libraries of this archive are text files, so the loader cannot find them.
        place.file("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n");
    } else {
        let read_only = Permissions::from_mode(0o555);
        fs::set_permissions(place.root("etc/rnicd"), read_only).unwrap();
    }
    let before = place.snapshot();
    let text = place.fails(&["install", "--commands"]);
    assert!(text.contains("the loader finds") || text.contains("Permission denied"), "{text}");
    assert_eq!(place.snapshot(), before);
    // A failed upgrade leaves the earlier installation.
    if geteuid().is_root() {
        fs::remove_file(place.root("etc/ld.so.conf")).unwrap();
        place.succeeds(&["install", "--commands"]);
        place.file("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n");
        fs::write(place.at("archive/bin/rnicd"), "bin/rnicd 2\n").unwrap();
        let before = place.snapshot();
        place.fails(&["install", "--prefix", "/opt/rnicd"]);
        assert_eq!(place.snapshot(), before);
        fs::remove_file(place.root("etc/ld.so.conf")).unwrap();
        place.succeeds(&["uninstall"]);
    }
}

#[test]
fn killed_installation_can_be_removed() {
    let place = Place::new();
    place.file("etc/passwd", USERS);
    place.file("etc/group", "root:x:0:\n");
    let before = place.snapshot();
    place.succeeds(&["install"]);
    // The state after a kill: an incomplete manifest, one file missing, and one file not yet
    // renamed.
    let manifest = place.root("var/lib/rnicd/installed");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replace("\"complete\": true", "\"complete\": false")).unwrap();
    fs::remove_file(place.root("usr/local/bin/rnicd")).unwrap();
    place.file("usr/local/bin/.rnicd.rnicd-new", "half");
    let text = place.succeeds(&["status"]);
    assert!(
        text.contains("incompletely") && text.contains("/usr/local/bin/rnicd (missing)"),
        "{text}"
    );
    place.succeeds(&["uninstall"]);
    assert_eq!(place.snapshot(), before);
}

#[test]
fn refused_options_change_nothing() {
    let place = Place::new();
    place.file("etc/group", "root:x:0:\n");
    symlink("/tmp", place.root("usr")).unwrap();
    let before = place.snapshot();
    for (arguments, words) in [
        (&["install", "--prefix", "relative"][..], "absolute path"),
        (&["install", "--prefix", "/a b"], "must not contain"),
        (&["install", "--prefix", "/a/../b"], "without `..`"),
        (&["install", "--allow", "@nobody-there"], "no such group"),
        (&["install"], "out of --root"),
        (&["uninstall"], "is not installed here"),
        (&["status"], "is not installed here"),
        (&["start"], "is not installed here"),
    ] {
        let text = place.fails(arguments);
        assert!(text.contains(words) && text.lines().count() == 1, "{arguments:?}: {text}");
    }
    for wrong in [&["install", "--allow", "alice"][..], &["install", "--allow", "@"], &[]] {
        assert_eq!(place.system(wrong).status.code(), Some(2), "{wrong:?}");
    }
    assert_eq!(place.snapshot(), before);
    fs::remove_file(place.at("archive/lib/rnicd/libibverbs.so.1")).unwrap();
    assert!(place.fails(&["install"]).contains("libibverbs.so.1"));
}

#[test]
fn files_out_of_root_are_not_opened() {
    let place = Place::new();
    place.file("etc/group", "root:x:0:\n");
    let outside = place.at("outside");
    fs::write(&outside, USERS).unwrap();
    for name in ["etc/passwd", "etc/ld.so.preload"] {
        let nothing = place.at("nothing");
        symlink(if name == "etc/passwd" { &outside } else { &nothing }, place.root(name)).unwrap();
        let before = place.snapshot();
        let text = place.fails(&["install", "--preload"]);
        assert!(text.contains(name) && text.contains("out of --root"), "{text}");
        assert_eq!(place.snapshot(), before);
        fs::remove_file(place.root(name)).unwrap();
        assert!(!nothing.exists());
    }
    fs::create_dir_all(place.root("var/lib/rnicd")).unwrap();
    symlink(&outside, place.root("var/lib/rnicd/installed.new")).unwrap();
    place.succeeds(&["install"]);
    assert_eq!(fs::read_to_string(&outside).unwrap(), USERS);
}

#[test]
fn other_prefix_replaces_the_earlier_one() {
    let place = Place::new();
    place.file("usr/local/other", "");
    symlink("local", place.root("usr/other")).unwrap();
    for text in [None, Some("/lib/x.so"), Some("/lib/x.so\n")] {
        if let Some(text) = text {
            place.file("etc/ld.so.preload", text);
        }
        let before = place.snapshot();
        place.succeeds(&["install", "--preload"]);
        // Another path of the same folder.
        place.succeeds(&["install", "--preload", "--prefix", "/usr/other"]);
        assert!(place.root("usr/local/bin/rnicd").exists());
        assert!(place.root("usr/local/lib/rnicd/libibverbs.so.1").exists());
        place.succeeds(&["install", "--preload", "--prefix", "/opt/rnicd"]);
        assert!(!place.root("usr/local/bin/rnicd").exists());
        let list = fs::read_to_string(place.root("etc/ld.so.preload")).unwrap();
        let lines: Vec<&str> = list.lines().filter(|line| line.contains("rnicd")).collect();
        assert_eq!(lines, ["/opt/rnicd/lib/rnicd/librnic_preload.so"]);
        place.succeeds(&["uninstall"]);
        assert_eq!(place.snapshot(), before);
    }
}

#[test]
fn replaced_files_do_not_stop_uninstall() {
    let place = Place::new();
    place.file("etc/group", "root:x:0:\n");
    place.succeeds(&["install"]);
    // The administrator moves the configuration, and replaces a program with a folder and a folder
    // with a file.
    fs::rename(place.root("etc/rnicd"), place.root("etc/other")).unwrap();
    symlink("other", place.root("etc/rnicd")).unwrap();
    fs::rename(place.root("etc/other/rnicd.toml"), place.root("etc/real.toml")).unwrap();
    symlink("../real.toml", place.root("etc/other/rnicd.toml")).unwrap();
    let text = place.succeeds(&["install"]);
    assert!(text.contains("kept       /etc/rnicd/rnicd.toml"), "{text}");
    fs::remove_file(place.root("usr/local/bin/rnicd")).unwrap();
    fs::create_dir(place.root("usr/local/bin/rnicd")).unwrap();
    fs::remove_dir_all(place.root("usr/local/lib/rnicd/bin")).unwrap();
    fs::write(place.root("usr/local/lib/rnicd/bin"), "").unwrap();
    let text = place.fails(&["uninstall"]);
    for name in ["bin/rnicd", "lib/rnicd/bin", "/etc/rnicd/rnicd.toml", "/etc/rnicd"] {
        assert!(text.contains(&format!("{name} (changed")), "{name}: {text}");
    }
    assert!(place.fails(&["uninstall"]).contains("is not installed here"));
}

#[test]
fn umask_does_not_hide_the_installation() {
    let place = Place::new();
    let mut command = Command::new("sh");
    command.args(["-c", "umask 077; exec \"$@\"", "sh"]).arg(place.at("archive/bin/rnicctl"));
    command.args(["system", "install", "--preload", "--root"]).arg(place.at("root"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    for name in ["etc/ld.so.preload", "var/lib/rnicd/installed", "etc/rnicd/rnicd.toml"] {
        assert_eq!(fs::metadata(place.root(name)).unwrap().mode() & 0o777, 0o644, "{name}");
    }
    assert_eq!(fs::metadata(place.root("etc/rnicd")).unwrap().mode() & 0o777, 0o755);
}

/// Returns a container with the distribution's files, and all of rnicd in `/archive`.
fn container() -> Option<Place> {
    if !geteuid().is_root() {
        omit("only root can make a container in which programs run as root");
        return None;
    }
    for program in ["/usr/bin/ibv_devices", "/usr/bin/ib_write_bw"] {
        if !Path::new(program).exists() {
            omit(&format!("{program} is not installed (Debian packages ibverbs-utils, perftest)"));
            return None;
        }
    }
    let place = Place::with(&["rnicd", "rnicctl", "rnic-run"]);
    copy_files(built::libraries(), &place.at("archive/lib/rnicd/all"));
    for name in LIBRARIES {
        let from = place.at("archive/lib/rnicd/all").join(name);
        fs::rename(from, place.at("archive/lib/rnicd").join(name)).unwrap();
    }
    Some(place)
}

impl Place {
    /// Runs a script as root in a new container. Returns its output in sections: the text after
    /// each line `== NAME`.
    fn run(&self, script: &str) -> BTreeMap<String, String> {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "sh", "-c"]);
        command.arg(CONTAINER).arg("sh").arg(self.folder.path());
        command.args(["sh", "-c"]).arg(format!("{FUNCTIONS}{script}"));
        let output = command.output().unwrap();
        let text = output_text(&output);
        assert!(output.status.success(), "{text}");
        let sections = text.split("== ").skip(1);
        let section = |text: &str| {
            let (name, rest) = text.split_once('\n').unwrap();
            (name.to_owned(), rest.to_owned())
        };
        sections.map(section).collect()
    }
}

/// Makes a container with the root `$1/root`, and runs the other arguments in it.
const CONTAINER: &str = include_str!("system/container.sh");
/// Functions for the scripts that run in the container.
const FUNCTIONS: &str = include_str!("system/functions.sh");

#[test]
fn whole_container_gets_the_device() {
    let Some(place) = container() else { return };
    let found = place.run(include_str!("system/whole.sh"));
    let section = |name: &str| found.get(name).unwrap_or_else(|| panic!("{name}: {found:#?}"));
    assert!(section("install").contains("devices    rnicd0, rnicd1"), "{found:#?}");
    assert!(section("devices").contains("rnicd1"), "{found:#?}");
    // The line with the results of perftest starts with the message size.
    assert!(section("bandwidth").contains("65536"), "{found:#?}");
    assert!(section("member").contains("65536"), "{found:#?}");
    let refused = section("others");
    assert!(refused.contains("/run/rnicd/rnicd.sock") && refused.contains("denied"), "{found:#?}");
    assert!(section("modprobe").contains("loaded\n"), "{found:#?}");
    assert!(section("modprobe").contains("no other modprobe"), "{found:#?}");
    assert!(section("link").contains("link rnicd1/1 state ACTIVE physical_state LINK_UP netdev "));
    let json: Value = serde_json::from_str(section("json")).unwrap();
    assert_eq!(json[0]["ifname"], "rnicd1", "{json}");
    let added = section("added");
    assert!(added.contains("link rxe0/1 state ACTIVE"), "{found:#?}");
    assert!(added.contains("rxe0 in verbs\nrxe0 deleted\nrefused\n"), "{found:#?}");
    assert_eq!(section("difference"), "", "{found:#?}");
    assert_eq!(section("loader"), "", "{found:#?}");
}

/// A job for the kernel's rxe.
#[test]
fn profile_rxe_makes_devices_of_rxe() {
    let Some(place) = container() else { return };
    let found = place.run(include_str!("system/rxe.sh"));
    let section = |name: &str| found.get(name).unwrap_or_else(|| panic!("{name}: {found:#?}"));
    assert!(section("first").contains("rxe0 "), "{found:#?}");
    let line = "link rxe0/1 state ACTIVE physical_state LINK_UP netdev lo \n";
    let job = section("job");
    assert_eq!(job.matches(line).count(), 2, "{found:#?}");
    assert!(job.contains("there is already a device rxe0") && !job.contains("rnicd"), "{found:#?}");
    let limits = section("limits");
    for words in ["max_cqe:\t\t\t32767", "GID[  0]:\t\tfe80:", "::ffff:127.0.0.1"] {
        assert!(limits.contains(words), "{words}: {found:#?}");
    }
    assert_eq!(section("pingpong").matches("10 iters in ").count(), 2, "{found:#?}");
}

#[test]
fn profile_is_checked_before_the_installation() {
    let place = Place::new();
    for (name, words) in [
        ("rxf", "no profile \"rxf\"; known are rnicd, rxe, "),
        ("./tiny.toml", "the path must be absolute"),
    ] {
        let output = place.system(&["install", "--profile", name]);
        assert_eq!(output.status.code(), Some(2), "{name}: {}", output_text(&output));
        assert!(output_text(&output).contains(words), "{name}: {}", output_text(&output));
    }
    for name in ["rxe", "/etc/rnicd/a \"b\".toml"] {
        place.succeeds(&["install", "--profile", name]);
        let text = fs::read_to_string(place.root("etc/rnicd/rnicd.toml")).unwrap();
        let config: toml::Table = text.parse().unwrap();
        assert_eq!(config["wired"]["profile"].as_str(), Some(name), "{text}");
    }
    place.succeeds(&["install"]);
    let text = fs::read_to_string(place.root("etc/rnicd/rnicd.toml")).unwrap();
    assert!(!text.contains("[wired]"), "{text}");
}

/// The GitHub action with the input `system`.
#[test]
fn action_gives_sudo_the_device() {
    let Some(place) = container() else { return };
    if Command::new("zstd").arg("--version").output().is_err() {
        return omit("zstd is not installed");
    }
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist/action");
    copy_files(scripts, &place.at("archive/action"));
    let found = place.run(include_str!("system/action.sh"));
    let section = |name: &str| found.get(name).unwrap_or_else(|| panic!("{name}: {found:#?}"));
    for line in ["device-name=rxe_7", "interface=lo", "ip=127.0.0.1"] {
        assert!(section("output").lines().any(|found| found == line), "{line}: {found:#?}");
    }
    let sudo = section("sudo");
    assert!(sudo.contains("rxe_7 ") && sudo.contains("link rxe_7/1 state ACTIVE"), "{found:#?}");
    assert!(section("bandwidth").contains("65536"), "{found:#?}");
    for line in ["::group::rnicctl why", "::group::tail -n 200 /var/log/rnicd.log"] {
        assert!(section("report").lines().any(|found| found == line), "{line}: {found:#?}");
    }
    assert!(section("again").contains("rxe_8 "), "{found:#?}");
}

#[test]
fn units_are_started_by_systemd() {
    let Some(place) = container() else { return };
    let found = place.run(include_str!("system/systemd.sh"));
    let section = |name: &str| found.get(name).unwrap_or_else(|| panic!("{name}: {found:#?}"));
    assert!(section("devices").contains("rnicd1"), "{found:#?}");
    assert!(section("users").contains("SocketMode=0666"), "{found:#?}");
    let calls = ["daemon-reload", "start rnicd.socket rnicd.service"].join("\n");
    let calls = format!("{calls}\nstop rnicd.service rnicd.socket\ndaemon-reload\n");
    assert_eq!(section("calls"), &calls, "{found:#?}");
    assert_eq!(section("difference"), "", "{found:#?}");
}

#[test]
fn devices_are_shown_in_sys_and_dev() {
    let Some(place) = container() else { return };
    let found = place.run(include_str!("system/shown.sh"));
    let section = |name: &str| found.get(name).unwrap_or_else(|| panic!("{name}: {found:#?}"));
    for how in ["mount", "preload"] {
        let shown = section(how);
        for line in ["rnicd1", "uverbs0", "4: ACTIVE", "lo"] {
            assert!(shown.lines().any(|found| found == line), "{how}, {line}: {found:#?}");
        }
    }
    if Path::new("/usr/bin/rdma").exists() {
        assert!(section("rdma").contains(": rxe0: pd 0 cq 0 qp 0 "), "{found:#?}");
    } else {
        omit("/usr/bin/rdma is not installed (Debian package iproute2)");
    }
    assert_eq!(section("difference"), "", "{found:#?}");
}

#[test]
fn daemon_that_does_not_start_undoes_all() {
    let Some(place) = container() else { return };
    let found = place.run(include_str!("system/undone.sh"));
    let section = |name: &str| found.get(name).unwrap_or_else(|| panic!("{name}: {found:#?}"));
    assert!(section("invalid").contains("the daemon did not start"), "{found:#?}");
    assert!(section("invalid").contains("no-such-key"), "{found:#?}");
    assert!(section("taken").contains("another daemon"), "{found:#?}");
    for folder in ["/home/user", "/home/all"] {
        let words = format!("other users than root can replace {folder}");
        assert!(section("owned").contains(&words), "{found:#?}");
    }
    assert_eq!(section("difference"), "", "{found:#?}");
}
