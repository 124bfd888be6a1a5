//! Two processes that connect RC QPs without a connection manager, with one mistake per case. The
//! result is that of a RoCE adapter: a request without an acknowledgement fails at its timeout. In
//! addition, one line gives the reason.
//!
//! Both processes are `wires.c` and execute the commands of this test, which orders their steps.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rnic_client::Context;
use rnic_tests::{Process, verbs};
use rustix::io::Errno;
use tempfile::TempDir;

use crate::case::{Group, Setting};
use crate::stage::Stage;

/// Steps of two ends, and their outcome.
pub struct Case {
    /// The mistake.
    pub what: &'static str,
    /// The outcome.
    pub outcome: &'static str,
    /// Text of `rnicctl why`, within a daemon and between two. Braces stand for the peer's
    /// attributes given to the failing end (`qp`, `gid`, `rq_psn`), the first PSN that this end
    /// sends (`sq_psn`), the first PSN that the peer sends (`theirs`), and the PSN that the peer
    /// expects (`awaited`).
    pub says: [&'static str; 2],
    /// Runs the steps, and fills in the rest of the text. The first end has the mistake.
    does: fn(&mut End, &mut End, &str),
}

/// All cases.
pub const CASES: &[Case] = &[
    Case {
        what: "none",
        outcome: "messages arrive in both directions with correct data",
        says: NOTHING,
        does: right,
    },
    Case {
        what: "no QP has this number",
        outcome: FAILS,
        says: [
            "there is no queue pair {qp} at {gid}",
            "queue pair {qp} at {gid}: there is no RC/UC QP with this number",
        ],
        does: |a, b, says| mistaken(a, b, says, |to| to.qp += 1000),
    },
    Case {
        what: "the QP with this number has another peer",
        outcome: FAILS,
        says: [
            "queue pair {qp} at {gid} has another peer: queue pair {qp} at {gid}",
            "queue pair {qp} at {gid}: it has another peer",
        ],
        does: another,
    },
    Case {
        what: "this end's `rq_psn` differs from the peer's `sq_psn`",
        outcome: FAILS,
        says: [
            "PSNs differ: queue pair {qp} starts with {theirs} (sq_psn), but this side expects \
             {rq_psn} (rq_psn)",
            "this side expects {rq_psn} (rq_psn)",
        ],
        does: |a, b, says| mistaken(a, b, says, |to| to.psn += 7),
    },
    Case {
        what: "this end's `sq_psn` differs from the peer's `rq_psn`",
        outcome: FAILS,
        says: [
            "PSNs differ: this side starts with {sq_psn} (sq_psn), but queue pair {qp} expects \
             {awaited} (rq_psn)",
            "PSNs differ: this side starts with {sq_psn} (sq_psn), but queue pair {qp} expects",
        ],
        does: sends_from_another_psn,
    },
    Case {
        what: "the host has no route to the GID",
        outcome: "the transition to RTR fails with `ENETUNREACH`",
        says: [UNREACHABLE, UNREACHABLE],
        does: unrouted,
    },
    Case {
        what: "no host in the network has the GID",
        outcome: FAILS,
        says: [UNANSWERED, UNANSWERED],
        does: |a, b, says| mistaken(a, b, says, |to| to.gid = UNUSED_GID.to_owned()),
    },
    Case {
        what: "the peer enters RTR after the first Send is posted",
        outcome: "the Send succeeds, the peer gets `IBV_EVENT_COMM_EST`",
        says: NOTHING,
        does: late,
    },
    Case {
        what: "the peer never enters RTR",
        outcome: FAILS,
        says: [
            "queue pair {qp} at {gid} is not in RTR yet",
            "queue pair {qp} at {gid} is not in RTR yet",
        ],
        does: never,
    },
    Case {
        what: "the peer is killed before it enters RTR",
        outcome: FAILS,
        says: [
            "there is no queue pair {qp} at {gid}",
            "queue pair {qp} at {gid}: there is no RC/UC QP with this number",
        ],
        does: killed_early,
    },
    Case {
        what: "the peer is killed while a Send waits for its receive",
        outcome: FAILS,
        says: [
            "there is no queue pair {qp} at {gid}",
            "queue pair {qp} at {gid}: there is no RC/UC QP with this number",
        ],
        does: killed_late,
    },
    Case {
        what: "the peer replaces its QP with one that has another PSN",
        outcome: "messages arrive again after RESET and with new attributes",
        says: NOTHING,
        does: other_queue_pair,
    },
    Case {
        what: "both ends reset their QPs and connect them with other PSNs",
        outcome: "messages arrive again",
        says: NOTHING,
        does: both_reset,
    },
];

/// Outcome of most cases.
const FAILS: &str = "`IBV_WC_RETRY_EXC_ERR` at the timeout, the rest is flushed";
const NOTHING: [&str; 2] = ["", ""];

/// An address without a route.
const UNROUTED_GID: &str = "::ffff:192.0.2.9";
const UNREACHABLE: &str = "no route from";
/// An unused address in the network of both hosts.
const UNUSED_GID: &str = "::ffff:10.77.0.99";
/// Error before and after the kernel gives up resolving the address.
const UNANSWERED: &str = "queue pair {qp} at {gid}: its host has accepted no TCP connection or \
                          queue pair {qp} at {gid}: connect: No route to host";

/// Attributes that the other end needs.
#[derive(Clone)]
struct Name {
    qp: u32,
    gid: String,
    /// The first PSN that it sends.
    psn: u32,
}

/// A process with RC QPs.
struct End {
    /// `None` after it was killed.
    process: Option<Process>,
    socket: PathBuf,
    /// The newest QP.
    name: Name,
    /// Attributes of the peer that were given to this QP.
    told: Option<Name>,
    /// Diagnoses of the failures at this end.
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
        self.process.as_mut().expect("the process runs").ask(line, "answer: ")
    }

