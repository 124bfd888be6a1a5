//! Attacks by which a user tries to exceed its share. Each attack runs as one user while a
//! well-behaved pair of another user is measured.
//!
//! [`Attack`] lists the attacks and [`play`] runs one. [`bystander`] holds the measured pair and
//! its commands. [`stage`] sets up the daemon and the CPUs, measures, and checks the bounds.
//! [`counted`] does the same without a clock.

pub mod bystander;
mod closing;
pub mod counted;
pub mod cpu;
mod crowd;
mod flush;
mod fpdus;
mod free;
mod holds;
mod intruder;
mod progress;
mod questions;
mod refused;
pub mod stage;
mod startups;
mod storm;
mod unread;

use std::convert::Infallible;
use std::path::Path;

use clap::ValueEnum;

use crate::traffic::Failure;
pub use cpu::confine;
use progress::Progress;

/// An attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Attack {
    /// The send queue of a QP in ERR, refilled while it is flushed.
    FlushedSends,
    /// The same, with a CQ that is rearmed each time.
    FlushedSendsArmed,
    /// The receive queue of a QP in ERR, refilled while it is flushed.
    FlushedReceives,
    /// Binds and local invalidates from one session.
    Binds,
    /// The same from 32 sessions.
    BindsOfMany,
    /// Reads after the peer's FIN.
    Reads,
    /// The same from 32 sessions.
    ReadsOfMany,
    /// 64 connections that carry FPDUs of 20 bytes.
    ShortFpdus,
    /// Idle doorbells: 8,000 QPs rung every 2 ms without any work.
    Doorbells,
    /// 128 busy sessions of one user.
    Sessions,
    /// Requests for lists of diagnoses, by sessions with the maximum number of diagnoses.
    Whys,
    /// Device queries.
    Questions,
    /// Connection requests that the listener neither accepts nor rejects.
    Undecided,
    /// Sockets that close slowly.
    SlowClose,
    /// 20,000 connections a second that send nothing.
    Silent,
    /// Wrong STags on the attacker's own QPs.
    StagGuessLimiter,
    /// Connections to peers that do not read.
    ClosedWindows,
    /// Repeated attempts to attach a descriptor that is not memory.
    WrongMemory,
    /// Shared buffers of several GiB, which the daemon refuses.
    RefusedMemory,
    /// A busy loop on the worker's CPU.
    BusyLoop,
    /// Messages without a receive, held until their RNR deadline passes.
    Holds,
}

impl Attack {
    /// Returns the attack's name on command lines and in reports.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Runs an attack forever.
///
/// # Errors
///
/// If the attack cannot start, or the daemon stops it.
pub fn play(attack: Attack, socket: &Path) -> Result<Infallible, Failure> {
    use Attack::*;
    use flush::Side;
    use free::Requests;
    use questions::Question;
    crate::process::raise_descriptor_limit();
    match attack {
        FlushedSends => flush::run(socket, Side::Sends, false),
        FlushedSendsArmed => flush::run(socket, Side::Sends, true),
        FlushedReceives => flush::run(socket, Side::Receives, false),
        Binds => free::run(socket, Requests::Binds, 1),
        BindsOfMany => free::run(socket, Requests::Binds, 32),
        Reads => free::run(socket, Requests::Reads, 1),
        ReadsOfMany => free::run(socket, Requests::Reads, 32),
        ShortFpdus => fpdus::run(socket),
        Doorbells => storm::run(socket),
        Sessions => crowd::run(socket, 128),
        Whys => questions::run(socket, Question::Whys, 100, 256),
        Questions => questions::run(socket, Question::Device, 64, 0),
        Undecided => startups::undecided(socket),
        SlowClose => closing::run(socket),
        Silent => startups::silent(socket),
        StagGuessLimiter => startups::guesses(socket),
        ClosedWindows => unread::run(socket),
        WrongMemory => refused::attach(socket),
        RefusedMemory => refused::memory(socket),
        BusyLoop => spin(),
        Holds => holds::run(socket),
    }
}

/// Uses a whole CPU.
fn spin() -> Result<Infallible, Failure> {
    let progress = Progress::begin();
    loop {
        for _ in 0..10_000 {
            std::hint::spin_loop();
        }
        progress.add(1);
    }
}
