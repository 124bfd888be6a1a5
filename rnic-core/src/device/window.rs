//! Memory windows: STags that give a part of a region to peers, bound and unbound by send requests.
//!
//! A [`Window`] is shared by the resource manager, which makes it and lists it, and the workers,
//! which bind it. Its state stands behind a short lock, so of two QPs on two workers that bind it
//! at once one wins. A window of type 1 serves every QP of its domain and so changes on every
//! worker ([`StagChange`](super::StagChange)); one of type 2 serves the QP that bound it and lives
//! on that QP's worker alone.
//!
//! A region with windows must stay. [`WindowCount`] is where both sides meet: binding counts up,
//! withdrawing the region closes the count, and each is refused once the other has happened. So no
//! window ever outlives its region, whatever is under way on which worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::types::{MrId, MwId, PdId, SessionId, Stag, WindowKind};

/// Windows bound to one region, counted by whoever binds them; closed when the region goes.
#[derive(Debug, Default)]
pub struct WindowCount(AtomicU32);

/// The count of a region that is gone or going. No limit allows so many windows.
const CLOSED: u32 = u32::MAX;

impl WindowCount {
    /// Counts one more; false if the region is going.
    fn add(&self) -> bool {
        let add = |n| (n < CLOSED - 1).then(|| n + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).is_ok()
    }

    /// Closes the region for windows, for good; how many are bound if there are any. Closing twice
    /// is closing once.
    pub fn withdraw(&self) -> Result<(), u32> {
        match self.0.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) | Err(CLOSED) => Ok(()),
            Err(bound) => Err(bound),
        }
    }
}

/// A window's hold on its region, from the request that binds it until nothing can be reached
/// through it any more.
#[derive(Debug)]
pub struct Binding {
    window: MwId,
    region: MrId,
    count: Arc<WindowCount>,
    ended: AtomicBool,
}

impl Binding {
    pub(super) fn new(
        window: MwId,
        region: MrId,
        count: &Arc<WindowCount>,
    ) -> Result<Arc<Self>, BindFault> {
        let count = count.clone();
        if !count.add() {
            return Err(BindFault::NoRegion);
        }
        Ok(Arc::new(Binding { window, region, count, ended: AtomicBool::new(false) }))
    }

    /// The window that is bound.
    pub(super) fn window(&self) -> MwId {
        self.window
    }

    /// Lets go of the region. A worker that sleeps may still hold its copy of the entry, which it
    /// drops before it looks at anything else; so this does not wait for the last copy to go.
    fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.count.0.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        self.end();
    }
}

/// A memory window (MW) of type 1 or 2, as all workers and the control thread share it.
#[derive(Debug)]
pub struct Window {
    id: MwId,
    session: SessionId,
    pd: PdId,
    kind: WindowKind,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    stag: Stag,
    bound: BindState,
}

#[derive(Debug)]
enum BindState {
    Nothing,
    To(Arc<Binding>),
    /// Type 1: workers are being told; it was bound to this before.
    Changing(Option<Arc<Binding>>),
    /// It has been taken back.
    Gone,
}

impl Window {
    /// A window that is bound to nothing and has this STag.
    pub fn new(id: MwId, session: SessionId, pd: PdId, kind: WindowKind, stag: Stag) -> Self {
        let state = Mutex::new(State { stag, bound: BindState::Nothing });
        Window { id, session, pd, kind, state }
    }

    /// Handle of the window, which no other window of any session has.
    pub fn id(&self) -> MwId {
        self.id
    }

    pub(super) fn session(&self) -> SessionId {
        self.session
    }

    /// Protection domain of the window; only regions and QPs of this domain are bound with it.
    pub fn pd(&self) -> PdId {
        self.pd
    }

    /// Type of the window, fixed when it is made.
    pub fn kind(&self) -> WindowKind {
        self.kind
    }

    /// Its STag as it was last bound or unbound, and the region it is bound to.
    pub fn view(&self) -> (Stag, Option<MrId>) {
        let state = self.state.lock();
        let region = match &state.bound {
            BindState::To(binding) | BindState::Changing(Some(binding)) => Some(binding.region),
            BindState::Nothing | BindState::Changing(None) | BindState::Gone => None,
        };
        (state.stag, region)
    }

    /// It has been taken back and no worker knows it: what it was bound to is free of it.
    pub fn close(&self) {
        let before = std::mem::replace(&mut self.state.lock().bound, BindState::Gone);
        if let BindState::To(binding) | BindState::Changing(Some(binding)) = before {
            binding.end();
        }
    }

