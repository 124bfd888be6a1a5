//! An attack next to a bystander that counts operations instead of measuring time. A busy machine
//! slows it down but cannot change the verdict.

use std::time::Instant;

use crate::{DEADLINE, Process};

use super::Attack;
use super::cpu;
use super::stage::{Case, LINES, Stage, allowed, tcp_memory};

/// Runs a case against a daemon with `workers` workers. During the attack, every round trip,
/// command and session of the bystander must complete, its peers must be served, and the daemon's
/// memory, the kernel's memory and the log must stay within their bounds.
///
/// # Panics
///
/// If a condition fails, or the attack makes no progress.
pub fn play(case: &Case, workers: u32) {
    let cpus = cpu::allowed();
    let here = cpus[0];
    let there = *cpus.last().expect("a CPU to run on");
    let is_on_worker = matches!(case.attack, Attack::BusyLoop);
    let pair = if is_on_worker { there } else { here };
    let attacker = if is_on_worker { here } else { there };
    let mut stage = Stage::new(case, workers, [here, pair]);
    let allowed = allowed(&stage.daemon);
    // The first pass allocates everything that is allocated only once.
    stage.counted(OPERATIONS);
    let memory = stage.daemon.anonymous_kib();
    let kernel = tcp_memory();
    let part = ["overload", &case.attack.name(), &attacker.to_string()];
    let mut attacker = stage.daemon.actor_as(61_102, &part);
    attacker.line_after("under way");
    wait_progress(&mut attacker);
    for _ in 0..TURNS {
        stage.counted(OPERATIONS);
        let grown = stage.daemon.anonymous_kib().saturating_sub(memory);
        assert!(grown <= allowed, "{grown} KiB more in the daemon, {allowed} are allowed");
        let kernel = tcp_memory().saturating_sub(kernel);
        assert!(kernel <= case.kernel, "{kernel} KiB in the kernel, {} are allowed", case.kernel);
    }
    assert!(!attacker.has_ended(), "the attacker has exited");
    attacker.kill();
    let lines = stage.end().len();
    assert!(lines <= LINES, "{lines} lines in the log");
}

/// Waits until the attack makes progress.
fn wait_progress(attacker: &mut Process) {
    let deadline = Instant::now() + DEADLINE;
    while attacker.line_after("done ") == "0" {
        assert!(Instant::now() < deadline, "the attack makes no progress");
    }
}

/// Number of passes of the bystander during the attack. The bounds are checked after each.
const TURNS: u32 = 3;
/// Round trips, sets of commands and sessions per pass.
const OPERATIONS: u64 = 20;
