//! Daemons for third-party programs, in separate network namespaces, and the execution of cases.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use rnic_client::{Context, ListKind, QpRow, Rows};
use rnic_tests::apart::{Apart, Side};
use rnic_tests::{DEADLINE, Daemon, Process, built, installed, omit, on_path, verbs};
use tempfile::TempDir;

use crate::case::{Case, End, Group, Ready, Server, Setting};
use crate::figures::Metrics;

/// Users of the two ends, if they differ. No other program uses them.
const UIDS: [u32; 2] = [65_531, 65_532];

/// Indices of the two ends.
pub const SERVER: usize = 0;
pub const CLIENT: usize = 1;

/// Daemons and network namespaces for cases.
pub struct Stage {
    setting: Setting,
    /// The daemons of the server and the client, or the only one.
    daemons: Vec<Daemon>,
    /// Metrics files of the daemons.
    figures: TempDir,
    /// Files of the programs, with a folder for each end.
    scratch: TempDir,
    /// Folder with both libraries.
    libraries: PathBuf,
    /// Devices that the programs see, or empty for all.
    devices: &'static str,
    /// Port of the last case. Ports in the namespaces are all free.
    port: u16,
    /// Declared last, because it must be dropped after the daemons.
    pub apart: Apart,
}

impl Stage {
    /// Starts the daemons for these cases. Returns `None` if a program or a privilege is missing.
    pub fn new(setting: Setting, group: &Group) -> Option<Self> {
        if !installed(group.program, group.package) {
            return None;
        }
        if setting == Setting::Users && !rustix::process::getuid().is_root() {
            omit(&format!("not root: {} with several users is not tested", group.package));
            return None;
        }
        let apart = match setting {
            Setting::Direct | Setting::Tcp => Apart::new(),
            Setting::Users => Apart::with_all_users(),
        };
        let apart = match apart {
            Ok(apart) => apart,
            Err(e) => {
                omit(&format!("no network namespaces here: {e}"));
                return None;
            }
        };
        let figures = tempfile::tempdir().expect("a temporary directory");
        let sides: &[Side] = match setting {
            Setting::Direct | Setting::Users => &[Side::A],
            Setting::Tcp => &[Side::A, Side::B],
        };
        let start = |(n, side): (usize, &Side)| {
            let file = figures.path().join(n.to_string());
            let config = format!(
                "{}[control]\nmode = \"0666\"\n[metrics]\nfile = {file:?}\ninterval = \"24h\"\n{}",
                on_path("direct"),
                group.config
            );
            apart.daemon(*side, &config)
        };
        let daemons: Vec<Daemon> = sides.iter().enumerate().map(start).collect();
        let scratch = scratch(setting);
        let libraries = match setting {
            Setting::Direct | Setting::Tcp => built::libraries().to_owned(),
            Setting::Users => verbs::directory_for_all(&daemons[0]),
        };
        let devices = group.devices;
        Some(Stage { setting, daemons, figures, scratch, libraries, devices, port: 7000, apart })
    }

    /// Runs a case. Returns the reason if it failed; otherwise none of its objects remain.
    pub fn run(&mut self, case: &Case) -> Result<(), String> {
        self.port += 10;
        let before = self.read_figures();
        // Both programs spin, and the machine may be busy.
        let patience = DEADLINE;
        match &case.server {
            None => ends(self.start(CLIENT, case.client), case.client_says, patience)?,
            Some(server) => self.pair(case, server, patience)?,
        }
        self.is_empty();
        let after = self.read_figures();
        self.went_over(case.bytes, &before, &after)
    }

    /// Waits until the daemons hold no objects of any session.
    pub fn is_empty(&self) {
        self.daemons.iter().for_each(|daemon| drop(daemon.is_empty()));
    }

    /// Kills both ends during a transfer, the end `first` first.
    pub fn kills(&mut self, case: &Case, first: usize) {
        self.port += 10;
        let server = case.server.as_ref().expect("two ends");
        let mut ends = [Some(self.server_of(server)), None];
        self.is_ready(server.ready, ends[SERVER].as_mut().expect("just started")).expect("ready");
        ends[CLIENT] = Some(self.start(CLIENT, case.client));
        let context = Context::open_at(self.daemon(CLIENT).socket()).expect("the daemon answers");
        let moved = |row: &QpRow| row.counters.bytes_sent + row.counters.bytes_received;
        let most = || match context.list(ListKind::Qps, 0).expect("the daemon answers").rows {
            Rows::Qps(rows) => rows.iter().map(moved).max().unwrap_or(0),
            other => panic!("{other:?}"),
        };
        let deadline = Instant::now() + DEADLINE;
        while most() < case.bytes {
            assert!(Instant::now() < deadline, "nothing is under way");
            std::thread::yield_now();
        }
        drop(context);
        for n in [first, 1 - first] {
            ends[n].take().expect("killed only once").kill();
        }
        self.is_empty();
    }

