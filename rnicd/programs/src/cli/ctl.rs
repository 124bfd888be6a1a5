//! `rnicctl`: shows the state of the daemon and runs administrator commands.

use std::ffi::OsString;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use rnic_abi::abi::control::*;
use rnic_client::{Context, Error, QpId};
use serde::Serialize;

use super::rows::Shown;
use super::table::{of_devices, of_status};
use super::{fault, follow, why};
use crate::{commands, profile, system};

/// Show the state of rnicd, and run administrator commands.
///
/// Administrators see the objects of all users, other users only their own.
///
/// Exit codes: 0 done; 1 refused or failed; 2 wrong usage; 3 no connection to a daemon.
#[derive(Debug, Parser)]
#[command(name = "rnicctl", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: CommonArgs,
}

#[derive(Debug, Args)]
struct CommonArgs {
    /// Control socket of the daemon [default: RNIC_SOCKET or the usual paths].
    #[arg(long, value_name = "PATH", global = true)]
    socket: Option<PathBuf>,
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Summary of the daemon.
    Status,
    /// Sessions of programs.
    Clients,
    /// Queue pairs: state, addresses, counters.
    Qps,
    /// Completion queues.
    Cqs,
    /// Memory regions.
    Mrs,
    /// Shared receive queues.
    Srqs,
    /// Memory windows.
    Windows,
    /// Protection domains.
    Pds,
    /// Bound addresses.
    Listeners,
    /// Limits and their current use.
    Limits,
    /// Notable events, newest first.
    Events {
        /// Show new events too, oldest first, until interrupted.
        #[arg(long)]
        follow: bool,
    },
    /// Why a request was refused or an operation failed.
    ///
    /// Every refused request, failed completion, Terminate and lost connection leaves a record. A
    /// completion contains the record's number in `diagnosis_id`, and the text of a library error
    /// ends with it.
    Why {
        /// Number of a record; without it, all records, newest first.
        id: Option<u64>,
    },
    /// End the connection of a queue pair of any user (administrators).
    Disconnect {
        /// Number of the queue pair, as shown by `rnicctl qps`.
        qp: u32,
    },
    /// The devices that programs see: list them, or add or remove a RoCE device (administrators).
    #[command(subcommand)]
    Device(Device),
    /// Faults on command: failed requests, refused messages, ports that go down, and more.
    #[command(subcommand)]
    Fault(fault::Command),
    /// Profiles: adapters and drivers that the devices resemble (`wired.profile`, `rnic-run --as`).
    Profile {
        #[command(subcommand)]
        command: profile::Command,
    },
    /// Refuse new sessions, objects and connections, or accept them again (administrators).
    ///
    /// Existing ones are not affected. `rnicctl status` shows whether the daemon is draining.
    Drain {
        /// Start or stop draining.
        #[arg(value_enum)]
        switch: Switch,
    },
    /// Install rnicd for all programs of this machine, or remove it (root).
    System {
        #[command(subcommand)]
        command: system::Command,
    },
}

