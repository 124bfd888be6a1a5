//! Memory windows: a part of a region for a peer, given and taken away by send requests.

use std::fmt;
use std::ops::RangeBounds;
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_core::abi::control::{ReplyBody, RequestBody};
use rnic_core::types::{Access, MwId, Stag, WindowKind};

use crate::error::Error;
use crate::mr::{Mr, Registration, RemoteMr};
use crate::pd::PdInner;
use crate::qp::Qp;
use crate::request::SendRequest;
use crate::session::unexpected;
use crate::shared_buffer::ends;

/// What a window is to be bound to (`struct ibv_mw_bind_info` of `ibv_bind_mw(3)`).
#[derive(Clone, Copy, Debug)]
pub struct Bind<'a> {
    /// The region; none unbinds a window of type 1.
    pub region: Option<&'a Mr>,
    /// First address, as the region's elements have it.
    pub address: u64,
    /// Bytes, at least 1.
    pub length: u64,
    /// Any of `REMOTE_READ`, `REMOTE_WRITE` (which needs a region with `LOCAL_WRITE`) and
    /// `ZERO_BASED`.
    pub access: Access,
}

impl<'a> Bind<'a> {
    /// A range of a region, in bytes from its start. The region needs [`Access::MW_BIND`]. The
    /// daemon checks the rest when it carries the request out: what may not be bound completes as
    /// `MwBind` and ends the connection.
    pub fn new(region: &'a Mr, range: impl RangeBounds<u64>, access: Access) -> Self {
        let (start, end) = ends(range, region.len());
        Bind {
            region: Some(region),
            address: region.iova().wrapping_add(start),
            length: end.saturating_sub(start),
            access,
        }
    }

    /// To nothing: unbinds a window of type 1.
    pub fn nothing() -> Self {
        Bind { region: None, address: 0, length: 0, access: Access::empty() }
    }

    /// What a peer must know to use a window that is bound like this and has this STag.
    pub fn remote(&self, rkey: Stag) -> RemoteMr {
        let zero_based = self.access.contains(Access::ZERO_BASED);
        let addr = if zero_based { 0 } else { self.address };
        RemoteMr { addr, len: self.length, rkey }
    }
}

/// A memory window: an STag that gives peers a part of a region (`ibv_alloc_mw(3)`).
///
/// Registering is a request to the daemon; binding is a send request, which costs little and keeps
/// its place among the others. A window of type 1 serves every QP of its domain and may be bound
/// again at any time. One of type 2 serves the QP that has bound it and must be invalidated first:
/// by [`unbind`](Self::unbind), or by the peer with a Send with Invalidate
/// ([`Completion::invalidated`](crate::Completion::invalidated)).
///
/// Regions a window was bound to stay registered until it is bound elsewhere or dropped, even if
/// their [`Mr`] is dropped. Dropping the window takes it back: when that returns, nothing is
/// reached through it any more.
///
/// ```no_run
/// # use rnic_client::*;
/// # fn give(pd: &Pd, qp: &Qp, cq: &Cq, buffer: &SharedBuffer) -> Result<(), Error> {
/// let region = pd.reg_mr(buffer, .., Access::LOCAL_WRITE | Access::MW_BIND)?;
/// let window = pd.alloc_window(WindowKind::Type2)?;
/// // 100 bytes for the peer of this QP, with the key 7.
/// let hundred = Bind::new(&region, 64..164, Access::REMOTE_WRITE);
/// let remote = window.bind_with_key(qp, 1, &hundred, 7)?;
/// // Behind the bind in the queue: when the peer has the message, the window is there.
/// qp.post_send(&[SendRequest::send_inline(2, &remote.to_bytes())])?;
/// // ... and when that has completed, they are the program's again.
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
    /// What it was last bound to, unless it was unbound.
    remote: Option<RemoteMr>,
    /// Regions it is or may still be bound to: the requests that change that may be under way.
    regions: Vec<Arc<Registration>>,
}