    fn pair(&self, case: &Case, server: &Server, patience: Duration) -> Result<(), String> {
        let mut process = self.server_of(server);
        let ended = self.is_ready(server.ready, &mut process).and_then(|()| {
            let client = self.start(CLIENT, case.client);
            let client = ended(client, patience)?;
            says(&client, case.client_says)
        });
        let by_itself = match server.end {
            End::Itself => process.ends_within(patience),
            End::Killed => true,
        };
        let (status, lines) = process.killed();
        let server_ended = match (server.end, by_itself) {
            (End::Itself, false) => Err(format!("does not end\n{}", lines.join("\n"))),
            (End::Itself, true) => success(status, lines),
            (End::Killed, _) => Ok(lines),
        };
        let server_ended = server_ended.and_then(|lines| says(&lines, server.says));
        match (ended, server_ended) {
            (Ok(()), Ok(())) => Ok(()),
            (client, server) => Err(format!("client: {client:#?}\nserver: {server:#?}")),
        }
    }

    /// Checks that the daemons have placed at least `bytes` bytes since `before`, and, if both ends
    /// are counted separately, that each has moved some.
    pub fn went_over(
        &self,
        bytes: u64,
        before: &[Metrics],
        after: &[Metrics],
    ) -> Result<(), String> {
        let rose = |name: &str| -> Vec<u64> {
            let of = |(before, after): (&Metrics, &Metrics)| after.of(name) - before.of(name);
            before.iter().zip(after).map(of).collect()
        };
        let placed: u64 = rose("rnicd_placed_bytes_total").iter().sum();
        if placed < bytes {
            return Err(format!("{placed} bytes placed instead of {bytes}"));
        }
        let moved: Vec<u64> = match self.setting {
            Setting::Direct => return Ok(()),
            Setting::Tcp => rose("rnicd_sent_bytes_total")
                .iter()
                .zip(rose("rnicd_placed_bytes_total"))
                .map(|(sent, placed)| sent + placed)
                .collect(),
            Setting::Users => UIDS
                .iter()
                .map(|uid| {
                    let of =
                        |what| rose(&format!("rnicd_user_{what}_bytes_total{{uid=\"{uid}\"}}"));
                    of("sent")[0] + of("placed")[0]
                })
                .collect(),
        };
        if bytes > 0 && moved.contains(&0) {
            Err(format!("bytes of only one end are counted: {moved:?}"))
        } else {
            Ok(())
        }
    }

    /// Reads the metrics of the daemons. No session may exist.
    pub fn read_figures(&self) -> Vec<Metrics> {
        let read = |(n, daemon): (usize, &Daemon)| {
            Metrics::read(daemon, &self.figures.path().join(n.to_string()))
        };
        self.daemons.iter().enumerate().map(read).collect()
    }

    /// Returns the daemon of an end.
    pub fn daemon(&self, end: usize) -> &Daemon {
        &self.daemons[end % self.daemons.len()]
    }

    /// Returns the host of an end.
    pub fn side(&self, end: usize) -> Side {
        match (self.setting, end) {
            (Setting::Tcp, CLIENT) => Side::B,
            _ => Side::A,
        }
    }

    fn server_of(&self, server: &Server) -> Process {
        self.start(SERVER, server.command)
    }

    /// Returns the command prefix that runs a program as the user of an end.
    pub fn as_user(&self, end: usize) -> Vec<String> {
        let Some(uid) = self.uid(end) else { return Vec::new() };
        let [user, group] = [format!("--reuid={uid}"), format!("--regid={uid}")];
        vec!["setpriv".to_owned(), user, group, "--clear-groups".to_owned()]
    }

    /// Returns the user of an end, if the ends have different users.
    pub fn uid(&self, end: usize) -> Option<u32> {
        uid(self.setting, end)
    }

    /// Returns a folder that the programs of both ends can read.
    pub fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// Returns a folder of the user of an end.
    pub fn folder(&self, end: usize) -> PathBuf {
        self.scratch.path().join(end.to_string())
    }

