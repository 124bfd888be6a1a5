//! The command line of `rnicd`.
//!
//! Each command is a function from its arguments to an exit code. The work itself is done in other
//! modules. The binary calls [`main`].

pub mod ctl;
pub mod fault;
mod follow;
pub mod rows;
pub mod table;
pub mod why;

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

use rnic_client::Context;

use crate::demo;
use rnicd::config::{
    ANNOTATED_DEFAULT, Config, ConfigError, Control, InForce, Loopback, Profile, Seccomp, Size,
    Span, explain,
};
use rnicd::control::{ControlSocket, Notifier, Server, SocketError, StartError, check_filters};
use rnicd::exec::{self, DaemonProcess, Death, ExecError, LogTo, Overrides};
use rnicd::log::{Log, error_text};
use rnicd::privilege::{self, RenounceError, SignalSet, Signals};
use rnicd::resource::{Capacity, PassedPort, Policy};

/// An iWARP RDMA NIC in a daemon: no hardware, no kernel module, no root.
///
/// Exit codes: 0 done; 1 failed; 2 wrong usage. `exec` returns the exit code of its program.
#[derive(Debug, Parser)]
#[command(name = "rnicd", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon in the foreground until SIGTERM or SIGINT.
    ///
    /// Exit codes: 0 stopped; 1 failed; 2 wrong usage; 75 another daemon uses the socket; 78 the
    /// configuration is invalid, and a restart does not help.
    Run(Run),
    /// Print every effective value of a configuration, its meaning, and the worst-case memory.
    ///
    /// Exit codes: 0 valid; 78 invalid; 2 wrong usage.
    CheckConfig(Check),
    /// Print the default configuration with an explanation of every key.
    PrintConfig,
    /// Run a program with a private daemon, which ends with it.
    ///
    /// The daemon's socket is in a folder that only this user can enter. Programs of other users
    /// cannot reach it. Signals are forwarded to the program. If this process is killed by SIGKILL,
    /// so is the program, and the daemon ends.
    ///
    /// Exit code: that of the program, which may have been ended by a signal; 127 if the program
    /// was not found, 126 if it cannot be executed, 125 if anything else failed or the daemon died
    /// while the program succeeded; 2 wrong usage.
    Exec(Exec),
    /// Demonstrate RDMA: every operation between two processes, a file copy, and measurements.
    Demo(Demo),
    /// The daemon of `exec` and `demo`. Serves until its standard input is closed.
    #[command(hide = true)]
    PrivateDaemon {
        /// Folder for its socket, removed at its end.
        #[arg(long)]
        folder: PathBuf,
        /// Overrides wired.profile.
        #[arg(long)]
        profile: Option<String>,
        /// Overrides engine.loopback.
        #[arg(long)]
        loopback: Option<LoopbackArg>,
        /// Overrides control.seccomp.
        #[arg(long)]
        seccomp: Option<SeccompArg>,
    },
    /// A child process of the demo.
    #[command(hide = true, subcommand)]
    DemoPart(demo::parts::Part),
}

#[derive(Debug, Args)]
struct Configured {
    /// Configuration file [default: the built-in configuration].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Use the built-in configuration if the file does not exist.
    #[arg(long, requires = "config")]
    config_optional: bool,
}

impl Configured {
    /// Returns the file to read, if any.
    fn file(&self) -> Option<&Path> {
        self.config.as_deref().filter(|file| !self.config_optional || is_there(file))
    }
}

/// Returns false only if a file certainly does not exist.
fn is_there(file: &Path) -> bool {
    file.try_exists().unwrap_or(true)
}

#[derive(Debug, Args)]
struct Check {
    /// Configuration file [default: the built-in configuration].
    file: Option<PathBuf>,
    /// Configuration file, as an option.
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    config: Option<PathBuf>,
    /// Use the built-in configuration if the file does not exist.
    #[arg(long, requires = "config")]
    config_optional: bool,
    /// Print nothing if the configuration is valid.
    #[arg(long)]
    quiet: bool,
}

