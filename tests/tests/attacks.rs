//! Every attack by which one user could take more than its share, beside a well-behaved pair of
//! another user. All that the pair asks for is done, and the daemon's memory stays within what
//! `check-config` says.
//!
//! With `RNIC_TEST_TIMING=1`, on a machine that does nothing else, each attack is measured instead:
//! the pair keeps a share of its rate, no command takes longer than 50 ms and no new session longer
//! than 100 ms, or than the longest without an attack. The share is a third; beside a busy loop on
//! the worker's CPU, where each hop of a round trip wakes the worker, it is a tenth, or 10,000
//! round trips per second: one that had to wait for the loop's time to be over would leave less
//! than 400. The figures before and beside each attack are printed, and collected in
//! `target/attacks.txt`. `RNIC_TEST_LONG=1` plays each for longer.

use std::process::Command;
use std::sync::{Mutex, PoisonError};

use rnic_core::shm::wait::cpus;
use rnic_tests::attacks::Attack;
use rnic_tests::attacks::stage::Case;
use rnic_tests::attacks::{counted, stage};
use rnic_tests::{Process, binaries, omit, timing};

/// Measurements do not measure each other.
static ALONE: Mutex<()> = Mutex::new(());

/// KiB that the kernel may have for a hundred connections whose peers do not read: a MiB each, as
/// `check-config` says, and what those peers have received.
const KERNEL: u64 = 100 * (1024 + 512);

/// Plays a case with so many workers, each number after the other.
fn attacked(test: &str, case: &Case, workers: &[u32]) {
    if let Some(measured) = std::env::var_os(INSIDE) {
        for workers in workers {
            if measured == MEASURED {
                stage::play(binaries!(), case, *workers);
            } else {
                counted::play(binaries!(), case, *workers);
            }
        }
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return omit("only root can be several users");
    }
    if cpus() < 2 {
        return omit("one CPU is too few for an attacker and whoever is attacked");
    }
    let manner = if timing(test) { MEASURED } else { "counted" };
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut command = Command::new("setsid");
    command.args(["sh", "-c", FIRST]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(INSIDE, manner);
    let (status, lines) = Process::start(command).finish_within(1800);
    println!("{}", lines.join("\n"));
    assert!(status.success(), "{test}: {status}");
}

/// Says in which manner a process plays a case.
const INSIDE: &str = "RNIC_TEST_ATTACKED";
const MEASURED: &str = "measured";

/// Has that process and all that it starts run before whatever else the machine does: the kernel
/// shares CPUs out among the sessions of terminals first, if it is told to, and then among
/// processes. Without the right to that they run like others.
const FIRST: &str = "(echo -20 >/proc/$$/autogroup; renice -n -15 -p $$) >/dev/null 2>&1
exec \"$0\" \"$@\"";

macro_rules! attacks {
    ($workers:expr, $($test:ident: $case:expr,)*) => {
        $(
            #[test]
            fn $test() {
                attacked(stringify!($test), &$case, &$workers);
            }
        )*
    };
}

// What a worker does for one session, it does not do for others.
attacks! {
    [1, 2],
    a_flush_of_sends_that_never_ends: Case::new(Attack::FlushedSends),
    a_flush_with_a_queue_that_is_always_armed: Case::new(Attack::FlushedSendsArmed),
    a_flush_of_receives_that_never_ends: Case::new(Attack::FlushedReceives),
    binds_and_invalidates: Case::new(Attack::Binds),
    binds_and_invalidates_of_many_sessions: Case::new(Attack::BindsOfMany),
    reads_behind_the_peers_end: Case::new(Attack::Reads),
    reads_behind_the_peers_end_of_many_sessions: Case::new(Attack::ReadsOfMany),
    connections_that_bring_the_shortest_fpdus: Case::new(Attack::ShortFpdus),
    doorbells_rung_for_nothing: Case { qps: 8100, ..Case::new(Attack::Doorbells) },
    sessions_of_one_user: Case::new(Attack::Sessions),
}

// What the control thread does for one client, or the kernel for the daemon.
attacks! {
    [1],
    lists_of_diagnoses: Case::new(Attack::Whys),
    questions_about_the_device: Case::new(Attack::Questions),
    requests_that_nobody_decides: Case {
        limit: "ulimit -n 1500", peers: true, ..Case::new(Attack::Undecided)
    },
    closes_that_take_their_time: Case {
        limit: "ulimit -n 1500", after: 10_000, ..Case::new(Attack::SlowClose)
    },
    silent_connections: Case { peers: true, ..Case::new(Attack::Silent) },
    wrong_stags_on_ones_own_connections: Case {
        peers: true,
        config: "[limits.peer]\nstag_guesses_per_minute = 30",
        ..Case::new(Attack::StagGuessLimiter)
    },
    windows_that_stay_closed: Case { kernel: KERNEL, ..Case::new(Attack::ClosedWindows) },
    memory_that_is_none: Case::new(Attack::WrongMemory),
    gigabytes_that_are_refused: Case { window: 900, ..Case::new(Attack::RefusedMemory) },
    a_busy_loop_on_the_workers_cpu: Case {
        share: 0.1,
        enough: 10_000.0,
        ..Case::new(Attack::BusyLoop)
    },
    messages_held_until_their_deadline: Case::new(Attack::Holds),
}