    /// Returns the environment of an end's programs, as `rnic-run` sets it.
    pub fn environment(&self, end: usize) -> [(&'static str, PathBuf); 4] {
        let socket = self.daemon(end).socket();
        let libraries = ["librnic_preload.so", "libibverbs.so.1", "librdmacm.so.1"];
        let libraries = libraries.map(|name| self.libraries.join(name).display().to_string());
        [
            ("LD_LIBRARY_PATH", self.libraries.clone()),
            ("LD_PRELOAD", libraries.join(":").into()),
            ("RNIC_SOCKET", socket.to_owned()),
            ("RNIC_TREE", socket.with_file_name("rnicd.sock.tree")),
        ]
    }

    /// Starts a program at an end.
    pub fn start(&self, end: usize, words: &str) -> Process {
        let mut command = self.apart.on(self.side(end));
        command.args(self.as_user(end));
        let ip = self.side(SERVER).ip();
        let port = self.port.to_string();
        let fill = |word: &str| word.replace("{ip}", ip).replace("{port}", &port);
        command.args(words.split_whitespace().map(fill));
        command.envs(self.environment(end));
        let devices = if self.devices.is_empty() { verbs::BOTH_DEVICES } else { self.devices };
        command.env("RNIC_DEVICES", devices);
        // Logs the reasons for refusals and failures.
        command.env("RNIC_LOG", "debug").env("RUST_BACKTRACE", "1").current_dir("/");
        // Some programs fork, and their children must be killed, too.
        command.process_group(0);
        Process::start(command)
    }

    /// Waits until a server is ready for its client.
    fn is_ready(&self, ready: Ready, server: &mut Process) -> Result<(), String> {
        let context = Context::open_at(self.daemon(SERVER).socket()).expect("the daemon answers");
        let pid = server.id();
        let is_listed =
            |port| match context.list(ListKind::Listeners, 0).expect("the daemon answers").rows {
                Rows::Listeners(rows) => {
                    rows.iter().any(|r| r.address.port() == port && r.backlog > 0)
                }
                other => panic!("{other:?}"),
            };
        let is_ready = || match ready {
            Ready::Listener => is_listed(self.port),
            Ready::ListenerAt(port) => is_listed(port),
            Ready::Tcp => ["tcp", "tcp6"].iter().any(|name| self.listens(name, pid)),
        };
        let deadline = Instant::now() + DEADLINE;
        while !is_ready() {
            if Instant::now() > deadline {
                return Err("the server does not listen".to_owned());
            }
            if server.has_ended() {
                return Err("the server exited before it listened".to_owned());
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Returns true if a TCP socket listens on the port in the namespace of this process.
    fn listens(&self, table: &str, pid: u32) -> bool {
        let table = std::fs::read_to_string(format!("/proc/{pid}/net/{table}"));
        let port = format!(":{:04X}", self.port);
        table.unwrap_or_default().lines().any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // Number, local address, remote address, state: 0A is LISTEN.
            fields.len() > 3 && fields[1].ends_with(&port) && fields[3] == "0A"
        })
    }
}

/// Creates the folders of the ends.
fn scratch(setting: Setting) -> TempDir {
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let open = Permissions::from_mode(0o755);
    std::fs::set_permissions(scratch.path(), open).expect("a writable directory");
    for end in [SERVER, CLIENT] {
        let folder = scratch.path().join(end.to_string());
        std::fs::create_dir(&folder).expect("a writable directory");
        let user = uid(setting, end);
        chown(&folder, user, user).expect("root may change the owner");
    }
    scratch
}

fn uid(setting: Setting, end: usize) -> Option<u32> {
    (setting == Setting::Users).then_some(UIDS[end])
}

fn ends(client: Process, wanted: &[&str], patience: Duration) -> Result<(), String> {
    says(&ended(client, patience)?, wanted)
}

/// Waits until a process exits with success, and returns its output.
fn ended(mut process: Process, patience: Duration) -> Result<Vec<String>, String> {
    if process.ends_within(patience) {
        let (status, lines) = process.finish();
        success(status, lines)
    } else {
        Err(format!("does not end\n{}", process.killed().1.join("\n")))
    }
}

fn success(status: ExitStatus, lines: Vec<String>) -> Result<Vec<String>, String> {
    if status.success() { Ok(lines) } else { Err(format!("{status}\n{}", lines.join("\n"))) }
}

/// Checks that each text of `wanted` is in one of the lines.
fn says(lines: &[String], wanted: &[&str]) -> Result<(), String> {
    let plain = |line: &String| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let plain: Vec<String> = lines.iter().map(|line| format!("^{} ", plain(line))).collect();
    let missing = wanted.iter().find(|text| !plain.iter().any(|line| line.contains(**text)));
    match missing {
        Some(text) => Err(format!("does not print {text:?}\n{}", lines.join("\n"))),
        None => Ok(()),
    }
}
