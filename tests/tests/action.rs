//! The scripts of the GitHub action, run as a runner does: inputs in the environment, results in
//! files. The GitLab component uses the same scripts. Its lines run as in a GitLab runner:
//! `before_script` in the shell of the job, `after_script` in another shell.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rnic_tests::{built, omit, output_text};
use serde::Deserialize as _;
use serde_yaml_ng::Value;
use tempfile::TempDir;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn script(name: &str) -> PathBuf {
    repository().join("dist/action").join(name)
}

/// Returns the documents of a YAML file of the repository.
fn yaml(file: &str) -> Vec<Value> {
    let text = fs::read_to_string(repository().join(file)).unwrap();
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    documents.map(|document| Value::deserialize(document).unwrap()).collect()
}

/// Returns the names of inputs with their defaults. An input without a default is mandatory.
fn defaults(inputs: &Value) -> BTreeMap<String, Option<String>> {
    let inputs = inputs.as_mapping().unwrap().iter();
    let defaults = inputs.map(|(name, input)| (scalar(name), input.get("default").map(scalar)));
    defaults.collect()
}

fn scalar(value: &Value) -> String {
    match value {
        Value::Bool(value) => value.to_string(),
        value => value.as_str().unwrap().to_owned(),
    }
}

/// Ends the test if a program that the scripts use is missing.
fn has_programs() -> bool {
    let mut missing = ["zstd", "curl"]
        .into_iter()
        .filter(|program| Command::new(program).arg("--version").output().is_err());
    missing.next().inspect(|program| omit(&format!("{program} is not installed"))).is_none()
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

    /// Creates an archive with the layout of a release.
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

    /// Returns the `NAME=VALUE` pairs in one of the runner's files.
    fn pairs(&self, file: &str) -> HashMap<String, String> {
        let text = fs::read_to_string(self.at(file)).unwrap();
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }
}

/// Returns the process ID in the output of `start`.
fn daemon_pid(text: &str) -> i32 {
    text.split_once("(pid ").unwrap().1.split_once(')').unwrap().0.parse().unwrap()
}