    /// Type 1: starts a change; the STag that is to be revoked, if it is bound.
    pub(super) fn begin(&self, present: Stag) -> Result<Option<Stag>, BindFault> {
        let mut state = self.state.lock();
        if state.stag != present {
            return Err(BindFault::OldKey);
        }
        let before = match &state.bound {
            BindState::Nothing => None,
            BindState::To(binding) => Some(binding.clone()),
            BindState::Changing(_) => return Err(BindFault::Busy),
            BindState::Gone => return Err(BindFault::NoWindow),
        };
        let revoke = before.is_some().then_some(state.stag);
        state.bound = BindState::Changing(before);
        Ok(revoke)
    }

    /// Type 1: every worker has carried out the change.
    pub(super) fn settle(&self, stag: Stag, to: Option<Arc<Binding>>) {
        let mut state = self.state.lock();
        match &state.bound {
            BindState::Changing(before) => {
                if let Some(before) = before {
                    before.end();
                }
                state.stag = stag;
                state.bound = to.map_or(BindState::Nothing, BindState::To);
            }
            // Taken back meanwhile: the workers did not install it.
            BindState::Nothing | BindState::To(_) | BindState::Gone => {
                if let Some(to) = to {
                    to.end();
                }
            }
        }
    }

    /// Type 2: binds it, if nothing else has.
    pub(super) fn bind(&self, present: Stag, new: Stag, to: Arc<Binding>) -> Result<(), BindFault> {
        let mut state = self.state.lock();
        match state.bound {
            BindState::Nothing if state.stag == present => {
                *state = State { stag: new, bound: BindState::To(to) };
                Ok(())
            }
            BindState::Nothing => Err(BindFault::OldKey),
            BindState::To(_) | BindState::Changing(_) => Err(BindFault::Bound),
            BindState::Gone => Err(BindFault::NoWindow),
        }
    }

    /// Type 2: it was bound to this, and its entry is gone.
    pub(super) fn unbound(&self, from: &Arc<Binding>) {
        from.end();
        let mut state = self.state.lock();
        if matches!(&state.bound, BindState::To(to) if Arc::ptr_eq(to, from)) {
            state.bound = BindState::Nothing;
        }
    }
}

/// What a send request says about a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindRequest {
    /// The window's present STag.
    pub window: Stag,
    /// The STag it is to have.
    pub new: Stag,
    /// First address, in the region's terms.
    pub address: u64,
    /// Bytes; 0 unbinds a window of type 1.
    pub length: u64,
    /// Local key of the region to bind to, which is its STag.
    pub lkey: u32,
    /// Rights as they were written.
    pub access: u32,
}

/// Why a window was not bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindFault {
    /// No such window, or it is another session's or domain's.
    #[error("no such window in this domain")]
    NoWindow,
    /// The STag given for the window is not its present one.
    #[error("not the window's present STag")]
    OldKey,
    /// The new STag is another window's, reserved, or (type 1) the present one.
    #[error("not a new STag of this window")]
    NewKey,
    /// A window of type 2 must be invalidated before it is bound again.
    #[error("the window is bound")]
    Bound,
    /// Another QP binds it at this moment.
    #[error("another bind of the window is under way")]
    Busy,
    /// No such region, or it is another session's, domain's or QP's, or it is going.
    #[error("no such region in this domain")]
    NoRegion,
    /// A window of type 1 would open a region of one QP to the whole domain.
    #[error("a region of one QP takes no window of type 1")]
    RegionOfOneQp,
    /// The region lacks `MW_BIND`.
    #[error("the region does not allow windows")]
    NotBindable,
    /// Rights that a window cannot have.
    #[error("a window has remote rights only")]
    Rights,
    /// An RC or UC QP binds no window to a region registered with `ZERO_BASED`.
    #[error("the region is zero-based")]
    ZeroBased,
    /// Writing through the window needs a region that its owner may write.
    #[error("remote writing needs a region with local writing")]
    NoLocalWrite,
    /// The range is empty or leaves the region.
    #[error("outside the region")]
    Bounds,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_counts_no_more_windows_than_it_can() {
        let count = WindowCount(AtomicU32::new(CLOSED - 2));
        assert!(count.add());
        // One more would be a region that has gone.
        assert!(!count.add());
        assert_eq!(count.withdraw(), Err(CLOSED - 1));
    }
}
