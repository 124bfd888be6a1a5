//! Checks whether a program can work. The result is a list of facts, with advice for each problem.
//!
//! This module checks the requirements of every program: libraries, a daemon and its network port.
//! `program` checks the program, `script` a script that starts it, `copies` other copies of
//! rdma-core's libraries, and `obstacle` the properties that prevent any use of the libraries.
//! Nothing is started or run, not even the program's loader.

mod copies;
mod obstacle;
mod program;
mod script;

use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;

pub use obstacle::{Obstacle, Refusal};
pub use program::{find, refusal};

use rnic_client::{DeviceRow, StatusInfo};

use crate::daemon::{self, Probe};
use crate::elf::Elf;
use crate::libraries::{LibrariesError, PATH_VARIABLE, SONAMES};
use crate::preload;

/// Input of the check.
#[derive(Debug)]
pub struct CheckOptions<'a> {
    /// Directory with rnicd's libraries, or the reason why there is none.
    pub folder: Result<PathBuf, LibrariesError>,
    /// Program of the daemon that would be started.
    pub daemon: Option<PathBuf>,
    /// A daemon may be started.
    pub may_start: bool,
    /// Profile of the daemon (`--as`).
    pub profile: Option<&'a str>,
    /// Devices for the program (`--devices`).
    pub devices: Option<&'a OsStr>,
    /// The program to check.
    pub program: Option<&'a OsStr>,
}

/// Result of the check, in order of examination.
#[derive(Debug, Default)]
pub struct Report {
    facts: Vec<Fact>,
}

#[derive(Debug)]
struct Fact {
    kind: Kind,
    about: &'static str,
    words: String,
}

/// Effect of a fact on the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Fine,
    /// Possibly a problem. The check cannot determine it.
    Unknown,
    /// Prevents the program from working.
    Problem,
}

impl Report {
    /// Returns true if nothing prevents the program from working.
    pub fn can_work(&self) -> bool {
        self.facts.iter().all(|fact| fact.kind != Kind::Problem)
    }

    fn add(&mut self, kind: Kind, about: &'static str, words: impl Into<String>) {
        self.facts.push(Fact { kind, about, words: words.into() });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Fact { kind, about, words } in &self.facts {
            let kind = match kind {
                Kind::Fine => "ok",
                Kind::Unknown => "unknown",
                Kind::Problem => "PROBLEM",
            };
            writeln!(f, "{kind:<8} {about:<10} {words}")?;
        }
        Ok(())
    }
}

/// Performs all checks.
pub fn examine(question: &CheckOptions<'_>) -> Report {
    let mut report = Report::default();
    let ours = libraries(question, &mut report);
    daemon(question, &mut report);
    if let Some(program) = question.program {
        program::examine(program, ours.as_ref(), &mut report);
    }
    report
}

/// rnicd's libraries, as the loader would find them.
#[derive(Debug)]
struct OwnLibraries {
    folder: PathBuf,
    /// Libraries in `LD_PRELOAD`; `None` if the folder's path does not permit that.
    preloaded: Option<Vec<PathBuf>>,
    /// Library files in the order of [`SONAMES`].
    files: [Elf; SONAMES.len()],
}

fn libraries(question: &CheckOptions<'_>, report: &mut Report) -> Option<OwnLibraries> {
    let about = "libraries";
    let folder = match &question.folder {
        Ok(folder) => folder.clone(),
        Err(error) => {
            report.add(Kind::Problem, about, error.to_string());
            return None;
        }
    };
    let here = Elf::here();
    let read = |name: &str| {
        let path = folder.join(name);
        let elf = Elf::read(&path).map_err(|error| format!("{error}; install it again"))?;
        if here.as_ref().is_ok_and(|here| elf.target == *here) {
            Ok(elf)
        } else {
            Err(format!("{} is for a different machine; build it on this one", path.display()))
        }
    };
    match SONAMES.map(read) {
        [Ok(verbs), Ok(cm)] => {
            let words = format!("{} has {}", folder.display(), SONAMES.join(" and "));
            report.add(Kind::Fine, about, words);
            let preloaded = preload::libraries(&folder, &folder);
            if preloaded.is_none() {
                let words = format!(
                    "{} contains white space, which LD_PRELOAD does not permit: programs find \
                     the libraries by {PATH_VARIABLE} only, and no device files; move or link the \
                     folder",
                    folder.display()
                );
                report.add(Kind::Unknown, about, words);
            }
            Some(OwnLibraries { folder, preloaded, files: [verbs, cm] })
        }
        files => {
            for problem in files.into_iter().filter_map(Result::err) {
                report.add(Kind::Problem, about, problem);
            }
            None
        }
    }
}

/// Reports whether other hosts can connect to the RoCE device, which not every program requires.
fn other_hosts(status: &StatusInfo, report: &mut Report) {
    let StatusInfo { wired_port, wired_port_problem, gids, gids_problem, .. } = status;
    if wired_port_problem.is_empty() {
        let words = format!("the daemon listens on port {wired_port} for other hosts (wired.port)");
        report.add(Kind::Fine, "wired.port", words);
    } else {
        let words = format!(
            "{wired_port_problem}; other hosts cannot connect to the RoCE device until the daemon \
             can bind port {wired_port} (wired.port)"
        );
        report.add(Kind::Unknown, "wired.port", words);
    }
    if *gids == 0 {
        let why = if gids_problem.is_empty() {
            "no network interface that is up has an address (`ip link set lo up`)"
        } else {
            gids_problem
        };
        report.add(Kind::Unknown, "GIDs", format!("the RoCE device has no GIDs: {why}"));
    }
}

fn daemon(question: &CheckOptions<'_>, report: &mut Report) {
    let probe = match daemon::find(question.profile) {
        Ok(found) => found.probe,
        Err(error) => return report.add(Kind::Problem, "daemon", error.to_string()),
    };
    let of_profile =
        question.profile.map_or(String::new(), |name| format!(" with the profile {name}"));
    match probe {
        Probe::Serves { pid, status, devices, .. } => {
            let words = format!("one{of_profile} serves this user (pid {pid})");
            report.add(Kind::Fine, "daemon", words);
            other_hosts(&status, report);
            check_devices(question, Some(&devices), report);
        }
        Probe::Refuses(why) => report.add(Kind::Problem, "daemon", why),
        Probe::Absent(why) | Probe::Foreign(why) | Probe::Ending(why) => match &question.daemon {
            _ if !question.may_start => report.add(Kind::Problem, "daemon", why),
            Some(program) => {
                let program = program.display();
                let words = format!("none{of_profile} serves this user; {program} will be started");
                report.add(Kind::Fine, "daemon", words);
                check_devices(question, None, report);
            }
            None => {
                let words = format!(
                    "{why}, and there is no rnicd to start; install it, or set its path with \
                     --daemon"
                );
                report.add(Kind::Problem, "daemon", words);
            }
        },
    }
}

fn check_devices(question: &CheckOptions<'_>, running: Option<&[DeviceRow]>, report: &mut Report) {
    if let Err(error) = daemon::check_devices(question.devices, running) {
        report.add(Kind::Problem, "devices", error.to_string());
    }
}
