//! Refused requests that cost the daemon more than they cost the client.

use std::convert::Infallible;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rnic_abi::abi::control::{Reply, RequestBody};
use rustix::fs::{FallocateFlags, MemfdFlags};

use super::progress::Progress;
use crate::raw::Raw;
use crate::traffic::Failure;

/// Repeatedly tries to attach a descriptor that is not this process's memory.
pub fn attach(socket: &Path) -> Result<Infallible, Failure> {
    let progress = Progress::begin();
    loop {
        let Some(mut raw) = Raw::try_open(socket) else { continue };
        let zeros = std::fs::File::open("/dev/zero")?;
        while raw.try_call(RequestBody::AttachMemory, &[zeros.as_fd()]).is_some() {
            progress.add(1);
        }
    }
}

/// Shares memory with a hole at its end, which the daemon refuses. The process that closes the
/// memfd last must free 3 GiB. Unread replies delay the daemon, so that it closes the memfd last.
pub fn memory(socket: &Path) -> Result<Infallible, Failure> {
    const LEN: u64 = 3 << 30;
    /// More requests than a socket buffer holds replies.
    const REQUESTS: usize = 320;
    let progress = Progress::begin();
    loop {
        let Some(mut raw) = Raw::try_open(socket) else { continue };
        let buffer = holed(LEN)?;
        for _ in 0..REQUESTS {
            raw.ask(RequestBody::Status, &[]);
            // Matches the daemon's pace while it still answers.
            std::thread::sleep(Duration::from_micros(50));
        }
        let body = RequestBody::AddSharedBuffer { length: LEN + HOLE };
        raw.ask(body, &[buffer.as_fd()]);
        drop(buffer);
        // Reads up to the refusal of the buffer. The session may end first.
        while raw.receive().is_some_and(|(bytes, _)| {
            postcard::from_bytes::<Reply>(&bytes).is_ok_and(|reply| reply.result.is_ok())
        }) {}
        progress.add(1);
    }
}

/// Length of the hole in bytes.
const HOLE: u64 = 4096;

fn holed(length: u64) -> Result<OwnedFd, Failure> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = rustix::fs::memfd_create("holed", flags)?;
    rustix::fs::fallocate(&memfd, FallocateFlags::empty(), 0, length)?;
    rustix::fs::ftruncate(&memfd, length + HOLE)?;
    Ok(memfd)
}
