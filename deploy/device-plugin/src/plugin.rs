//! Serves the kubelet, and registers with each new one.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rnic_run::libraries::{self, LibrariesError};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint, Server};
use tonic::{Code, Status};

use crate::api::{
    DevicePluginServer, KUBELET_SOCKET, RegisterRequest, RegistrationClient, VERSION,
};
use crate::daemon::Daemon;
use crate::log;
use crate::options::Options;
use crate::service::{OPTIONS, Service};

/// Time between two looks at the sockets.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time limit for the registration. The kubelet connects to the plugin in that time.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Reason why the plugin ends.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// There are no libraries for containers.
    #[error(transparent)]
    Libraries(#[from] LibrariesError),
    /// The plugin cannot listen.
    #[error("cannot listen on {} (--kubelet, --resource): {error}", path.display())]
    Listen {
        /// The plugin's socket.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The kubelet does not accept the plugin.
    #[error("the kubelet at {} refuses {resource} (--resource): {}", path.display(), status.message())]
    Refused {
        /// The kubelet's socket.
        path: PathBuf,
        /// The resource.
        resource: String,
        /// The kubelet's answer.
        status: Box<Status>,
    },
}

/// Serves until a failure.
pub async fn run(options: &Options) -> Result<std::convert::Infallible, PluginError> {
    // A node without libraries is a fault of the installation, not of a pod.
    libraries::folder(Some(&options.lib_dir))?;
    let daemon = Arc::new(Daemon::new(options.socket.clone(), options.devices.clone()));
    let (sender, state) = watch::channel(Err("the daemon has not been probed yet".to_owned()));
    let _probes = Task(tokio::spawn(Arc::clone(&daemon).watch(sender)));
    // Otherwise the kubelet would see unhealthy devices for a moment.
    let _ = state.clone().changed().await;
    let service = |stop| Service {
        resource: options.resource.clone(),
        shares: options.shares,
        daemon: Arc::clone(&daemon),
        libraries: options.lib_dir.clone(),
        state: state.clone(),
        stop,
    };
    let kubelet = options.kubelet.join(KUBELET_SOCKET);
    let mut is_known_absent = false;
    loop {
        let Some(now) = Identity::of(&kubelet) else {
            if !is_known_absent {
                log(&format!("waiting for the kubelet at {} (--kubelet)", kubelet.display()));
            }
            is_known_absent = true;
            tokio::time::sleep(INTERVAL).await;
            continue;
        };
        // The kubelet connects to the plugin before it replies.
        let serving = Serving::start(options, service)?;
        match register(&kubelet, &options.resource, &serving.name).await {
            Ok(()) => {
                log(&format!("registered {} with the kubelet", options.resource));
                is_known_absent = false;
                while Identity::of(&kubelet) == Some(now) && serving.is_intact() {
                    tokio::time::sleep(INTERVAL).await;
                }
                log("the kubelet's sockets have changed");
            }
            Err(status) if may_pass(status.code()) => {
                if !is_known_absent {
                    let kubelet = kubelet.display();
                    log(&format!("no answer from the kubelet at {kubelet}: {}", status.message()));
                }
                is_known_absent = true;
                tokio::time::sleep(INTERVAL).await;
            }
            Err(status) => {
                let resource = options.resource.clone();
                return Err(PluginError::Refused {
                    path: kubelet,
                    resource,
                    status: status.into(),
                });
            }
        }
        serving.end().await;
    }
}

/// Returns true for a failure of the connection. A kubelet that is starting or ending causes it.
fn may_pass(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled)
}

/// Registers the plugin that listens at `endpoint`, a name in the directory of `kubelet`.
async fn register(kubelet: &Path, resource: &str, endpoint: &str) -> Result<(), Status> {
    let unreachable = |error: tonic::transport::Error| {
        let source = std::error::Error::source(&error).map(ToString::to_string);
        Status::unavailable(source.unwrap_or_else(|| error.to_string()))
    };
    let channel = Endpoint::from_shared(format!("unix:{}", kubelet.display()))
        .map_err(unreachable)?
        .timeout(TIMEOUT)
        .connect()
        .await
        .map_err(unreachable)?;
    let request = RegisterRequest {
        version: VERSION.to_owned(),
        endpoint: endpoint.to_owned(),
        resource_name: resource.to_owned(),
        options: Some(OPTIONS),
    };
    RegistrationClient::new(channel).register(request).await.map(drop)
}

/// Identity of a socket's file. A restarted kubelet has a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl Identity {
    fn of(path: &Path) -> Option<Self> {
        let found = std::fs::symlink_metadata(path).ok()?;
        let changed = (found.ctime(), found.ctime_nsec());
        Some(Identity { device: found.dev(), inode: found.ino(), changed })
    }
}

/// The plugin's server at its socket. Removes the socket when it is dropped.
struct Serving {
    path: PathBuf,
    name: String,
    identity: Option<Identity>,
    stop: watch::Sender<bool>,
    server: Task,
}

impl Serving {
    /// Replaces a socket of an earlier plugin of the same resource.
    fn start(
        options: &Options,
        service: impl FnOnce(watch::Receiver<bool>) -> Service,
    ) -> Result<Self, PluginError> {
        let name = format!("rnicd-{}.sock", options.resource.replace('/', "-"));
        let path = options.kubelet.join(&name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(PluginError::Listen { path, error });
            }
            _ => {}
        }
        let listener = match UnixListener::bind(&path) {
            Ok(listener) => listener,
            Err(error) => return Err(PluginError::Listen { path, error }),
        };
        let identity = Identity::of(&path);
        let (stop, mut stopped) = watch::channel(false);
        let service = service(stopped.clone());
        let incoming = UnixListenerStream::new(listener);
        let calls = DevicePluginServer::new(service);
        let server = Server::builder().serve_with_incoming_shutdown(calls, incoming, async move {
            let _ = stopped.wait_for(|stop| *stop).await;
        });
        let server = Task(tokio::spawn(async move {
            if let Err(error) = server.await {
                log(&format!("the server has ended: {error}"));
            }
        }));
        Ok(Serving { path, name, identity, stop, server })
    }

    /// Returns true if the kubelet can connect. A starting kubelet removes all sockets.
    fn is_intact(&self) -> bool {
        Identity::of(&self.path) == self.identity && !self.server.0.is_finished()
    }

    /// Ends all streams and waits for the server.
    async fn end(mut self) {
        self.stop.send_replace(true);
        let _ = tokio::time::timeout(INTERVAL, &mut self.server.0).await;
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if Identity::of(&self.path) == self.identity {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A task that ends when this value is dropped.
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}
