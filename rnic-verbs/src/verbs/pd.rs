//! Protection domains (`ibv_alloc_pd(3)`).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rnic_client::{CallObject, DeviceKind, Function, Pd};

use crate::c::{ibv_context, ibv_pd};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Kind, OfContext, live, publish, withdraw};
use crate::verbs::adapter::Adapter;
use crate::verbs::context::{ContextBody, context};
use crate::verbs::device::Device;

/// A protection domain.
pub(crate) struct PdBody {
    device: Arc<Device>,
    pd: Pd,
    /// Device of its queue pairs.
    adapter: Arc<Adapter>,
    /// Number of objects in it. The PD cannot be deallocated before it is 0.
    users: AtomicUsize,
}

impl Body for Arc<PdBody> {
    type Head = ibv_pd;
    const KIND: Kind = Kind::Pd;
}

// SAFETY: the head begins with its context.
unsafe impl OfContext for Arc<PdBody> {}

impl PdBody {
    pub(crate) fn allocate(context: &ContextBody) -> Result<Arc<PdBody>, Errno> {
        let device = context.device().clone();
        let pd = device.context.open_pd(None)?;
        let adapter = context.adapter().clone();
        Ok(Arc::new(PdBody { device, pd, adapter, users: AtomicUsize::new(0) }))
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the device of its queue pairs.
    pub(crate) fn adapter(&self) -> &Arc<Adapter> {
        &self.adapter
    }

    /// Returns the kind of this device.
    pub(crate) fn kind(&self) -> DeviceKind {
        self.adapter.kind()
    }

    pub(crate) fn client(&self) -> &Pd {
        &self.pd
    }

    /// Evaluates the fault rules of a call that concerns the PD, or an object in it.
    pub(crate) fn admit(&self, function: Function) -> Result<(), Errno> {
        self.device.admit(function.of(CallObject::Pd(self.pd.id())))
    }

    /// Counts an object of the PD until the result is dropped.
    pub(crate) fn user(self: &Arc<Self>) -> PdUser {
        self.users.fetch_add(1, Ordering::Relaxed);
        PdUser(self.clone())
    }

    /// Checks that no object uses it.
    ///
    /// # Errors
    ///
    /// `EBUSY` otherwise.
    pub(crate) fn check_unused(&self) -> Result<(), Errno> {
        match self.users.load(Ordering::Relaxed) {
            0 => Ok(()),
            n => Err(busy!("{n} objects use the protection domain")),
        }
    }
}

/// Counts an object as a user of its PD.
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

pub(crate) fn alloc(of: *mut ibv_context) -> Result<*mut ibv_pd, Errno> {
    let pd = PdBody::allocate(&*context(of)?)?;
    let head = ibv_pd { context: of, handle: pd.client().id().0 };
    Ok(publish(head, pd).as_ptr())
}

fn dealloc(pd: *mut ibv_pd) -> Result<(), Errno> {
    let body = live::<Arc<PdBody>>(pd)?;
    body.check_unused()?;
    body.admit(Function::DeallocPd)?;
    // SAFETY: no thread uses `pd`, now or later (ibv_dealloc_pd(3)).
    unsafe { withdraw::<Arc<PdBody>>(pd) }.map(drop)
}

entry! {
    uncancelled ibv_alloc_pd(of: *mut ibv_context) -> pointer<ibv_pd> = alloc;
    uncancelled ibv_dealloc_pd(pd: *mut ibv_pd) -> status = dealloc;
}
