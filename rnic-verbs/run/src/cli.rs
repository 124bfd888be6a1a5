//! The command line.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::{CommandFactory, Parser};
use rnic_client::{DeviceKind, DeviceRow};
use rustix::fs::{Mode, OFlags};

use crate::bisect::{self, BisectError, Verdict};
use crate::check::{self, Obstacle};
use crate::daemon::{
    self, DaemonError, Found, Probe, SOCKET_VARIABLE, StartOptions, StartedDaemon,
};
use crate::environment::{DEVICES_VARIABLE, Environment};
use crate::libraries::{self, LibrariesError};
use crate::mount::{self, MountError};
use crate::options;
use crate::preload;
use crate::shell::quote;

/// Run a libibverbs or librdmacm program on rnicd's RDMA devices.
///
/// rnic-run replaces itself with the unmodified program, with rnicd's libibverbs.so.1 and
/// librdmacm.so.1 first in LD_LIBRARY_PATH and in LD_PRELOAD. Another preloaded library shows the
/// program the daemon's devices in /sys/class/infiniband and /dev/infiniband. If no daemon serves
/// this user (sockets tried: RNIC_SOCKET, else $XDG_RUNTIME_DIR/rnicd.sock, the user's own
/// directory in the temporary directory, /run/rnicd/rnicd.sock), rnic-run starts one with the
/// built-in configuration, which exits when it has been idle for a while.
///
/// Exit status: that of the program; 127 it was not found; 126 it cannot be run, or not with these
/// libraries (static, setuid, setgid, or with capabilities); 125 any other failure. With --check: 0
/// the program can work, 1 it cannot. 2 wrong usage.
#[derive(Debug, Parser)]
#[command(name = "rnic-run", version, override_usage = USAGE, after_help = EXAMPLES)]
struct Cli {
    /// Directory with libibverbs.so.1 and librdmacm.so.1 [default: RNIC_VERBS_DIR, else `verbs`
    /// beside this program, `../lib/rnicd` from there, /usr/lib/rnicd].
    #[arg(long, value_name = "FOLDER")]
    lib_dir: Option<PathBuf>,
    /// Daemon to start if needed [default: rnicd beside this program, else in PATH].
    #[arg(long, value_name = "RNICD")]
    daemon: Option<PathBuf>,
    /// The adapter or kernel driver that the program expects (rxe, siw, mlx5, ..., see `rnicctl
    /// profile list`), or the file of a profile. The program gets a daemon of this user with the
    /// names, GID tables and limits of the profile; rnic-run starts it if necessary. siw shows the
    /// iWARP device, most others the RoCE devices, which support RC, UC and UD QPs, with and
    /// without rdma_cm [default: any daemon; the devices in RNIC_DEVICES, else the RoCE devices].
    #[arg(long = "as", value_name = "PROFILE", conflicts_with = "devices", value_parser = profile)]
    profile: Option<String>,
    /// Devices for the program, in this order ("rnicd1,rnicd0").
    #[arg(long, value_name = "NAMES")]
    devices: Option<OsString>,
    /// Time without clients after which a started daemon exits ("60s", "5min").
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    idle: String,
    /// Show the daemon's devices by private mounts on /sys/class and /dev instead of LD_PRELOAD.
    /// This also works for a program that does not open files through the C library (Go), or that
    /// is linked statically. The program keeps its user and group. Requires user and mount
    /// namespaces.
    #[arg(long, conflicts_with_all = ["check", "print_env"])]
    mount: bool,
    /// Fail instead of starting a daemon.
    #[arg(long)]
    no_start: bool,
    /// Print shell commands for `eval "$(rnic-run --print-env)"` and run nothing.
    #[arg(long, conflicts_with_all = ["check", "program"])]
    print_env: bool,
    /// Check whether all parts are installed and whether PROGRAM can work. Starts and runs nothing.
    #[arg(long)]
    check: bool,
    /// Find the inversion of memory order that makes PROGRAM fail. Runs it about log2(N) times with
    /// fault rules that invert some of the first N messages of each QP, and prints both requests
    /// and the rule that permits the inversion. RNIC_FAULTS may contain a rule with do=order, which
    /// sets the order and the model. Exit status: 0 PROGRAM never fails, 1 otherwise.
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u64).range(1..),
        conflicts_with_all = ["check", "print_env", "mount"]
    )]
    order_bisect: Option<u64>,
    /// Start a daemon and exit when it accepts clients (internal).
    #[arg(long, hide = true, conflicts_with_all = ["check", "program", "print_env"])]
    start_daemon: bool,
    /// The program and its arguments.
    #[arg(
        trailing_var_arg = true,
        value_name = "PROGRAM",
        required_unless_present_any = ["print_env", "check", "start_daemon"]
    )]
    program: Vec<OsString>,
}

