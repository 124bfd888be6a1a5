//! Generates the gRPC services of the kubelet's device plugin API. Their messages are in
//! `src/api.rs`.

use tonic_build::manual::{Builder, Method, Service};

fn main() {
    let registration = Service::builder()
        .name("Registration")
        .package(PACKAGE)
        .method(method("register", "Register", "RegisterRequest", "Empty").build());
    let options = method(
        "get_device_plugin_options",
        "GetDevicePluginOptions",
        "Empty",
        "DevicePluginOptions",
    );
    let list = method("list_and_watch", "ListAndWatch", "Empty", "ListAndWatchResponse");
    let prefer = method(
        "get_preferred_allocation",
        "GetPreferredAllocation",
        "PreferredAllocationRequest",
        "PreferredAllocationResponse",
    );
    let allocate = method("allocate", "Allocate", "AllocateRequest", "AllocateResponse");
    let start = method(
        "pre_start_container",
        "PreStartContainer",
        "PreStartContainerRequest",
        "PreStartContainerResponse",
    );
    let plugin = Service::builder()
        .name("DevicePlugin")
        .package(PACKAGE)
        .method(options.build())
        .method(list.server_streaming().build())
        .method(prefer.build())
        .method(allocate.build())
        .method(start.build());
    Builder::new().compile(&[registration.build(), plugin.build()]);
    println!("cargo::rerun-if-changed=build.rs");
}

/// Returns a method with messages of `src/api.rs`.
fn method(
    name: &str,
    route: &str,
    input: &str,
    output: &str,
) -> tonic_build::manual::MethodBuilder {
    Method::builder()
        .name(name)
        .route_name(route)
        .input_type(format!("crate::api::{input}"))
        .output_type(format!("crate::api::{output}"))
        .codec_path("tonic_prost::ProstCodec")
}

/// Package of the API in the kubelet.
const PACKAGE: &str = "v1beta1";
