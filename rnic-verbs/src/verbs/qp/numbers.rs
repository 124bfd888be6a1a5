//! Numbers of outstanding requests.
//!
//! Programs may use any `wr_id`, so the library numbers requests consecutively and passes these
//! numbers to the daemon. A completion returns the number, which identifies the request and its
//! `wr_id`. As in verbs, polling a completion frees the slots of its request and of earlier ones.

use std::collections::VecDeque;

use crate::errno::Errno;
use crate::verbs::mw::PostedBind;

/// An outstanding request, as the program posted it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Posted {
    pub(super) wr_id: u64,
    /// Length in bytes of a send request.
    pub(super) length: u32,
}

/// Outstanding requests in order, with the library's number and the program's `wr_id` of each.
#[derive(Debug)]
pub(super) struct Numbers {
    posted: VecDeque<Posted>,
    /// The outstanding binds, by number.
    pub(super) binds: VecDeque<(u64, PostedBind)>,
    /// Number of the oldest outstanding request.
    first: u64,
    /// Maximum number of outstanding requests.
    most: usize,
}

impl Numbers {
    pub(super) fn new(most: u32) -> Self {
        // Not preallocated: programs create deep queues and use a small part.
        Numbers { posted: VecDeque::new(), binds: VecDeque::new(), first: 0, most: most as usize }
    }

    /// Returns the number of the next request, or `ENOMEM` if the queue is full.
    pub(super) fn next(&self) -> Result<u64, Errno> {
        if self.posted.len() < self.most {
            Ok(self.first + self.posted.len() as u64)
        } else {
            let most = self.most;
            Err(errno!(libc::ENOMEM, "the queue is full: {most} requests are outstanding"))
        }
    }

    /// Drops all outstanding requests.
    pub(super) fn clear(&mut self) {
        self.first += self.posted.len() as u64;
        self.posted.clear();
        self.binds.clear();
    }

    /// Returns the number of requests that can still be posted.
    pub(super) fn room(&self) -> usize {
        self.most - self.posted.len()
    }

    /// Adds a request that was posted.
    pub(super) fn push(&mut self, wr_id: u64, length: u32) {
        self.posted.push_back(Posted { wr_id, length });
    }

    /// Settles the binds up to a completed request. Binds before it have succeeded, because a
    /// request that fails always completes.
    pub(super) fn settle_binds(&mut self, number: u64, succeeded: bool) {
        while let Some((at, bind)) = self.binds.pop_front_if(|(at, _)| *at <= number) {
            if at == number && !succeeded {
                bind.failed();
            }
        }
    }

    /// Frees a completed request and all requests before it. Returns the completed request.
    pub(super) fn done(&mut self, number: u64) -> Posted {
        let mut done = Posted::default();
        while self.first <= number
            && let Some(next) = self.posted.pop_front()
        {
            done = next;
            self.first += 1;
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_frees_the_slots_before_it() {
        let mut numbers = Numbers::new(3);
        for wr_id in [70, 71, 72] {
            numbers.next().expect("room");
            numbers.push(wr_id, 5);
        }
        assert_eq!(numbers.next().map_err(|errno| errno.number()).err(), Some(libc::ENOMEM));
        assert_eq!(numbers.done(1), Posted { wr_id: 71, length: 5 });
        assert_eq!(numbers.next().ok(), Some(3));
        assert_eq!(numbers.done(2).wr_id, 72);
    }
}
