//! Which commands all workers have carried out.
//!
//! A worker carries commands out in order and publishes the last ticket it has seen, so one number
//! per worker tells about every ticket. A worker that sleeps is acknowledged for by the issuer, if
//! the command allows it (see [`rnic_core::shm::parker`]).

use std::collections::VecDeque;

/// Identifies a command that is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Tickets whose workers have not all answered.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    last: u64,
    open: VecDeque<Open>,
}

#[derive(Debug)]
struct Open {
    ticket: Ticket,
    /// Workers still to answer.
    waiting: Vec<usize>,
    /// They do so for this one by itself: later ones may be done before.
    apart: bool,
}

impl Tickets {
    /// A new ticket, above all earlier ones.
    pub(super) fn issue(&mut self) -> Ticket {
        self.last += 1;
        Ticket(self.last)
    }

    /// Has a ticket wait for these workers; for none, it is done.
    pub(super) fn open(&mut self, ticket: Ticket, waiting: Vec<usize>) {
        self.open.push_back(Open { ticket, waiting, apart: false });
    }

    /// Has a ticket wait for these workers, each of which says of this one by itself when it is
    /// [answered](Self::answered), because it takes longer than others.
    pub(super) fn open_apart(&mut self, ticket: Ticket, waiting: Vec<usize>) {
        self.open.push_back(Open { ticket, waiting, apart: true });
    }

    /// A worker has carried out what a ticket that is apart stands for.
    pub(super) fn answered(&mut self, ticket: Ticket, worker: usize) {
        if let Some(open) = self.open.iter_mut().find(|open| open.apart && open.ticket == ticket) {
            open.waiting.retain(|w| *w != worker);
        }
    }

    /// Takes a ticket that is done, given the last ticket each worker has carried out.
    pub(super) fn poll(&mut self, carried_out: impl Fn(usize) -> u64) -> Option<Ticket> {
        let done = self.open.iter_mut().position(|open| {
            let apart = open.apart;
            open.waiting.retain(|worker| apart || carried_out(*worker) < open.ticket.0);
            open.waiting.is_empty()
        })?;
        self.open.remove(done).map(|open| open.ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_done_when_every_worker_it_waits_for_has_passed_it() {
        let mut tickets = Tickets::default();
        let (first, second) = (tickets.issue(), tickets.issue());
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
    fn a_ticket_that_is_apart_waits_for_its_own_answers_and_holds_up_no_other() {
        let mut tickets = Tickets::default();
        let (end, later) = (tickets.issue(), tickets.issue());
        tickets.open_apart(end, vec![0, 1]);
        tickets.open(later, vec![0]);
        assert_eq!(tickets.poll(|_| later.0), Some(later));
        tickets.answered(end, 1);
        assert_eq!(tickets.poll(|_| later.0), None);
        tickets.answered(end, 0);
        assert_eq!(tickets.poll(|_| 0), Some(end));
    }

    #[test]
    fn a_ticket_nobody_has_to_answer_is_done_at_once() {
        let mut tickets = Tickets::default();
        let ticket = tickets.issue();
        tickets.open(ticket, Vec::new());
        assert_eq!(tickets.poll(|_| 0), Some(ticket));
    }
}
