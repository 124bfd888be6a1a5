//! What one user can do to take more than its share: each attack is played by a process of another
//! user, beside a well-behaved pair that is measured.
//!
//! [`Attack`] is the table, [`play`] an attacker's life, [`bystander`] the pair and the commands
//! that are measured, [`stage`] the daemon, the CPUs, the measurement and the verdict, and
//! [`counted`] the same without a clock.

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
    /// A send queue in Error that is refilled while it is flushed.
    FlushedSends,
    /// The same with a CQ that is armed anew all the time.
    FlushedSendsArmed,
    /// A receive queue in Error that is refilled while it is flushed.
    FlushedReceives,
    /// Binds and local invalidates of one session.
    Binds,
    /// The same of 32 sessions.
    BindsOfMany,
    /// Reads behind the peer's FIN.
    Reads,
    /// The same of 32 sessions.
    ReadsOfMany,
    /// 64 connections that bring FPDUs of 20 bytes.
    ShortFpdus,
    /// 8,000 QPs rung for nothing every 2 ms.
    Doorbells,
    /// 128 busy sessions of one user.
    Sessions,
    /// Lists of diagnoses beside sessions that have as many as may be.
    Whys,
    /// Questions about the device.
    Questions,
    /// Connection requests that nobody decides.
    Undecided,
    /// Sockets whose close takes its time.
    SlowClose,
    /// 20,000 silent connections a second.
    Silent,
    /// Wrong STags on the attacker's own QPs.
    StagGuessLimiter,
    /// Connections whose peers read nothing.
    ClosedWindows,
    /// Memory that is no memory, attached again and again.
    WrongMemory,
    /// Gigabytes that are refused.
    RefusedMemory,
    /// A busy loop on the worker's CPU.
    BusyLoop,
    /// Messages held until their deadline.
    Holds,
}

impl Attack {
    /// Its name on command lines and in reports.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Plays an attack for ever.
///
/// # Errors
///
/// If it cannot even begin, or is stopped by the daemon.
pub fn play(attack: Attack, socket: &Path) -> Result<Infallible, Failure> {
    use Attack::*;
    use flush::Side;
    use free::What;
    use questions::Question;
    crate::process::raise_descriptor_limit();
    match attack {
        FlushedSends => flush::run(socket, Side::Sends, false),
        FlushedSendsArmed => flush::run(socket, Side::Sends, true),
        FlushedReceives => flush::run(socket, Side::Receives, false),
        Binds => free::run(socket, What::Binds, 1),
        BindsOfMany => free::run(socket, What::Binds, 32),
        Reads => free::run(socket, What::Reads, 1),
        ReadsOfMany => free::run(socket, What::Reads, 32),
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

/// Uses a CPU.
fn spin() -> Result<Infallible, Failure> {
    let progress = Progress::begin();
    loop {
        for _ in 0..10_000 {
            std::hint::spin_loop();
        }
        progress.add(1);
    }
}
