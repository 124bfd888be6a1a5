//! Memory windows: STags that give a part of a region to peers, bound and unbound by send requests.
//!
//! A [`Window`] is shared by the resource manager, which makes it and lists it, and the workers,
//! which bind it. Its state stands behind a short lock, so of two QPs on two workers that bind it
//! at once one wins. A window of type 1 serves every QP of its domain and so changes on every
//! worker ([`StagChange`]); one of type 2 serves the QP that bound it and lives on that QP's worker
//! alone.
//!
//! A region with windows must stay. [`WindowCount`] is where both sides meet: binding counts up,
//! withdrawing the region closes the count, and each is refused once the other has happened. So no
//! window ever outlives its region, whatever is under way on which worker.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;

use super::allocator::index;
use super::copier::Copier;
use super::stag::{Principal, StagEntry, StagTable, in_scope};
use crate::types::{Access, MrId, MwId, PdId, QpId, Scope, SessionId, Stag, WindowKind};

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
    fn new(window: MwId, region: MrId, count: &Arc<WindowCount>) -> Result<Arc<Self>, BindFault> {
        let count = count.clone();
        if !count.add() {
            return Err(BindFault::NoRegion);
        }
        Ok(Arc::new(Binding { window, region, count, ended: AtomicBool::new(false) }))
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

/// A memory window.
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
    bound: Bound,
}

#[derive(Debug)]
enum Bound {
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
        let state = Mutex::new(State { stag, bound: Bound::Nothing });
        Window { id, session, pd, kind, state }
    }

    /// Its handle.
    pub fn id(&self) -> MwId {
        self.id
    }

    /// Its domain.
    pub fn pd(&self) -> PdId {
        self.pd
    }

    /// Its type.
    pub fn kind(&self) -> WindowKind {
        self.kind
    }

    /// Its STag as it was last bound or unbound, and the region it is bound to.
    pub fn view(&self) -> (Stag, Option<MrId>) {
        let state = self.state.lock();
        let region = match &state.bound {
            Bound::To(binding) | Bound::Changing(Some(binding)) => Some(binding.region),
            Bound::Nothing | Bound::Changing(None) | Bound::Gone => None,
        };
        (state.stag, region)
    }

    /// It has been taken back and no worker knows it: what it was bound to is free of it.
    pub fn close(&self) {
        let before = std::mem::replace(&mut self.state.lock().bound, Bound::Gone);
        if let Bound::To(binding) | Bound::Changing(Some(binding)) = before {
            binding.end();
        }
    }

    /// Type 1: starts a change; the STag that is to be revoked, if it is bound.
    fn begin(&self, present: Stag) -> Result<Option<Stag>, BindFault> {
        let mut state = self.state.lock();
        if state.stag != present {
            return Err(BindFault::OldKey);
        }
        let before = match &state.bound {
            Bound::Nothing => None,
            Bound::To(binding) => Some(binding.clone()),
            Bound::Changing(_) => return Err(BindFault::Busy),
            Bound::Gone => return Err(BindFault::NoWindow),
        };
        let revoke = before.is_some().then_some(state.stag);
        state.bound = Bound::Changing(before);
        Ok(revoke)
    }

    /// Type 1: every worker has carried out the change.
    fn settle(&self, stag: Stag, to: Option<Arc<Binding>>) {
        let mut state = self.state.lock();
        match &state.bound {
            Bound::Changing(before) => {
                if let Some(before) = before {
                    before.end();
                }
                state.stag = stag;
                state.bound = to.map_or(Bound::Nothing, Bound::To);
            }
            // Taken back meanwhile: the workers did not install it.
            Bound::Nothing | Bound::To(_) | Bound::Gone => {
                if let Some(to) = to {
                    to.end();
                }
            }
        }
    }

    /// Type 2: binds it, if nothing else has.
    fn bind(&self, present: Stag, new: Stag, to: Arc<Binding>) -> Result<(), BindFault> {
        let mut state = self.state.lock();
        match state.bound {
            Bound::Nothing if state.stag == present => {
                *state = State { stag: new, bound: Bound::To(to) };
                Ok(())
            }
            Bound::Nothing => Err(BindFault::OldKey),
            Bound::To(_) | Bound::Changing(_) => Err(BindFault::Bound),
            Bound::Gone => Err(BindFault::NoWindow),
        }
    }

    /// Type 2: it was bound to this, and its entry is gone.
    fn unbound(&self, from: &Arc<Binding>) {
        from.end();
        let mut state = self.state.lock();
        if matches!(&state.bound, Bound::To(to) if Arc::ptr_eq(to, from)) {
            state.bound = Bound::Nothing;
        }
    }
}

