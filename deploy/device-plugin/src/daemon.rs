//! The daemon: whether it serves programs, and with which devices.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rnic_client::{Context, OpenOptions};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};

use crate::log;

/// Time between two probes of the daemon.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time limit for each reply of the daemon.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The daemon at a socket, and the devices that containers need.
#[derive(Debug)]
pub struct Daemon {
    socket: PathBuf,
    devices: Vec<String>,
}

/// A daemon that serves programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Serving {
    /// Directory with its device files.
    pub tree: Option<PathBuf>,
}

/// The result of the last probe; the error is a message.
pub type State = Result<Serving, String>;

impl Daemon {
    /// Returns the daemon at `socket`, with `devices`.
    pub fn new(socket: PathBuf, devices: Vec<String>) -> Self {
        Daemon { socket, devices }
    }

    /// Opens the device as a program does. Fails if the daemon would not serve a new program.
    /// Blocks for a few seconds at most.
    pub fn probe(&self) -> State {
        let options = OpenOptions { socket: Some(self.socket.clone()), reply_timeout: TIMEOUT };
        let device = Context::open_with(options).and_then(|context| context.device());
        let device = device.map_err(|error| error.to_string())?;
        let has = |name: &String| device.devices.iter().any(|device| device.name == *name);
        if let Some(missing) = self.devices.iter().find(|name| !has(name)) {
            let names: Vec<&str> = device.devices.iter().map(|device| &*device.name).collect();
            return Err(format!(
                "the daemon at {} has no device {missing:?} (--devices); it has {}",
                self.socket.display(),
                names.join(", ")
            ));
        }
        let tree = Some(PathBuf::from(device.tree)).filter(|tree| tree.is_dir());
        Ok(Serving { tree })
    }

    /// Probes the daemon once a second and reports changes. Never returns.
    pub async fn watch(self: Arc<Self>, state: watch::Sender<State>) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let daemon = Arc::clone(&self);
            let Ok(found) = spawn_blocking(move || daemon.probe()).await else { continue };
            state.send_if_modified(|state| {
                let is_new = *state != found;
                if is_new {
                    self.report(&found);
                    *state = found;
                }
                is_new
            });
        }
    }

    fn report(&self, state: &State) {
        let socket = self.socket.display();
        match state {
            Ok(Serving { tree: Some(tree) }) if !tree.starts_with(self.folder()) => log(&format!(
                "the daemon at {socket} serves, but containers see no device files: {} \
                 (device.tree) is not beside the socket",
                tree.display()
            )),
            Ok(_) => log(&format!("the daemon at {socket} serves")),
            Err(error) => log(&format!("no container gets the device: {error}")),
        }
    }

    /// Returns the directory of the socket.
    pub fn folder(&self) -> &Path {
        self.socket.parent().unwrap_or(Path::new("/"))
    }

    /// Returns the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the devices that containers see; empty for the RoCE devices.
    pub fn devices(&self) -> &[String] {
        &self.devices
    }
}
