//! Protection domains (`ibv_alloc_pd(3)`).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rnic_client::Pd;

use crate::c;
use crate::context::ContextBody;
use crate::device::{Device, DeviceKind};
use crate::errno::Errno;
use crate::object::{Body, Kind};

/// A protection domain.
pub(crate) struct PdBody {
    device: Arc<Device>,
    pd: Pd,
    /// Queue pairs of which device are in it.
    kind: DeviceKind,
    /// Objects in it: it cannot be given back as long as there are any.
    users: AtomicUsize,
}

impl Body for Arc<PdBody> {
    type Head = c::ibv_pd;
    const KIND: Kind = Kind::Pd;
}

impl PdBody {
    pub(crate) fn allocate(context: &ContextBody) -> Result<Arc<PdBody>, Errno> {
        let device = context.device().clone();
        let pd = device.context.open_pd(None)?;
        let kind = context.kind();
        Ok(Arc::new(PdBody { device, pd, kind, users: AtomicUsize::new(0) }))
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// How its queue pairs come by their peers.
    pub(crate) fn kind(&self) -> DeviceKind {
        self.kind
    }

    pub(crate) fn client(&self) -> &Pd {
        &self.pd
    }

    /// One more object is in it, as long as what is returned lives.
    pub(crate) fn user(self: &Arc<Self>) -> PdUser {
        self.users.fetch_add(1, Ordering::Relaxed);
        PdUser(self.clone())
    }

    /// Checks that no object uses it.
    ///
    /// # Errors
    ///
    /// `EBUSY` if one does.
    pub(crate) fn check_unused(&self) -> Result<(), Errno> {
        match self.users.load(Ordering::Relaxed) {
            0 => Ok(()),
            n => Err(Errno::busy(format_args!("{n} objects use the protection domain"))),
        }
    }
}

/// An object's place in its domain.
pub(crate) struct PdUser(Arc<PdBody>);

impl std::ops::Deref for PdUser {
    type Target = PdBody;

    fn deref(&self) -> &PdBody {
        &self.0
    }
}

impl Drop for PdUser {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::Relaxed);
    }
}