    /// Executes a command that must succeed.
    fn does(&mut self, line: &str) {
        assert_eq!(self.ask(line), "0", "{line}");
    }

    /// Creates another QP, with another PSN.
    fn make(&mut self) {
        let made = self.ask("make");
        let (qp, gid) = made.split_once(' ').expect("number and GID");
        let qp = qp.parse().expect("a QP number");
        self.name = Name { qp, gid: gid.to_owned(), psn: self.name.psn + 1 };
    }

    fn ready_to_receive(&mut self, to: &Name) {
        self.does(&format!("rtr {} {} {}", to.qp, to.gid, to.psn));
        self.told = Some(to.clone());
    }

    fn ready_to_send(&mut self) {
        self.does(&format!("rts {} {TIMEOUT} {RETRIES}", self.name.psn));
    }

    fn state(&mut self) -> String {
        self.ask("state")
    }

    /// Returns the next completion: request ID, status and number of the diagnosis.
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

    /// Posts a receive and two Sends. Returns the time before the first Send.
    fn posts(&mut self) -> Instant {
        self.does("receive 9");
        let began = Instant::now();
        self.does("send 1 first");
        self.does("send 2 second");
        began
    }

    /// Asserts that the first posted Send fails at the QP's timeout since `began` with this
    /// diagnosis, and that all other requests are flushed, including a later one.
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
        // No asynchronous event, since the completions report the failure.
        assert_eq!(self.ask("quiet"), "none");
        let told = self.told.clone().expect("the QP has a peer");
        let says = says
            .replace("{qp}", &told.qp.to_string())
            .replace("{gid}", &told.gid)
            .replace("{rq_psn}", &told.psn.to_string());
        assert!(
            says.split(" or ").any(|says| text.contains(says)),
            "does not contain {says:?}: {text}"
        );
        assert!(!text.contains('\n'), "{text}");
        self.failures.push(text);
    }

    /// Asserts that the other end's failure had no effect here.
    fn stays(&mut self) {
        assert_eq!(self.state(), RTS);
        assert_eq!(self.ask("quiet"), "none");
    }

    fn kill(&mut self) {
        self.process.take().expect("killed only once").kill();
    }

    /// Lets the process exit, and checks the failures that it has printed.
    fn ends(self) {
        let Some(mut process) = self.process else { return };
        process.release();
        let lines = process.succeed();
        let fails = |line: &&String| line.contains("failed: ") || line.contains("refused: ");
        let reasons: Vec<&String> = lines.iter().filter(fails).collect();
        assert_eq!(reasons.len(), self.failures.len(), "{lines:#?}");
        for (line, text) in reasons.iter().zip(&self.failures) {
            assert!(line.starts_with("rnic: ") && line.contains(text), "{text}: not in {line}");
        }
    }
}

/// Connects two ends.
fn wire(a: &mut End, b: &mut End) {
    a.ready_to_receive(&b.name.clone());
    b.ready_to_receive(&a.name.clone());
    a.ready_to_send();
    b.ready_to_send();
}

/// Sends a message from one end to the other.
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
        // Overwrites the message in the meantime.
        message(from, to, "other");
        from.does(&format!("read 7 {there}"));
        from.completes(7);
        assert_eq!(from.ask("sent"), format!("written-{turn}"));
    }
    a.stays();
    b.stays();
}

/// The first end gets wrong attributes of the other, which gets the right ones.
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

fn unrouted(a: &mut End, b: &mut End, says: &str) {
    let answer = a.ask(&format!("rtr {} {UNROUTED_GID} {}", b.name.qp, b.name.psn));
    assert_eq!(answer, Errno::NETUNREACH.raw_os_error().to_string());
    assert_eq!(a.state(), INIT);
    a.failures.push(says.to_owned());
    // The QP can still have another peer.
    wire(a, b);
    message(a, b, "routed");
    a.stays();
    b.stays();
}

/// The other end has two QPs, and the first one is its own peer.
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
    // The Sends wait for a receive without limit.
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

fn both_reset(a: &mut End, b: &mut End, _: &str) {
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

/// Returns the time after which an unacknowledged request fails.
fn in_time() -> Duration {
    Duration::from_nanos(4096 << TIMEOUT) * (RETRIES + 1)
}

/// `timeout` attribute: 4.096 µs << 19, or 17 s with all retries. The diagnosis needs a connection
/// to the other end in this time, even on a busy machine.
const TIMEOUT: u32 = 19;
const RETRIES: u32 = 7;
/// `timeout` attribute for 34 s with all retries.
const LONG: u32 = 20;

// Values of `ibv_wc_status` and `ibv_qp_state`.
const SUCCESS: u32 = 0;
const FLUSHED: u32 = 5;
const RETRY_EXCEEDED: u32 = 12;
const INIT: &str = "1";
const RTR: &str = "2";
const RTS: &str = "3";
const ERROR: &str = "6";

/// The package that builds the program.
const GROUP: Group =
    Group { program: "cc", package: "gcc", manner: "", devices: "", config: "", cases: &[] };

fn all(setting: Setting) {
    let scratch = folder();
    let Some(program) = verbs::program("verbs/wires.c", scratch.path()) else { return };
    let program = program.to_str().expect("a UTF-8 path");
    let Some(stage) = Stage::new(setting, &GROUP) else { return };
    // All cases at once, because most of them take a full timeout.
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

/// A folder that all users may enter.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).expect("a writable directory");
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
