//! The command line of `rnicd`.
//!
//! Each command is a function from its arguments to an exit code; what it does lives elsewhere.
//! The binary calls [`main`].

pub mod ctl;
mod follow;
pub mod table;
pub mod why;

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::config::{
    ANNOTATED_DEFAULT, Config, ConfigError, Control, InForce, Loopback, Seccomp, Size, Span,
    explain,
};
use crate::control::{ControlSocket, Notifier, Server, SocketError, StartError, check_filters};
use crate::demo;
use crate::exec::{self, DaemonProcess, ExecError, LogTo, Overrides};
use crate::log::{Log, error_text};
use crate::privilege::{self, RenounceError, SignalSet, Signals};
use crate::resource::{Capacity, PassedPort, Policy};

/// An iWARP RDMA NIC in a daemon: no hardware, no kernel module, no root.
///
/// Exit codes: 0 done; 1 failed; 2 wrong usage. `exec` has those of the program it runs.
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
    /// Exit codes: 0 stopped; 1 failed; 2 wrong usage; 75 another daemon has the socket; 78 the
    /// configuration is wrong, and starting again is of no use before it is changed.
    Run(Run),
    /// Explain every effective value of a configuration and the memory it may cost.
    ///
    /// Exit codes: 0 it is right; 78 it is wrong; 2 wrong usage.
    CheckConfig(Check),
    /// Print the default configuration, every key with its meaning.
    PrintConfig,
    /// Run a program with a daemon of its own, and end both together.
    ///
    /// The daemon's socket is in a folder that only this user may enter: programs that run as other
    /// users cannot reach it, so there are no helper processes for their attached memory. Signals
    /// are passed on. If this process is killed by SIGKILL, so is the program, and the daemon ends.
    ///
    /// Exit code: the program's, or its signal's end; 127 if the program was not found, 126 if it
    /// cannot be run, 125 if something else failed or the daemon died while the program succeeded;
    /// 2 wrong usage.
    Exec(Exec),
    /// See RDMA happen: every operation between two processes, a file copied, figures.
    Demo(Demo),
    /// The daemon of `exec` and `demo`: serves as long as its standard input is open.
    #[command(hide = true)]
    PrivateDaemon {
        /// Where its socket is to be; removed at its end.
        #[arg(long)]
        folder: PathBuf,
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
    /// Configuration file; the built-in default without it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Use the built-in default if the configuration file does not exist.
    #[arg(long, requires = "config")]
    config_optional: bool,
}

impl Configured {
    /// The file to be read, if any.
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
    /// Configuration file; the built-in default without it.
    file: Option<PathBuf>,
    /// The same.
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    config: Option<PathBuf>,
    /// Use the built-in default if the file does not exist.
    #[arg(long, requires = "config")]
    config_optional: bool,
    /// Say nothing of a configuration that is right.
    #[arg(long)]
    quiet: bool,
}

#[derive(Debug, Args)]
struct Run {
    #[command(flatten)]
    configured: Configured,
    /// Control socket; overrides control.socket of the configuration.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Stop in order once there has been no client for this long ("60s", "5min").
    #[arg(long, value_name = "DURATION", value_parser = Span::parse)]
    exit_when_idle: Option<Span>,
    /// For programs that start a daemon and go on: leave their session and terminal, and close
    /// every descriptor but the standard ones.
    #[arg(long)]
    detached: bool,
}

#[derive(Debug, Args)]
struct Exec {
    #[command(flatten)]
    configured: Configured,
    /// How queue pairs of this daemon talk to each other; overrides engine.loopback.
    #[arg(long, value_name = "WAY")]
    loopback: Option<LoopbackArg>,
    /// Write the daemon's log to this file, or to standard error if it is `-` [default: keep it,
    /// and show its last lines if the daemon dies].
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// The program and its arguments. RNIC_SOCKET in its environment names the daemon.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

#[derive(Debug, Args)]
struct Demo {
    /// File to copy; one is made without it.
    file: Option<PathBuf>,
    /// Size of the file that is made.
    #[arg(long, default_value = "256MiB", conflicts_with = "file", value_parser = Size::parse)]
    size: Size,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LoopbackArg {
    /// From memory to memory.
    Direct,
    /// Over TCP, like strangers.
    Tcp,
}

/// `control.seccomp`, as it is said to the daemon of `exec` and `demo`.
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

/// Runs the command of this process's arguments.
pub fn main() -> ExitCode {
    let command = Cli::parse().command;
    // The exit code of a failure, where it is not 1.
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
        Command::PrivateDaemon { folder, loopback, seccomp } => {
            let loopback = loopback.map(Loopback::from);
            let seccomp = seccomp.map(Seccomp::from);
            Ok(exec::serve(folder, Overrides { loopback, seccomp }))
        }
        Command::DemoPart(part) => demo::parts::play(&part).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        complain(&format!("rnicd: {error}"));
        code(&error)
    })
}