impl MemoryWindow {
    pub(crate) fn allocate(pd: &Arc<PdInner>, kind: WindowKind) -> Result<Self, Error> {
        match pd.session.request(RequestBody::AllocWindow { pd: pd.id, kind })? {
            ReplyBody::Window { window: id, stag: rkey } => {
                let state = State { rkey, remote: None, regions: Vec::new() };
                Ok(MemoryWindow { pd: pd.clone(), id, kind, state: Mutex::new(state) })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Its handle in the daemon.
    pub fn id(&self) -> MwId {
        self.id
    }

    /// Type of the window, fixed when it was made.
    pub fn kind(&self) -> WindowKind {
        self.kind
    }

    /// Its STag as of the last bind that was posted. After a bind with [`SendRequest::bind`] tell
    /// it by [`set_rkey`](Self::set_rkey).
    pub fn rkey(&self) -> Stag {
        self.state.lock().rkey
    }

    /// Says which STag it has: for programs that post binds of their own making.
    pub fn set_rkey(&self, rkey: Stag) {
        self.state.lock().rkey = rkey;
    }

    /// What a peer must know to use it, as of the last bind that was posted; `None` if it was
    /// unbound since, or never bound.
    pub fn remote(&self) -> Option<RemoteMr> {
        self.state.lock().remote
    }

    /// Type 1: posts a signaled request that binds it, under the next key (`ibv_bind_mw(3)`). The
    /// peer may use what is returned when the request has completed, and can no longer use what it
    /// had before.
    pub fn bind(&self, qp: &Qp, wr_id: u64, bind: &Bind<'_>) -> Result<RemoteMr, Error> {
        self.expect(WindowKind::Type1)?;
        self.post(qp, wr_id, bind, next_key)
    }

    /// Type 2: posts a signaled request that binds it for the peer of this QP, under a key of the
    /// caller's choice.
    pub fn bind_with_key(
        &self,
        qp: &Qp,
        wr_id: u64,
        bind: &Bind<'_>,
        key: u8,
    ) -> Result<RemoteMr, Error> {
        self.expect(WindowKind::Type2)?;
        self.post(qp, wr_id, bind, |present| Stag(present.0 & !0xFF | u32::from(key)))
    }

    /// Posts a signaled request that unbinds it: a bind to nothing for type 1, a local invalidate
    /// for type 2, which only the QP that has bound it can do. When it has completed, nothing is
    /// reached through the window.
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

    /// Takes it back (`ibv_dealloc_mw(3)`): when this returns, nothing is reached through it.
    pub fn deallocate(self) {
        drop(self);
    }

    fn expect(&self, kind: WindowKind) -> Result<(), Error> {
        if self.kind == kind { Ok(()) } else { Err(Error::WrongWindow { kind: self.kind }) }
    }

    fn same_session(&self, other: &PdInner, what: &'static str) -> Result<(), Error> {
        match Arc::ptr_eq(&other.session, &self.pd.session) {
            true => Ok(()),
            false => Err(Error::ForeignObject { what }),
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
        // Held while posting, so that binds stand in the queue in the order of their keys.
        let mut state = self.state.lock();
        let new = key(state.rkey);
        qp.post_send(&[SendRequest::bind(wr_id, state.rkey, new, bind).signaled()])?;
        let remote = bind.remote(new);
        (state.rkey, state.remote) = (new, bind.region.map(|_| remote));
        // Regions whose `Mr` is gone and which the window has left.
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

/// The STag with its key advanced by one (`ibv_inc_rkey(3)`).
fn next_key(present: Stag) -> Stag {
    Stag(present.0 & !0xFF | present.0.wrapping_add(1) & 0xFF)
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        // A session that has ended has taken it back already. The regions go after this.
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

    #[test]
    fn a_zero_based_window_is_addressed_from_zero() {
        let mut bind =
            Bind { region: None, address: 0x7000, length: 9, access: Access::REMOTE_READ };
        assert_eq!(bind.remote(Stag(5)), RemoteMr { addr: 0x7000, len: 9, rkey: Stag(5) });
        bind.access |= Access::ZERO_BASED;
        assert_eq!(bind.remote(Stag(5)).addr, 0);
    }
}
