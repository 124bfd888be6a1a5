//! Shows what the daemon knows: figures, clients and their objects.

use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use rnic_client::{Context, Error, ListKind, Rows, StatusInfo};
use rnicd::cli::table::{Table, of_rows, of_status};
use serde::Serialize;

/// Show what rnicd knows. Administrators see everybody's objects, others their own.
///
/// Exit codes: 0 shown; 1 the daemon refused or failed; 2 wrong usage; 3 no daemon was reached.
#[derive(Debug, Parser)]
#[command(name = "rnicctl", version)]
struct Cli {
    /// What to show.
    #[arg(value_enum)]
    what: What,
    /// Control socket of the daemon; otherwise RNIC_SOCKET and the usual places.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// Figures of the daemon.
    Status,
    /// Sessions of programs.
    Clients,
    /// Queue pairs.
    Qps,
    /// Completion queues.
    Cqs,
    /// Memory regions.
    Mrs,
    /// Bound addresses.
    Listeners,
    /// Shared receive queues.
    Srqs,
    /// Memory windows.
    Windows,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match show(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rnicctl: {error}");
            match error.downcast_ref::<Error>() {
                Some(Error::NoDaemon { .. } | Error::NotAdmitted { .. }) => ExitCode::from(3),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn show(cli: &Cli) -> Result<(), Box<dyn std::error::Error>> {
    let context = match &cli.socket {
        Some(path) => Context::open_at(path)?,
        None => Context::open()?,
    };
    let kind = match cli.what {
        What::Status => {
            let status: StatusInfo = context.status()?;
            return print(cli.json, &status, &of_status(&status));
        }
        What::Clients => ListKind::Clients,
        What::Qps => ListKind::Qps,
        What::Cqs => ListKind::Cqs,
        What::Mrs => ListKind::Mrs,
        What::Listeners => ListKind::Listeners,
        What::Srqs => ListKind::Srqs,
        What::Windows => ListKind::Windows,
    };
    let rows = all_rows(&context, kind)?;
    let table = of_rows(&rows);
    match &rows {
        Rows::Clients(rows) => print(cli.json, rows, &table),
        Rows::Qps(rows) => print(cli.json, rows, &table),
        Rows::Cqs(rows) => print(cli.json, rows, &table),
        Rows::Mrs(rows) => print(cli.json, rows, &table),
        Rows::Listeners(rows) => print(cli.json, rows, &table),
        Rows::Srqs(rows) => print(cli.json, rows, &table),
        Rows::Windows(rows) => print(cli.json, rows, &table),
        Rows::Pds(rows) => print(cli.json, rows, &table),
        Rows::Limits(rows) => print(cli.json, rows, &table),
        Rows::Whys(rows) => print(cli.json, rows, &table),
        Rows::Events(rows) => print(cli.json, rows, &table),
    }
}

/// All pages of a list. Objects come and go meanwhile, so the sum may miss or repeat one.
fn all_rows(context: &Context, kind: ListKind) -> Result<Rows, Error> {
    let (mut all, _) = context.list(kind, 0)?;
    loop {
        let have = len(&all);
        let (page, total) = context.list(kind, u32::try_from(have).unwrap_or(u32::MAX))?;
        if len(&page) == 0 || have >= total as usize {
            return Ok(all);
        }
        match (&mut all, page) {
            (Rows::Clients(all), Rows::Clients(page)) => all.extend(page),
            (Rows::Qps(all), Rows::Qps(page)) => all.extend(page),
            (Rows::Cqs(all), Rows::Cqs(page)) => all.extend(page),
            (Rows::Mrs(all), Rows::Mrs(page)) => all.extend(page),
            (Rows::Listeners(all), Rows::Listeners(page)) => all.extend(page),
            (Rows::Srqs(all), Rows::Srqs(page)) => all.extend(page),
            (Rows::Windows(all), Rows::Windows(page)) => all.extend(page),
            (Rows::Pds(all), Rows::Pds(page)) => all.extend(page),
            (Rows::Limits(all), Rows::Limits(page)) => all.extend(page),
            (Rows::Whys(all), Rows::Whys(page)) => all.extend(page),
            (Rows::Events(all), Rows::Events(page)) => all.extend(page),
            // A daemon that answers with other rows than asked for has nothing more to say.
            _ => return Ok(all),
        }
    }
}

fn len(rows: &Rows) -> usize {
    match rows {
        Rows::Clients(rows) => rows.len(),
        Rows::Qps(rows) => rows.len(),
        Rows::Cqs(rows) => rows.len(),
        Rows::Mrs(rows) => rows.len(),
        Rows::Listeners(rows) => rows.len(),
        Rows::Srqs(rows) => rows.len(),
        Rows::Windows(rows) => rows.len(),
        Rows::Pds(rows) => rows.len(),
        Rows::Limits(rows) => rows.len(),
        Rows::Whys(rows) => rows.len(),
        Rows::Events(rows) => rows.len(),
    }
}

fn print<T: Serialize + ?Sized>(
    json: bool,
    value: &T,
    table: &Table,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut text = if json { serde_json::to_string_pretty(value)? } else { table.to_string() };
    text.push('\n');
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
