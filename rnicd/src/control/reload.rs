//! Reloads the configuration file on SIGHUP. A file with an error changes nothing.
//!
//! A separate thread reads, parses and checks the file, so no client waits for a large file or a
//! slow disk. The control thread applies the result in bounded time. Only one reload runs at a
//! time; a SIGHUP during a reload starts another one.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::Duration;

use mio::Waker;

use crate::clock;
use crate::config::{Config, Seccomp};
use crate::log::Level;
use crate::privilege::{ThreadKind, spawn_confined};
use crate::resource::{Manager, Reload, Replaced};

/// Reloads one configuration file. Dropping it ends its thread without waiting for it.
pub(super) struct Reloader {
    file: PathBuf,
    /// `None` if `RUST_LOG` sets the log filter.
    level: Option<Level>,
    orders: Sender<Order>,
    checked: Receiver<Result<Box<Reload>, String>>,
    stage: Stage,
    /// A SIGHUP has arrived since the last reload began.
    again: bool,
}

/// A command to the thread.
enum Order {
    /// Reads the file and compares it with this configuration, which is in force.
    Read(Arc<Config>),
    Drop(Box<Replaced>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Idle,
    AwaitChecked,
    /// The rights of sessions are being renewed.
    Renewing,
}

impl Reloader {
    /// Starts the thread, which wakes the control thread through `waker`.
    pub(super) fn start(
        file: PathBuf,
        level: Option<Level>,
        waker: Arc<Waker>,
        seccomp: Seccomp,
    ) -> io::Result<Self> {
        let (orders, inbox) = channel();
        let (results, checked) = channel();
        let path = file.clone();
        spawn_confined("rnicd-config", ThreadKind::ConfigReader, seccomp, move || {
            for order in inbox {
                match order {
                    Order::Read(running) => {
                        let wanted = Config::load(&path).map_err(|error| error.to_string());
                        let checked = wanted.map(|w| Box::new(Reload::prepare(w, &running)));
                        // The receiver lives until the process ends.
                        let _ = results.send(checked);
                        // Our own eventfd: fails only if the wake-up is already pending.
                        let _ = waker.wake();
                    }
                    Order::Drop(replaced) => drop(replaced),
                }
            }
        })?;
        Ok(Reloader { file, level, orders, checked, stage: Stage::Idle, again: false })
    }

    /// Requests a reload, which [`begin`](Self::begin) starts.
    pub(super) fn ask(&mut self) {
        self.again = true;
    }

    /// Begins a requested reload if none is in progress. Returns true if it has begun.
    pub(super) fn begin(&mut self, manager: &Manager) -> bool {
        let begins = self.again && self.stage == Stage::Idle;
        if begins {
            self.again = false;
            self.stage = Stage::AwaitChecked;
            // If the thread has ended, `poll` notices that.
            let _ = self.orders.send(Order::Read(manager.config().clone()));
        }
        begins
    }

    /// Continues a reload for a bounded time. Returns its result when it has finished. The error is
    /// the text for a service manager.
    pub(super) fn poll(&mut self, manager: &mut Manager) -> Option<Result<(), String>> {
        match self.stage {
            Stage::Idle => None,
            Stage::AwaitChecked => {
                let checked = match self.checked.try_recv() {
                    Ok(checked) => checked,
                    Err(TryRecvError::Empty) => return None,
                    Err(TryRecvError::Disconnected) => {
                        Err("the thread that reads the file has ended".to_owned())
                    }
                };
                match checked {
                    Ok(reload) => {
                        self.stage = Stage::Renewing;
                        self.take_over(*reload, manager);
                        self.renew(manager)
                    }
                    Err(error) => {
                        self.stage = Stage::Idle;
                        let text = format!(
                            "configuration not reloaded, the previous one remains: {error}"
                        );
                        tracing::error!("{text}");
                        Some(Err(text))
                    }
                }
            }
            Stage::Renewing => self.renew(manager),
        }
    }

    fn take_over(&self, reload: Reload, manager: &mut Manager) {
        log_first(&reload.changed, |change| tracing::info!("reloaded: {change}"));
        log_first(&reload.kept, |change| {
            tracing::warn!("takes effect after a restart: {change}");
        });
        log_first(&reload.warnings, |warning| tracing::warn!("configuration: {warning}"));
        let changed = reload.changed.len();
        let kept = reload.kept.len();
        let has_level = reload.changed.iter().any(|change| change.key == "log.level");
        let replaced = manager.reload(reload);
        // If the thread has ended, the send fails and drops the value here.
        let _ = self.orders.send(Order::Drop(Box::new(replaced)));
        tracing::info!(file = %self.file.display(), changed, kept, "configuration reloaded");
        // Last, so that the old filter applies to the lines above.
        if has_level && !self.level.as_ref().is_some_and(|l| l.set(&manager.config().log)) {
            tracing::warn!("log.level has no effect: RUST_LOG overrides it");
        }
    }

    fn renew(&mut self, manager: &mut Manager) -> Option<Result<(), String>> {
        let began = clock::now();
        while manager.has_outdated_rights() {
            manager.renew_rights();
            if clock::now().since(began) >= TURN {
                return None;
            }
        }
        self.stage = Stage::Idle;
        Some(Ok(()))
    }
}

/// Logs the first lines of a list and the number of omitted lines.
fn log_first<T>(all: &[T], log: impl Fn(&T)) {
    all.iter().take(MAX_LINES).for_each(log);
    if let Some(more) = all.len().checked_sub(MAX_LINES).filter(|more| *more > 0) {
        tracing::info!("and {more} more like this");
    }
}

/// Maximum time to renew sessions' rights before clients have their turns.
const TURN: Duration = Duration::from_millis(1);
/// Maximum log lines of one kind per reload.
const MAX_LINES: usize = 50;
