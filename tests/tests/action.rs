//! The scripts of the GitHub action, run as a runner does: inputs in the environment, results in
//! files.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rnic_tests::{built, omit};
use tempfile::TempDir;

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist/action").join(name)
}

/// A job of a runner.
struct Job {
    folder: TempDir,
}

impl Job {
    fn new() -> Self {
        let job = Job { folder: TempDir::with_prefix("rnic-action-").unwrap() };
        for file in ["env", "path", "output"] {
            fs::write(job.at(file), "").unwrap();
        }
        job
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes an archive with the layout of a release.
    fn archive(&self) -> PathBuf {
        let root = self.at("rnicd-0-test");
        fs::create_dir_all(root.join("bin")).unwrap();
        fs::create_dir_all(root.join("lib/rnicd")).unwrap();
        for name in ["rnicd", "rnicctl", "rnic-run"] {
            fs::copy(built::program(name), root.join("bin").join(name)).unwrap();
        }
        for name in ["libibverbs.so.1", "librdmacm.so.1", "librnic_preload.so"] {
            fs::copy(built::libraries().join(name), root.join("lib/rnicd").join(name)).unwrap();
        }
        let archive = self.at("rnicd.tar.zst");
        let mut tar = Command::new("tar");
        tar.args(["--zstd", "-cf"]).arg(&archive).arg("-C").arg(self.folder.path());
        assert!(tar.arg("rnicd-0-test").status().unwrap().success());
        archive
    }

    fn run(&self, name: &str, inputs: &[(&str, &str)]) -> Output {
        let mut command = Command::new("bash");
        command.arg(script(name)).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("RUNNER_TEMP", self.folder.path()).env("GITHUB_ENV", self.at("env"));
        command.env("GITHUB_PATH", self.at("path")).env("GITHUB_OUTPUT", self.at("output"));
        let inputs = inputs.iter().map(|(name, value)| (format!("INPUT_{name}"), value));
        command.envs(inputs).output().unwrap()
    }

    /// Returns the pairs of a file of the runner.
    fn pairs(&self, file: &str) -> HashMap<String, String> {
        let text = fs::read_to_string(self.at(file)).unwrap();
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn steps_get_the_device() {
    if Command::new("zstd").arg("--version").output().is_err() {
        return omit("zstd is not installed");
    }
    let job = Job::new();
    let archive = job.archive();
    let inputs = [
        ("ARCHIVE", archive.to_str().unwrap()),
        ("PROFILE", "rxe"),
        ("DEVICE-NAME", "rxe_7"),
        ("INTERFACE", "lo"),
        ("SYSTEM", "false"),
    ];
    let output = job.run("start", &inputs);
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    let outputs = job.pairs("output");
    let expected = [("device", "rxe_7"), ("interface", "lo"), ("gid-index", "1")];
    for (name, value) in expected.into_iter().chain([("ip", "127.0.0.1")]) {
        assert_eq!(outputs[name], value, "{outputs:?}");
    }
    let path = fs::read_to_string(job.at("path")).unwrap();
    let path = format!("{}:/usr/bin:/bin", path.trim());
    let step = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).env_clear().envs(job.pairs("env")).env("PATH", &path);
        command.output()
    };
    let listed = step("ls", &["/sys/class/infiniband"]).unwrap();
    assert_eq!(said(&listed).trim(), "rxe_7");
    let status = said(&step("rnicctl", &["status", "--json"]).unwrap());
    assert!(status.contains("\"pid\""), "{status}");

    let report = said(&job.run("report", &[]));
    for group in ["rnicctl why", "rnicctl events", "tail -n 200"] {
        assert!(report.contains(&format!("::group::{group}")), "{report}");
    }
    // A job's processes end with it.
    let pid = text.split_once("(pid ").unwrap().1.split_once(')').unwrap().0.parse().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let deadline = std::time::Instant::now() + rnic_tests::DEADLINE;
    while job.at("rnicd/rnicd.sock").exists() {
        assert!(std::time::Instant::now() < deadline, "the daemon has not stopped");
        std::thread::yield_now();
    }
}

#[test]
fn wrong_inputs_are_errors_of_the_job() {
    let job = Job::new();
    let missing = job.run("start", &[("ARCHIVE", "/nonexistent.tar.zst")]);
    assert_eq!(missing.status.code(), Some(1));
    let text = said(&missing);
    assert!(text.contains("::error title=rnicd::input archive: there is no file"), "{text}");
    if Command::new("zstd").arg("--version").output().is_err() {
        return omit("zstd is not installed");
    }
    let archive = job.archive();
    let inputs = [
        ("ARCHIVE", archive.to_str().unwrap()),
        ("PROFILE", "mlx5"),
        ("DEVICE-NAME", "rxe0"),
        ("INTERFACE", ""),
    ];
    let wrong = job.run("start", &inputs);
    let text = said(&wrong);
    assert_eq!(wrong.status.code(), Some(1), "{text}");
    assert!(text.contains("mlx5") && text.contains("not a valid configuration"), "{text}");
}
