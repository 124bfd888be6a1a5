//! Memory windows: send requests grant a peer access to part of a region and revoke it.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_abi::abi::control::{ReplyBody, RequestBody};
use rnic_abi::types::{MwId, Stag, WindowKind};

use crate::error::Error;
use crate::mr::{Mr, Registration, RemoteMr};
use crate::pd::{Pd, PdInner};
use crate::qp::Qp;
use crate::request::{Bind, SendRequest};
use crate::session::unexpected;

/// A memory window: an STag that gives peers access to part of a region (`ibv_alloc_mw(3)`).
///
/// Registration is a request to the daemon. Binding is a send request, which costs less and is
/// ordered with the other send requests. A window of type 1 is usable by all QPs of its domain and
/// may be rebound at any time. A window of type 2 is usable only by the QP that bound it and must
/// be invalidated before it is rebound: by [`unbind`](Self::unbind), or by the peer's Send with
/// Invalidate ([`Completion::invalidated`](crate::Completion::invalidated)).
///
/// A region stays registered until its window is bound elsewhere or dropped, even if its [`Mr`] is
/// dropped. Dropping the window deallocates it and revokes the access (`ibv_dealloc_mw(3)`).
///
/// ```no_run
/// # use rnic_client::*;
/// # fn give(pd: &Pd, qp: &Qp, cq: &Cq, buffer: &SharedBuffer) -> Result<(), Error> {
/// let region = pd.reg_mr(buffer, .., Access::LOCAL_WRITE | Access::MW_BIND)?;
/// let window = pd.alloc_window(WindowKind::Type2)?;
/// // 100 bytes for the peer of this QP, with key 7.
/// let hundred = Bind::new(&region, 64..164, Access::REMOTE_WRITE);
/// let remote = window.bind_with_key(qp, 1, &hundred, 7)?;
/// // Queued after the bind: the window is bound before the peer has the message.
/// qp.post_send(&[SendRequest::send_inline(2, &remote.to_bytes())])?;
/// // ... When this has completed, the peer has lost access.
/// window.unbind(qp, 3)?;
/// # Ok(())
/// # }
/// ```
pub struct MemoryWindow {
    pd: Arc<PdInner>,
    id: MwId,
    kind: WindowKind,
    state: Mutex<State>,
}

struct State {
    rkey: Stag,
    /// Description after the last posted bind; `None` if the window is unbound.
    remote: Option<RemoteMr>,
    /// Regions to which the window is bound, or may be bound once outstanding binds have completed.
    regions: Vec<Arc<Registration>>,
}

impl Pd {
    /// Allocates an unbound memory window (`ibv_alloc_mw(3)`).
    pub fn alloc_window(&self, kind: WindowKind) -> Result<MemoryWindow, Error> {
        let pd = &self.inner;
        match pd.session.request(RequestBody::AllocWindow { pd: pd.id, kind })? {
            ReplyBody::Window { window: id, stag: rkey } => {
                let state = State { rkey, remote: None, regions: Vec::new() };
                Ok(MemoryWindow { pd: pd.clone(), id, kind, state: Mutex::new(state) })
            }
            other => Err(unexpected(&other)),
        }
    }
}

impl MemoryWindow {
    /// Returns the window's handle in the daemon.
    pub fn id(&self) -> MwId {
        self.id
    }

    /// Returns the type of the window.
    pub fn kind(&self) -> WindowKind {
        self.kind
    }

    /// Returns the STag after the last bind that the window has posted.
    pub fn rkey(&self) -> Stag {
        self.state.lock().rkey
    }

    /// Returns the description for the peer after the last posted bind; `None` if the window is
    /// unbound.
    pub fn remote(&self) -> Option<RemoteMr> {
        self.state.lock().remote
    }

