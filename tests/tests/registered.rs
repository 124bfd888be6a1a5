//! Registered memory of C verbs programs: a region changes nothing that the program observes.
//!
//! The programs are in `registered/` and run under `rnic-run`: as the daemon's user, for which
//! workers copy, and as another user, for which the library copies. The latter needs root.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rnic_tests::daemon::Daemon;
use rnic_tests::{Process, built, copy_files, omit, verbs};
use tempfile::TempDir;

/// A program of `registered/` with its own daemon.
struct Scene {
    daemon: Daemon,
    /// `rnic-run`, and the libraries.
    run: PathBuf,
    libraries: PathBuf,
    program: PathBuf,
    /// User of the program, if different from the daemon's.
    stranger: Option<u32>,
    scratch: TempDir,
}

const RUN: &str = "rnic-run";
/// A user that differs from this one.
const STRANGER: u32 = 61_019;

impl Scene {
    /// Builds the program and starts a daemon. Returns `None` if the headers for the program are
    /// missing.
    fn new(source: &str) -> Option<Scene> {
        let scratch = tempfile::tempdir().unwrap();
        let program = verbs::program(&format!("tests/registered/{source}"), scratch.path())?;
        let daemon = Daemon::start("[control]\nmode = \"0666\"\n");
        let run = built::program(RUN).into();
        let libraries = built::libraries().to_owned();
        Some(Scene { daemon, run, libraries, program, stranger: None, scratch })
    }

    /// Like [`Scene::new`], with a program of another user. Returns `None` if this test does not
    /// run as root.
    fn of_stranger(source: &str) -> Option<Scene> {
        if !rustix::process::getuid().is_root() {
            omit("not root: programs of other users are not tested");
            return None;
        }
        let mut scene = Scene::new(source)?;
        std::fs::set_permissions(scene.scratch.path(), Permissions::from_mode(0o755)).unwrap();
        scene.run = scene.scratch.path().join("rnic-run");
        copy_files(built::program(RUN), &scene.run);
        scene.libraries = verbs::directory_for_all(&scene.daemon);
        scene.stranger = Some(STRANGER);
        Some(scene)
    }

    /// Returns a program of the daemon's user, and one of another user.
    fn both(source: &str) -> impl Iterator<Item = Scene> {
        Scene::new(source).into_iter().chain(Scene::of_stranger(source))
    }

    /// Returns a command that runs the program under `rnic-run`, started by `words`.
    fn command(&self, words: &[&Path], part: &[&str]) -> Command {
        let ids = self.stranger.map(|id| [format!("--reuid={id}"), format!("--regid={id}")]);
        let user: Vec<&Path> = ids
            .iter()
            .flat_map(|[user, group]| ["setpriv", user, group, "--clear-groups"].map(Path::new))
            .collect();
        let all = [words, &user, &[&*self.run]].concat();
        let mut command = Command::new(all[0]);
        command.args(&all[1..]).arg("--no-start").arg("--lib-dir").arg(&self.libraries);
        command.arg(&self.program).args(part);
        command.env("RNIC_SOCKET", self.daemon.socket()).env_remove("RNIC_LOG");
        command
    }

    /// Runs parts of the program.
    fn run(&self, parts: &[&str]) {
        for part in parts {
            self.run_command(self.command(&[], &[part]));
        }
    }

    fn run_command(&self, command: Command) {
        match &Process::start(command).succeed()[..] {
            [said] if said == "done" => {}
            [said] if said.starts_with("left out: ") => omit(said),
            said => panic!("{said:?}"),
        }
        self.daemon.is_empty();
    }
}

/// Runs parts of a program.
fn run(source: &str, parts: &[&str]) {
    for scene in Scene::both(source) {
        scene.run(parts);
    }
}

#[test]
fn io_uring_and_the_program_see_one_memory() {
    run("calls.c", &["uring"]);
}

#[test]
fn aio_and_the_program_see_one_memory() {
    run("calls.c", &["aio"]);
}

#[test]
fn pages_in_pipes_and_futexes_stay() {
    run("calls.c", &["pages"]);
}

#[test]
fn no_store_of_a_thread_is_lost() {
    run("calls.c", &["threads"]);
}

#[test]
fn children_of_any_kind_have_a_snapshot() {
    run("children.c", &["snapshots"]);
}

#[test]
fn a_child_of_vfork_borrows_the_memory() {
    run("children.c", &["borrowed"]);
}

#[test]
fn a_child_leaves_regions_of_its_parent_alone() {
    run("children.c", &["own_device"]);
}

#[test]
fn page_tables_are_unchanged_by_a_region() {
    run("pages.c", &["scenarios"]);
}

#[test]
fn pages_without_the_right_are_refused() {
    run("pages.c", &["refusals"]);
}

#[test]
fn later_protection_does_not_bind_the_device() {
    // Copies by the library respect the protection, so only workers are tested.
    if let Some(scene) = Scene::new("pages.c") {
        scene.run(&["later_protection"]);
    }
}

#[test]
fn random_operations_match_those_without_regions() {
    for scene in Scene::both("random.c") {
        for seed in 1..=6 {
            scene.run_command(scene.command(&[], &["operations", &seed.to_string()]));
        }
    }
}

/// 600 MiB in a cgroup of 1 GiB, if a cgroup can be created. Otherwise the program checks only its
/// own resident memory.
#[test]
fn a_large_region_takes_no_memory() {
    let Some(scene) = Scene::new("pages.c") else { return };
    let cgroup = Cgroup::new(1 << 30);
    let enter = match &cgroup {
        Some(cgroup) => {
            format!("echo $$ > '{}' && exec \"$@\"", cgroup.at("cgroup.procs").display())
        }
        None => "exec \"$@\"".to_owned(),
    };
    let words = ["/bin/sh", "-c", &enter, "sh"].map(Path::new);
    scene.run_command(scene.command(&words, &["large"]));
}

/// A control group with a memory limit.
struct Cgroup {
    folder: PathBuf,
}

impl Cgroup {
    /// Creates a v2 or v1 cgroup. Returns `None` if that is refused.
    fn new(bytes: u64) -> Option<Cgroup> {
        let name = format!("rnic-test-{}", std::process::id());
        let kinds = [("", "memory.max"), ("memory", "memory.limit_in_bytes")];
        kinds.iter().find_map(|(hierarchy, limit)| {
            let folder = Path::new("/sys/fs/cgroup").join(hierarchy).join(&name);
            std::fs::create_dir(&folder).ok()?;
            let cgroup = Cgroup { folder };
            // Must not be created: the folder may belong to no cgroup hierarchy.
            let mut limit = std::fs::File::options().write(true).open(cgroup.at(limit)).ok()?;
            limit.write_all(bytes.to_string().as_bytes()).ok()?;
            Some(cgroup)
        })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Fails while the kernel still holds the last process. Then the empty cgroup remains.
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// A program that forks itself: Python's `multiprocessing` with `fork`.
#[test]
fn python_workers_are_forked_beside_a_region() {
    let daemon = Daemon::start("");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/registered.py");
    let mut command = Command::new("python3");
    command.arg(script).env("LD_LIBRARY_PATH", built::libraries());
    command.env("RNIC_SOCKET", daemon.socket());
    assert_eq!(Process::start(command).succeed(), ["done"]);
    daemon.is_empty();
}