#[derive(Debug, Args)]
struct Run {
    #[command(flatten)]
    configured: Configured,
    /// Control socket; overrides control.socket in the configuration.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Profile of the devices, by its name or the path of a file; overrides wired.profile in the
    /// configuration.
    #[arg(long, value_name = "PROFILE")]
    profile: Option<String>,
    /// Stop gracefully after this time without a client ("60s", "5min").
    #[arg(long, value_name = "DURATION", value_parser = Span::parse)]
    exit_when_idle: Option<Span>,
    /// Detach from the session and terminal of the caller, and close all descriptors except stdin,
    /// stdout and stderr. For programs that start a daemon and continue.
    #[arg(long)]
    detached: bool,
}

#[derive(Debug, Args)]
struct Exec {
    #[command(flatten)]
    configured: Configured,
    /// Profile of the devices, by its name or the path of a file; overrides wired.profile in the
    /// configuration.
    #[arg(long, value_name = "PROFILE")]
    profile: Option<String>,
    /// Path between queue pairs of this daemon; overrides engine.loopback.
    #[arg(long, value_name = "WAY")]
    loopback: Option<LoopbackArg>,
    /// Write the daemon's log to this file, or to standard error for `-` [default: keep the log,
    /// and show its last lines if the daemon dies].
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Set the fault rules of this TOML file before the program starts (see `rnicctl fault add`).
    #[arg(long, value_name = "FILE")]
    faults: Option<PathBuf>,
    /// The program and its arguments. Its environment variable RNIC_SOCKET is the daemon's socket.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

#[derive(Debug, Args)]
struct Demo {
    /// File to copy. Without it the demo creates one.
    file: Option<PathBuf>,
    /// Size of the created file.
    #[arg(long, default_value = "256MiB", conflicts_with = "file", value_parser = Size::parse)]
    size: Size,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LoopbackArg {
    /// From buffer to buffer.
    Direct,
    /// Over TCP, as between hosts.
    Tcp,
}

/// `control.seccomp`, as passed to the daemon of `exec` and `demo`.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum SeccompArg {
    Enforce,
    Log,
    Off,
}

impl From<SeccompArg> for Seccomp {
    fn from(arg: SeccompArg) -> Self {
        match arg {
            SeccompArg::Enforce => Seccomp::Enforce,
            SeccompArg::Log => Seccomp::Log,
            SeccompArg::Off => Seccomp::Off,
        }
    }
}

impl From<LoopbackArg> for Loopback {
    fn from(arg: LoopbackArg) -> Self {
        match arg {
            LoopbackArg::Direct => Loopback::Direct,
            LoopbackArg::Tcp => Loopback::Tcp,
        }
    }
}

/// Returns the command line of `rnicd`, for its manual page and completions.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command in this process's arguments.
pub fn main() -> ExitCode {
    let command = Cli::parse().command;
    // Maps a failure to an exit code.
    let code: fn(&Failure) -> ExitCode = match command {
        Command::Exec(_) => exec_failed,
        _ => failed,
    };
    let result = match command {
        Command::Run(args) => run(&args),
        Command::CheckConfig(args) => check_config(&args),
        Command::PrintConfig => print(ANNOTATED_DEFAULT),
        Command::Exec(args) => exec(&args),
        Command::Demo(args) => show(args),
        Command::PrivateDaemon { folder, profile, loopback, seccomp } => {
            let loopback = loopback.map(Loopback::from);
            let seccomp = seccomp.map(Seccomp::from);
            Ok(exec::serve(folder, Overrides { profile, loopback, seccomp }))
        }
        Command::DemoPart(part) => demo::parts::play(&part).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        complain(&format!("rnicd: {error}"));
        code(&error)
    })
}

/// Writes an error to standard error. Failed writes are ignored: the exit code reports the failure
/// too.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", error_text(text));
}

