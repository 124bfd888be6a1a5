//! Whether a program can work, in facts: each with what to do if it cannot.
//!
//! Here is what is to be there whatever the program: libraries, a daemon, the right to use memory
//! of one's own. What matters of the program is in `program`, what keeps libraries from it
//! altogether in `served`. Nothing is started and nothing is run, also not the program's loader.

mod program;
mod served;

use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;

pub use program::{find, refusal};
pub use served::{Obstacle, Refusal};

use rnic_client::StatusInfo;

use crate::daemon::{Probe, probe};
use crate::elf::Elf;
use crate::libraries::{LibrariesError, SONAMES};

/// What is to be found out.
#[derive(Debug)]
pub struct Question<'a> {
    /// The folder with our libraries, or why there is none.
    pub folder: Result<PathBuf, LibrariesError>,
    /// The daemon that would be started.
    pub daemon: Option<PathBuf>,
    /// Whether it may be.
    pub may_start: bool,
    /// The program.
    pub program: Option<&'a OsStr>,
}

/// What was found out, in the order in which it matters.
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

/// What a fact means for the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Fine,
    /// It may matter, and cannot be known.
    Unknown,
    /// It keeps the program from working.
    Problem,
}

impl Report {
    /// Whether nothing was found that keeps the program from working.
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

/// Finds it out.
pub fn examine(question: &Question<'_>) -> Report {
    let mut report = Report::default();
    let ours = libraries(question, &mut report);
    daemon(question, &mut report);
    if let Some(program) = question.program {
        program::examine(program, ours.as_ref(), &mut report);
    }
    report
}

/// Our libraries, as the loader will see them.
#[derive(Debug)]
struct Ours {
    folder: PathBuf,
    /// In the order of [`SONAMES`].
    files: [Elf; SONAMES.len()],
}

fn libraries(question: &Question<'_>, report: &mut Report) -> Option<Ours> {
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
        match here.as_ref().is_ok_and(|here| elf.target == *here) {
            true => Ok(elf),
            false => {
                Err(format!("{} is for another kind of machine; build it here", path.display()))
            }
        }
    };
    match SONAMES.map(read) {
        [Ok(verbs), Ok(cm)] => {
            let words = format!("{} has {}", folder.display(), SONAMES.join(" and "));
            report.add(Kind::Fine, about, words);
            Some(Ours { folder, files: [verbs, cm] })
        }
        files => {
            for problem in files.into_iter().filter_map(Result::err) {
                report.add(Kind::Problem, about, problem);
            }
            None
        }
    }
}

/// Whether QPs of the RoCE device reach other hosts, which not every program needs.
fn other_hosts(status: &StatusInfo, report: &mut Report) {
    let StatusInfo { wired_port, wired_port_problem, gids, gids_problem, .. } = status;
    if wired_port_problem.is_empty() {
        let words = format!("port {wired_port} leads to other hosts (wired.port)");
        report.add(Kind::Fine, "wired port", words);
    } else {
        let words = format!(
            "{wired_port_problem}; the RoCE device reaches this host only until the daemon has port \
             {wired_port} (wired.port)"
        );
        report.add(Kind::Unknown, "wired port", words);
    }
    if *gids == 0 {
        let words = format!("the RoCE device has none; {gids_problem}");
        report.add(Kind::Unknown, "GIDs", words);
    }
}

fn daemon(question: &Question<'_>, report: &mut Report) {
    match probe() {
        Probe::Serves { pid, status, .. } => {
            report.add(Kind::Fine, "daemon", format!("one serves this user (pid {pid})"));
            other_hosts(&status, report);
        }
        Probe::Refuses(why) => report.add(Kind::Problem, "daemon", why),
        Probe::Absent(why) | Probe::Foreign(why) | Probe::Ending(why) => match &question.daemon {
            _ if !question.may_start => report.add(Kind::Problem, "daemon", why),
            Some(program) => {
                let words = format!("none serves this user; {} will be started", program.display());
                report.add(Kind::Fine, "daemon", words);
            }
            None => {
                let words = format!(
                    "{why}, and there is no rnicd to start; install it or name it by --daemon"
                );
                report.add(Kind::Problem, "daemon", words);
            }
        },
    }
}