/// Says what is wrong on standard error, if that takes it: the exit code tells in any case.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", error_text(text));
}

/// The exit code of other commands that failed.
fn failed(error: &Failure) -> ExitCode {
    match error.downcast_ref::<SocketError>() {
        Some(SocketError::Taken { .. }) => ExitCode::from(EX_TEMPFAIL),
        _ if is_configuration(error) => ExitCode::from(EX_CONFIG),
        _ => ExitCode::FAILURE,
    }
}

/// Whether it failed for what the configuration says, so that it will fail again.
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

/// `EX_CONFIG` of `sysexits.h`, by which a service manager knows that it need not try again.
const EX_CONFIG: u8 = 78;
/// `EX_TEMPFAIL`: by which whoever starts daemons knows that somebody else was faster.
const EX_TEMPFAIL: u8 = 75;

/// What a user is told when a command fails.
pub(crate) type Failure = Box<dyn std::error::Error>;

fn run(args: &Run) -> Result<ExitCode, Failure> {
    if args.detached {
        privilege::detach();
    }
    let config = Config::load_or_default(args.configured.file())?;
    let mut log = start_log(&config);
    let signals = Signals::take(SignalSet::Daemon)?;
    let (socket, control) = (args.socket.as_deref(), &config.control);
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

/// What a service manager passed.
struct PassedSockets {
    control: Option<OwnedFd>,
    ports: Vec<PassedPort>,
}

/// Tells the control socket and sockets of `wired.port` apart by what they are.
fn sort_sockets(config: &Config) -> Result<PassedSockets, Failure> {
    let mut sockets = PassedSockets { control: None, ports: Vec::new() };
    for fd in privilege::passed_sockets()? {
        if !PassedPort::is_of_internet(&fd) {
            if sockets.control.replace(fd).is_some() {
                return Err(SocketError::Passed("one control socket is enough".to_owned()).into());
            }
        } else {
            let port = PassedPort::new(fd, config.wired.port).map_err(SocketError::Passed)?;
            sockets.ports.push(port);
        }
    }
    Ok(sockets)
}

/// Everything that took privileges is done: none is needed from here on, and no thread runs yet.
fn give_up_privileges(control: &Control, socket: &ControlSocket) -> Result<(), Failure> {
    match privilege::account_to_become(control.user.as_deref())? {
        Some(account) => {
            socket.give_to(account.uid)?;
            privilege::become_account(&account)?;
            let (uid, gid, groups) = (account.uid, account.gid, &account.groups);
            tracing::info!(uid, gid, ?groups, "dropped privileges");
        }
        None if privilege::own_user() == 0 => tracing::warn!(
            "running as root: whoever takes over the daemon takes over the machine; \
             set control.user"
        ),
        None => privilege::renounce()?,
    }
    if !socket.can_be_removed() {
        let path = socket.path().display();
        tracing::info!(%path, "the socket will be left behind: its folder is not this user's");
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
    let in_force = InForce { guid: Some(config.device.guid_here()), ..in_force };
    print(&explain(&config, &in_force, Policy::new(&config).unknown()))
}

fn exec(args: &Exec) -> Result<ExitCode, Failure> {
    // Read once, and before anything is started: it may come from a pipe.
    let text = Config::read_or_default(args.configured.file())?;
    let overrides =
        Overrides { loopback: args.loopback.map(Loopback::from), ..Overrides::default() };
    let log = match &args.log {
        None => LogTo::Nobody,
        Some(path) if path.as_os_str() == "-" => LogTo::Stderr,
        Some(path) => LogTo::File(path.clone()),
    };
    let daemon = DaemonProcess::start(&text, overrides, log)?;
    let signals = Signals::take(SignalSet::Wrapper)?;
    Ok(exec::end_as(exec::run(daemon, &args.program, &signals)?))
}

/// The exit code of an `exec` that could not do what was asked.
fn exec_failed(error: &Failure) -> ExitCode {
    let known = error.downcast_ref::<ExecError>().map(ExecError::exit_code);
    known.unwrap_or(ExitCode::from(exec::FAILED))
}

fn show(args: Demo) -> Result<ExitCode, Failure> {
    let cargo = match args.file {
        Some(path) => demo::Cargo::File(path),
        None => demo::Cargo::Made(args.size.0),
    };
    Ok(demo::run(&cargo)?)
}

fn start_log(config: &Config) -> Log {
    let (log, problem) = Log::start(&config.log);
    if let Some(problem) = problem {
        complain(&format!("rnicd: {problem}; using log.level of the configuration"));
    }
    log
}

/// Writes to standard output; a reader that has had enough is no error.
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
    use clap::CommandFactory;

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