/// Returns the exit code for a failure of all commands except `exec`.
fn failed(error: &Failure) -> ExitCode {
    match error.downcast_ref::<SocketError>() {
        Some(SocketError::Taken { .. }) => ExitCode::from(EX_TEMPFAIL),
        _ if is_configuration(error) => ExitCode::from(EX_CONFIG),
        _ => ExitCode::FAILURE,
    }
}

/// Returns true if the configuration caused the failure, so that a restart would fail too.
fn is_configuration(error: &Failure) -> bool {
    let socket = match error.downcast_ref::<StartError>() {
        Some(StartError::NoFilters { .. }) => return true,
        Some(StartError::Socket(error)) => Some(error),
        _ => error.downcast_ref::<SocketError>(),
    };
    error.is::<ConfigError>()
        || matches!(socket, Some(SocketError::NoSuchGroup { .. }))
        || matches!(
            error.downcast_ref::<RenounceError>(),
            Some(RenounceError::NoSuchUser { .. } | RenounceError::NotRoot { .. })
        )
}

/// `EX_CONFIG` of `sysexits.h`. Tells a service manager not to restart the daemon.
const EX_CONFIG: u8 = 78;
/// `EX_TEMPFAIL` of `sysexits.h`. Tells the caller that another daemon was started first.
const EX_TEMPFAIL: u8 = 75;

/// Error of a failed command, shown to the user.
pub(crate) type Failure = Box<dyn std::error::Error>;

fn run(args: &Run) -> Result<ExitCode, Failure> {
    if args.detached {
        privilege::detach();
    }
    let mut config = Config::load_or_default(args.configured.file())?;
    if let Some(profile) = profile(args.profile.as_deref())? {
        config.wired.profile = profile;
    }
    let mut log = start_log(&config);
    let signals = Signals::take(SignalSet::Daemon)?;
    let socket = args.socket.as_deref();
    let control = &config.control;
    let PassedSockets { control: passed, ports } = sort_sockets(&config)?;
    let socket = match passed {
        Some(passed) => ControlSocket::passed(passed, socket, control)?,
        None => ControlSocket::open(socket, control)?,
    };
    let notifier = Notifier::from_environment()?;
    give_up_privileges(control, &socket)?;
    check_filters(control.seccomp)?;
    privilege::raise_descriptor_limit();
    log.start_writing(control.seccomp)?;
    let mut server = Server::start(config, socket, Some(signals), notifier)?;
    server.take_wired_port(ports);
    if let Some(file) = &args.configured.config {
        server.reload_from(file.clone(), log.level())?;
    }
    if let Some(Span(most)) = args.exit_when_idle {
        server.exit_when_idle(most);
    }
    server.run()?;
    Ok(ExitCode::SUCCESS)
}

/// Loads the profile of `--profile`.
fn profile(name: Option<&str>) -> Result<Option<Profile>, Failure> {
    let Some(name) = name else { return Ok(None) };
    let profile = load_profile(name).map_err(|why| format!("--profile {name}: {why}"))?;
    Ok(Some(profile))
}

/// Loads a profile. A path may be relative.
fn load_profile(name: &str) -> Result<Profile, String> {
    if !name.contains('/') {
        return Profile::load(name);
    }
    let path = std::path::absolute(name).map_err(|error| error.to_string())?;
    Profile::load(path.to_str().ok_or("the path is not UTF-8 text")?)
}

/// Sockets from a service manager.
struct PassedSockets {
    control: Option<OwnedFd>,
    ports: Vec<PassedPort>,
}

/// Sorts the passed sockets into the control socket and sockets for `wired.port`.
fn sort_sockets(config: &Config) -> Result<PassedSockets, Failure> {
    let mut sockets = PassedSockets { control: None, ports: Vec::new() };
    for fd in privilege::passed_sockets()? {
        if !PassedPort::is_inet(&fd) {
            if sockets.control.replace(fd).is_some() {
                return Err(SocketError::Passed("more than one control socket".to_owned()).into());
            }
        } else {
            let port = PassedPort::new(fd, config.wired.port).map_err(SocketError::Passed)?;
            sockets.ports.push(port);
        }
    }
    Ok(sockets)
}

