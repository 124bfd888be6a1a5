//! Missing receives on RC QPs. Each end notifies its peer when a Send waits for a receive. While a
//! Send of this side waits at the peer, later requests wait too, but responses and acknowledgements
//! continue.

use crate::engine::qp::Qp;
use crate::engine::rnr_notice::Notice;
use crate::engine::state::EngineState;
use rnic_abi::types::Msn;

impl Qp {
    /// Sets the MSN of the peer's Send that waits for a receive, or `None`, and wakes the QP to
    /// send a notice if needed. On the direct path the peer sees the wait itself.
    pub(in crate::engine) fn send_rnr_notice(
        &mut self,
        engine: &mut EngineState,
        msn: Option<Msn>,
    ) {
        if self.requester.set_waits(msn) {
            engine.wake(&mut self.core);
        }
    }

    /// Handles a notice of the peer.
    pub(in crate::engine) fn notice_arrived(&mut self, engine: &mut EngineState, notice: Notice) {
        match notice {
            Notice::Waits(msn) => {
                // Ignores an MSN that no Send in flight has.
                let Some(seq) = self.requester.send_of(msn) else { return };
                let Some(rc) = &mut self.rc else { return };
                if rc.waited.replace(msn) == Some(msn) {
                    // A repeated MSN is an error, because the peer could otherwise extend the time
                    // limit forever.
                    return self.lost(engine, "the peer reported twice that the same Send waits");
                }
                self.requester.acknowledge_before(seq);
                self.retire(engine);
                // A new waiting Send gets its full time.
                self.stop_clock(engine);
                self.set_peer_waits(engine, true);
            }
            Notice::Resumed => self.set_peer_waits(engine, false),
            Notice::RefusesWrite(number) => self.requester.write_refused(number),
            Notice::Done(msn) => {
                // Ignores an MSN that no Send in flight has.
                let Some(seq) = self.requester.send_of(msn) else { return };
                self.requester.acknowledge_through(seq);
                self.retire(engine);
                self.stop_clock(engine);
            }
        }
        self.watch(engine);
    }

    /// Sets whether a Send of this side waits for a receive at the other end.
    pub(in crate::engine) fn set_peer_waits(&mut self, engine: &mut EngineState, waits: bool) {
        if let Some(rc) = &mut self.rc
            && rc.peer_waits != waits
        {
            rc.peer_waits = waits;
            self.requester.set_peer_waits(waits);
            self.stop_clock(engine);
            engine.wake(&mut self.core);
        }
    }
}