/// What an STag stands for.
#[derive(Clone, Debug)]
pub enum Names {
    /// A region, with the count of windows bound to it.
    Region(Arc<WindowCount>),
    /// A window, bound to the entry's region.
    Window(Arc<Binding>),
}

impl Names {
    /// A region without windows.
    pub fn region() -> Self {
        Names::Region(Arc::default())
    }
}

/// A change of the STag table of every worker, asked for by a send request.
#[derive(Clone, Default)]
pub struct StagChange {
    pub(super) revoke: Option<Stag>,
    /// The copier that alone reaches the memory of what is revoked.
    pub(super) copier: Option<Arc<Copier>>,
    pub(super) install: Option<StagEntry>,
    /// The window that changes, and the STag it then has.
    pub(super) window: Option<(Arc<Window>, Stag)>,
}

impl StagChange {
    /// Every worker has carried it out: the window, if it is one, is in its new state. To be called
    /// before the QP that asked goes on.
    pub fn settle(&self) {
        let Some((window, stag)) = &self.window else { return };
        let to = self.install.as_ref().and_then(|entry| match &entry.names {
            Names::Window(binding) => Some(binding.clone()),
            Names::Region(_) => None,
        });
        window.settle(*stag, to);
    }

    /// The copier that may be at work on what stops to work here: its jobs must be over as well
    /// before this is settled.
    pub fn copier(&self) -> Option<&Arc<Copier>> {
        self.copier.as_ref()
    }

    /// The STag that stops to work, if one does.
    pub fn revoked(&self) -> Option<Stag> {
        self.revoke
    }
}

impl fmt::Debug for StagChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StagChange { revoke, install, window, .. } = self;
        let install = install.as_ref().map(|entry| entry.stag);
        let window = window.as_ref().map(|(window, _)| window.id);
        write!(f, "revoke {revoke:?}, install {install:?} of window {window:?}")
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
    /// The region.
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
    /// Writing through the window needs a region that its owner may write.
    #[error("remote writing needs a region with local writing")]
    NoLocalWrite,
    /// The range is empty or leaves the region.
    #[error("outside the region")]
    Bounds,
}

/// A window as a worker knows it.
#[derive(Clone)]
pub(super) struct Known {
    window: Arc<Window>,
    /// The STag of its entry in this table.
    bound: Option<Stag>,
}

/// Rights a window may have.
const WINDOW_RIGHTS: Access =
    Access::REMOTE_READ.union(Access::REMOTE_WRITE).union(Access::ZERO_BASED);

impl StagTable {
    /// Makes a window known, so that it can be bound.
    pub fn add_window(&mut self, window: Arc<Window>) {
        let (stag, _) = window.view();
        self.windows.insert(index(stag), Known { window, bound: None });
    }

    /// Forgets a window, and what could be reached through it.
    pub fn remove_window(&mut self, window: &Window) {
        let (stag, _) = window.view();
        if let Some(Known { bound: Some(bound), .. }) = self.windows.remove(&index(stag)) {
            self.remove(bound);
        }
    }

    /// Binds a window. What has to happen on every worker before it is done is returned: nothing
    /// for a window of type 2, which only `who` uses.
    pub fn bind(
        &mut self,
        who: Principal,
        request: &BindRequest,
    ) -> Result<Option<StagChange>, BindFault> {
        let known = self.windows.get(&index(request.window)).ok_or(BindFault::NoWindow)?;
        let window = known.window.clone();
        if window.session != who.session || window.pd != who.pd {
            return Err(BindFault::NoWindow);
        }
        let new = request.new;
        if index(new) != index(request.window) || new.0 == 0 || new.0 == u32::MAX {
            return Err(BindFault::NewKey);
        }
        match window.kind {
            WindowKind::Type1 => {
                if new == request.window {
                    return Err(BindFault::NewKey);
                }
                let install = match request.length {
                    0 => None,
                    _ => Some(self.entry_for(who, &window, request)?.0),
                };
                let revoke = window.begin(request.window)?;
                let copier = revoke.and_then(|stag| self.copier_of(stag));
                Ok(Some(StagChange { revoke, copier, install, window: Some((window, new)) }))
            }
            WindowKind::Type2 => {
                let (entry, binding) = self.entry_for(who, &window, request)?;
                window.bind(request.window, new, binding)?;
                self.install(entry);
                Ok(None)
            }
        }
    }

