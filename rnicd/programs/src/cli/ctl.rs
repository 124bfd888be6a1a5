//! `rnicctl`: shows the state of the daemon and runs commands of administrators.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rnic_client::{Context, Error, ListKind, Page, QpId, Rows};
use serde::Serialize;

use super::table::{of_rows, of_status};
use super::{follow, why};

/// Show the state of rnicd, and run commands of administrators.
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
    /// Refuse new sessions, objects and connections, or accept them again (administrators).
    ///
    /// Existing ones are not affected. `rnicctl status` shows whether the daemon is draining.
    Drain {
        /// Start or stop draining.
        #[arg(value_enum)]
        switch: Switch,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Switch {
    /// Refuse new ones.
    On,
    /// Accept new ones again.
    Off,
}

/// Runs `rnicctl` with the arguments of this process.
pub fn main() -> ExitCode {
    let Cli { command, common } = Cli::parse();
    match run_command(&command, &common) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            super::complain(&format!("rnicctl: {error}"));
            match error.downcast_ref::<Error>() {
                Some(Error::NoDaemon { .. } | Error::NotAdmitted { .. }) => ExitCode::from(3),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn run_command(command: &Command, common: &CommonArgs) -> Result<(), Box<dyn std::error::Error>> {
    let context = match &common.socket {
        Some(path) => Context::open_at(path)?,
        None => Context::open()?,
    };
    let list = |kind| show_rows(&context, kind, common.json);
    match *command {
        Command::Status => {
            let status = context.status()?;
            print(common.json, &status, &of_status(&status))
        }
        Command::Clients => list(ListKind::Clients),
        Command::Qps => list(ListKind::Qps),
        Command::Cqs => list(ListKind::Cqs),
        Command::Mrs => list(ListKind::Mrs),
        Command::Srqs => list(ListKind::Srqs),
        Command::Windows => list(ListKind::Windows),
        Command::Pds => list(ListKind::Pds),
        Command::Listeners => list(ListKind::Listeners),
        Command::Limits => list(ListKind::Limits),
        Command::Events { follow: false } => list(ListKind::Events),
        Command::Events { follow: true } => {
            follow::follow(&context, common.json, &mut std::io::stdout())
        }
        Command::Why { id: None } => list(ListKind::Diagnoses),
        Command::Why { id: Some(id) } => {
            let record = context.diagnosis(id)?;
            print(common.json, &record, &why::explain(&record))
        }
        Command::Disconnect { qp } => {
            context.admin_disconnect(QpId(qp))?;
            done(common.json)
        }
        Command::Drain { switch } => {
            context.drain(matches!(switch, Switch::On))?;
            done(common.json)
        }
    }
}

fn show_rows(
    context: &Context,
    kind: ListKind,
    json: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    let rows = all_rows(context, kind)?;
    let table = of_rows(&rows);
    match &rows {
        Rows::Clients(rows) => print(json, rows, &table),
        Rows::Qps(rows) => print(json, rows, &table),
        Rows::Cqs(rows) => print(json, rows, &table),
        Rows::Mrs(rows) => print(json, rows, &table),
        Rows::Listeners(rows) => print(json, rows, &table),
        Rows::Srqs(rows) => print(json, rows, &table),
        Rows::Windows(rows) => print(json, rows, &table),
        Rows::Pds(rows) => print(json, rows, &table),
        Rows::Limits(rows) => print(json, rows, &table),
        Rows::Diagnoses(rows) => print(json, rows, &table),
        Rows::Events(rows) => print(json, rows, &table),
    }
}

/// Returns all pages of a list. Objects may change between pages, so the result is no snapshot.
fn all_rows(context: &Context, kind: ListKind) -> Result<Rows, Error> {
    let Page { rows: mut all, mut next, .. } = context.list(kind, 0)?;
    while let Some(from) = next {
        let page = context.list(kind, from)?;
        next = page.next;
        match (&mut all, page.rows) {
            (Rows::Clients(all), Rows::Clients(page)) => all.extend(page),
            (Rows::Qps(all), Rows::Qps(page)) => all.extend(page),
            (Rows::Cqs(all), Rows::Cqs(page)) => all.extend(page),
            (Rows::Mrs(all), Rows::Mrs(page)) => all.extend(page),
            (Rows::Listeners(all), Rows::Listeners(page)) => all.extend(page),
            (Rows::Srqs(all), Rows::Srqs(page)) => all.extend(page),
            (Rows::Windows(all), Rows::Windows(page)) => all.extend(page),
            (Rows::Pds(all), Rows::Pds(page)) => all.extend(page),
            (Rows::Limits(all), Rows::Limits(page)) => all.extend(page),
            (Rows::Diagnoses(all), Rows::Diagnoses(page)) => all.extend(page),
            (Rows::Events(all), Rows::Events(page)) => all.extend(page),
            // The daemon answered with rows of another kind. Stop here.
            _ => return Ok(all),
        }
    }
    Ok(all)
}

/// Reports success of a command without output.
fn done(json: bool) -> Result<(), Box<dyn std::error::Error>> {
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
