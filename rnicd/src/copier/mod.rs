//! Copiers: processes that copy to and from the address space of a client whom no worker may wait
//! for.
//!
//! A copy of attached memory waits for whoever serves the client's pages, past any signal, and so
//! may every touch of a descriptor that a client made. For clients who are neither the daemon's own
//! user nor trusted, both are left to a process per session: `rnicd copier`, which holds that
//! descriptor and nothing else. Workers send it jobs and go on; one that does not answer in time
//! costs its session its life.
//!
//! [`Copiers`] has them started and hears of their ends. [`Spawner`] starts them: a process of its
//! own, because what a new process inherits is closed before it runs its program, and among what
//! this one has open may be a descriptor that nobody can close. `process` is what runs in a copier,
//! `channel` how descriptors are passed, `wire` what is said. Nobody waits for a copier but a
//! thread of its own: one that is stuck in the kernel is left behind with it, and counts against
//! `limits.user.copiers` and `limits.copiers` until it is gone. Those threads are started by one
//! that began with the daemon, because no other may start anything.

mod channel;
mod process;
mod spawner;
pub mod wire;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use mio::Waker;
use parking_lot::Mutex;
use rnic_core::device::Copier;
use rnic_core::types::SessionId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};
use rustix::process::{Signal, pidfd_send_signal};

use channel::pair;
pub use process::run;
pub use spawner::{Spawner, start_copiers};

use crate::config::Seccomp;
use crate::privilege::{ThreadKind, spawn_confined};

/// Has copiers started, and hears of them.
pub struct Copiers {
    deadline: Duration,
    supervisor: Sender<Start>,
    inbox: Receiver<CopierReport>,
}

/// What became of a copier.
#[derive(Debug)]
pub enum CopierReport {
    /// It has found what it was given to be the client's memory, and takes jobs.
    Ready {
        /// Session whose memory it reaches.
        session: SessionId,
        /// To end it by.
        process: OwnedFd,
    },
    /// No copier was started, or it found that it was given something else.
    Refused {
        /// Whose it would be.
        session: SessionId,
        /// Reason that the client's refusal says.
        why: NoCopier,
        /// What was passed, if nobody has touched it: closing it may take its time.
        memory: Option<OwnedFd>,
    },
    /// One that was added has no process any more, and nobody holds a descriptor for it but for the
    /// one that was refused back.
    Ended {
        /// Session whose memory it reached.
        session: SessionId,
    },
}

/// Why there is no copier.
#[derive(Debug)]
pub enum NoCopier {
    /// The descriptor is not what it should be.
    Memory(String),
    /// The system refused, or the descriptor did not let itself be looked at in time.
    System(String),
}

/// A session's copier, as the resource manager holds it. Dropping it ends the process, without
/// waiting for that; a thread that may not send signals is to drop it only when it has been
/// [ended](CopierHandle::end).
#[derive(Debug)]
pub struct CopierHandle {
    /// What workers know of it.
    pub shared: Arc<Copier>,
    /// When the last copy of this is closed, it ends by itself.
    _setup: Arc<OwnedFd>,
    process: Option<OwnedFd>,
}

impl CopierHandle {
    /// Takes the descriptor by which its process is ended, now that it runs.
    pub fn started(&mut self, process: OwnedFd) {
        self.process = Some(process);
    }

    /// Ends the process, without waiting for that.
    pub fn end(&mut self) {
        self.shared.end();
        if let Some(process) = self.process.take() {
            kill(&process);
        }
    }
}

impl Drop for CopierHandle {
    fn drop(&mut self) {
        self.end();
    }
}

impl Copiers {
    /// None yet, and the thread that is to have them started by `spawner`; without one, none is.
    /// `control` is woken when there is something to hear. A copier may take `deadline` to look at
    /// what it is given.
    pub fn start(
        control: Arc<Waker>,
        spawner: Option<Spawner>,
        deadline: Duration,
        seccomp: Seccomp,
    ) -> io::Result<Self> {
        let (reports, inbox) = unbounded();
        let (supervisor, starts) = unbounded();
        let told = ReportSink { reports, control };
        spawn_confined("rnicd-copiers", ThreadKind::Supervisor, seccomp, move || {
            let mut spawner = spawner;
            starts.into_iter().for_each(|start| begin(start, &mut spawner, &told));
        })?;
        Ok(Copiers { deadline, supervisor, inbox })
    }

    /// Takes another deadline from now on.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// The next report, if there is one; never waits.
    pub fn poll_report(&mut self) -> Option<CopierReport> {
        self.inbox.try_recv().ok()
    }

    /// Begins to start a copier for what a client says is the memory of process `pid`. The
    /// descriptor is passed on, not touched. Returns also one channel for each worker. Reports
    /// follow, of which the last is that it has ended.
    pub fn add(
        &mut self,
        session: SessionId,
        pid: i32,
        memory: OwnedFd,
        workers: u32,
    ) -> Result<(CopierHandle, Vec<OwnedFd>), (io::Error, OwnedFd)> {
        let prepared = pair().and_then(|setup| {
            let channels = (0..workers).map(|_| pair()).collect::<io::Result<Vec<_>>>()?;
            Ok((setup, channels))
        });
        let ((ours, theirs), channels) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err((error, memory)),
        };
        let (channels, ends): (Vec<_>, Vec<_>) = channels.into_iter().unzip();
        let setup = Arc::new(ours);
        let start = Start {
            session,
            pid,
            deadline: self.deadline,
            setup: setup.clone(),
            theirs,
            passed: std::iter::once(memory).chain(ends).collect(),
        };
        // The thread lives as long as this.
        let _ = self.supervisor.send(start);
        let shared = Copier::new(session, workers);
        Ok((CopierHandle { shared, _setup: setup, process: None }, channels))
    }
}

