//! Tracks which commands the workers have carried out.
//!
//! A worker carries out commands in order and publishes the last ticket it has seen, so one number
//! per worker covers every ticket. The issuer acknowledges a command on behalf of a sleeping worker
//! if the command allows it (see [`rnic_abi::shm::parker`]).

use std::collections::VecDeque;

/// Identifies a command that must be acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Tickets that wait for workers.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    last: u64,
    open: VecDeque<Open>,
}

#[derive(Debug)]
struct Open {
    ticket: Ticket,
    /// Workers that have not answered yet.
    waiting: Vec<usize>,
    /// The workers answer this ticket separately: later tickets may be done earlier.
    separate: bool,
}

impl Tickets {
    /// Returns a new ticket, greater than all earlier ones.
    pub(super) fn issue(&mut self) -> Ticket {
        self.last += 1;
        Ticket(self.last)
    }

    /// Makes a ticket wait for these workers. Without workers, it is done at once.
    pub(super) fn open(&mut self, ticket: Ticket, waiting: Vec<usize>) {
        self.open.push_back(Open { ticket, waiting, separate: false });
    }

    /// Makes a ticket wait for these workers, each of which answers it separately with
    /// [`answered`](Self::answered), because it takes longer than others.
    pub(super) fn open_separate(&mut self, ticket: Ticket, waiting: Vec<usize>) {
        self.open.push_back(Open { ticket, waiting, separate: true });
    }

    /// Records that a worker has carried out a ticket opened with
    /// [`open_separate`](Self::open_separate).
    pub(super) fn answered(&mut self, ticket: Ticket, worker: usize) {
        if let Some(open) = self.open.iter_mut().find(|open| open.separate && open.ticket == ticket)
        {
            open.waiting.retain(|w| *w != worker);
        }
    }

    /// Takes a finished ticket, given the last ticket that each worker has carried out.
    pub(super) fn poll(&mut self, carried_out: impl Fn(usize) -> u64) -> Option<Ticket> {
        let done = self.open.iter_mut().position(|open| {
            let separate = open.separate;
            open.waiting.retain(|worker| separate || carried_out(*worker) < open.ticket.0);
            open.waiting.is_empty()
        })?;
        self.open.remove(done).map(|open| open.ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticket_waits_for_every_worker() {
        let mut tickets = Tickets::default();
        let first = tickets.issue();
        let second = tickets.issue();
        tickets.open(first, vec![0, 2]);
        tickets.open(second, vec![1]);
        let mut passed = [0, 0, 0];
        assert_eq!(tickets.poll(|w| passed[w]), None);
        passed[0] = second.0;
        passed[1] = second.0;
        assert_eq!(tickets.poll(|w| passed[w]), Some(second));
        assert_eq!(tickets.poll(|w| passed[w]), None);
        passed[2] = first.0;
        assert_eq!(tickets.poll(|w| passed[w]), Some(first));
        assert_eq!(tickets.poll(|w| passed[w]), None);
    }

    #[test]
    fn separate_ticket_does_not_delay_others() {
        let mut tickets = Tickets::default();
        let end = tickets.issue();
        let later = tickets.issue();
        tickets.open_separate(end, vec![0, 1]);
        tickets.open(later, vec![0]);
        assert_eq!(tickets.poll(|_| later.0), Some(later));
        tickets.answered(end, 1);
        assert_eq!(tickets.poll(|_| later.0), None);
        tickets.answered(end, 0);
        assert_eq!(tickets.poll(|_| 0), Some(end));
    }

    #[test]
    fn ticket_without_workers_is_done_at_once() {
        let mut tickets = Tickets::default();
        let ticket = tickets.issue();
        tickets.open(ticket, Vec::new());
        assert_eq!(tickets.poll(|_| 0), Some(ticket));
    }
}