    /// Type 1: posts a signaled request that binds the window with the next key (`ibv_bind_mw(3)`).
    /// After its completion, the peer can use the returned description, and the previous
    /// description is invalid.
    pub fn bind(&self, qp: &Qp, wr_id: u64, bind: &Bind<'_>) -> Result<RemoteMr, Error> {
        self.check_kind(WindowKind::Type1)?;
        self.post(qp, wr_id, bind, next_key)
    }

    /// Type 2: posts a signaled request that binds the window for the peer of this QP with the
    /// given key.
    pub fn bind_with_key(
        &self,
        qp: &Qp,
        wr_id: u64,
        bind: &Bind<'_>,
        key: u8,
    ) -> Result<RemoteMr, Error> {
        self.check_kind(WindowKind::Type2)?;
        self.post(qp, wr_id, bind, |present| Stag(present.0 & !0xFF | u32::from(key)))
    }

    /// Posts a signaled request that unbinds the window: a bind to nothing for type 1, a local
    /// invalidate for type 2, which must be posted on the QP that bound the window. After its
    /// completion, the window grants no access.
    pub fn unbind(&self, qp: &Qp, wr_id: u64) -> Result<(), Error> {
        match self.kind {
            WindowKind::Type1 => {
                self.post(qp, wr_id, &Bind::nothing(), next_key)?;
            }
            WindowKind::Type2 => {
                self.same_session(&qp.pd, "the QP")?;
                let mut state = self.state.lock();
                qp.post_send(&[SendRequest::local_invalidate(wr_id, state.rkey).signaled()])?;
                state.remote = None;
            }
        }
        Ok(())
    }

    fn check_kind(&self, kind: WindowKind) -> Result<(), Error> {
        if self.kind == kind { Ok(()) } else { Err(Error::WrongWindow { kind: self.kind }) }
    }

    fn same_session(&self, other: &PdInner, what: &'static str) -> Result<(), Error> {
        if Arc::ptr_eq(&other.session, &self.pd.session) {
            Ok(())
        } else {
            Err(Error::ForeignObject { what })
        }
    }

    fn post(
        &self,
        qp: &Qp,
        wr_id: u64,
        bind: &Bind<'_>,
        key: impl FnOnce(Stag) -> Stag,
    ) -> Result<RemoteMr, Error> {
        let registration = bind.region.map(Mr::registration);
        self.same_session(&qp.pd, "the QP")?;
        registration.map_or(Ok(()), |r| self.same_session(&r.pd, "the region"))?;
        // Held while posting, so that binds are queued in the order of their keys.
        let mut state = self.state.lock();
        let new = key(state.rkey);
        qp.post_send(&[SendRequest::bind(wr_id, state.rkey, new, bind).signaled()])?;
        let remote = bind.remote(new);
        state.rkey = new;
        state.remote = bind.region.map(|_| remote);
        // Deregisters regions to which the window is no longer bound and that have no `Mr`.
        state.regions.retain(|old| Arc::strong_count(old) > 1 || old.end().is_err());
        if let Some(new) = registration
            && !state.regions.iter().any(|old| Arc::ptr_eq(old, new))
        {
            state.regions.push(new.clone());
        }
        Ok(remote)
    }
}

impl fmt::Debug for MemoryWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryWindow")
            .field("id", &self.id)
            .field("kind", &self.kind)
            .field("rkey", &self.rkey())
            .field("remote", &self.remote())
            .finish_non_exhaustive()
    }
}

/// Returns the STag with the next key (`ibv_inc_rkey(3)`).
fn next_key(present: Stag) -> Stag {
    Stag(present.0 & !0xFF | present.0.wrapping_add(1) & 0xFF)
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        // If the session has ended, the window is deallocated already. Its regions are dropped
        // after this.
        let _ = self.pd.session.command(RequestBody::DeallocWindow { window: self.id });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_advance_within_their_byte() {
        assert_eq!(next_key(Stag(0x1234_56FE)), Stag(0x1234_56FF));
        assert_eq!(next_key(Stag(0x1234_56FF)), Stag(0x1234_5600));
    }
}
