//! Two processes that wire queue pairs by hand, in each wrong way: it ends as on a RoCE adapter,
//! where the request that nobody acknowledges fails when its time is over, and one line says what
//! was wrong.
//!
//! Both are `wires.c` and do what they are told here, so that each step comes when it is its turn.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rnic_client::Context;
use rnic_tests::{Process, verbs};
use tempfile::TempDir;

use crate::case::{Group, Setting};
use crate::stage::Stage;

/// What two ends are made to do, and what comes of it.
pub struct Case {
    /// What is wrong with it.
    pub what: &'static str,
    /// How it ends.
    pub outcome: &'static str,
    /// What `rnicctl why` says: within a daemon, and between two. In braces, what the end that it
    /// is about was told of the other one (`qp`, `gid`, `rq_psn`), from which PSN it sends
    /// (`sq_psn`), and from which the other one does (`theirs`), and which that awaits
    /// (`awaited`).
    pub says: [&'static str; 2],
    /// Does it, and says the rest: the first end is the one that it is about.
    does: fn(&mut End, &mut End, &str),
}

/// All of them.
pub const CASES: &[Case] = &[
    Case {
        what: "nothing",
        outcome: "messages of both ends come, data are right",
        says: NOTHING,
        does: right,
    },
    Case {
        what: "the number is of no queue pair",
        outcome: FAILS,
        says: [
            "there is no queue pair {qp} at {gid}",
            "queue pair {qp} at {gid}: there is no such queue pair that is wired by hand",
        ],
        does: |a, b, says| mistaken(a, b, says, |to| to.qp += 1000),
    },
    Case {
        what: "the number is of a queue pair that has another peer",
        outcome: FAILS,
        says: [
            "queue pair {qp} at {gid} is wired to queue pair {qp} at {gid}, not to this one",
            "queue pair {qp} at {gid}: it is wired to another one, not to this one",
        ],
        does: another,
    },
    Case {
        what: "this end awaits another PSN than the other one sends from",
        outcome: FAILS,
        says: [
            "PSNs differ: queue pair {qp} would send from {theirs} on (sq_psn), this side awaits \
             {rq_psn} (rq_psn)",
            "this side awaits {rq_psn} (rq_psn)",
        ],
        does: |a, b, says| mistaken(a, b, says, |to| to.psn += 7),
    },
    Case {
        what: "this end sends from another PSN than the other one awaits",
        outcome: FAILS,
        says: [
            "PSNs differ: this side would send from {sq_psn} on (sq_psn), queue pair {qp} awaits \
             {awaited} (rq_psn)",
            "PSNs differ: this side would send from {sq_psn} on (sq_psn), queue pair {qp} awaits",
        ],
        does: sends_from_another_psn,
    },
    Case {
        what: "the GID is of no network that the host knows",
        outcome: FAILS,
        says: [UNREACHABLE, UNREACHABLE],
        does: |a, b, says| mistaken(a, b, says, |to| to.gid = NOWHERE.to_owned()),
    },
    Case {
        what: "the GID is nobody's in the network",
        outcome: FAILS,
        says: [UNANSWERED, UNANSWERED],
        does: |a, b, says| mistaken(a, b, says, |to| to.gid = NOBODY.to_owned()),
    },
    Case {
        what: "the other end is not in RTR when the first Send is posted, but later",
        outcome: "the Send succeeds, the other end has `IBV_EVENT_COMM_EST`",
        says: NOTHING,
        does: late,
    },
    Case {
        what: "the other end is never in RTR",
        outcome: FAILS,
        says: [
            "queue pair {qp} at {gid} has not been wired (RTR) yet",
            "queue pair {qp} at {gid} has not been wired (RTR) yet",
        ],
        does: never,
    },
    Case {
        what: "the other end is killed before it is in RTR",
        outcome: FAILS,
        says: [
            "there is no queue pair {qp} at {gid}",
            "queue pair {qp} at {gid}: there is no such queue pair that is wired by hand",
        ],
        does: killed_early,
    },
    Case {
        what: "the other end is killed while a Send waits for its receive",
        outcome: FAILS,
        says: [
            "there is no queue pair {qp} at {gid}",
            "queue pair {qp} at {gid}: there is no such queue pair that is wired by hand",
        ],
        does: killed_late,
    },
    Case {
        what: "the other end has made itself another queue pair, with another PSN",
        outcome: "after RESET and another wiring messages come again",
        says: NOTHING,
        does: other_queue_pair,
    },
    Case {
        what: "both ends are moved to RESET and wired again, with other PSNs",
        outcome: "messages come again",
        says: NOTHING,
        does: both_anew,
    },
];

/// How most of them end.
const FAILS: &str = "`IBV_WC_RETRY_EXC_ERR` in time, the rest is flushed";
const NOTHING: [&str; 2] = ["", ""];

/// An address without a route.
const NOWHERE: &str = "::ffff:192.0.2.9";
const UNREACHABLE: &str = "queue pair {qp} at {gid}: connect: Network is unreachable";
/// Nobody's address, in the network of both hosts.
const NOBODY: &str = "::ffff:10.77.0.99";
/// Until the kernel gives up asking for it, and then.
const UNANSWERED: &str = "queue pair {qp} at {gid}: nobody there has taken a TCP connection or \
                          queue pair {qp} at {gid}: connect: No route to host";

/// What an end has to know of another.
#[derive(Clone)]
struct Name {
    qp: u32,
    gid: String,
    /// The PSN from which it sends.
    psn: u32,
}

/// A process that wires.
struct End {
    /// None once it was killed.
    process: Option<Process>,
    socket: PathBuf,
    /// The newest queue pair.
    name: Name,
    /// What that was told of the other end.
    told: Option<Name>,
    /// Explanations of what failed here.
    failures: Vec<String>,
}

impl End {
    fn start(stage: &Stage, end: usize, program: &str) -> Self {
        let name = Name { qp: 0, gid: String::new(), psn: 1000 * (1 + end as u32) };
        let process = Some(stage.start(end, program));
        let socket = stage.daemon(end).socket().to_owned();
        let mut end = End { process, socket, name, told: None, failures: Vec::new() };
        end.make();
        end
    }

