//! Memory windows: STags that give peers access to a part of a region. Send requests bind and
//! unbind them.
//!
//! The resource manager, which creates and lists a [`Window`], shares it with the workers, which
//! bind it. A lock, held briefly, protects its state, so if two QPs on two workers bind it at the
//! same time, only one succeeds. A type 1 window serves every QP of its domain and therefore
//! changes on every worker ([`StagChange`](super::StagChange)). A type 2 window serves only the QP
//! that bound it and exists only on that QP's worker.
//!
//! A region with bound windows cannot be removed. [`WindowCount`] ensures this: binding increments
//! the count and fails if the region is withdrawn; withdrawing closes the count and fails if a
//! window is bound. So no window outlives its region, even if both happen at the same time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;

use rnic_abi::types::{MrId, MwId, PdId, SessionId, Stag, WindowKind};

/// Number of windows bound to one region. Closed when the region is withdrawn.
#[derive(Debug, Default)]
pub struct WindowCount(AtomicU32);

/// Value of the count for a withdrawn region. All limits are far below it.
const CLOSED: u32 = u32::MAX;

impl WindowCount {
    /// Counts a window. Returns false if the region is withdrawn.
    fn add(&self) -> bool {
        let add = |n| (n < CLOSED - 1).then(|| n + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).is_ok()
    }

    /// Closes the count permanently, so that no window can be bound to the region. If windows are
    /// bound, returns their number as the error. May be called again.
    pub fn withdraw(&self) -> Result<(), u32> {
        match self.0.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) | Err(CLOSED) => Ok(()),
            Err(bound) => Err(bound),
        }
    }
}

/// Binding of a window. Pins the region from the bind request until the window gives no more access
/// to it.
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

    /// Returns the bound window.
    pub(super) fn window(&self) -> MwId {
        self.window
    }

    /// Releases the region. Does not wait until all workers have dropped their copy of the entry: a
    /// sleeping worker drops its copy before it does anything else.
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

/// A memory window (MW) of type 1 or 2, shared by all workers and the control thread.
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
    /// Type 1: the workers are applying a change. Contains the previous binding.
    Changing(Option<Arc<Binding>>),
    /// Deallocated.
    Gone,
}

impl Window {
    /// Creates an unbound window with this STag.
    pub fn new(id: MwId, session: SessionId, pd: PdId, kind: WindowKind, stag: Stag) -> Self {
        let state = Mutex::new(State { stag, bound: BindState::Nothing });
        Window { id, session, pd, kind, state }
    }

    /// Returns the handle, unique among the windows of all sessions.
    pub fn id(&self) -> MwId {
        self.id
    }

    pub(super) fn session(&self) -> SessionId {
        self.session
    }

    /// Returns the protection domain. The window can be bound only to regions, and by QPs, of this
    /// domain.
    pub fn pd(&self) -> PdId {
        self.pd
    }

    /// Returns the type, fixed at creation.
    pub fn kind(&self) -> WindowKind {
        self.kind
    }

    /// Returns the current STag, and the region to which the window is bound.
    pub fn view(&self) -> (Stag, Option<MrId>) {
        let state = self.state.lock();
        let region = match &state.bound {
            BindState::To(binding) | BindState::Changing(Some(binding)) => Some(binding.region),
            BindState::Nothing | BindState::Changing(None) | BindState::Gone => None,
        };
        (state.stag, region)
    }

    /// Releases the region. Called when the window is deallocated and no worker has it any more.
    pub fn close(&self) {
        let before = std::mem::replace(&mut self.state.lock().bound, BindState::Gone);
        if let BindState::To(binding) | BindState::Changing(Some(binding)) = before {
            binding.end();
        }
    }

    /// Type 1: starts a change. Returns the STag to revoke; `None` if the window is unbound.
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

    /// Type 1: completes a change that every worker has applied.
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
            // Deallocated during the change: the workers have not installed the entry.
            BindState::Nothing | BindState::To(_) | BindState::Gone => {
                if let Some(to) = to {
                    to.end();
                }
            }
        }
    }

    /// Type 2: binds the window, if it is unbound.
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

    /// Type 2: unbinds the window after its entry was removed.
    pub(super) fn unbound(&self, from: &Arc<Binding>) {
        from.end();
        let mut state = self.state.lock();
        if matches!(&state.bound, BindState::To(to) if Arc::ptr_eq(to, from)) {
            state.bound = BindState::Nothing;
        }
    }
}

/// Fields of a bind request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindRequest {
    /// Current STag of the window.
    pub window: Stag,
    /// New STag of the window.
    pub new: Stag,
    /// First address, in the region's address range.
    pub address: u64,
    /// Length in bytes. 0 unbinds a type 1 window.
    pub length: u64,
    /// Local key of the region to which it is bound, which is the region's STag.
    pub lkey: u32,
    /// Rights as written in the request.
    pub access: u32,
}

/// Reason why a window was not bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindFault {
    /// The window does not exist, or belongs to another session or domain.
    #[error("no such window in this domain")]
    NoWindow,
    /// The given STag is not the window's current one.
    #[error("not the window's current STag")]
    OldKey,
    /// The new STag belongs to another window, is reserved, or is the current one (type 1).
    #[error("not a new STag of this window")]
    NewKey,
    /// A type 2 window must be invalidated before it is bound again.
    #[error("the window is bound")]
    Bound,
    /// Another QP is binding the window.
    #[error("another bind of the window is in progress")]
    Busy,
    /// The region does not exist, is withdrawn, or belongs to another session, domain or QP.
    #[error("no such region in this domain")]
    NoRegion,
    /// A type 1 window would give the whole domain access to a region of one QP.
    #[error("a window of type 1 cannot be bound to a region of one QP")]
    RegionOfOneQp,
    /// The region lacks `MW_BIND`.
    #[error("the region does not allow windows")]
    NotBindable,
    /// The request contains rights that a window cannot have.
    #[error("a window can have remote rights only")]
    Rights,
    /// An RC or UC QP cannot bind a window to a region registered with `ZERO_BASED`.
    #[error("the region is zero-based")]
    ZeroBased,
    /// Remote writes and atomic operations need a region that its owner may write.
    #[error("remote writes require a region with local write access")]
    NoLocalWrite,
    /// The range is empty or not within the region.
    #[error("outside the region")]
    Bounds,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_count_is_bounded() {
        let count = WindowCount(AtomicU32::new(CLOSED - 2));
        assert!(count.add());
        // The next value would be that of a withdrawn region.
        assert!(!count.add());
        assert_eq!(count.withdraw(), Err(CLOSED - 1));
    }
}