/// Gives up all privileges. None are needed from here on, and no other thread runs yet.
fn give_up_privileges(control: &Control, socket: &ControlSocket) -> Result<(), Failure> {
    match privilege::account_to_switch_to(control.user.as_deref())? {
        Some(account) => {
            socket.give_to(account.uid)?;
            privilege::switch_to_account(&account)?;
            let uid = account.uid;
            let gid = account.gid;
            let groups = &account.groups;
            tracing::info!(uid, gid, ?groups, "dropped privileges");
        }
        None if privilege::own_user() == 0 => tracing::warn!(
            "running as root: an attacker who controls the daemon controls the machine; \
             set control.user"
        ),
        None => privilege::renounce()?,
    }
    if !socket.can_be_removed() {
        let path = socket.path().display();
        tracing::info!(%path, "the socket will be left behind: this user cannot remove it");
    }
    Ok(())
}

fn check_config(args: &Check) -> Result<ExitCode, Failure> {
    let file = args.file.as_deref().or(args.config.as_deref());
    let file = file.filter(|file| !args.config_optional || is_there(file));
    let config = Config::load_or_default(file)?;
    if args.quiet {
        return Ok(ExitCode::SUCCESS);
    }
    let in_force = Capacity::of_this_process(&config).in_force();
    let in_force = InForce { guid: Some(config.device.effective_guid()), ..in_force };
    print(&explain(&config, &in_force, Policy::new(&config).unknown()))
}

fn exec(args: &Exec) -> Result<ExitCode, Failure> {
    // Read once, before anything is started: the file may be a pipe.
    let text = Config::read_or_default(args.configured.file())?;
    let profile = profile(args.profile.as_deref())?;
    let overrides = Overrides {
        profile: profile.map(|profile| profile.name().to_owned()),
        loopback: args.loopback.map(Loopback::from),
        seccomp: None,
    };
    let log = match &args.log {
        None => LogTo::TempFile,
        Some(path) if path.as_os_str() == "-" => LogTo::Stderr,
        Some(path) => LogTo::File(path.clone()),
    };
    let rules = args.faults.as_deref().map(fault::read).transpose()?.unwrap_or_default();
    let daemon = DaemonProcess::start(&text, overrides, log)?;
    let signals = Signals::take(SignalSet::Wrapper)?;
    if !rules.is_empty() {
        fault::set(&Context::open_at(daemon.socket())?, &rules)?;
    }
    let report = |death: &Death| complain(&format!("rnicd: {death}"));
    Ok(exec::end_as(exec::run(daemon, &args.program, &signals, report)?))
}

/// Returns the exit code for a failure of `exec`.
fn exec_failed(error: &Failure) -> ExitCode {
    let known = error.downcast_ref::<ExecError>().map(ExecError::exit_code);
    known.unwrap_or(ExitCode::from(exec::FAILED))
}

fn show(args: Demo) -> Result<ExitCode, Failure> {
    let payload = match args.file {
        Some(path) => demo::Payload::File(path),
        None => demo::Payload::Generated(args.size.0),
    };
    Ok(demo::run(&payload)?)
}

fn start_log(config: &Config) -> Log {
    let (log, problem) = Log::start(&config.log);
    if let Some(problem) = problem {
        complain(&format!("rnicd: {problem}; using log.level from the configuration"));
    }
    log
}

/// Writes to standard output. A closed pipe is not an error.
pub(crate) fn print(text: &str) -> Result<ExitCode, Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(format!("cannot write to standard output: {error}").into())
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn everything_after_two_dashes_is_the_program() {
        let cli = Cli::try_parse_from(["rnicd", "exec", "--loopback", "tcp", "--", "ls", "--help"]);
        let Ok(Cli { command: Command::Exec(exec) }) = cli else { panic!("{cli:?}") };
        assert!(matches!(exec.loopback, Some(LoopbackArg::Tcp)));
        assert_eq!(exec.program, ["ls", "--help"]);
        assert!(Cli::try_parse_from(["rnicd", "exec"]).is_err());
    }
}