    fn ask(&mut self, line: &str) -> String {
        self.process.as_mut().expect("it was not killed").ask(line, "answer: ")
    }

    /// Has it do something that succeeds.
    fn does(&mut self, line: &str) {
        assert_eq!(self.ask(line), "0", "{line}");
    }

    /// Makes another queue pair, with another PSN.
    fn make(&mut self) {
        let made = self.ask("make");
        let (qp, gid) = made.split_once(' ').expect("number and GID");
        let qp = qp.parse().expect("a number");
        self.name = Name { qp, gid: gid.to_owned(), psn: self.name.psn + 1 };
    }

    fn ready_to_receive(&mut self, to: &Name) {
        self.does(&format!("rtr {} {} {}", to.qp, to.gid, to.psn));
        self.told = Some(to.clone());
    }

    fn ready_to_send(&mut self) {
        let (timeout, retries) = (TIMEOUT, RETRIES);
        self.does(&format!("rts {} {timeout} {retries}", self.name.psn));
    }

    fn state(&mut self) -> String {
        self.ask("state")
    }

    /// The next completion: its request, status and the number of the diagnosis.
    fn completion(&mut self) -> (u64, u32, u64) {
        let told = self.ask("completion");
        let words: Vec<u64> = told.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [wr_id, status, diagnosis] = words[..] else { panic!("no completion: {told}") };
        (wr_id, status as u32, diagnosis)
    }

    fn completes(&mut self, wr_id: u64) {
        let (found, status, why) = self.completion();
        assert_eq!((found, status), (wr_id, SUCCESS), "{}", self.diagnosis(why));
    }

    fn diagnosis(&self, id: u64) -> String {
        let context = Context::open_at(&self.socket).expect("the daemon answers");
        context.diagnosis(id).map_or_else(|e| e.to_string(), |diagnosis| diagnosis.text)
    }

    /// Posts a receive and two Sends; when that was.
    fn posts(&mut self) -> Instant {
        self.does("receive 9");
        let began = Instant::now();
        self.does("send 1 first");
        self.does("send 2 second");
        began
    }

