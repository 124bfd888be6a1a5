//! A worker's channels to copiers.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rnic_core::device::Copier;
use rnic_core::device::copier::{CopyJob, CopyResult};
use rnic_core::device::memory::Unreachable;
use rnic_core::types::SessionId;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::copier::wire::{self, MAX_PACKET};

/// The channel to one copier.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) copier: Arc<Copier>,
    fd: OwnedFd,
    /// Jobs that were sent, oldest first: they are answered in that order.
    sent: VecDeque<u64>,
    /// Jobs that found no room in the channel.
    unsent: VecDeque<(u64, Vec<u8>)>,
    broken: bool,
}

/// Channels to copiers, by session.
#[derive(Debug, Default)]
pub(super) struct Channels {
    of: HashMap<SessionId, Channel>,
    buffer: Vec<u8>,
}

/// What a copier has answered.
pub(super) type Answer = (Arc<Copier>, u64, CopyResult);

impl Channels {
    pub(super) fn add(&mut self, copier: Arc<Copier>, fd: OwnedFd) {
        let session = copier.session();
        let (sent, unsent) = (VecDeque::new(), VecDeque::new());
        self.of.insert(session, Channel { copier, fd, sent, unsent, broken: false });
    }

    /// Forgets a channel; the answers that will not come.
    pub(super) fn remove(&mut self, session: SessionId) -> Vec<Answer> {
        self.of.remove(&session).map_or(Vec::new(), |mut channel| channel.give_up())
    }

    /// Sends a job. The answer if there will be none.
    pub(super) fn submit(&mut self, job: &CopyJob) -> Option<Answer> {
        let session = job.copier.session();
        let Some(channel) = self.of.get_mut(&session).filter(|c| !c.broken) else {
            return Some((job.copier.clone(), job.id, Err(Unreachable::Detached)));
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
                            answers.push((channel.copier.clone(), id, moved));
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
    /// Answers, in the copier's place, what it will not answer.
    fn give_up(&mut self) -> Vec<Answer> {
        let unsent = self.unsent.drain(..).map(|(id, _)| id);
        let left = self.sent.drain(..).chain(unsent);
        left.map(|id| (self.copier.clone(), id, Err(Unreachable::Detached))).collect()
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
