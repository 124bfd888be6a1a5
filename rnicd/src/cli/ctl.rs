//! `rnicctl`: asks the daemon what it knows, and tells it what administrators want.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rnic_client::{Context, Error, ListKind, Page, QpId, Rows};
use serde::Serialize;

use super::table::{of_rows, of_status};
use super::{follow, why};

/// Show what rnicd knows, and have it do what administrators may ask.
///
/// Administrators see everybody's objects, others their own.
///
/// Exit codes: 0 done; 1 the daemon refused or failed; 2 wrong usage; 3 no daemon was reached.
#[derive(Debug, Parser)]
#[command(name = "rnicctl", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    how: How,
}

#[derive(Debug, Args)]
struct How {
    /// Control socket of the daemon; otherwise RNIC_SOCKET and the usual places.
    #[arg(long, value_name = "PATH", global = true)]
    socket: Option<PathBuf>,
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Figures of the daemon.
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
    /// Limits, and how much of each is in use.
    Limits,
    /// Notable happenings, newest first.
    Events {
        /// Show them as they happen, oldest first, until interrupted.
        #[arg(long)]
        follow: bool,
    },
    /// Why something was refused or failed.
    ///
    /// Every refused request, failed completion, Terminate and lost connection leaves a record. A
    /// completion names its record by `diagnosis_id`, an error of the library as "(why 17)".
    Why {
        /// Number of a record; without it, all records there are, newest first.
        id: Option<u64>,
    },
    /// End a queue pair's connection, whoever owns it (administrators).
    Disconnect {
        /// Number of the queue pair, as `rnicctl qps` shows it.
        qp: u32,
    },
    /// Refuse new sessions, objects and connections, or take them again (administrators).
    ///
    /// What exists goes on. `rnicctl status` shows whether the daemon drains.
    Drain {
        /// Whether to refuse.
        #[arg(value_enum)]
        switch: Switch,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Switch {
    /// Take nothing new.
    On,
    /// Take new things again.
    Off,
}

/// Runs `rnicctl` with the arguments of this process.
pub fn main() -> ExitCode {
    let Cli { command, how } = Cli::parse();
    match carry_out(&command, &how) {
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

fn carry_out(command: &Command, how: &How) -> Result<(), Box<dyn std::error::Error>> {
    let context = match &how.socket {
        Some(path) => Context::open_at(path)?,
        None => Context::open()?,
    };
    let list = |kind| show_rows(&context, kind, how.json);
    match *command {
        Command::Status => {
            let status = context.status()?;
            print(how.json, &status, &of_status(&status))
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
            follow::follow(&context, how.json, &mut std::io::stdout())
        }
        Command::Why { id: None } => list(ListKind::Diagnoses),
        Command::Why { id: Some(id) } => {
            let record = context.diagnosis(id)?;
            print(how.json, &record, &why::explain(&record))
        }
        Command::Disconnect { qp } => {
            context.admin_disconnect(QpId(qp))?;
            done(how.json)
        }
        Command::Drain { switch } => {
            context.drain(matches!(switch, Switch::On))?;
            done(how.json)
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

/// All pages of a list. Objects come and go meanwhile, so the sum is true of no one instant.
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
            // A daemon that answers with other rows than asked for has nothing more to say.
            _ => return Ok(all),
        }
    }
    Ok(all)
}

/// What was asked for has been done, and there is nothing to show.
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
