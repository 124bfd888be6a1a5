//! An attack beside a bystander that counts instead of measuring: a busy machine makes it slower
//! and changes no verdict.

use std::time::Instant;

use crate::daemon::Binaries;
use crate::{DEADLINE, Process};

use super::Attack;
use super::cpu;
use super::stage::{Case, LINES, Stage, allowed, anonymous, tcp_memory};

/// Plays a case against a daemon with so many workers. While the attack goes on, every round trip,
/// command and session of the bystander ends, and its peers are served; the daemon's memory, the
/// kernel's and the log stay within their bounds.
///
/// # Panics
///
/// If one of these does not hold, or the attack does not get anywhere.
pub fn play(binaries: Binaries, case: &Case, workers: u32) {
    let cpus = cpu::allowed();
    let here = cpus[0];
    let there = *cpus.last().expect("a CPU to run on");
    let is_on_worker = matches!(case.attack, Attack::BusyLoop);
    let pair = if is_on_worker { there } else { here };
    let attacker = if is_on_worker { here } else { there };
    let mut stage = Stage::new(binaries, case, workers, [here, pair]);
    let allowed = allowed(binaries, &stage.daemon);
    // What is made once exists from here on.
    stage.counted(OPERATIONS);
    let memory = anonymous(&stage.daemon);
    let kernel = tcp_memory();
    let part = ["overload", &case.attack.name(), &attacker.to_string()];
    let mut attacker = stage.daemon.actor_as(61_102, &part);
    attacker.line_after("under way");
    gets_somewhere(&mut attacker);
    for _ in 0..TURNS {
        stage.counted(OPERATIONS);
        let grown = anonymous(&stage.daemon).saturating_sub(memory);
        assert!(grown <= allowed, "{grown} KiB more in the daemon, {allowed} are allowed");
        let kernel = tcp_memory().saturating_sub(kernel);
        assert!(kernel <= case.kernel, "{kernel} KiB in the kernel, not {}", case.kernel);
    }
    assert!(!attacker.has_ended(), "the attacker has given up");
    attacker.kill();
    let lines = stage.end().len();
    assert!(lines <= LINES, "{lines} lines in the log");
}

/// Waits until the attack is under way.
fn gets_somewhere(attacker: &mut Process) {
    let deadline = Instant::now() + DEADLINE;
    while attacker.line_after("done ") == "0" {
        assert!(Instant::now() < deadline, "the attacker gets nowhere");
    }
}

/// Times that the bystander works beside the attack, and the bounds are checked.
const TURNS: u32 = 3;
/// Round trips, sets of commands and sessions of each turn.
const OPERATIONS: u64 = 20;