#[derive(Debug, Subcommand)]
enum Device {
    /// All devices, in the order in which programs see them.
    List,
    /// Add a RoCE device until the daemon ends. Programs see it when they list the devices again.
    Add {
        /// Name of the device.
        name: String,
        /// Interface whose addresses are the GIDs of the device [default: all interfaces].
        #[arg(long, value_name = "IF", conflicts_with = "addresses")]
        netdev: Option<String>,
        /// Address that is a GID of the device. May be given several times.
        #[arg(long = "address", value_name = "IP")]
        addresses: Vec<IpAddr>,
    },
    /// Remove a RoCE device from the list. Programs that have opened it are not affected.
    Remove {
        /// Name of the device.
        name: String,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Switch {
    /// Refuse new ones.
    On,
    /// Accept new ones again.
    Off,
}

/// Returns the command line of `rnicctl`, for its manual page and completions.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs `rnicctl`, or the command with the name of this process, with its arguments.
pub fn main() -> ExitCode {
    commands::by_name().unwrap_or_else(|| run(std::env::args_os()))
}

/// Runs `rnicctl` with these arguments, the first of which is its name.
pub fn run(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> ExitCode {
    let Cli { command, common } = Cli::parse_from(arguments);
    match run_command(&command, &common) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            super::complain(&format!("rnicctl: {error}"));
            match error.downcast_ref::<Error>() {
                Some(Error::NoDaemon { tried }) => {
                    for socket in sockets_of_profiles(tried) {
                        let socket = socket.display();
                        super::complain(&format!("rnicctl: there is also RNIC_SOCKET={socket}"));
                    }
                    ExitCode::from(3)
                }
                Some(Error::NotAdmitted { .. }) => ExitCode::from(3),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Returns the sockets of daemons that `rnic-run --as` has started, in the folders of these
/// sockets.
fn sockets_of_profiles(tried: &[(PathBuf, io::Error)]) -> Vec<PathBuf> {
    let folders = tried.iter().filter_map(|(path, _)| std::fs::read_dir(path.parent()?).ok());
    let is_socket = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("rnicd-") && name.ends_with(".sock")
    };
    let paths = folders.flatten().flatten().map(|entry| entry.path());
    paths.filter(is_socket).collect()
}

fn run_command(command: &Command, common: &CommonArgs) -> Result<(), Box<dyn std::error::Error>> {
    if let Command::System { command } = command {
        return system::run(command, common.json);
    }
    if let Command::Profile { command } = command {
        return profile::run(command, common.json);
    }
    let context = match &common.socket {
        Some(path) => Context::open_at(path)?,
        None => Context::open()?,
    };
    let context = &context;
    let json = common.json;
    match *command {
        Command::Device(Device::List) => {
            let devices = context.device_unruled()?.devices;
            print(json, &devices, &of_devices(&devices))
        }
        Command::Device(Device::Add { ref name, ref netdev, ref addresses }) => {
            let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            let addresses = Some(addresses.join(",")).filter(|list| !list.is_empty());
            context.add_device(name, netdev.as_ref().or(addresses.as_ref()).map(String::as_str))?;
            done(json)
        }
        Command::Device(Device::Remove { ref name }) => {
            context.remove_device(name)?;
            done(json)
        }
        Command::Fault(ref command) => fault::run(command, context, json),
        Command::Status => {
            let status = context.status()?;
            print(json, &status, &of_status(&status))
        }
        Command::Clients => list::<ClientRow>(context, json),
        Command::Qps => list::<QpRow>(context, json),
        Command::Cqs => list::<CqRow>(context, json),
        Command::Mrs => list::<MrRow>(context, json),
        Command::Srqs => list::<SrqRow>(context, json),
        Command::Windows => list::<WindowRow>(context, json),
        Command::Pds => list::<PdRow>(context, json),
        Command::Listeners => list::<ListenerRow>(context, json),
        Command::Limits => list::<LimitRow>(context, json),
        Command::Events { follow: false } => list::<EventRecord>(context, json),
        Command::Events { follow: true } => follow::follow(context, json, &mut std::io::stdout()),
        Command::Why { id: None } => list::<Diagnosis>(context, json),
        Command::Why { id: Some(id) } => {
            let record = context.diagnosis(id)?;
            print(json, &record, &why::explain(&record))
        }
        Command::Disconnect { qp } => {
            context.admin_disconnect(QpId(qp))?;
            done(json)
        }
        Command::Drain { switch } => {
            context.drain(matches!(switch, Switch::On))?;
            done(json)
        }
        Command::System { .. } | Command::Profile { .. } => Ok(()),
    }
}

/// Prints a list.
pub(super) fn list<R: Shown>(
    context: &Context,
    json: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    print_rows(json, &context.rows::<R>()?)
}

/// Prints rows.
pub(super) fn print_rows<R: Shown>(
    json: bool,
    rows: &[R],
) -> Result<(), Box<dyn std::error::Error>> {
    print(json, rows, &R::text(rows))
}

/// Reports success of a command without output.
pub(super) fn done(json: bool) -> Result<(), Box<dyn std::error::Error>> {
    if json { print(json, &serde_json::json!({ "done": true }), &"") } else { Ok(()) }
}

fn print<T: Serialize + ?Sized>(
    json: bool,
    value: &T,
    text: &dyn std::fmt::Display,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut text = if json { serde_json::to_string_pretty(value)? } else { text.to_string() };
    text.push('\n');
    super::print(&text).map(drop)
}
