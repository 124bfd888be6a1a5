//! What runs in a copier: one thread per worker's channel, which copies and answers; and one that
//! ends the process when the daemon has closed its end, or has ended itself.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rnic_core::device::memory::Unreachable;
use rnic_core::shm::AddressSpace;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal};

use super::channel;
use super::wire::{self, Job, MAX_PACKET, Task};
use crate::config::Seccomp;
use crate::privilege::{ThreadKind, confine, spawn_confined};

/// Works for the process `pid`, whose memory comes by standard input, until the daemon has enough.
///
/// # Errors
///
/// If standard input is no channel of a daemon.
pub fn run(pid: i32, seccomp: Seccomp) -> io::Result<()> {
    give_up(c"rnicd-copier")?;
    let stdin = io::stdin();
    let setup = stdin.as_fd();
    let (_, passed) = channel::receive(setup, &mut [0])?;
    let mut passed = passed.into_iter();
    let memory = passed.next().ok_or(io::ErrorKind::InvalidInput)?;
    // Looking at it may take for ever; the daemon does not wait that long.
    let space = match AddressSpace::adopt(memory, pid) {
        Ok(space) => space,
        Err((error, _)) => {
            send(setup, error.to_string().as_bytes(), SendFlags::NOSIGNAL)?;
            return Ok(());
        }
    };
    for channel in passed {
        let space = space.clone();
        spawn_confined("copies", ThreadKind::Copier, seccomp, move || serve(&channel, &space))?;
    }
    confine(ThreadKind::Copier, seccomp)?;
    send(setup, &[0], SendFlags::NOSIGNAL)?;
    // Nothing more comes but the end. A thread that is stuck in the kernel ends when it can.
    while matches!(recv(setup, &mut [0], RecvFlags::empty()), Ok((1.., _))) {}
    std::process::exit(0)
}

/// Gives up what a copier, or who starts copiers, does not need, and takes a name. It has no
/// descriptor but its own, because all of the daemon's are close-on-exec, and no variable of the
/// environment. What it may ask of the kernel is little once it has threads ([`confine`]); up to
/// then it is what the thread may that started it.
pub(super) fn give_up(name: &CStr) -> io::Result<()> {
    // Who lists processes would see `exe`.
    rustix::thread::set_name(name)?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    rustix::thread::set_no_new_privs(true)?;
    // Running a program has made it possible again for others of this user to look into this one.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    for resource in [Resource::Core, Resource::Fsize] {
        rustix::process::setrlimit(resource, none)?;
    }
    Ok(())
}

/// Carries out the jobs of one worker until there are no more.
fn serve(channel: &OwnedFd, space: &Arc<AddressSpace>) {
    let mut packet = vec![0; MAX_PACKET];
    let mut answer = Vec::with_capacity(MAX_PACKET);
    loop {
        let len = match recv(channel, &mut packet, RecvFlags::empty()) {
            Ok((0, _)) => return,
            Ok((len, _)) => len,
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        };
        let Some(job) = packet.get(..len).and_then(wire::parse_job) else { return };
        carry_out(space, &job, &mut answer);
        if send(channel, &answer, SendFlags::NOSIGNAL).is_err() {
            return;
        }
    }
}

fn carry_out(space: &AddressSpace, job: &Job<'_>, answer: &mut Vec<u8>) {
    wire::emit_answer(job.id, Ok(()), answer);
    let mut at = 0;
    for (address, len) in &job.pieces {
        let len = *len as usize;
        let copied = match job.task {
            Task::Write(bytes, tail_last) => space.write(*address, &bytes[at..at + len], tail_last),
            Task::Read => {
                let from = answer.len();
                answer.resize(from + len, 0);
                space.read(*address, &mut answer[from..])
            }
            Task::Update(operation) => space
                .update_u64(*address, |old| operation.applied_to(old))
                .map(|old| answer.extend_from_slice(&old.to_ne_bytes())),
        };
        if let Err(fault) = copied {
            return wire::emit_answer(job.id, Err(Unreachable::from(fault)), answer);
        }
        at += len;
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rnic_core::device::copier::Pieces;
    use rnic_core::types::AtomicOperation;

    use super::*;

    /// This process's own memory, as a copier has a client's.
    fn own() -> Arc<AddressSpace> {
        let memory = File::options().read(true).write(true).open("/proc/self/mem");
        let memory = memory.unwrap_or_else(|e| panic!("{e}"));
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        AddressSpace::adopt(memory.into(), pid).unwrap_or_else(|(e, _)| panic!("{e}"))
    }

    /// What is said of a job with these pieces.
    fn outcome(pieces: &[(u64, u32)], write: Option<&[u8]>) -> Result<Vec<u8>, Unreachable> {
        carried_out(pieces, write.map_or(Task::Read, |bytes| Task::Write(bytes, true)))
    }

    fn carried_out(pieces: &[(u64, u32)], task: Task<'_>) -> Result<Vec<u8>, Unreachable> {
        let pieces: Pieces = pieces.iter().copied().collect();
        let job = Job { id: 5, pieces, task };
        let mut answer = Vec::new();
        carry_out(&own(), &job, &mut answer);
        let (id, moved) = wire::parse_answer(&answer).unwrap_or_else(|| panic!("{answer:?}"));
        assert_eq!(id, 5);
        moved
    }

    #[test]
    fn each_piece_has_its_own_bytes() {
        let memory = *b"abcdefgh";
        let at = |offset: u64| memory.as_ptr().expose_provenance() as u64 + offset;
        assert_eq!(outcome(&[(at(6), 2), (at(0), 3)], None), Ok(b"ghabc".to_vec()));
        let mut memory = [0u8; 8];
        let start = memory.as_mut_ptr().expose_provenance() as u64;
        let at = |offset: u64| start + offset;
        assert_eq!(outcome(&[(at(6), 2), (at(0), 3)], Some(b"ghabc")), Ok(Vec::new()));
        let written = outcome(&[(at(0), 8)], None);
        assert_eq!(written, Ok(b"abc\0\0\0gh".to_vec()));
    }

    #[test]
    fn a_word_is_changed_and_what_it_was_is_answered() {
        let mut word = 40u64;
        let pieces = [((&raw mut word).expose_provenance() as u64, 8)];
        let add = Task::Update(AtomicOperation::FetchAdd { add: 2, boundaries: 0 });
        assert_eq!(carried_out(&pieces, add), Ok(40u64.to_ne_bytes().to_vec()));
        assert_eq!(outcome(&pieces, None), Ok(42u64.to_ne_bytes().to_vec()));
        assert_eq!(carried_out(&[(8, 8)], add), Err(Unreachable::Unmapped));
    }

    #[test]
    fn a_copy_that_failed_is_no_success() {
        let memory = [7; 8];
        let there = (memory.as_ptr().expose_provenance() as u64, 8);
        // Nobody has a page there (mmap_min_addr), nor beyond the addresses of programs.
        for nowhere in [(8, 8), (1 << 60, 8)] {
            for pieces in [[there, nowhere], [nowhere, there]] {
                assert_eq!(outcome(&pieces, None), Err(Unreachable::Unmapped));
                assert_eq!(outcome(&pieces, Some(&[7; 16])), Err(Unreachable::Unmapped));
            }
        }
    }
}
