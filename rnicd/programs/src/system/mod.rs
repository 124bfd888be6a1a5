//! `rnicctl system`: installs rnicd for all programs of a machine or container, and removes it.
//!
//! `parts` lists what is installed. `plan` compares it with the system and refuses to replace
//! files of others. `change` carries out the steps and reverses them after a failure. `manifest`
//! records each created item. `loader`, `service` and `mount` handle the cache, the daemon and the
//! mounts that go with the files.

mod accounts;
mod change;
mod install;
mod loader;
mod manifest;
mod mount;
mod parts;
mod plan;
mod report;
mod root;
mod service;
mod uninstall;

use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use rnicd::config::Profile;

use root::Root;

/// Command below `rnicctl system`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Install rnicd for all programs, also those started by sudo or with an empty environment.
    ///
    /// Copies the programs and libraries beside this program below --prefix, makes the loader find
    /// libibverbs.so.1 and librdmacm.so.1 there first, creates the user and group rnicd, and starts
    /// the daemon: by systemd if it runs here, else in the background. `uninstall` undoes all of
    /// it. A second `install` is an upgrade; its options replace the earlier ones. Existing files
    /// that are not of this installation are never replaced.
    Install(Install),
    /// Stop the daemon and remove everything that `install` created.
    Uninstall(Uninstall),
    /// Start the installed daemon, for a container whose image contains the installation.
    Start(At),
    /// Stop the installed daemon.
    Stop(At),
    /// Show what is installed, and whether programs can use it.
    Status(At),
}

/// Arguments of `install`.
#[derive(Debug, Args)]
pub struct Install {
    #[command(flatten)]
    at: At,
    /// Folder for `bin` and `lib/rnicd`.
    #[arg(long, value_name = "FOLDER", default_value = "/usr/local")]
    prefix: PathBuf,
    /// Users that may use the daemon: `@GROUP`, or `everyone`.
    #[arg(long, value_name = "WHO", default_value = "@rnicd", value_parser = Allow::parse)]
    allow: Allow,
    /// Profile of the devices, by its name or the absolute path of a file. With rxe, programs find
    /// rxe0, and `rdma link add NAME type rxe netdev IF` makes devices like those of the kernel's
    /// rxe.
    #[arg(long, value_name = "NAME", value_parser = profile)]
    profile: Option<String>,
    /// Put `modprobe`, `rmmod` and `rdma` of rnicd in PREFIX/sbin and PREFIX/bin, before the
    /// system's. Without this option they are only in PREFIX/lib/rnicd/bin.
    #[arg(long)]
    commands: bool,
    /// Show the devices in /sys/class by mounts. All processes of this mount namespace see them.
    #[arg(long)]
    mount: bool,
    /// Show the devices in /sys and /dev by /etc/ld.so.preload: every dynamically linked program
    /// then loads librnic_preload.so, system services and setuid programs included. 32-bit programs
    /// print an error at each start. For containers and disposable machines.
    #[arg(long)]
    preload: bool,
    /// Start no daemon; `rnicctl system start` does later.
    #[arg(long)]
    no_start: bool,
    /// Print the changes without making them.
    #[arg(long)]
    dry_run: bool,
}

/// Arguments of `uninstall`.
#[derive(Debug, Args)]
pub struct Uninstall {
    #[command(flatten)]
    at: At,
    /// Print the changes without making them.
    #[arg(long)]
    dry_run: bool,
}

/// The system to change.
#[derive(Debug, Args)]
pub struct At {
    /// Use this directory as the root, for images and packages. Nothing is started there.
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// Users that may open the daemon's socket.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Allow {
    Group(String),
    Everyone,
}

impl Allow {
    fn parse(text: &str) -> Result<Self, String> {
        let is_name = |name: &str| {
            let rest = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
            !name.is_empty() && !name.starts_with('-') && name.bytes().all(rest)
        };
        match (text, text.strip_prefix('@')) {
            ("everyone", _) => Ok(Allow::Everyone),
            (_, Some(group)) if is_name(group) => Ok(Allow::Group(group.to_owned())),
            _ => Err("write `everyone`, or `@` and the name of a group".to_owned()),
        }
    }

    /// Returns the group of the socket.
    fn group(&self) -> &str {
        match self {
            Allow::Group(group) => group,
            Allow::Everyone => OWN_NAME,
        }
    }

    /// Returns the mode of the socket.
    fn mode(&self) -> &'static str {
        match self {
            Allow::Group(_) => "0660",
            Allow::Everyone => "0666",
        }
    }
}

/// Checks the name of a profile. The daemon checks a file when it starts: with `--root`, the file
/// may be only there.
fn profile(name: &str) -> Result<String, String> {
    if !name.contains('/') {
        Profile::text(name)?;
    } else if !Path::new(name).is_absolute() {
        return Err("the path must be absolute".to_owned());
    }
    Ok(name.to_owned())
}

/// Name of the daemon's user and group.
const OWN_NAME: &str = "rnicd";

