//! Actions that rules have delayed: events, messages of the connection manager, and accepts.

use rnic_abi::types::*;

use super::held::Later;
use crate::resource::Manager;

impl Manager {
    /// Delays an action of a session until `at`. If the session has ended or has [`MAX_DELAYED`]
    /// delayed actions, sends an event or a message at once and returns false. Accepts are always
    /// delayed, because a session has at most one per QP.
    pub(super) fn delay(&mut self, at: Time, session: SessionId, what: Later, now: Time) -> bool {
        let delayed = self.faults.later.values().filter(|(of, _)| *of == session).count();
        let is_accept = matches!(what, Later::Accept(_));
        if !is_accept && (delayed >= MAX_DELAYED || !self.sessions.contains_key(&session)) {
            self.carry_out(session, what, now);
            return false;
        }
        self.faults.last += 1;
        self.faults.later.insert((at, self.faults.last), (session, what));
        true
    }

    /// Carries out the delayed actions that are due.
    pub(super) fn run_delayed(&mut self, now: Time) {
        while let Some(entry) = self.faults.later.first_entry()
            && entry.key().0 <= now
        {
            let (session, what) = entry.remove();
            self.carry_out(session, what, now);
        }
    }

    /// Drops the delayed events and the held accepts of a session that ends, and sends its delayed
    /// messages.
    pub(super) fn end_delayed(&mut self, session: SessionId, now: Time) {
        self.faults.accepts.retain(|_, held| held.session != session);
        let of_session = self.faults.later.extract_if(.., |_, (of, _)| *of == session);
        for (_, (_, what)) in of_session.collect::<Vec<_>>() {
            if let Later::Message(_) = what {
                self.carry_out(session, what, now);
            }
        }
    }

    fn carry_out(&mut self, session: SessionId, what: Later, now: Time) {
        match what {
            Later::Event(event) => self.tell(session, &event),
            Later::Message(message) => self.pass(&message, now),
            Later::Accept(request) => self.end_held_accept(request, now),
        }
    }
}

/// Maximum number of delayed actions of a session, except accepts.
pub(super) const MAX_DELAYED: usize = 64;
