//! A daemon, a kubelet and the plugin as the tests run them.

#![allow(dead_code, reason = "each test program uses a part")]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc as lines;
use std::time::{Duration, Instant};

use rnic_device_plugin::api::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, DevicePluginClient, Empty,
    KUBELET_SOCKET, ListAndWatchResponse, RegisterRequest, Registration, RegistrationServer,
};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

/// Time limit of every wait. Reached only by a test that hangs.
pub const DEADLINE: Duration = Duration::from_secs(180);

/// Returns a file that the project's workspace builds: in `RNIC_BIN`, or in `target/debug`.
pub fn built(name: &str) -> PathBuf {
    let folder = std::env::var_os("RNIC_BIN").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| repository().join("target/debug"));
    let path = folder.join(name);
    assert!(path.exists(), "{} is missing: build the workspace, or set RNIC_BIN", path.display());
    path
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns a directory with rnicd's libraries under their names.
pub fn libraries() -> TempDir {
    let folder = folder();
    for name in ["libibverbs.so.1", "librdmacm.so.1", "librnic_preload.so"] {
        std::fs::copy(built("verbs").join(name), folder.path().join(name)).unwrap();
    }
    folder
}

/// Returns a directory that every user may enter.
pub fn folder() -> TempDir {
    let folder = TempDir::with_prefix("rnic-plugin-").unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// A child process with its output. Dropping it kills it.
pub struct Process {
    child: Child,
    lines: lines::Receiver<String>,
    seen: Vec<String>,
}

impl Process {
    pub fn start(command: &mut Command) -> Self {
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let (sender, lines) = lines::channel();
        let outputs: [Box<dyn std::io::Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for output in outputs {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        Process { child, lines, seen: Vec::new() }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line with this text.
    pub fn line_with(&mut self, text: &str) -> String {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            let line = line.unwrap_or_else(|error| panic!("{text:?}: {error}: {:#?}", self.seen));
            self.seen.push(line.clone());
            if line.contains(text) {
                return line;
            }
        }
    }

    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }

    /// Sends `SIGTERM` and returns the exit status.
    pub fn terminate(mut self) -> ExitStatus {
        self.signal("TERM");
        self.child.wait().unwrap()
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for the end. Returns the exit status and the output.
    pub fn finish(mut self) -> (ExitStatus, String) {
        drop(self.child.stdin.take());
        let deadline = Instant::now() + DEADLINE;
        let mut seen = std::mem::take(&mut self.seen);
        // The output ends with the process and its children.
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => seen.push(line),
                Err(lines::RecvTimeoutError::Disconnected) => break,
                Err(error) => panic!("{error}: {seen:#?}"),
            }
        }
        (self.child.wait().unwrap(), seen.join("\n"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A daemon, and the directory of its socket.
pub struct Daemon {
    pub process: Process,
    pub socket: PathBuf,
    folder: TempDir,
}

impl Daemon {
    /// Starts a daemon of this user with any free port.
    pub fn start() -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Daemon::start_in(folder(), &format!("[wired]\nport = {port}\n"))
    }

    pub fn start_in(folder: TempDir, config: &str) -> Self {
        Daemon::start_by(folder, &built("rnicd"), config, &[])
    }

    /// Starts a daemon with its socket in `folder`, by another command.
    pub fn start_by(folder: TempDir, program: &Path, config: &str, by: &[String]) -> Self {
        let socket = folder.path().join("rnicd.sock");
        let file = folder.path().join("rnicd.toml");
        std::fs::write(&file, config).unwrap();
        let program = program.to_str().unwrap();
        let words: Vec<&str> = by.iter().map(String::as_str).chain([program, "run"]).collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg("--config").arg(&file).arg("--socket").arg(&socket);
        let mut process = Process::start(&mut command);
        process.line_with("listening");
        Daemon { process, socket, folder }
    }

    /// Ends the daemon. Returns its directory and its configuration.
    pub fn ends(self) -> (TempDir, String) {
        assert!(self.process.terminate().success());
        let config = std::fs::read_to_string(self.folder.path().join("rnicd.toml")).unwrap();
        (self.folder, config)
    }
}

/// The kubelet's directory and its registration service.
pub struct Kubelet {
    pub folder: TempDir,
    service: Option<(mpsc::Receiver<RegisterRequest>, JoinHandle<()>)>,
}

struct Registrations {
    requests: mpsc::Sender<RegisterRequest>,
    refusal: Option<&'static str>,
}

#[tonic::async_trait]
impl Registration for Registrations {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        if let Some(refusal) = self.refusal {
            return Err(Status::unknown(refusal));
        }
        self.requests.send(request.into_inner()).await.unwrap();
        Ok(Response::new(Empty {}))
    }
}

impl Kubelet {
    pub fn new() -> Self {
        Kubelet { folder: folder(), service: None }
    }

    /// Starts, like a kubelet, without the sockets of earlier plugins.
    pub fn start(&mut self, refusal: Option<&'static str>) {
        self.stop();
        for entry in std::fs::read_dir(self.folder.path()).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let (requests, received) = mpsc::channel(8);
        let listener = UnixListener::bind(self.folder.path().join(KUBELET_SOCKET)).unwrap();
        let calls = RegistrationServer::new(Registrations { requests, refusal });
        let incoming = UnixListenerStream::new(listener);
        let server = Server::builder().serve_with_incoming(calls, incoming);
        let server = tokio::spawn(async { server.await.unwrap() });
        self.service = Some((received, server));
    }

    pub fn stop(&mut self) {
        if let Some((_, server)) = self.service.take() {
            server.abort();
        }
    }

    /// Waits for a plugin and connects to it.
    pub async fn plugin(&mut self) -> (RegisterRequest, DevicePluginClient<Channel>) {
        let (requests, _) = self.service.as_mut().unwrap();
        let request = within(requests.recv()).await.unwrap();
        let socket = self.folder.path().join(&request.endpoint);
        let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
        (request, DevicePluginClient::new(within(endpoint.connect()).await.unwrap()))
    }
}

/// Waits with a time limit.
pub async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.expect("in time")
}

/// Starts the plugin.
pub fn plugin(kubelet: &Kubelet, socket: &Path, libraries: &Path, options: &[&str]) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rnic-device-plugin"));
    command.arg("--kubelet").arg(kubelet.folder.path()).arg("--socket").arg(socket);
    Process::start(command.arg("--lib-dir").arg(libraries).args(options))
}

/// Waits until all devices have this state. Returns the last response.
pub async fn until(
    stream: &mut Streaming<ListAndWatchResponse>,
    health: &str,
) -> ListAndWatchResponse {
    loop {
        let list = within(stream.message()).await.unwrap().expect("an open stream");
        if list.devices.iter().all(|device| device.health == health) {
            return list;
        }
    }
}

pub async fn allocate(
    plugin: &mut DevicePluginClient<Channel>,
    containers: &[&[&str]],
) -> Result<AllocateResponse, Status> {
    let owned = |ids: &&[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
    let requests =
        containers.iter().map(|ids| ContainerAllocateRequest { devices_ids: owned(ids) });
    let request = AllocateRequest { container_requests: requests.collect() };
    Ok(within(plugin.allocate(request)).await?.into_inner())
}
