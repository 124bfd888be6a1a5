//! A worker's channels to movers.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rnic_core::device::Mover;
use rnic_core::device::memory::Unreachable;
use rnic_core::device::mover::{MoveJob, Moved};
use rnic_core::types::SessionId;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::mover::wire::{self, MAX_PACKET};

/// The channel to one mover.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) mover: Arc<Mover>,
    fd: OwnedFd,
    /// Jobs that were sent, oldest first: they are answered in that order.
    sent: VecDeque<u64>,
    /// Jobs that found no room in the channel.
    unsent: VecDeque<(u64, Vec<u8>)>,
    broken: bool,
}

/// Channels by session.
#[derive(Debug, Default)]
pub(super) struct Channels {
    of: HashMap<SessionId, Channel>,
    buffer: Vec<u8>,
}

/// What a mover has answered.
pub(super) type Answer = (Arc<Mover>, u64, Moved);

impl Channels {
    pub(super) fn add(&mut self, mover: Arc<Mover>, fd: OwnedFd) {
        let session = mover.session();
        let (sent, unsent) = (VecDeque::new(), VecDeque::new());
        self.of.insert(session, Channel { mover, fd, sent, unsent, broken: false });
    }

    /// Forgets a channel; the answers that will not come.
    pub(super) fn remove(&mut self, session: SessionId) -> Vec<Answer> {
        self.of.remove(&session).map_or(Vec::new(), |mut channel| channel.give_up())
    }

    /// Sends a job. The answer if there will be none.
    pub(super) fn submit(&mut self, job: &MoveJob) -> Option<Answer> {
        let session = job.mover.session();
        let Some(channel) = self.of.get_mut(&session).filter(|c| !c.broken) else {
            return Some((job.mover.clone(), job.id, Err(Unreachable::Detached)));
        };
        channel.unsent.push_back((job.id, wire::emit_job(job)));
        channel.flush();
        None
    }

    /// The channel is ready: sends what waits, takes what has been answered.
    pub(super) fn ready(&mut self, session: SessionId) -> Vec<Answer> {
        self.buffer.resize(MAX_PACKET, 0);
        let Some(channel) = self.of.get_mut(&session) else { return Vec::new() };
        channel.flush();
        let mut answers = Vec::new();
        while !channel.broken {
            match recv(&channel.fd, &mut self.buffer[..], RecvFlags::DONTWAIT) {
                Ok((len, _)) => {
                    let answer = self.buffer.get(..len).and_then(wire::parse_answer);
                    // Anything but the answer to the oldest job is none.
                    match answer.filter(|(id, _)| channel.sent.front() == Some(id)) {
                        Some((id, moved)) => {
                            channel.sent.pop_front();
                            answers.push((channel.mover.clone(), id, moved));
                        }
                        None => channel.broken = true,
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => channel.broken = true,
            }
        }
        if channel.broken {
            answers.extend(channel.give_up());
        }
        answers
    }
}

impl Channel {
    /// Answers, in the mover's place, what it will not answer.
    fn give_up(&mut self) -> Vec<Answer> {
        let unsent = self.unsent.drain(..).map(|(id, _)| id);
        let left = self.sent.drain(..).chain(unsent);
        left.map(|id| (self.mover.clone(), id, Err(Unreachable::Detached))).collect()
    }

    fn flush(&mut self) {
        while let Some((id, packet)) = self.unsent.front() {
            match send(&self.fd, packet, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(_) => {
                    self.sent.push_back(*id);
                    self.unsent.pop_front();
                }
                Err(Errno::INTR) => {}
                // A channel that is broken is readable as well, and found so there.
                Err(_) => return,
            }
        }
    }
}