#[test]
fn steps_get_the_device() {
    if !has_programs() {
        return;
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
    let text = output_text(&output);
    assert!(output.status.success(), "{text}");
    let outputs = job.pairs("output");
    let expected = [("device-name", "rxe_7"), ("interface", "lo"), ("gid-index", "1")];
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
    assert_eq!(output_text(&listed).trim(), "rxe_7");
    let status = output_text(&step("rnicctl", &["status", "--json"]).unwrap());
    assert!(status.contains("\"pid\""), "{status}");
    let link = output_text(&step("rdma", &["link", "show", "rxe_7/1"]).unwrap());
    assert!(link.starts_with("link rxe_7/1 state ACTIVE"), "{link}");
    let declared = yaml("action.yml")[0]["outputs"].as_mapping().unwrap().clone();
    let declared: BTreeSet<String> = declared.keys().map(scalar).collect();
    assert_eq!(outputs.into_keys().collect::<BTreeSet<_>>(), declared);

    let report = output_text(&job.run("report", &[]));
    for group in ["rnicctl why", "rnicctl events", "tail -n 200"] {
        assert!(report.contains(&format!("::group::{group}")), "{report}");
    }
    // A runner kills the processes of a job at its end. Here the test ends the daemon.
    let pid = rustix::process::Pid::from_raw(daemon_pid(&text)).unwrap();
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
    let text = output_text(&missing);
    assert!(text.contains("::error title=rnicd::input archive: there is no file"), "{text}");
    if !has_programs() {
        return;
    }
    let archive = job.archive();
    let inputs = [
        ("ARCHIVE", archive.to_str().unwrap()),
        ("PROFILE", "mlx9"),
        ("DEVICE-NAME", "rxe0"),
        ("INTERFACE", ""),
    ];
    let wrong = job.run("start", &inputs);
    let text = output_text(&wrong);
    assert_eq!(wrong.status.code(), Some(1), "{text}");
    assert!(text.contains("mlx9") && text.contains("not a valid configuration"), "{text}");
}

/// A workflow replaces `SF-Zhou/setup-soft-roce-action` by changing the line that names it.
#[test]
fn action_replaces_the_soft_roce_action() {
    let action = &yaml("action.yml")[0];
    let inputs = defaults(&action["inputs"]);
    assert_eq!(inputs["interface"].as_deref(), Some(""));
    assert_eq!(inputs["device-name"].as_deref(), Some("rxe_0"));
    let outputs = action["outputs"].as_mapping().unwrap();
    for name in ["interface", "device-name"] {
        assert!(outputs.contains_key(name), "{name}");
    }
}

/// A job of GitLab that extends `.setup-rnicd`.
struct GitlabJob {
    job: Job,
    /// Values of the inputs, given or default.
    inputs: BTreeMap<String, String>,
    template: Value,
    id: String,
}

impl GitlabJob {
    fn new(inputs: &[(&str, &str)]) -> Self {
        let job = Job::new();
        let [spec, jobs] = yaml(COMPONENT).try_into().unwrap();
        let defaults = defaults(&spec["spec"]["inputs"]).into_iter();
        let mut values: BTreeMap<_, _> =
            defaults.filter_map(|(name, default)| Some((name, default?))).collect();
        values.extend(inputs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())));
        let repository = format!("file://{}", job.at("repository").display());
        values.insert("repository".to_owned(), repository);
        let id = job.folder.path().file_name().unwrap().to_str().unwrap().to_owned();
        Self { job, inputs: values, template: jobs[".setup-rnicd"].clone(), id }
    }

    /// Creates the files that the server of the repository provides: the scripts, and the release
    /// with its checksum, or with the checksum `published`.
    fn publish(&self, published: Option<&str>) {
        let version = &self.inputs["version"];
        let raw = self.job.at(&format!("repository/-/raw/v{version}/dist/action"));
        fs::create_dir_all(&raw).unwrap();
        for name in ["start", "report"] {
            fs::copy(script(name), raw.join(name)).unwrap();
        }
        let release = self.job.at(&format!("repository/-/releases/v{version}/downloads"));
        fs::create_dir_all(&release).unwrap();
        let name = format!("rnicd-{version}-{}-linux-gnu", std::env::consts::ARCH);
        fs::rename(self.job.archive(), release.join(format!("{name}.tar.zst"))).unwrap();
        let mut sum = Command::new("sha256sum");
        sum.arg(format!("{name}.tar.zst")).current_dir(&release);
        let sum = String::from_utf8(sum.output().unwrap().stdout).unwrap();
        let sum = published.map_or(sum.clone(), |published| sum.replace(&sum[..64], published));
        fs::write(release.join(format!("{name}.SHA256SUMS")), sum).unwrap();
    }

    /// Replaces `$[[ inputs.NAME ]]` by the value of the input.
    fn interpolate(&self, text: &str) -> String {
        let mut parts = text.split("$[[ inputs.");
        let mut out = parts.next().unwrap().to_owned();
        for part in parts {
            let (name, rest) = part.split_once(" ]]").unwrap();
            out += &self.inputs[name];
            out += rest;
        }
        out
    }

    /// Returns the lines of a key of the job.
    fn lines(&self, key: &str) -> String {
        let lines = self.template[key].as_sequence().unwrap().iter();
        lines.map(|line| self.interpolate(line.as_str().unwrap()) + "\n").collect()
    }

    /// Runs lines in a new shell, in the form and with the variables of a runner.
    fn shell(&self, lines: &str, status: Option<&str>) -> Output {
        let file = self.job.at("script");
        fs::write(&file, lines).unwrap();
        let mut command = Command::new("bash");
        command.args(["-c", r#"set -eo pipefail; set +o noclobber; : | eval "$(<"$0")""#]);
        command.arg(&file).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        for (name, value) in self.template["variables"].as_mapping().unwrap() {
            command.env(scalar(name), self.interpolate(value.as_str().unwrap()));
        }
        command.env("CI", "true").env("GITLAB_CI", "true").env("CI_JOB_ID", &self.id);
        command.env("CI_PROJECT_DIR", self.job.folder.path()).current_dir(self.job.folder.path());
        if let Some(status) = status {
            command.env("CI_JOB_STATUS", status);
        }
        command.output().unwrap()
    }

    fn run(&self, script: &str) -> Output {
        self.shell(&(self.lines("before_script") + script), None)
    }

    /// Runs `after_script` and checks that it leaves no files.
    fn finish(&self, status: &str) -> String {
        let output = self.shell(&self.lines("after_script"), Some(status));
        assert!(output.status.success(), "{}", output_text(&output));
        assert!(!self.temporary().exists());
        output_text(&output)
    }

    fn temporary(&self) -> PathBuf {
        Path::new("/tmp").join(format!("rnicd-job-{}", self.id))
    }
}

impl Drop for GitlabJob {
    fn drop(&mut self) {
        // The test failed before `finish`.
        if self.temporary().exists() {
            let _ = self.shell(&self.lines("after_script"), Some("success"));
        }
    }
}

const COMPONENT: &str = "templates/setup-rnicd.yml";

#[test]
fn component_and_action_have_the_same_inputs() {
    let mut component = defaults(&yaml(COMPONENT)[0]["spec"]["inputs"]);
    assert_eq!(component.remove("repository"), Some(None), "GitLab does not provide it");
    assert_eq!(component, defaults(&yaml("action.yml")[0]["inputs"]));
}

#[test]
fn gitlab_job_gets_the_device() {
    if !has_programs() {
        return;
    }
    let job = GitlabJob::new(&[("device-name", "rxe_7"), ("interface", "lo")]);
    job.publish(None);
    let output = job.run(
        "ls /sys/class/infiniband\n\
         echo $RNICD_DEVICE_NAME $RNICD_INTERFACE $RNICD_GID_INDEX $RNICD_IP\n\
         env -u RNIC_SOCKET rnicctl --socket \"$RNICD_SOCKET\" status --json\n",
    );
    let text = output_text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("\nrxe_7\nrxe_7 lo 1 127.0.0.1\n"), "{text}");
    let pid = daemon_pid(&text);
    assert!(text.contains(&format!("\"pid\": {pid}")), "{text}");

    let after = job.finish("success");
    assert!(!after.contains("section_start"), "{after}");
    let deadline = std::time::Instant::now() + rnic_tests::DEADLINE;
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    while rustix::process::test_kill_process(pid).is_ok() {
        assert!(std::time::Instant::now() < deadline, "the daemon has not stopped");
        std::thread::yield_now();
    }
}

#[test]
fn failed_gitlab_job_prints_the_log() {
    if !has_programs() {
        return;
    }
    let job = GitlabJob::new(&[]);
    job.publish(None);
    let output = job.run("false\n");
    assert_eq!(output.status.code(), Some(1), "{}", output_text(&output));
    let after = job.finish("failed");
    for (number, title) in ["rnicctl why", "rnicctl events", "rnicctl status"].iter().enumerate() {
        let start = format!(":rnicd_{}[collapsed=true]\r\x1b[0K{title}\n", number + 1);
        assert!(after.contains(&start), "{after}");
    }
}

#[test]
fn gitlab_job_refuses_a_changed_release() {
    if !has_programs() {
        return;
    }
    let job = GitlabJob::new(&[]);
    job.publish(Some(&"0".repeat(64)));
    let output = job.run("echo reached\n");
    let text = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("rnicd: rnicd-0.1.0-"), "{text}");
    assert!(text.contains("does not have the published SHA-256"), "{text}");
    assert!(!text.contains("reached"), "{text}");
    job.finish("failed");
}
