//! SIGHUP: the configuration file is read again. Everything or nothing: a file that is wrong in one
//! place changes nothing.
//!
//! A thread of its own reads, parses and checks, so that no client waits for a file, whatever its
//! size and however slow its disk. The control thread takes the result over in bounded time. One
//! reload is under way at a time; a SIGHUP that comes meanwhile has the file read once more.

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

/// Reloads one configuration file. Its thread ends, unwaited for, when this is dropped.
pub(super) struct Reloader {
    file: PathBuf,
    /// None if `RUST_LOG` says what is logged.
    level: Option<Level>,
    orders: Sender<Order>,
    checked: Receiver<Result<Box<Reload>, String>>,
    stage: Stage,
    /// SIGHUP has come since the file was last opened.
    again: bool,
}

/// An order for the thread.
enum Order {
    /// Reads the file and compares it with the configuration in force.
    Read(Arc<Config>),
    Drop(Box<Replaced>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Idle,
    AwaitChecked,
    /// Sessions get their new rights.
    Renewing,
}

impl Reloader {
    /// Starts the thread, which wakes the control thread by `waker`.
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
                        // An eventfd of our own: writing fails only when it rings already.
                        let _ = waker.wake();
                    }
                    Order::Drop(replaced) => drop(replaced),
                }
            }
        })?;
        Ok(Reloader { file, level, orders, checked, stage: Stage::Idle, again: false })
    }

    /// Asks for a reload, which begins by [`begin`](Self::begin).
    pub(super) fn ask(&mut self) {
        self.again = true;
    }

    /// Begins a reload if one was asked for and none is under way. Returns true if it has.
    pub(super) fn begin(&mut self, manager: &Manager) -> bool {
        let begins = self.again && self.stage == Stage::Idle;
        if begins {
            self.again = false;
            self.stage = Stage::AwaitChecked;
            // That the thread has ended is seen when its result is awaited.
            let _ = self.orders.send(Order::Read(manager.config().clone()));
        }
        begins
    }

    /// Goes on with a reload for a bounded time. Returns its outcome when it is over; the error is
    /// the text for a service manager.
    pub(super) fn poll(&mut self, manager: &mut Manager) -> Option<Result<(), String>> {
        match self.stage {
            Stage::Idle => None,
            Stage::AwaitChecked => {
                let checked = match self.checked.try_recv() {
                    Ok(checked) => checked,
                    Err(TryRecvError::Empty) => return None,
                    Err(TryRecvError::Disconnected) => {
                        Err("the thread that reads it has ended".to_owned())
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
                        let text =
                            format!("configuration not reloaded, the old one stays: {error}");
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
            tracing::warn!("not changed before the next start: {change}");
        });
        log_first(&reload.warnings, |warning| tracing::warn!("configuration: {warning}"));
        let (changed, kept) = (reload.changed.len(), reload.kept.len());
        let has_level = reload.changed.iter().any(|change| change.key == "log.level");
        let replaced = manager.reload(reload);
        // A thread that has ended drops nothing; then it is dropped here.
        let _ = self.orders.send(Order::Drop(Box::new(replaced)));
        tracing::info!(file = %self.file.display(), changed, kept, "configuration reloaded");
        // Last, so that these lines are logged as before.
        if has_level && !self.level.as_ref().is_some_and(|l| l.set(&manager.config().log)) {
            tracing::warn!("log.level stays: RUST_LOG overrides it");
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

/// Logs the first of many lines, and how many there are more.
fn log_first<T>(all: &[T], log: impl Fn(&T)) {
    all.iter().take(MOST_LINES).for_each(log);
    if let Some(more) = all.len().checked_sub(MOST_LINES).filter(|more| *more > 0) {
        tracing::info!("and {more} more like this");
    }
}

/// How long sessions get their new rights before clients have their turns.
const TURN: Duration = Duration::from_millis(1);
/// Lines of one kind about one reload.
const MOST_LINES: usize = 50;