    /// The entry of a window that is bound as requested.
    fn entry_for(
        &self,
        who: Principal,
        window: &Window,
        r: &BindRequest,
    ) -> Result<(StagEntry, Arc<Binding>), BindFault> {
        let region = self.entries.get(&r.lkey).ok_or(BindFault::NoRegion)?;
        let Names::Region(count) = &region.names else { return Err(BindFault::NoRegion) };
        if region.session != who.session || region.pd != who.pd || !in_scope(region, who.qp) {
            return Err(BindFault::NoRegion);
        }
        let scope = match (window.kind, region.scope) {
            (WindowKind::Type1, Scope::Qp(_)) => return Err(BindFault::RegionOfOneQp),
            (WindowKind::Type1, Scope::Pd) => Scope::Pd,
            (WindowKind::Type2, _) => Scope::Qp(who.qp),
        };
        if !region.access.contains(Access::MW_BIND) {
            return Err(BindFault::NotBindable);
        }
        let access = Access::from_bits(r.access).ok_or(BindFault::Rights)?;
        if !WINDOW_RIGHTS.contains(access) {
            return Err(BindFault::Rights);
        }
        if access.contains(Access::REMOTE_WRITE) && !region.access.contains(Access::LOCAL_WRITE) {
            return Err(BindFault::NoLocalWrite);
        }
        if r.length == 0 {
            return Err(BindFault::Bounds);
        }
        let from = region.offset_of(r.address, r.length).ok_or(BindFault::Bounds)?;
        let binding = Binding::new(window.id, region.mr, count)?;
        // The address plus the length is at most the region's end, which is below 2^64.
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { r.address };
        let entry = StagEntry {
            stag: r.new,
            scope,
            access,
            iova,
            length: r.length,
            memory: region.memory.at(from as u64),
            names: Names::Window(binding.clone()),
            ..region.clone()
        };
        Ok((entry, binding))
    }

    /// Carries out a change that another worker's QP, or one of this worker's, asked for.
    pub fn change(&mut self, change: &StagChange) {
        if let Some(stag) = change.revoke {
            self.revoke(stag);
        }
        if let Some(entry) = &change.install {
            self.install(entry.clone());
        }
    }

    /// Adds the entry of a window to what is known of it; whether the window is still there.
    pub(super) fn note_bound(&mut self, entry: &StagEntry, binding: &Binding) -> bool {
        let Some(known) = self.windows.get_mut(&index(entry.stag)) else { return false };
        if known.window.id != binding.window {
            return false;
        }
        known.bound = Some(entry.stag);
        if let Scope::Qp(qp) = entry.scope {
            self.of_qps.entry(qp).or_default().insert(entry.stag);
        }
        true
    }

    /// Takes the entry of a window that is gone out of what is known of it.
    pub(super) fn note_unbound(&mut self, entry: &StagEntry) {
        if let Some(known) = self.windows.get_mut(&index(entry.stag))
            && known.bound == Some(entry.stag)
        {
            known.bound = None;
        }
        if let Scope::Qp(qp) = entry.scope
            && let Some(stags) = self.of_qps.get_mut(&qp)
        {
            stags.remove(&entry.stag);
            if stags.is_empty() {
                self.of_qps.remove(&qp);
            }
        }
    }

    /// Unbinds a window of type 2: nothing is reached through it, and it may be bound again.
    pub(super) fn unbind(&mut self, stag: Stag) {
        let Some(entry) = self.remove(stag) else { return };
        if let Names::Window(binding) = &entry.names
            && let Some(known) = self.windows.get(&index(stag))
        {
            known.window.unbound(binding);
        }
    }

    /// A QP is gone: the windows it has bound are bound to nothing.
    pub fn unbind_all_of(&mut self, qp: QpId) {
        for stag in self.of_qps.remove(&qp).unwrap_or_default() {
            self.unbind(stag);
        }
    }

    /// Forgets the windows of a session; its entries are gone already.
    pub(super) fn forget_windows_of(&mut self, session: SessionId) {
        self.windows.retain(|_, known| known.window.session != session);
    }
}

#[cfg(test)]
mod tests;
