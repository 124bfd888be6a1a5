//! Receives that are missing, at either end: the peer is told when one of its Sends waits here, and
//! when this side's waits there, its other requests do, too; responses and acknowledgements go on.

use crate::engine::notice::Notice;
use crate::engine::qp::Qp;
use crate::engine::state::EngineState;
use crate::types::Msn;

impl Qp {
    /// A Send of the peer's waits for a receive here, or none does any more. By the direct path the
    /// peer sees that by itself.
    pub(in crate::engine) fn tell_of_wait(&mut self, engine: &mut EngineState, msn: Option<Msn>) {
        if self.requester.set_waits(msn) {
            engine.wake(&mut self.core);
        }
    }

    /// The peer has said whether a Send waits there.
    pub(in crate::engine) fn notice_arrived(&mut self, engine: &mut EngineState, notice: Notice) {
        match notice {
            Notice::Waits(msn) => {
                // A number of no Send under way is none of ours.
                let Some(seq) = self.requester.send_of(msn) else { return };
                let Some(wired) = &mut self.wired else { return };
                if wired.waited.replace(msn) == Some(msn) {
                    // Its budget would never be over.
                    return self.lost(engine, "the peer has said twice that the same Send waits");
                }
                self.requester.acknowledge_before(seq);
                self.retire(engine);
                // Another one than before has its time from now on.
                self.stop_clock(engine);
                self.set_peer_waits(engine, true);
            }
            Notice::GoesOn => self.set_peer_waits(engine, false),
            Notice::RefusesWrite(number) => self.requester.write_refused(number),
        }
        self.watch(engine);
    }

    /// A Send of this side waits for a receive at the other end, or none does.
    pub(in crate::engine) fn set_peer_waits(&mut self, engine: &mut EngineState, waits: bool) {
        if let Some(wired) = &mut self.wired
            && wired.peer_waits != waits
        {
            wired.peer_waits = waits;
            self.requester.set_peer_waits(waits);
            self.stop_clock(engine);
            engine.wake(&mut self.core);
        }
    }
}