    /// The first of the Sends that were posted fails when the time of the queue pair since then is
    /// over, and says this; all else is flushed, then and later.
    fn fails(&mut self, began: Instant, says: &str) {
        let (wr_id, status, why) = self.completion();
        let after = began.elapsed();
        let text = self.diagnosis(why);
        assert_eq!((wr_id, status), (1, RETRY_EXCEEDED), "{text}");
        assert!(after >= in_time() / 2, "after {after:?}: {text}");
        let mut rest = [self.completion(), self.completion()].map(|(id, status, _)| (id, status));
        rest.sort_unstable();
        assert_eq!(rest, [(2, FLUSHED), (9, FLUSHED)]);
        assert_eq!(self.state(), ERROR);
        self.does("send 3 third");
        let (wr_id, status, _) = self.completion();
        assert_eq!((wr_id, status), (3, FLUSHED));
        // The completions have said it.
        assert_eq!(self.ask("quiet"), "none");
        let told = self.told.clone().expect("it has been wired");
        let says = says
            .replace("{qp}", &told.qp.to_string())
            .replace("{gid}", &told.gid)
            .replace("{rq_psn}", &told.psn.to_string());
        assert!(
            says.split(" or ").any(|says| text.contains(says)),
            "does not say {says:?}: {text}"
        );
        assert!(!text.contains('\n'), "{text}");
        self.failures.push(text);
    }

    /// Nothing has come of the other end's failure.
    fn stays(&mut self) {
        assert_eq!(self.state(), RTS);
        assert_eq!(self.ask("quiet"), "none");
    }

    fn kill(&mut self) {
        self.process.take().expect("once").kill();
    }