/// Who is told what becomes of copiers.
#[derive(Clone)]
struct ReportSink {
    reports: Sender<CopierReport>,
    control: Arc<Waker>,
}

impl ReportSink {
    fn report(&self, report: CopierReport) {
        // Nobody hears it when the daemon has ended.
        let _ = self.reports.send(report);
        let _ = self.control.wake();
    }
}

/// Has a copier started, and minds it on a thread that may be kept waiting.
fn begin(start: Start, spawner: &mut Option<Spawner>, told: &ReportSink) {
    let session = start.session;
    let refused = |error: io::Error, start: Option<Start>| {
        // The descriptor goes back, to be closed where that may take its time.
        let memory = start.map(|mut start| start.passed.swap_remove(0));
        let why = NoCopier::System(error.to_string());
        told.report(CopierReport::Refused { session, why, memory });
        told.report(CopierReport::Ended { session });
    };
    let answer = spawner.as_ref().map(|spawner| spawner.copier(start.pid, &start.theirs));
    let process = match answer {
        Some(Ok(Ok(process))) => process,
        Some(Ok(Err(why))) => return refused(io::Error::other(why), Some(start)),
        Some(Err(error)) => {
            // Whatever it says later would be taken for the answer to another question.
            *spawner = None;
            tracing::error!(
                %error,
                "no copier can be started any more, until the daemon is restarted"
            );
            return refused(spawner::ended(), Some(start));
        }
        None => return refused(spawner::ended(), Some(start)),
    };
    let start = Arc::new(Mutex::new(Some((start, process))));
    let (starts, tells) = (start.clone(), told.clone());
    let spawned = std::thread::Builder::new().name("rnicd-copier".to_owned()).spawn(move || {
        let Some((start, process)) = starts.lock().take() else { return };
        start.mind(&process, &tells);
        tells.report(CopierReport::Ended { session });
    });
    if let Err(error) = spawned {
        let start = start.lock().take().map(|(start, process)| {
            kill(&process);
            start
        });
        refused(error, start);
    }
}

/// What it takes to start a copier.
struct Start {
    session: SessionId,
    pid: i32,
    deadline: Duration,
    setup: Arc<OwnedFd>,
    theirs: OwnedFd,
    /// The memory, then a channel for each worker.
    passed: Vec<OwnedFd>,
}

impl Start {
    /// Passes a copier what it needs, reports what it says of it, and returns when it has ended.
    fn mind(self, process: &OwnedFd, told: &ReportSink) {
        let Start { session, deadline, setup, theirs, passed, .. } = self;
        // Its standard input by now; open here as well, its end would not be seen.
        drop(theirs);
        let fds: Vec<BorrowedFd<'_>> = passed.iter().map(AsFd::as_fd).collect();
        let answered = channel::send(&*setup, &[0], &fds)
            .and_then(|()| answer(&setup, deadline))
            .and_then(|answer| Ok((answer, process.try_clone()?)));
        let refused = |why| {
            kill(process);
            CopierReport::Refused { session, why, memory: None }
        };
        told.report(match answered {
            Ok((None, process)) => CopierReport::Ready { session, process },
            Ok((Some(why), _)) => refused(NoCopier::Memory(why)),
            Err(error) => refused(NoCopier::System(error.to_string())),
        });
        drop(setup);
        // These may be for ever.
        drop(passed);
        wait_for_end(process);
    }
}

/// Returns when a process has ended. It may be nobody's child here.
fn wait_for_end(process: &OwnedFd) {
    while let Err(rustix::io::Errno::INTR) = poll(&mut [PollFd::new(process, PollFlags::IN)], None)
    {
    }
}

/// What a copier says of the memory: nothing, or why it is none.
fn answer(setup: &OwnedFd, deadline: Duration) -> io::Result<Option<String>> {
    let timeout =
        Timespec { tv_sec: deadline.as_secs() as i64, tv_nsec: i64::from(deadline.subsec_nanos()) };
    if poll(&mut [PollFd::new(setup, PollFlags::IN)], Some(&timeout))? == 0 {
        return Err(io::Error::other("the descriptor could not be examined in time"));
    }
    let mut said = [0; 512];
    let (len, _) = recv(setup, &mut said, RecvFlags::DONTWAIT)?;
    match said.get(..len) {
        Some([0]) => Ok(None),
        Some([]) | None => Err(io::Error::other("the copier has ended")),
        Some(why) => Ok(Some(String::from_utf8_lossy(why).into_owned())),
    }
}

fn kill(process: &OwnedFd) {
    // If it has ended, all the better.
    let _ = pidfd_send_signal(process, Signal::KILL);
}