const USAGE: &str = "rnic-run [OPTIONS] PROGRAM [ARGS]...
       rnic-run [OPTIONS] --check [PROGRAM]
       rnic-run [OPTIONS] --order-bisect N PROGRAM [ARGS]...
       rnic-run [OPTIONS] --print-env";

const EXAMPLES: &str = "\
Examples:
  rnic-run rping -s -a 127.0.0.1
  rnic-run ib_write_bw -R 192.0.2.7
  rnic-run --as siw rping -c -a 192.0.2.7
  rnic-run --as mlx5 ibv_devinfo -v
  rnic-run --check ib_write_bw
  rnic-run --mount ls /sys/class/infiniband
  eval \"$(rnic-run --print-env)\"";

/// Reason why the program was not run.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Libraries(#[from] LibrariesError),
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// The helper process has already printed the reason.
    #[error("no daemon was started")]
    NotStarted,
    #[error("{what}: {error}")]
    System { what: &'static str, error: io::Error },
    #[error("{}: not found{}", program.display(), path_hint(is_path))]
    NotFound { program: PathBuf, is_path: bool },
    #[error("{}: its interpreter is missing: {error}", program.display())]
    NoInterpreter { program: PathBuf, error: io::Error },
    #[error("{}: cannot be run: {error}", program.display())]
    NotRun { program: PathBuf, error: io::Error },
    #[error(transparent)]
    NotServed(#[from] check::Refusal),
    #[error(transparent)]
    NotShown(#[from] MountError),
    #[error(transparent)]
    Bisect(#[from] BisectError),
}

impl RunError {
    /// Returns the exit status for this error, by the convention of `env` and `timeout`.
    fn exit_code(&self) -> u8 {
        match self {
            RunError::NotFound { .. } | RunError::NoInterpreter { .. } => 127,
            RunError::NotRun { .. } | RunError::NotServed(_) | RunError::NotShown(_) => 126,
            _ => FAILED,
        }
    }
}

/// Returns the command line of `rnic-run`, for its manual page and completions.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs `rnic-run` with the arguments of this process.
pub fn main() -> ExitCode {
    let cli = options::parse::<Cli>();
    let done = match &cli {
        Cli { start_daemon: true, .. } => start(&cli),
        Cli { check: true, .. } => return examine(&cli),
        Cli { print_env: true, .. } => print_env(&cli),
        Cli { order_bisect: Some(messages), .. } => {
            return exit_code(bisect(&cli, *messages));
        }
        _ => run(&cli).map(|never| match never {}),
    };
    exit_code(done.map(|()| ExitCode::SUCCESS))
}

/// Prints an error and returns its exit status.
fn exit_code(done: Result<ExitCode, RunError>) -> ExitCode {
    done.unwrap_or_else(|error| {
        if !matches!(error, RunError::NotStarted) {
            print_message(&error.to_string());
        }
        ExitCode::from(error.exit_code())
    })
}

/// Searches for the inversion that makes the program fail.
fn bisect(cli: &Cli, messages: u64) -> Result<ExitCode, RunError> {
    let (mut command, _) = prepare(cli)?;
    let verdict = bisect::run(messages, &mut command, print_message)?;
    let passes = verdict == Verdict::Passes;
    Ok(if passes { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Replaces this process with the program.
fn run(cli: &Cli) -> Result<std::convert::Infallible, RunError> {
    let (mut command, found) = prepare(cli)?;
    let error = command.exec();
    let program = PathBuf::from(command.get_program());
    Err(match error.kind() {
        io::ErrorKind::NotFound if found.exists() => RunError::NoInterpreter { program, error },
        io::ErrorKind::NotFound => RunError::NotFound { program, is_path: true },
        _ => RunError::NotRun { program, error },
    })
}

/// Returns the program with its arguments and environment, and its path.
fn prepare(cli: &Cli) -> Result<(Command, PathBuf), RunError> {
    let folder = libraries::folder(cli.lib_dir.as_deref())?;
    // Before a daemon is started, check that the program can be run.
    let Some((program, arguments)) = cli.program.split_first() else {
        return Err(RunError::NotFound { program: PathBuf::new(), is_path: false });
    };
    let found = check::find(program).ok_or_else(|| {
        let is_path = program.as_encoded_bytes().contains(&b'/');
        RunError::NotFound { program: program.into(), is_path }
    })?;
    match check::refusal(program) {
        Some(refusal) if !cli.mount || matches!(refusal.obstacle, Obstacle::Rights(_)) => {
            return Err(refusal.into());
        }
        Some(refusal) => print_message(&format!(
            "{} cannot use rnicd's libraries: with --mount it gets the device files, but no verbs",
            refusal.path.display()
        )),
        None => {}
    }
    let mut shown = show(cli)?;
    if cli.mount {
        let tree = shown.tree.take().ok_or(MountError::NoTree)?;
        let inherited = std::env::var_os(DEVICES_VARIABLE);
        let devices = shown.devices.as_deref().or(inherited.as_deref());
        mount::show(&tree, &preload::view(&tree, devices))?;
    }
    let mut command = Command::new(program);
    command.args(arguments).envs(environment(&folder, shown, None));
    Ok((command, found))
}

/// Returns the environment through which a program finds libraries and devices.
fn environment(
    folder: &Path,
    shown: Shown,
    socket: Option<OsString>,
) -> Vec<(&'static str, OsString)> {
    let Shown { tree, devices, socket: own } = shown;
    let socket = own.map(OsString::from).or(socket);
    let environment =
        Environment { libraries: folder, libraries_in_program: folder, socket, tree, devices };
    environment.variables(|name| std::env::var_os(name))
}

/// Prints the environment in which programs find the libraries and the daemon.
fn print_env(cli: &Cli) -> Result<(), RunError> {
    let folder = libraries::folder(cli.lib_dir.as_deref())?;
    let shown = show(cli)?;
    let socket = std::env::var_os(SOCKET_VARIABLE).filter(|value| !value.is_empty());
    let mut out = io::stdout().lock();
    let mut export = |name: &str, value: &OsStr| {
        let line = [OsStr::new("export "), OsStr::new(name), OsStr::new("="), &quote(value)];
        let line: OsString = line.into_iter().collect();
        out.write_all(line.as_encoded_bytes()).and_then(|()| out.write_all(b";\n"))
    };
    let all = environment(&folder, shown, socket);
    let printed = all.iter().try_for_each(|(name, value)| export(name, value));
    printed.map_err(|error| RunError::System { what: "cannot write to standard output", error })
}

/// Prints whether the program can work.
fn examine(cli: &Cli) -> ExitCode {
    let report = check::examine(&check::CheckOptions {
        folder: libraries::folder(cli.lib_dir.as_deref()),
        daemon: daemon::program(cli.daemon.as_deref()),
        may_start: !cli.no_start,
        profile: cli.profile.as_deref(),
        devices: cli.devices.as_deref(),
        program: cli.program.first().map(OsString::as_os_str),
    });
    // Ignores a closed pipe. The exit status gives the result.
    let _ = write!(io::stdout(), "{report}");
    if report.can_work() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The devices and device files that a program gets.
#[derive(Default)]
struct Shown {
    /// Directory with the device files, if there is one.
    tree: Option<PathBuf>,
    /// New value of `RNIC_DEVICES`.
    devices: Option<OsString>,
    /// New value of `RNIC_SOCKET`, if the libraries would find another daemon.
    socket: Option<PathBuf>,
}

/// Returns the path of a folder without links. `realpath(3)` would return `/sys` for the tree if
/// another `rnic-run` has preloaded the library, so this calls no function of the C library.
fn canonical(folder: &Path) -> io::Result<PathBuf> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(folder, flags, Mode::empty())?;
    let link = format!("/proc/self/fd/{}", opened.as_raw_fd());
    let path = rustix::fs::readlink(link, Vec::new())?;
    Ok(OsString::from_vec(path.into_bytes()).into())
}

/// Ensures that a daemon serves this user and has the devices of `--devices`. Returns the
/// devices of the program.
fn show(cli: &Cli) -> Result<Shown, RunError> {
    // If the daemon has exited again, the program itself reports the error.
    let Some(Serving { tree, devices, kind, socket }) = ensure_daemon(cli)? else {
        return Ok(Shown::default());
    };
    daemon::check_devices(cli.devices.as_deref(), Some(&devices))?;
    let devices = match (&cli.profile, kind) {
        // Overrides an inherited variable. Without a name, programs see the RoCE devices, including
        // devices that are added later.
        (Some(_), DeviceKind::Roce) => std::env::var_os(DEVICES_VARIABLE).map(|_| OsString::new()),
        (Some(_), DeviceKind::Iwarp) => {
            let iwarp = devices.iter().filter(|device| device.kind == DeviceKind::Iwarp);
            let names: Vec<&str> = iwarp.map(|device| device.name.as_str()).collect();
            Some(OsString::from(names.join(",")))
        }
        (None, _) => cli.devices.clone(),
    };
    // The preload library compares working directories with this path, so it has no links.
    let tree = tree.map(|tree| canonical(&tree).unwrap_or(tree));
    Ok(Shown { tree, devices, socket })
}

/// A daemon that serves this user.
struct Serving {
    /// Directory with its device files, if there is one.
    tree: Option<PathBuf>,
    devices: Vec<DeviceRow>,
    /// The devices that its profile describes.
    kind: DeviceKind,
    /// Its socket, if the libraries would find another daemon.
    socket: Option<PathBuf>,
}

/// Ensures that a daemon with the profile of `--as` serves this user. Returns `None` if it has
/// exited again.
fn ensure_daemon(cli: &Cli) -> Result<Option<Serving>, RunError> {
    let Found { probe, socket } = daemon::find(cli.profile.as_deref())?;
    match probe {
        found @ Probe::Serves { .. } => return Ok(serving(found, socket)),
        Probe::Refuses(why) => return Err(DaemonError::Refuses(why).into()),
        Probe::Absent(why) | Probe::Foreign(why) | Probe::Ending(why) if cli.no_start => {
            return Err(DaemonError::Absent(why).into());
        }
        Probe::Foreign(why) => print_message(&format!("{why}; starting one for this user")),
        Probe::Absent(_) | Probe::Ending(_) => {}
    }
    // The helper process becomes the daemon's parent. The program must not be its parent.
    let mut helper = Command::new("/proc/self/exe");
    helper.arg("--start-daemon").arg("--idle").arg(&cli.idle);
    if let Some(profile) = &cli.profile {
        helper.args(["--as", profile]);
    }
    if let Some(program) = &cli.daemon {
        helper.arg("--daemon").arg(absolute(program)?);
    }
    if let Some(socket) = &socket {
        helper.env(SOCKET_VARIABLE, socket);
    }
    helper.stdin(Stdio::null()).stdout(Stdio::null());
    let status = helper.status();
    let status =
        status.map_err(|error| RunError::System { what: "cannot run rnic-run itself", error })?;
    if !status.success() {
        return Err(RunError::NotStarted);
    }
    let found = match &socket {
        Some(socket) => daemon::probe_at(socket),
        None => daemon::probe(),
    };
    Ok(serving(found, socket))
}

fn serving(found: Probe, socket: Option<PathBuf>) -> Option<Serving> {
    match found {
        Probe::Serves { tree, devices, profile, .. } => {
            Some(Serving { tree, devices, kind: profile.kind, socket })
        }
        Probe::Absent(_) | Probe::Foreign(_) | Probe::Ending(_) | Probe::Refuses(_) => None,
    }
}

/// Runs as the helper process: starts a daemon and returns when it accepts clients.
fn start(cli: &Cli) -> Result<(), RunError> {
    let program = cli.daemon.as_deref();
    let profile = cli.profile.as_deref();
    let started = daemon::start(&StartOptions { program, idle: &cli.idle, profile })?;
    if let Some(StartedDaemon { pid, log }) = started {
        let idle = &cli.idle;
        let log = log.display();
        print_message(&format!(
            "started daemon (pid {pid}); exits {idle} after its last client leaves; log: {log}"
        ));
    }
    Ok(())
}

/// Returns the name of a profile, or the absolute path of its file: the daemon runs in another
/// directory.
fn profile(text: &str) -> Result<String, String> {
    if !text.contains('/') {
        return Ok(text.to_owned());
    }
    let path = std::path::absolute(text).map_err(|error| error.to_string())?;
    path.into_os_string().into_string().map_err(|_| "the path is not UTF-8 text".to_owned())
}

/// Returns the absolute path of a program, for a process with another working directory.
fn absolute(program: &Path) -> Result<PathBuf, RunError> {
    std::path::absolute(program)
        .map_err(|error| RunError::System { what: "cannot find the current directory", error })
}

/// Returns the addition to "not found" for a program without a path.
fn path_hint(is_path: &bool) -> &'static str {
    if *is_path { "" } else { " in PATH" }
}

/// Prints a line to standard error. Ignores failures.
fn print_message(what: &str) {
    let _ = writeln!(io::stderr(), "rnic-run: {what}");
}

/// Parses a duration in the syntax of `rnicd`, at least 1 s. Returns it as text.
fn duration(text: &str) -> Result<String, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let is_long = |number: u64| match unit {
        "ms" => number >= 1000,
        _ => number > 0,
    };
    match number.parse::<u64>() {
        Ok(number) if ["ms", "s", "min", "h"].contains(&unit) && is_long(number) => Ok(text.into()),
        Ok(0..) if ["ms", "s", "min", "h"].contains(&unit) => Err("must be at least 1s".into()),
        _ => Err("not a duration: write a number and a unit, as in \"60s\" (ms, s, min, h)".into()),
    }
}

/// Exit status for a failure of this program itself.
const FAILED: u8 = 125;

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn arguments_after_program_are_its_own() {
        let parsed = |line: &str| Cli::try_parse_from(line.split(' '));
        let cli = parsed("rnic-run --no-start rping -s --help --idle 5").expect("a program");
        assert!(cli.no_start && cli.program == ["rping", "-s", "--help", "--idle", "5"]);
        for (wrong, meant) in [
            ("--device rnicd1", "--devices"),
            ("--no-starts", "--no-start"),
            ("-d rnicd1", "--devices"),
        ] {
            let error = parsed(&format!("rnic-run {wrong} rping"));
            let error = error.map_err(options::with_tip::<Cli>).expect_err("an unknown option");
            assert!(error.to_string().contains(&format!("'{meant}'")), "{error}");
        }
        for wrong in ["rnic-run", "rnic-run --print-env x", "rnic-run --print-env --check"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
        assert!(parsed("rnic-run --check").is_ok_and(|cli| cli.program.is_empty()));
    }

    #[test]
    fn idle_durations_are_at_least_1s() {
        for good in ["60s", "1000ms", "5min", "1h"] {
            assert_eq!(duration(good).as_deref(), Ok(good));
        }
        for bad in ["", "60", "s", "0s", "999ms", "-1s", "1day", "1 s", "99999999999999999999s"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
