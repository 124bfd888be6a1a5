//! Protection domains.

use std::fmt;
use std::sync::Arc;

use rnic_abi::abi::control::{ReplyBody, RequestBody};
use rnic_abi::types::PdId;

use crate::error::Error;
use crate::session::{Session, unexpected};

/// A protection domain: a QP can access only regions of its own domain (RFC 5040 section 8.1,
/// `ibv_alloc_pd(3)`).
///
/// Clones refer to the same domain. The daemon closes it when the last clone and all objects
/// created from it have been dropped.
#[derive(Clone)]
pub struct Pd {
    pub(crate) inner: Arc<PdInner>,
}

pub(crate) struct PdInner {
    pub(crate) session: Arc<Session>,
    pub(crate) id: PdId,
}

impl Pd {
    pub(crate) fn open(session: &Arc<Session>, name: Option<&str>) -> Result<Pd, Error> {
        match session.request(RequestBody::OpenPd { name: name.map(str::to_owned) })? {
            ReplyBody::Pd { pd: id } => {
                Ok(Pd { inner: Arc::new(PdInner { session: session.clone(), id }) })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Returns the domain's handle in the daemon.
    pub fn id(&self) -> PdId {
        self.inner.id
    }
}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pd").field("id", &self.id()).finish_non_exhaustive()
    }
}

impl Drop for PdInner {
    fn drop(&mut self) {
        // If the session has ended, the domain is closed already.
        let _ = self.session.command(RequestBody::ClosePd { pd: self.id });
    }
}
