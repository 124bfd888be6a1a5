//! The device plugin service, which the kubelet calls.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::allocation::allocation;
use crate::api::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerAllocateResponse, Device,
    DevicePlugin, DevicePluginOptions, Empty, HEALTHY, ListAndWatchResponse,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, UNHEALTHY,
};
use crate::daemon::{Daemon, State};
use crate::log;

/// Implements [`DevicePlugin`] for one daemon.
#[derive(Clone, Debug)]
pub struct Service {
    /// Resource name, for error messages.
    pub resource: String,
    /// Number of devices that the plugin offers to the kubelet, at least 1.
    pub shares: u16,
    /// The daemon whose socket is mounted into containers.
    pub daemon: Arc<Daemon>,
    /// Directory of the libraries on the host.
    pub libraries: PathBuf,
    /// State of the daemon, which decides whether devices are healthy.
    pub state: watch::Receiver<State>,
    /// Streams end when this is true, or when its sender is gone.
    pub stop: watch::Receiver<bool>,
}

impl Service {
    fn id(share: u16) -> String {
        format!("rnicd-{share}")
    }

    fn list(&self, state: &State) -> ListAndWatchResponse {
        let health = if state.is_ok() { HEALTHY } else { UNHEALTHY };
        let device = |share| Device { id: Self::id(share), health: health.to_owned() };
        ListAndWatchResponse { devices: (0..self.shares).map(device).collect() }
    }

    fn is_known(&self, id: &str) -> bool {
        let number = id.rsplit('-').next().and_then(|number| number.parse().ok());
        number.is_some_and(|share: u16| share < self.shares && Self::id(share) == id)
    }

    /// Returns the additions to one container.
    fn container(
        &self,
        request: &ContainerAllocateRequest,
    ) -> Result<ContainerAllocateResponse, Status> {
        let resource = &self.resource;
        if let Some(unknown) = request.devices_ids.iter().find(|id| !self.is_known(id)) {
            let last = Self::id(self.shares - 1);
            return Err(Status::invalid_argument(format!(
                "{resource} has no device {unknown:?}: names are {} to {last} (--shares {})",
                Self::id(0),
                self.shares
            )));
        }
        if request.devices_ids.is_empty() {
            return Err(Status::invalid_argument(format!(
                "the request names no device of {resource}"
            )));
        }
        let state = self.state.borrow().clone();
        let serving = state.map_err(|error| Status::unavailable(format!("{resource}: {error}")))?;
        allocation(&self.daemon, &serving, &self.libraries)
            .map_err(|error| Status::failed_precondition(format!("{resource}: {error}")))
    }
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (responses, stream) = mpsc::channel(1);
        let mut service = self.clone();
        tokio::spawn(async move {
            loop {
                let state = service.state.borrow_and_update().clone();
                let list = service.list(&state);
                tokio::select! {
                    sent = responses.send(Ok(list)) => if sent.is_err() { return },
                    _ = service.stop.wait_for(|stop| *stop) => return,
                }
                tokio::select! {
                    changed = service.state.changed() => if changed.is_err() { return },
                    _ = service.stop.wait_for(|stop| *stop) => return,
                    () = responses.closed() => return,
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let containers = &request.get_ref().container_requests;
        let responses: Result<Vec<_>, Status> =
            containers.iter().map(|container| self.container(container)).collect();
        match &responses {
            Ok(_) => log("allocated the device"),
            Err(error) => log(&format!("refused an allocation: {}", error.message())),
        }
        Ok(Response::new(AllocateResponse { container_responses: responses? }))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("all devices are interchangeable"))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Err(Status::unimplemented("containers need no preparation"))
    }
}

/// Asks the kubelet to make no optional calls.
pub const OPTIONS: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: false };