/// Reason why the system was not changed.
#[derive(Debug, thiserror::Error)]
pub enum SystemError {
    /// The process lacks rights.
    #[error("only root can do this; use sudo, or --root for another directory")]
    NotRoot,
    /// Another process changes the system.
    #[error("another `rnicctl system` is running; wait for its end")]
    Busy,
    /// `--prefix` is not usable.
    #[error("--prefix {}: {why}", path.display())]
    Prefix {
        /// The prefix.
        path: PathBuf,
        /// The reason.
        why: &'static str,
    },
    /// The installation is incomplete.
    #[error("{what} is not in {}; run rnicctl from the folder of the built or unpacked programs",
            folder.display())]
    NoSource {
        /// The missing file.
        what: String,
        /// The folder that was searched.
        folder: PathBuf,
    },
    /// Files of others are in the way.
    #[error("not installed by rnicctl, and would be replaced: {}; move them away", list(paths))]
    InTheWay {
        /// The files.
        paths: Vec<PathBuf>,
    },
    /// Other users could replace the libraries of all programs.
    #[error("other users than root can replace {}, and root's programs would load it; choose \
             another --prefix, or change its owner and mode", path.display())]
    NotOfRoot {
        /// The file or directory.
        path: PathBuf,
    },
    /// A link leads out of `--root`.
    #[error("{} leads to {}, out of --root {}", path.display(), real.display(), root.display())]
    LeadsOut {
        /// The link, or a directory below it.
        path: PathBuf,
        /// Its target.
        real: PathBuf,
        /// The root.
        root: PathBuf,
    },
    /// Nothing is installed.
    #[error("rnicd is not installed here: {} does not exist", path.display())]
    NotInstalled {
        /// The manifest.
        path: PathBuf,
    },
    /// The group of `--allow` does not exist.
    #[error("--allow @{group}: no such group in {}", path.display())]
    NoGroup {
        /// The group.
        group: String,
        /// The file that was searched.
        path: PathBuf,
    },
    /// A program failed or cannot be run.
    #[error("{program}: {why}")]
    Program {
        /// Name of the program.
        program: String,
        /// Its last output, or the system's error.
        why: String,
    },
    /// The loader finds another library first.
    #[error("the loader finds {} before {}; {hint}", first.display(), own.display())]
    NotFirst {
        /// The library that is found.
        first: PathBuf,
        /// The library of rnicd.
        own: PathBuf,
        /// Probable reason.
        hint: &'static str,
    },
    /// The daemon did not start.
    #[error("the daemon did not start: {0}")]
    NoDaemon(String),
    /// The mounts of `--mount` failed.
    #[error("--mount: {0}")]
    NotMounted(String),
    /// A step failed and some steps before it cannot be undone.
    #[error("{error}; not undone: {}", left.join("; "))]
    NotUndone {
        /// The failure.
        error: Box<SystemError>,
        /// The steps.
        left: Vec<String>,
    },
    /// Something that was installed was left in place.
    #[error("left in place: {}", .0.join("; "))]
    Left(Vec<String>),
    /// A system call failed.
    #[error("{what} {}: {error}", path.display())]
    System {
        /// The operation that failed, for display.
        what: &'static str,
        /// File of the operation.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

impl SystemError {
    fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SystemError {
        let path = path.to_owned();
        move |error| SystemError::System { what, path, error }
    }
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Runs a command.
pub fn run(command: &Command, json: bool) -> Result<(), Box<dyn std::error::Error>> {
    match command {
        Command::Install(args) => {
            let report = install::install(args)?;
            print(json, &report)
        }
        Command::Uninstall(args) => {
            let root = writable(&args.at)?;
            let _lock = root.lock()?;
            let report = uninstall::uninstall(&root, args.dry_run)?;
            print(json, &report)?;
            report.complaint().map_or(Ok(()), |left| Err(left.into()))
        }
        Command::Start(at) => {
            let root = writable(at)?;
            let _lock = root.lock()?;
            let manifest = installed(&root)?;
            if service::start(&root, &manifest)?.is_some() {
                mount::show(&manifest)?;
            }
            Ok(())
        }
        Command::Stop(at) => {
            let root = writable(at)?;
            let _lock = root.lock()?;
            installed(&root)?;
            service::stop(&root)?;
            Ok(())
        }
        Command::Status(at) => {
            let root = Root::open(&at.root)?;
            print(json, &report::status(&root, &installed(&root)?))
        }
    }
}

fn print(json: bool, report: &report::Report) -> Result<(), Box<dyn std::error::Error>> {
    let text = if json { serde_json::to_string_pretty(report)? + "\n" } else { report.to_string() };
    crate::cli::print(&text).map(drop)
}

/// Opens a root that this process may change.
fn writable(at: &At) -> Result<Root, SystemError> {
    let root = Root::open(&at.root)?;
    if root.is_own() && !rustix::process::geteuid().is_root() {
        return Err(SystemError::NotRoot);
    }
    Ok(root)
}

fn installed(root: &Root) -> Result<manifest::Manifest, SystemError> {
    let path = root.at(Path::new(manifest::MANIFEST))?;
    manifest::Manifest::read(root)?.ok_or(SystemError::NotInstalled { path })
}