    /// Lets it come to its end, and looks at what it has printed about what failed.
    fn ends(self) {
        let Some(mut process) = self.process else { return };
        process.release();
        let lines = process.succeed();
        let reasons: Vec<&String> = lines.iter().filter(|line| line.contains("failed: ")).collect();
        assert_eq!(reasons.len(), self.failures.len(), "{lines:#?}");
        for (line, text) in reasons.iter().zip(&self.failures) {
            assert!(line.starts_with("rnic: ") && line.contains(text), "{text}: not in {line}");
        }
    }
}

/// Wires two to each other.
fn wire(a: &mut End, b: &mut End) {
    a.ready_to_receive(&b.name.clone());
    b.ready_to_receive(&a.name.clone());
    a.ready_to_send();
    b.ready_to_send();
}

/// A message from one to the other.
fn message(from: &mut End, to: &mut End, text: &str) {
    to.does("receive 5");
    from.does(&format!("send 4 {text}"));
    from.completes(4);
    to.completes(5);
    assert_eq!(to.ask("received"), text);
}

fn right(a: &mut End, b: &mut End, _: &str) {
    wire(a, b);
    for turn in 0..2 {
        let (from, to) = if turn == 0 { (&mut *a, &mut *b) } else { (&mut *b, &mut *a) };
        message(from, to, &format!("message-{turn}"));
        let there = to.ask("memory");
        from.does(&format!("write 6 {there} written-{turn}"));
        from.completes(6);
        assert_eq!(to.ask("written"), format!("written-{turn}"));
        // Something else is there in the meantime.
        message(from, to, "other");
        from.does(&format!("read 7 {there}"));
        from.completes(7);
        assert_eq!(from.ask("sent"), format!("written-{turn}"));
    }
    a.stays();
    b.stays();
}

/// The first one is told something wrong of the other, which is told what is right.
fn mistaken(a: &mut End, b: &mut End, says: &str, spoil: fn(&mut Name)) {
    let mut to = b.name.clone();
    spoil(&mut to);
    a.ready_to_receive(&to);
    b.ready_to_receive(&a.name.clone());
    a.ready_to_send();
    b.ready_to_send();
    let began = a.posts();
    a.fails(began, &says.replace("{theirs}", &b.name.psn.to_string()));
    b.stays();
}

/// The other end has two queue pairs, of which one is wired to itself.
fn another(a: &mut End, b: &mut End, says: &str) {
    let other = b.name.clone();
    b.ready_to_receive(&other);
    b.ready_to_send();
    b.make();
    a.ready_to_receive(&other);
    b.ready_to_receive(&a.name.clone());
    a.ready_to_send();
    b.ready_to_send();
    let began = a.posts();
    a.fails(began, says);
    b.stays();
}

fn sends_from_another_psn(a: &mut End, b: &mut End, says: &str) {
    a.ready_to_receive(&b.name.clone());
    b.ready_to_receive(&a.name.clone());
    let awaited = a.name.psn;
    a.name.psn += 7;
    a.ready_to_send();
    b.ready_to_send();
    let began = a.posts();
    let says = says.replace("{sq_psn}", &a.name.psn.to_string());
    a.fails(began, &says.replace("{awaited}", &awaited.to_string()));
    b.stays();
}

fn late(a: &mut End, b: &mut End, _: &str) {
    a.ready_to_receive(&b.name.clone());
    a.does(&format!("rts {} {LONG} 7", a.name.psn));
    a.does("send 1 early");
    b.does("receive 2");
    b.ready_to_receive(&a.name.clone());
    a.completes(1);
    assert_eq!(b.ask("event"), "communication established");
    b.completes(2);
    assert_eq!((b.ask("received"), b.state()), ("early".to_owned(), RTR.to_owned()));
    b.ready_to_send();
    message(b, a, "late");
    a.stays();
    b.stays();
}

fn never(a: &mut End, b: &mut End, says: &str) {
    a.ready_to_receive(&b.name.clone());
    a.ready_to_send();
    let began = a.posts();
    a.fails(began, says);
    assert_eq!(b.state(), INIT);
}

fn killed_early(a: &mut End, b: &mut End, says: &str) {
    a.ready_to_receive(&b.name.clone());
    a.ready_to_send();
    let began = a.posts();
    b.kill();
    a.fails(began, says);
}

fn killed_late(a: &mut End, b: &mut End, says: &str) {
    wire(a, b);
    message(a, b, "before");
    message(b, a, "before");
    // There is no receive for them, which is waited for without end.
    a.posts();
    let killed = Instant::now();
    b.kill();
    a.fails(killed, says);
}

fn other_queue_pair(a: &mut End, b: &mut End, _: &str) {
    wire(a, b);
    message(a, b, "before");
    b.does("reset");
    b.make();
    a.does("reset");
    assert_eq!(a.state(), INIT);
    wire(a, b);
    message(a, b, "after");
    message(b, a, "after");
    a.stays();
    b.stays();
}

fn both_anew(a: &mut End, b: &mut End, _: &str) {
    for round in 0..3 {
        wire(a, b);
        message(a, b, &format!("round-{round}"));
        message(b, a, &format!("round-{round}"));
        for end in [&mut *a, &mut *b] {
            end.stays();
            end.does("reset");
            assert_eq!(end.state(), INIT);
            end.name.psn += 100;
        }
    }
}

/// How long a request may be without an acknowledgement.
fn in_time() -> Duration {
    Duration::from_nanos(4096 << TIMEOUT) * (RETRIES + 1)
}

/// 17 seconds. The diagnosis needs a connection to the other end within this time, on a busy
/// machine as well.
const TIMEOUT: u32 = 19;
const RETRIES: u32 = 7;
/// Half a minute.
const LONG: u32 = 20;

// Of `ibv_wc_status` and `ibv_qp_state`.
const SUCCESS: u32 = 0;
const FLUSHED: u32 = 5;
const RETRY_EXCEEDED: u32 = 12;
const INIT: &str = "1";
const RTR: &str = "2";
const RTS: &str = "3";
const ERROR: &str = "6";

/// What builds the program.
const GROUP: Group = Group { program: "cc", package: "gcc", manner: "", config: "", cases: &[] };

fn all(setting: Setting) {
    let scratch = folder();
    let Some(program) = verbs::program("verbs/wires.c", scratch.path()) else { return };
    let program = program.to_str().expect("a path in letters");
    let Some(stage) = Stage::new(setting, &GROUP) else { return };
    // All cases at once, because most of them take the whole time of a request.
    std::thread::scope(|scope| {
        for case in CASES {
            for first in [0, 1] {
                let ends = [first, 1 - first].map(|end| End::start(&stage, end, program));
                let run = move || {
                    let [mut a, mut b] = ends;
                    println!("{setting:?}, end {first}: {}", case.what);
                    (case.does)(&mut a, &mut b, case.says[usize::from(setting == Setting::Tcp)]);
                    a.ends();
                    b.ends();
                };
                let name = format!("{} (end {first})", case.what);
                std::thread::Builder::new().name(name).spawn_scoped(scope, run).expect("a thread");
            }
        }
    });
    stage.is_empty();
}

/// A folder that all users can read.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).expect("a directory of our own");
    folder
}

#[test]
fn between_processes_of_one_daemon() {
    all(Setting::Direct);
}

#[test]
fn between_hosts() {
    all(Setting::Tcp);
}

#[test]
fn between_users() {
    all(Setting::Users);
}
