//! Every attack by which one user could exceed its share, next to a well-behaved pair of another
//! user. All requests of the pair must succeed, and the daemon's memory must stay within the bound
//! that `check-config` prints.
//!
//! With `RNIC_TEST_TIMING=1`, on an otherwise idle machine, each attack is measured instead: the
//! pair keeps a third of its rate, no command takes longer than 50 ms and no new session longer
//! than 100 ms, or longer than the slowest one without an attack. Next to a busy loop on the
//! worker's CPU, where each hop of a round trip wakes the worker, the pair keeps a tenth of its
//! rate or 10,000 round trips per second. Waiting for the end of the loop's time slice would leave
//! fewer than 400. The measurements before and during each attack are printed and collected in
//! `target/attacks.txt`. `RNIC_TEST_LONG=1` runs each attack for longer.

use std::process::Command;
use std::sync::{Mutex, PoisonError};

use rnic_abi::shm::wait::cpus;
use rnic_tests::attacks::Attack;
use rnic_tests::attacks::stage::Case;
use rnic_tests::attacks::{counted, stage};
use rnic_tests::{Process, omit, timing};

/// Serialises the measurements, which would otherwise affect each other.
static ALONE: Mutex<()> = Mutex::new(());

/// Kernel memory in KiB for a hundred connections to peers that do not read: 1 MiB per connection,
/// as `check-config` prints, plus the receive buffers of those peers.
const KERNEL: u64 = 100 * (1024 + 512);

/// Runs a case with each of these numbers of workers.
fn attacked(test: &str, case: &Case, workers: &[u32]) {
    if let Some(measured) = std::env::var_os(INSIDE) {
        for workers in workers {
            if measured == MEASURED {
                stage::play(case, *workers);
            } else {
                counted::play(case, *workers);
            }
        }
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return omit("only root can act as several users");
    }
    if cpus() < 2 {
        return omit("the attacker and its victims need two CPUs");
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

/// Environment variable that selects how the child process runs the case.
const INSIDE: &str = "RNIC_TEST_ATTACKED";
const MEASURED: &str = "measured";

/// Raises the priority of the child process and its children above all other load: first the
/// autogroup of its session, by which the kernel may distribute CPU time, then the processes.
/// Without the privilege they run at normal priority.
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

// Load on a worker, which delays other sessions.
attacks! {
    [1, 2],
    a_flush_of_sends_that_never_ends: Case::new(Attack::FlushedSends),
    a_flush_with_a_queue_that_is_always_armed: Case::new(Attack::FlushedSendsArmed),
    a_flush_of_receives_that_never_ends: Case::new(Attack::FlushedReceives),
    binds_and_invalidates: Case::new(Attack::Binds),
    binds_and_invalidates_of_many_sessions: Case::new(Attack::BindsOfMany),
    reads_after_peer_end: Case::new(Attack::Reads),
    reads_after_peer_end_of_many_sessions: Case::new(Attack::ReadsOfMany),
    connections_with_the_shortest_fpdus: Case::new(Attack::ShortFpdus),
    doorbells_without_requests: Case { qps: 8100, ..Case::new(Attack::Doorbells) },
    sessions_of_one_user: Case::new(Attack::Sessions),
}

// Fault rules of the attacker, which hold back work and data or add to it.
attacks! {
    [1, 2],
    flushed_sends_that_are_held: Case {
        faults: "do=hold-completion by=20ms user=61102",
        ..Case::new(Attack::FlushedSends)
    },
    flushed_sends_with_extra_events: Case {
        faults: "do=extra-event user=61102; do=lose-completion every=100 user=61102; \
                 do=hold-event by=10ms user=61102",
        ..Case::new(Attack::FlushedSendsArmed)
    },
    binds_that_fail_by_rules: Case {
        faults: "do=complete status=mw-bind-err every=50 user=61102; \
                 do=event event=port-err opcode=bind-mw user=61102",
        ..Case::new(Attack::Binds)
    },
    reads_on_a_slow_and_reordered_link: Case {
        faults: "do=link delay=1ms jitter=5ms user=61102; \
                 do=order order=worst hold=20ms user=61102; \
                 do=hold-completion by=1ms every=10 user=61102",
        ..Case::new(Attack::Reads)
    },
}

// Load on the control thread, or on the kernel on behalf of the daemon.
attacks! {
    [1],
    lists_of_diagnoses: Case::new(Attack::Whys),
    repeated_device_queries: Case::new(Attack::Questions),
    requests_without_a_decision: Case {
        limit: "ulimit -n 1500", peers: true, ..Case::new(Attack::Undecided)
    },
    closes_that_block: Case {
        limit: "ulimit -n 1500", after: 10_000, ..Case::new(Attack::SlowClose)
    },
    silent_connections: Case { peers: true, ..Case::new(Attack::Silent) },
    wrong_stags_on_own_connections: Case {
        peers: true,
        config: "[limits.peer]\nstag_guesses_per_minute = 30",
        ..Case::new(Attack::StagGuessLimiter)
    },
    windows_that_stay_closed: Case { kernel: KERNEL, ..Case::new(Attack::ClosedWindows) },
    invalid_shared_memory: Case::new(Attack::WrongMemory),
    refused_gigabytes: Case { window: 900, ..Case::new(Attack::RefusedMemory) },
    a_busy_loop_on_the_workers_cpu: Case {
        share: 0.1,
        enough: 10_000.0,
        ..Case::new(Attack::BusyLoop)
    },
    messages_held_until_their_deadline: Case::new(Attack::Holds),
}
